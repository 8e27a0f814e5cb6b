"""The two helpers of ``redislock run``, each a small process: this file is run by its path, and imports no package.

``start FD PROGRAM ARGUMENT0 …`` becomes the command, after it has written its process group to the guard. Thus the
guard knows the group before the command runs.

``guard GRACE`` reads lines from its standard input: ``group ID``, ``until TIME`` (end the group at that time of the
clock, unless a later line gives another time), ``lost`` (end it now) and ``done``. When the input ends without "done",
the parent was killed and the lock will expire. To end the group is to send it SIGTERM and, GRACE seconds later,
SIGKILL. Then the exit status is ENDED.
"""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import sys
import time
from contextlib import suppress

ENDED = 3
"""The exit status of a guard that had to end the command."""
LOOK_EVERY = 0.02
"""Seconds between two looks at a group that is to end."""
SLICE = 1.0
"""Seconds after which the guard looks at the clock again: a wait does not count a suspension, but the clock does."""
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # that of the lock's deadline


def say(text: str) -> None:
    """Write a line to stderr, if that can be done."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def start(pipe: int, program: str, command: list[str]) -> None:
    """Become the command, or exit as a shell does: 127 when there is no such program, 126 when it cannot be
    executed."""
    os.write(pipe, b"group %d\n" % os.getpid())
    os.close(pipe)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        try:
            os.execv(program, command)  # noqa: S606 - no shell is wanted
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            # A script without "#!" is run by the shell, as execvp() does it, and thus timeout and nohup.
            os.execv("/bin/sh", ["/bin/sh", program, *command[1:]])  # noqa: S606
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def guard(grace: float) -> None:
    """Wait until the command has ended, or has to end."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # an orderly stop sends them to all processes of a service
    text, group, until = b"", 0, math.inf
    # "lost" may come before "group": then it waits for that line, or the command would run on without lock.
    while not group or until > time.clock_gettime(CLOCK):
        left = max(0.0, until - time.clock_gettime(CLOCK)) if group else SLICE
        if not select.select([0], [], [], min(left, SLICE))[0]:
            continue
        piece = os.read(0, 4096)
        *lines, text = (text + piece).split(b"\n")
        for word, _, value in (line.partition(b" ") for line in lines):
            if word == b"group":
                group = int(value)
            elif word == b"until":
                until = float(value)
            elif word == b"lost":
                until = -math.inf
            else:
                return
        if not piece:
            if group:
                end(group, grace)  # first, because nobody may read what is said
                say(f"redislock run was killed; its command (process group {group}) was ended.")
            return
    end(group, grace)
    sys.exit(ENDED)


def end(group: int, grace: float) -> None:
    """Send SIGTERM to the group and, when the grace is over, SIGKILL."""
    over = time.monotonic() + grace
    with suppress(ProcessLookupError, PermissionError):  # the whole group has ended, or runs as another user
        os.killpg(group, signal.SIGTERM)
        os.killpg(group, signal.SIGCONT)  # a stopped process gets SIGTERM only when it goes on
        while is_alive(group):
            if time.monotonic() >= over:
                os.killpg(group, signal.SIGKILL)
                return
            time.sleep(LOOK_EVERY)


def is_alive(group: int) -> bool:
    """Return whether a process of the group runs: a zombie does not, but a signal finds it.

    Without /proc a zombie counts. Process 1 of a container may never reap it.
    """
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # they run as another user, or only wait to be reaped (macOS)
        pass
    # A process that forked and ended between two lines of the first reading is found by the second one.
    return not (_only_zombies(group) and _only_zombies(group))


def _only_zombies(group: int) -> bool:
    found = False
    with suppress(FileNotFoundError), os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal():
                with suppress(OSError), open(f"{entry.path}/stat", "rb") as file:  # noqa: PTH123 - it starts sooner
                    state, _, member = file.read().rpartition(b")")[2].split()[:3]
                    if int(member) == group:
                        if state not in b"ZX":
                            return False
                        found = True
    return found


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        guard(float(sys.argv[2]))
