"""`HeldLock`, what the admin shows: a lock held now, read from Redis; no table, no rows, two permissions."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence

from django.db import models
from django.utils.translation import gettext_lazy as _

from .core import LockInfo
from .core.listing import Waiting
from .core.validation import check_name

ALPHABET = b"-~"
"""The last two characters of base64: the admin writes three for an underscore."""
LONG = 2000
"""Bytes of a name whose primary key is packed."""


class NoRows(models.Manager["HeldLock"]):
    """Held locks live in Redis; whoever asks the database (``dumpdata`` asks for every model) hears that there are none."""

    def get_queryset(self) -> models.QuerySet[HeldLock]:
        return super().get_queryset().none()


class HeldLock(models.Model):
    """A lock held now. With `fence` 0 nobody holds it, and only its name and connection are known."""

    # Never stored, so the length says nothing; longer ones would make MySQL's checks warn.
    key = models.CharField(primary_key=True, max_length=255, editable=False)
    connection = models.CharField(_("connection"), max_length=255)
    name = models.CharField(_("name"), max_length=1000)
    kind = models.CharField(
        _("kind"),
        max_length=10,
        choices=[
            ("lock", _("lock")),
            ("cache", _("cache")),
            ("celery", _("Celery")),
            ("command", _("command")),
            ("leader", _("leader")),
        ],
    )
    label = models.CharField(_("label"), max_length=255)
    host = models.CharField(_("host"), max_length=255)
    pid = models.PositiveIntegerField(_("process"))
    thread = models.CharField(_("thread"), max_length=255)
    acquired_at = models.DateTimeField(_("acquired"))
    age = models.FloatField(_("held for"))
    expire = models.FloatField(_("life"))
    ttl = models.FloatField(_("expires in"))
    auto_renewal = models.BooleanField(_("renewed automatically"))
    fence = models.BigIntegerField(_("fence"), default=0)
    waiting = models.PositiveIntegerField(_("waiting"))

    owner_id = ""
    """The id, shortened: whole it would be the right to release."""
    arguments = ""
    worker = ""
    queue: Sequence[Waiting] = ()
    """The first of those who wait for it, where somebody looked."""

    objects = NoRows()

    class Meta:
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions = [("force_release_heldlock", "Can force-release held locks")]
        verbose_name = _("held lock")
        verbose_name_plural = _("held locks")

    def __str__(self) -> str:
        return visible(self.name)

    @property
    def place(self) -> str:
        """Where the holder runs: host, process, and thread if it says something."""
        thread = "" if self.thread == "MainThread" else self.thread
        return " · ".join(str(part) for part in (self.host, self.pid, thread) if part)

    @classmethod
    def of(cls, connection: str, info: LockInfo) -> HeldLock:
        """Return the lock that `info` of this connection describes."""
        fields = {field.name: getattr(info, field.name) for field in cls._meta.fields if hasattr(info, field.name)}
        lock = cls(key=encode_key(connection, info.name), connection=connection, **fields)
        lock.owner_id = f"{info.id[: min(6, len(info.id) // 4)]}…"
        lock.arguments, lock.worker = info.arguments, info.worker
        return lock

    @classmethod
    def free(cls, connection: str, name: str) -> HeldLock:
        """Return a lock that nobody holds."""
        return cls(key=encode_key(connection, name), connection=connection, name=name)


def encode_key(connection: str, name: str) -> str:
    """Return the primary key of a lock: safe in URLs and forms, whatever the name holds.

    A long name outside ASCII is packed, 21 bits a character, for servers refuse an address of more than about 4,000 bytes.
    """
    data = name.encode()
    if len(data) <= LONG:
        return _base64(connection, data)
    number = 1
    for character in name:
        number = number << 21 | ord(character)
    return "!" + _base64(connection, number.to_bytes((number.bit_length() + 7) // 8))


def decode_key(key: str) -> tuple[str, str]:
    """Return the connection and the name that a primary key stands for; raises ValueError for what is none."""
    plain = key.removeprefix("!")
    raw, separator, data = b64decode(plain + "=" * (-len(plain) % 4), ALPHABET).partition(b"\0")
    connection = raw.decode()
    name = check_name(_unpack(data) if key.startswith("!") else data.decode())
    if not separator or encode_key(connection, name) != key:
        raise ValueError(f"not the key of a lock: {key!r}")
    return connection, name


def _unpack(data: bytes) -> str:
    if len(data) > LONG * 2:
        raise ValueError("too long for the name of a lock")
    number = int.from_bytes(data)
    characters = []
    while number > 1:
        characters.append(chr(number & 0x1FFFFF))
        number >>= 21
    return "".join(reversed(characters))


def _base64(connection: str, data: bytes) -> str:
    return b64encode(connection.encode() + b"\0" + data, ALPHABET).decode().rstrip("=")


def visible(name: str) -> str:
    """Return the name with everything escaped that does not show or would change how the rest shows."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return shown if shown.strip() else repr(shown)
