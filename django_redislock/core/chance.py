"""Random numbers of the package's own.

Not those of `random`: the threads of the package took numbers out of a seeded program's sequence, and the children of
one fork drew the same ones.
"""

from __future__ import annotations

from random import SystemRandom

_system = SystemRandom()
random, uniform, shuffle = _system.random, _system.uniform, _system.shuffle
