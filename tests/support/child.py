"""The main module of a PythonProcess."""

from __future__ import annotations

import importlib
import json
import os
import sys

from tests.support.processes import say


def main() -> None:
    import django
    from django.conf import settings

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    task = json.loads(sys.argv[1])
    if not task["new"]:
        settings.INSTALLED_APPS = ["django_redislock", "tests.support.bank"]  # without an admin it starts sooner
    django.setup()
    if "code" in task:
        exec(compile(task["code"], "<code of a test>", "exec"), {"args": task["args"], "say": say})
    else:
        getattr(importlib.import_module(task["module"]), task["function"])(*task["args"])


if __name__ == "__main__":
    main()
