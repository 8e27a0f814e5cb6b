"""Which versions of a value somebody was told to be in force, for the rule that no older one is stored afterwards."""

from __future__ import annotations


class Versions:
    """The changes of one key."""

    def __init__(self) -> None:
        self.given: set[int] = set()
        """The versions that callers have set: two callers may do so in any order."""
        self._told: list[tuple[float, int, int]] = []
        """When somebody was told that a change is in force, its version, and the epoch."""
        self._suspended: list[tuple[float, int, int]] = []
        """Changes that are in force again with the script that follows a plain DEL, or a SET with a short expiry."""
        self._deleting = self._setting = False
        self._running = 0

    def begin(self) -> None:
        """Note that a caller begins a change."""
        self._running += 1

    def end(self) -> None:
        """Note that the change has ended, or failed."""
        self._running -= 1

    def set(self, version: int, brief: bool) -> None:
        """Note a SET, perhaps a late one: then it overwrites a newer version, as it does without this package."""
        self.given.add(version)
        self._told = [change for change in self._told if change[1] <= version]
        if brief:  # the version may be gone before the leases are ended
            self._setting = True
            self._suspend()

    def delete(self) -> None:
        """Note a plain DEL."""
        self._deleting = True
        self._suspend()

    def _suspend(self) -> None:
        self._suspended += self._told
        self._told = []

    def invalidated(self, deletes: bool) -> None:
        """Note that a script has ended the leases."""
        self._setting = False
        self._deleting = self._deleting and not deletes
        if not self._deleting:
            self._told += self._suspended
            self._suspended = []

    def tell(self, how: str, time: float, version: int, epoch: int) -> bool:
        """Note that a caller is told that its change is in force; return whether that protects the version from now on.

        The script of the last change that is under way must have been executed by then.
        """
        if self._running == 1 and how != "set":
            self.invalidated(how == "delete")
        suspended = self._deleting or self._setting
        (self._suspended if suspended else self._told).append((time, version, epoch))
        return not suspended

    def newest(self, before: float, epoch: int) -> int:
        """Return the newest version of which somebody was told, before that time, that it is in force."""
        return max((version for time, version, known in self._told if time <= before and known == epoch), default=0)
