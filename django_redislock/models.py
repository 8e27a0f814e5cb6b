"""`HeldLock`, the model of the admin: a lock held now, read from Redis; no table, no rows, two permissions."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence

from django.db import models
from django.utils.translation import gettext_lazy as _

from .core import LockInfo
from .core.keys import split_slot, with_slot
from .core.listing import QueuedWaiter
from .core.validation import check_name
from .texts import visible

ALPHABET = b"-~"
"""The last two characters of base64. Underscores are not used, because the admin writes three characters for each."""


class EmptyManager(models.Manager["HeldLock"]):
    """Finds no rows, because held locks are in Redis; ``dumpdata`` and others query the database for every model."""

    def get_queryset(self) -> models.QuerySet[HeldLock]:
        return super().get_queryset().none()


class HeldLock(models.Model):
    """A lock held now. With `fence` 0 it is free, and only its name and connection are known."""

    # Nothing is stored, so this length limits nothing; MySQL's checks warn about a larger one.
    key = models.CharField(primary_key=True, max_length=255, editable=False)
    connection = models.CharField(_("connection"), max_length=255)
    name = models.CharField(_("name"), max_length=1000)
    kind = models.CharField(
        _("kind"),
        max_length=10,
        choices=[
            ("lock", _("lock")),
            ("semaphore", _("semaphore")),
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
    expire = models.FloatField(_("expiry"))
    ttl = models.FloatField(_("expires in"))
    auto_renewal = models.BooleanField(_("renewed automatically"))
    fence = models.BigIntegerField(_("fence"), default=0)
    waiting = models.PositiveIntegerField(_("waiting"))

    owner_id = ""
    """The owner id, shortened, because the whole id is the right to release."""
    arguments = ""
    worker = ""
    slot = 0
    limit = 0
    recalled = False
    """Whether its holder was asked to give it back."""
    queue: Sequence[QueuedWaiter] = ()
    """The first waiters, where `read_waiters` of the admin read them."""

    objects = EmptyManager()

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
        """The host, the process and the thread of the holder, without the name of the main thread."""
        thread = "" if self.thread == "MainThread" else self.thread
        return " · ".join(str(part) for part in (self.host, self.pid, thread) if part)

    @classmethod
    def of(cls, connection: str, info: LockInfo) -> HeldLock:
        """Return the lock of this connection that `info` describes."""
        fields = {field.name: getattr(info, field.name) for field in cls._meta.fields if hasattr(info, field.name)}
        fields |= {name: visible(fields[name]) for name in ("kind", "label", "host", "thread") if fields[name]}
        fields["name"] = with_slot(info.name, info.slot)
        lock = cls(key=encode_key(connection, fields["name"]), connection=connection, **fields)
        lock.slot, lock.limit = info.slot, info.limit
        lock.owner_id = f"{info.id[: min(6, len(info.id) // 4)]}…"
        lock.arguments, lock.worker, lock.recalled = info.arguments, info.worker, info.recalled
        return lock

    @classmethod
    def free(cls, connection: str, name: str) -> HeldLock:
        """Return a lock that nobody holds."""
        return cls(key=encode_key(connection, name), connection=connection, name=name)


def encode_key(connection: str, name: str) -> str:
    """Return the primary key of a lock: for any listed name, it is safe in URLs and forms."""
    return b64encode(f"{connection}\0{name}".encode(errors="surrogateescape"), ALPHABET).decode().rstrip("=")


def decode_key(key: str) -> tuple[str, str]:
    """Return the connection and the listed name that a primary key stands for; raises ValueError for other texts."""
    raw = b64decode(key + "=" * (-len(key) % 4), ALPHABET)
    connection, separator, name = raw.decode(errors="surrogateescape").partition("\0")
    of, slot = split_slot(name)
    if not separator or with_slot(check_name(of), slot) != name or encode_key(connection, name) != key:
        raise ValueError(f"not the key of a lock: {key!r}")
    return connection, name
