"""Results in Redis, without a race of Celery's that has nothing to do with locks."""

from __future__ import annotations

from typing import Any

from celery import states
from celery.backends.redis import RedisBackend
from redis.exceptions import WatchError


class Backend(RedisBackend):
    """Stores no RETRY over the result of the retry.

    Celery publishes a retry first and stores RETRY then. It does look whether there is a result, but on a busy machine
    the retry may end between the look and the storing, and its result would be gone for ever.
    """

    def _set_with_state(self, key: Any, value: Any, state: str) -> Any:
        if state != states.RETRY:
            return super()._set_with_state(key, value, state)
        with self.client.pipeline() as pipe:
            pipe.watch(key)
            before = pipe.get(key)
            if before is not None and self.decode(before)["status"] in states.READY_STATES:
                return None
            pipe.multi()
            pipe.setex(key, self.expires, value)
            pipe.publish(key, value)
            try:
                return pipe.execute()
            except WatchError:
                return None
