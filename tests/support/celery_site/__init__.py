"""A small Celery app with Django, for workers in processes of their own."""
