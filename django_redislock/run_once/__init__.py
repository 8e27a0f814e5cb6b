"""One of all processes leads, or runs a command: the election of a leader, and ``manage.py redislock run``."""
