"""uWSGI, which forks its workers in C and calls no hook of Python unless it is told to."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import RedisServer, free_port, wait_until
from tests.support.processes import ROOT
from tests.support.programs import find_program_of_python

pytestmark = pytest.mark.processes


@pytest.fixture
def site(tmp_path):
    """``site(path)``: the answer to a request, of a site that uWSGI serves with four workers."""
    uwsgi = find_program_of_python("pyuwsgi")
    port, log = free_port(), tmp_path / "log"
    with RedisServer() as server, log.open("wb") as output:
        options = ["--http-socket", f"127.0.0.1:{port}", "--master", "--enable-threads", "--need-app"]
        options += ["--processes", "4", "--die-on-term", "--wsgi", "tests.support.uwsgi_site"]
        env = os.environ | {"SITE_URL": server.url, "PYTHONPATH": str(ROOT)}
        running = subprocess.Popen([uwsgi, *options], cwd=ROOT, env=env, stdout=output, stderr=output)

        def get(path):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                return json.load(answer)

        def serves():
            assert running.poll() is None, log.read_text()
            return log.read_text().count("spawned uWSGI worker") == 4

        try:
            wait_until(serves, timeout=60)
            yield get
        finally:
            running.terminate()
            running.wait(20)
        assert "Traceback" not in log.read_text()


def test_workers_whose_master_used_a_lock_exclude_each_other_and_have_values_and_records_of_their_own(site):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(site, ["/cycles/15"] * 40))
    assert sum(len(others) for _, _, others in answers) == 600
    assert not any(other for _, _, others in answers for other in others)
    assert all(forked for _, forked, _ in answers)
    assert len({pid for pid, _, _ in answers}) > 1


def test_a_worker_whose_master_used_a_lock_renews_its_own(site):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(site, ["/renewed/1"] * 4))
    assert [said for _, _, said in answers] == [[True, True]] * 4
