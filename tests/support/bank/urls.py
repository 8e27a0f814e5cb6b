"""Views that deposit 1 into account 1; the tests have ATOMIC_REQUESTS on."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_redislock import lock

from .models import Account


def deposit(request: HttpRequest) -> HttpResponse:
    with lock("account:1", timeout=30, until_commit=True):
        account = Account.objects.get(pk=1)
        account.balance += 1
        account.save()
    if "fail" in request.GET:
        raise RuntimeError("after the lock's block, before the commit")
    return HttpResponse(lock("account:1").locked())


urlpatterns = [path("deposit/", deposit)]
