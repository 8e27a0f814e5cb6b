"""The command ``redislock``, and the base of commands that run under a lock."""

from __future__ import annotations

from .locked_command import LockedCommand

__all__ = ["LockedCommand"]
