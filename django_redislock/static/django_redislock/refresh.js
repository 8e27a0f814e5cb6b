/* Reloads the list of held locks while its box is ticked; the choice is remembered in this browser. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
    const KEY = "django_redislock.refresh";
    const FOCUS = "django_redislock.refresh.focus";
    const control = document.querySelector(".redislock-refresh");
    if (!control) {
        return;
    }
    const box = control.querySelector("input");
    const seconds = Number(control.dataset.seconds);
    // Messages are shown once, so the page stays long enough to read them.
    const wait = document.querySelector(".messagelist") ? 6 * seconds : seconds;
    let timer;

    function busy() {
        const focus = document.activeElement;
        return (
            document.hidden ||
            document.querySelector("input.action-select:checked, #action-toggle:checked") ||
            (focus !== box && document.getElementById("changelist").contains(focus))
        );
    }

    function tick() {
        if (busy()) {
            timer = setTimeout(tick, 1000);
            return;
        }
        if (document.activeElement === box) {
            sessionStorage.setItem(FOCUS, "1");
        }
        location.reload();
    }

    function start() {
        clearTimeout(timer);
        if (box.checked) {
            timer = setTimeout(tick, wait * 1000);
        }
    }

    box.checked = localStorage.getItem(KEY) === "1";
    control.hidden = false;
    if (sessionStorage.getItem(FOCUS)) {
        sessionStorage.removeItem(FOCUS);
        box.focus({ preventScroll: true });
    }
    box.addEventListener("change", () => {
        localStorage.setItem(KEY, box.checked ? "1" : "0");
        start();
    });
    start();
});
