"""What the system checks and the doctor say about a ClusterCache, and about a Cluster behind another backend."""

from __future__ import annotations

import pytest
from django.core import checks
from django.core.management import CommandError, call_command

from django_redislock import get_client
from tests.support import free_port


@pytest.fixture
def check(settings):
    """Return the messages of the checks of a cache of this kind, as {id: [message, hint]}."""

    def check(backend: str, location: object, deploy: bool = False, **options: object) -> dict[str, list[str]]:
        path = f"django_redislock.cache.{backend}"
        settings.CACHES = {"default": {"BACKEND": path, "LOCATION": location, "OPTIONS": options}}
        messages = checks.run_checks(tags=["redislock"], include_deployment_checks=deploy)
        return {str(message.id): [message.msg, str(message.hint)] for message in messages}

    return check


def test_a_good_cache_has_no_message_and_no_check_connects(check):
    assert check("ClusterCache", f"redis://127.0.0.1:{free_port()}") == {}
    assert get_client().startup_nodes


@pytest.mark.parametrize(
    ("location", "options", "words"),
    [
        ("redis://127.0.0.1/3", {}, "no database but 0"),
        ("redis://127.0.0.1", {"socket_timout": 3}, "no option 'socket_timout'"),
        ("redis://127.0.0.1", {"CLIENT_CLASS": "django_redis.client.HerdClient"}, "no option 'CLIENT_CLASS'"),
    ],
)
def test_a_wrong_url_or_option_is_an_error(check, location, options, words):
    message, hint = check("ClusterCache", location, **options)["redislock.E015"]
    assert words in message
    assert "CACHES['default']" in message
    assert "in lower case" in hint


def test_a_cluster_that_answers_is_right(check, cluster):
    assert not {"redislock.E005", "redislock.E006", "redislock.E009"} & check("ClusterCache", cluster.url, True).keys()


def test_a_cluster_cache_on_a_server_that_is_no_cluster_is_an_error(check, server):
    message, hint = check("ClusterCache", server.url, True)["redislock.E005"]
    assert "cluster support disabled" in message
    assert "django_redislock.cache.RedisCache" in hint


@pytest.mark.parametrize("backend", ["RedisCache", "DjangoRedisCache"])
def test_a_cluster_behind_a_backend_for_one_server_is_an_error(check, cluster, backend):
    message, hint = check(backend, cluster.url, True)["redislock.E009"]
    assert "one of 3 primaries" in message
    assert "django_redislock.cache.ClusterCache" in hint


def test_the_doctor_tries_locks_and_a_value_on_a_cluster(check, cluster, capsys):
    check("ClusterCache", cluster.url)
    call_command("redislock", "doctor")
    said = capsys.readouterr().out
    assert "A value was computed, read and deleted." in said
    assert "Two locks were held at once" in said
    assert "problem" not in said


def test_the_doctor_names_the_right_backend_for_a_cluster(check, cluster, capsys):
    check("RedisCache", cluster.url)
    with pytest.raises(CommandError):
        call_command("redislock", "doctor")
    assert "django_redislock.cache.ClusterCache" in capsys.readouterr().out
