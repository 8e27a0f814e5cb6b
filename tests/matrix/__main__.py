"""``python -m tests.matrix [ROW or COLUMN]``: prints the table, whole or of the rows or columns of this name."""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatchcase


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from .table import ALL, text

    wanted = sys.argv[1] if len(sys.argv) > 1 else "*"
    of_a_row = any(fnmatchcase(each.row.name, wanted) for each in ALL)
    print(text(rows=wanted) if of_a_row else text(columns=wanted))


if __name__ == "__main__":
    main()
