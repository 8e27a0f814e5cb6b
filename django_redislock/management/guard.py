"""The two helpers of ``redislock run``, each a small process: this file is run by its path, and imports no package.

``start FD PROGRAM ARGUMENT0 …`` becomes the command, after it has written its process id to the guard. Thus the guard
knows the command's process group before the command runs.

``guard GRACE`` reads the process group from its standard input. When that ends without "done", the parent was killed
and the lock will expire: the guard ends the command's process group, with SIGTERM and, GRACE seconds later, with
SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def start(pipe: int, program: str, command: list[str]) -> None:
    """Become the command, or exit as a shell does: 127 when there is no such program, 126 when it cannot be
    executed."""
    os.write(pipe, b"%d\n" % os.getpid())
    os.close(pipe)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(program, command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def guard(grace: float) -> None:
    """Wait for the end of the parent."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # an orderly stop sends them to all processes of a service
    said = sys.stdin.read().split()
    if not said or said[-1] == "done":
        return
    group = int(said[0])
    end = time.monotonic() + grace
    number = signal.SIGTERM
    try:
        os.killpg(group, number)
        sys.stderr.write(f"redislock run was killed; its command (process group {group}) gets SIGTERM.\n")
        os.killpg(group, signal.SIGCONT)  # a stopped process gets SIGTERM only when it goes on
        while time.monotonic() < end:
            time.sleep(0.02)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:  # the whole group has ended
        pass


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        guard(float(sys.argv[2]))
