from __future__ import annotations

from django.db import models

from django_redislock.fencing import FencedModel


class Account(FencedModel):
    balance = models.IntegerField(default=0)
    owner = models.CharField(max_length=20, default="")

    def __str__(self) -> str:
        return self.owner


class SavingsAccount(Account):
    rate = models.IntegerField(default=0)


class Entry(models.Model):
    """A line of the bank's journal. To be without an account is an error at the commit."""

    account = models.ForeignKey(Account, models.CASCADE)
    fence = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.account_id}: {self.fence}"
