"""The alert rules and the dashboard in the docs: they can be read, and each query names a metric that exists."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from django_redislock import metrics
from tests.support import find_program

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"
RULES = FOLDER / "redislock-rules.yml"
DASHBOARD = FOLDER / "redislock-dashboard.json"


def families() -> dict[str, set[str]]:
    """Return the names of the series of each metric, without those of the time of its creation."""
    registry = CollectorRegistry()
    metrics.Metrics(registry)
    found: dict[str, set[str]] = {}
    for collector, names in registry._collector_to_names.items():
        for metric in collector.describe():
            of_it = {name for name in names if name.startswith(metric.name) and not name.endswith("_created")}
            found[metric.name] = of_it - {metric.name} if metric.type in ("counter", "histogram") else {metric.name}
    return found


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"redislock_\w+", query))


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]  # type: ignore[no-any-return]


def test_each_alert_queries_metrics_that_exist() -> None:
    assert len(rules()) == 2
    series = set().union(*families().values())
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "description"}
        assert metrics_in(rule["expr"]) <= series
    assert set().union(*(metrics_in(rule["expr"]) for rule in rules())) == {
        "redislock_oldest_lock_seconds",
        "redislock_waiting",
    }


def test_promtool_accepts_the_rules() -> None:
    promtool = find_program("promtool", package="prometheus")
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rules found" in done.stdout


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    shown = set().union(*(metrics_in(target["expr"]) for panel in panels for target in panel["targets"]))
    assert shown <= set().union(*families().values())
    assert [name for name, series in families().items() if not series & shown] == []
