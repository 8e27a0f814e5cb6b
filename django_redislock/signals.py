"""Django signals for the life of locks; the sender is the string that names the event.

Each comes with `name`. `lock_acquired`, `lock_released` and `lock_lost` also carry the `fence`, and the last one a `record` (a
LossRecord); `lock_backend_error` the `cause` in words; `lock_conflict` the `holder` who was in the way (a LockInfo, or None), the
`task`, its `task_id` and `on_conflict`; `task_skipped` the `task` and its `task_id`; `task_rescheduled` also the `delay` in seconds
and how `often` it was rescheduled by now; and `lock_force_released` the `fence` (None: whichever), the `user` who did it (a
user of the admin, words such as "command line (root)", or None) and the `reason` given. Receivers of `lock_lost` may be called from another thread.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal

from .core import events

lock_acquired = Signal()
lock_released = Signal()
lock_lost = Signal()
lock_conflict = Signal()
task_skipped = Signal()
task_rescheduled = Signal()
lock_force_released = Signal()
lock_backend_error = Signal()

_BY_EVENT = {
    "acquired": lock_acquired,
    "released": lock_released,
    "lost": lock_lost,
    "conflict": lock_conflict,
    "skipped": task_skipped,
    "rescheduled": task_rescheduled,
    "force_released": lock_force_released,
    "backend_error": lock_backend_error,
}


def _send(event: str, data: dict[str, Any]) -> None:
    signal = _BY_EVENT.get(event)
    if signal is not None and signal.receivers:
        signal.send_robust(sender=event, **data)


events.listeners.append(_send)
