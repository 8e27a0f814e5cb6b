"""Django signals about locks and single-instance tasks. The sender is the name of the event, a string.

Each signal has the `name` of the lock, and:

* `lock_acquired` and `lock_released`: the `fence`
* `lock_lost`: the `fence`, and a `record` (a LossRecord); another thread may send it
* `lock_backend_error`: the `cause` in words
* `lock_conflict`: the `holder` (a LockInfo, or None), the `task`, its `task_id`, and `on_conflict`
* `task_skipped`: the `task` and its `task_id`
* `task_rescheduled`: the `task`, its `task_id`, the `delay` in seconds, and how `often` it has been rescheduled
* `lock_recalled` (its holder was asked to give it back) and `lock_force_released`: the `fence` (None: any), the `user`
  (a user of the admin, a text such as "command line (root)", or None), and the `reason`
"""

from __future__ import annotations

import threading
from typing import Any

from django.dispatch import Signal

from .core import events

_connecting = threading.RLock()


class LockSignal(Signal):
    """A signal that is sent from its first receiver on: until then, no lock pays for its events."""

    def connect(self, *args: Any, **kwargs: Any) -> None:
        super().connect(*args, **kwargs)
        with _connecting:  # of two threads one registers it: registered twice, it would send each event twice
            if _send not in events.listeners:
                events.listeners.append(_send)


lock_acquired = LockSignal()
lock_released = LockSignal()
lock_lost = LockSignal()
lock_conflict = LockSignal()
task_skipped = LockSignal()
task_rescheduled = LockSignal()
lock_recalled = LockSignal()
lock_force_released = LockSignal()
lock_backend_error = LockSignal()

_BY_EVENT = {
    "acquired": lock_acquired,
    "released": lock_released,
    "lost": lock_lost,
    "conflict": lock_conflict,
    "skipped": task_skipped,
    "rescheduled": task_rescheduled,
    "recalled": lock_recalled,
    "force_released": lock_force_released,
    "backend_error": lock_backend_error,
}


def _send(event: str, data: dict[str, Any]) -> None:
    signal = _BY_EVENT.get(event)
    if signal is not None and signal.receivers:
        try:
            signal.send_robust(sender=event, **data)
        except RuntimeError:  # Django awaits asynchronous receivers in a loop of its own, but this thread's loop runs
            events.log.exception("Connect plain functions to the signals: within an event loop no others are called.")
