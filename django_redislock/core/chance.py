"""Random numbers of the package's own.

Not those of `random`: the threads of the package took numbers out of a seeded program's sequence, and the children of
one fork drew the same ones.
"""

from __future__ import annotations

from random import Random

from .driver.process import after_in_child

_own = Random()  # noqa: S311 - no secrets
random, uniform, shuffle = _own.random, _own.uniform, _own.shuffle

after_in_child("random numbers", _own.seed)  # with new ones of the system
