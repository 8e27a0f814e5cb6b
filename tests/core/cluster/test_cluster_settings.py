"""A Cluster in the settings: its URL, the facade, the checks, the command and the metrics."""

from __future__ import annotations

import json

import pytest
from django.core.management import call_command
from django.test import override_settings

from django_redislock import conf, get_client, lock
from django_redislock.checks import check_servers, check_settings
from django_redislock.server_url import client_from_url
from tests.support import free_port


@pytest.fixture
def cluster_url(cluster, client):
    url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
    with override_settings(DJANGO_REDISLOCK={"URL": url}):
        yield url


def test_locks_are_held_on_the_cluster_that_the_url_names(cluster_url, client):
    with lock("a"), lock("b"):
        assert get_client() is get_client()
    assert not lock("a").locked()


def test_one_node_of_the_url_that_answers_is_enough(cluster, client):
    url = f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{cluster.nodes[1].port}"
    with override_settings(DJANGO_REDISLOCK={"URL": url}), lock("a"):
        pass


def test_the_command_lists_and_diagnoses_the_cluster(cluster_url, capsys):
    with lock("a"), lock("b"):
        call_command("redislock", "list", "--format", "json")
        listed = json.loads(capsys.readouterr().out)
        assert sorted(row["name"] for row in listed) == ["a", "b"]
    call_command("redislock", "doctor")
    out = capsys.readouterr().out
    assert "All 3 nodes" in out
    assert "problem" not in out


def test_the_checks_inspect_each_node(cluster_url):
    assert {message.id for message in check_servers()} <= {"redislock.I001"}


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+cluster://h:1/3", "no database"),
        ("redis+cluster://h:x", "'h:x' is not host:port of a node"),
        ("redis+cluster://", "'' is not host:port"),
        ("redis+cluster://u:secret@a,b:1,,c", "'' is not host:port"),
        ("redis+cluster://h:1?wrong=1", "wrong"),
    ],
)
def test_a_wrong_url_is_reported_without_its_password(url, why):
    with pytest.raises(ValueError, match=why) as caught:
        client_from_url(url)
    assert "secret" not in str(caught.value)
    with override_settings(DJANGO_REDISLOCK={"URL": url}):
        (error,) = check_settings()
        assert ("the option" if "wrong" in url else "redis+cluster://") in error.hint
        assert "secret" not in error.hint + error.msg
    assert conf.read({"URL": "redis+cluster://u:p@a,b:1"})[1] == []


def test_user_password_tls_and_options_come_from_the_url():
    client = client_from_url("rediss+cluster://us%20er:pass@a,[::1]:7000?socket_timeout=3")
    settings = client.nodes_manager.connection_kwargs
    assert (settings["username"], settings["password"], settings["socket_timeout"]) == ("us er", "pass", 3)
    assert settings["connection_class"].__name__ == "SSLConnection"
    assert {(node.host, node.port) for node in client.nodes_manager.startup_nodes.values()} == {
        ("a", 6379),
        ("::1", 7000),
    }
