"""What is written into Redis and messages is a contract between the versions of the package: docs/wire-contract.rst."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.processes import ROOT
from tests.wire.contract import CONTRACT

pytestmark = pytest.mark.processes
SCENARIO = "from tests.wire.contract import contract; say(text=contract(*args))"


def test_keys_values_expiries_and_messages_are_those_of_the_contract(run_python, redis_url):
    (said,) = run_python(SCENARIO, redis_url, new=True).finish()
    assert said["text"] == CONTRACT.read_text(), (
        "after a change that docs/wire-contract.rst allows: python -m tests.wire.contract --write"
    )


def test_the_page_about_the_contract_lists_each_key_kind_header_and_field_of_a_message():
    page = (ROOT / "docs" / "wire-contract.rst").read_text()
    text = CONTRACT.read_text()
    keys = set(re.findall(r"^  \{redislock:<bucket>\}:(\w+)", text, re.M))
    keys |= set(re.findall(r"^  \{redislock:(?:run|beat)\}:(\w+)", text, re.M))
    headers = set(re.findall(r"^  header (\w+):", text, re.M))
    kinds = set(re.findall(r'"kind":"(\w+)"', text))
    (message,) = re.findall(r"^  message \w+: \[(.*), \{\}\]$", text, re.M)
    assert len(keys) > 12
    assert kinds == {"lock", "semaphore", "cache", "celery", "command", "leader"}
    assert {name for name in kinds | json.loads(message).keys() if f"``{name}``" not in page} == set()
    assert {key for key in keys if f":{key}" not in page} == set()
    assert {header for header in headers if header not in page} == set()


def test_a_reader_ignores_fields_of_a_record_that_it_does_not_know(client):
    from django_redislock import lock

    with lock("a", label="nightly"):
        (key,) = client.keys("*:lock:a")
        value = client.get(key)
        id, fence, acquired, record = value.split(b"\n", 3)
        more = json.dumps(json.loads(record) | {"of a later version": {"x": [1]}}).encode()
        client.set(key, b"\n".join([id, fence, acquired, more]), keepttl=True)
        assert lock("a").owner().label == "nightly"
