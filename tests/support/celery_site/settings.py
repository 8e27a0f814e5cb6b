"""Django's settings for the workers; REDISLOCK_TEST_LOCKS moves the locks to a server of their own, to break it."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403

if "REDISLOCK_TEST_LOCKS" in os.environ:
    DJANGO_REDISLOCK = {"URL": os.environ["REDISLOCK_TEST_LOCKS"], "RETRY_FOR": 1}
