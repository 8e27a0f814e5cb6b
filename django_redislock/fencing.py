"""Fenced writes: once a holder has written or claimed a row, the row refuses writes of earlier holders of its lock.

A lock in Redis cannot stop a holder that was frozen for longer than the lock's expiry from continuing and writing. The
row can::

    class Invoice(FencedModel): ...

    with lock(f"invoice:{pk}") as held:
        invoice = Invoice.objects.get(pk=pk)
        invoice.claim(held)
        ...
        invoice.save_fenced(held)

See Martin Kleppmann, "How to do distributed locking" (2016).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import models, router, transaction
from django.db.models.functions import Greatest

from .core.base import BaseLock
from .exceptions import LockLost, StaleFence

if TYPE_CHECKING:
    _BigIntegerField = models.BigIntegerField[int, int]
    _QuerySet = models.QuerySet[Any]
else:
    _BigIntegerField, _QuerySet = models.BigIntegerField, models.QuerySet


class FenceField(_BigIntegerField):
    """A fence that no ``save()`` lowers, fenced or not. For migrations and the database it is a BigIntegerField."""

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        value = super().pre_save(model_instance, add)
        return value if add else Greatest(models.F(self.attname), value, output_field=self)

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.BigIntegerField", args, kwargs


class FencedQuerySet(_QuerySet):
    """A QuerySet whose methods for many rows write no fence, because they would lower the fence of a row."""

    def bulk_update(self, objs: Iterable[Any], fields: Iterable[str], *args: Any, **options: Any) -> int:
        """Do as Django's method. Raises ValueError when the fence is among the fields."""
        fields = list(fields)
        _refuse_fence(self.model, fields, "bulk_update")
        return super().bulk_update(objs, fields, *args, **options)

    def bulk_create(
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Collection[str] | None = None,
        unique_fields: Collection[str] | None = None,
    ) -> Any:
        """Do as Django's method. Raises ValueError when a conflict would write the fence."""
        _refuse_fence(self.model, update_fields or (), "bulk_create")
        return super().bulk_create(objs, batch_size, ignore_conflicts, update_conflicts, update_fields, unique_fields)


def _refuse_fence(model: type[models.Model], names: Iterable[str], method: str) -> None:
    for name in names:
        if isinstance(model._meta.get_field(name), FenceField):
            raise ValueError(
                f"{method}() cannot update {name!r}, because it may lower the fence of a row; leave it out, or call "
                "save_fenced() of each row"
            )


class FencedModel(models.Model):
    """A row with the fence of the last holder that wrote or claimed it.

    Give the methods the held lock, or its fence as an int. Each method raises LockLost when the lock is known to be
    lost, StaleFence when a later holder wrote or claimed the row, DoesNotExist when the row is gone, and TypeError for
    anything but a lock or an int. A holder may write any number of times.

    Only these methods check the fence; ``save()``, ``update()`` and ``delete()`` do not. After `claim` in the same
    transaction they are safe. ``save()``, ``bulk_update()`` and ``bulk_create()`` never lower the fence; a manager of
    your own must be one of `FencedQuerySet`.
    """

    fence = FenceField(default=0, editable=False)

    objects = FencedQuerySet.as_manager()

    class Meta:
        abstract = True

    def claim(self, held: BaseLock | int, *, using: str | None = None) -> None:
        """Refuse later writes of earlier holders, and reload the row.

        Call it before you read a row whose new state depends on the old one: a late write of an earlier holder is
        either in the reloaded row, or refused. In a transaction it locks the row until the commit, so that other writes
        of the transaction, also to other rows, are made only if the claim stands. Raises LockLost, StaleFence and
        DoesNotExist.
        """
        self._claim(_name_and_fence(self, held), using)

    def save_fenced(
        self, held: BaseLock | int, *, update_fields: Iterable[str] | None = None, using: str | None = None
    ) -> None:
        """Save the row. Raises StaleFence when a later holder wrote or claimed it, LockLost, and DoesNotExist."""
        self._save_fenced(_name_and_fence(self, held), update_fields, using)

    async def aclaim(self, held: BaseLock | int, *, using: str | None = None) -> None:
        """Claim the row as `claim` does."""
        await sync_to_async(self._claim)(_name_and_fence(self, held), using)

    async def asave_fenced(
        self, held: BaseLock | int, *, update_fields: Iterable[str] | None = None, using: str | None = None
    ) -> None:
        """Save the row as `save_fenced` does."""
        await sync_to_async(self._save_fenced)(_name_and_fence(self, held), update_fields, using)

    def _claim(self, name_and_fence: tuple[str, int], using: str | None) -> None:
        using = using or router.db_for_write(type(self), instance=self)
        self._advance_fence(name_and_fence, using)
        self.refresh_from_db(using=using)

    def _save_fenced(
        self, name_and_fence: tuple[str, int], update_fields: Iterable[str] | None, using: str | None
    ) -> None:
        using = using or router.db_for_write(type(self), instance=self)
        adding = self._state.adding
        with transaction.atomic(using=using):
            if not adding:
                self._advance_fence(name_and_fence, using)  # it also locks the row until the commit
            self.fence = name_and_fence[1]
            self.save(force_insert=adding, update_fields=update_fields, using=using)

    def _advance_fence(self, name_and_fence: tuple[str, int], using: str) -> None:
        # The table with the column itself, because Django would update a parent's table in two steps. In one step, the
        # database checks the condition again after a wait for another transaction's write.
        table = self._meta.get_field("fence").model
        row = table._base_manager.using(using).filter(pk=getattr(self, table._meta.pk.attname))
        name, fence = name_and_fence
        if row.filter(fence__lte=fence).update(fence=fence):
            return
        if row.exists():
            raise StaleFence(name, fence)
        raise type(self).DoesNotExist(f"{self._meta.object_name} {self.pk!r} does not exist.")


def _name_and_fence(row: FencedModel, held: BaseLock | int) -> tuple[str, int]:
    if isinstance(held, BaseLock):
        if held.lost is not None:
            raise LockLost(held.name, held.lost)
        return held.name, held.fence
    if not isinstance(held, int) or isinstance(held, bool):
        raise TypeError(f"held must be a lock or its fence, an int, not {type(held).__name__}")
    return f"{row._meta.label} {row.pk}", held
