"""How the project is published: its address, its dependency groups, and workflows that call what tox.ini has."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from configparser import RawConfigParser
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import conftest

ROOT = Path(__file__).parents[2]
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
HOME = "https://code.example/redislock"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
CI = WORKFLOWS["ci.yml"]["jobs"]


def ini(name: str) -> RawConfigParser:
    parser = RawConfigParser()
    parser.read(ROOT / name)
    return parser


TOX = ini("tox.ini")
FACTORS = {factor for text in TOX["testenv"].values() for factor in re.findall(r"^(\w+):", text, re.MULTILINE)}


# The address


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_address_of_the_project_stands_in_one_place():
    home = SETUP["HOME"] or "://github.com/django-redislock"
    texts = {path: path.read_bytes().decode(errors="replace") for path in tracked()}
    named = [path.name for path, text in texts.items() if home in text and path != Path(__file__)]
    assert named == (["setup.py"] if SETUP["HOME"] else [])
    assert not SETUP["HOME"].endswith("/")


def test_every_link_and_picture_comes_from_the_address():
    urls = SETUP["project_urls"](HOME)
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} <= urls.keys()
    assert all(url.startswith(HOME) for url in urls.values())
    readme = SETUP["readme"](HOME)
    assert re.findall(r"image:: (\S+)", readme) == [f"{HOME}/raw/HEAD/docs/pictures/list.png"]
    links = re.findall(r"<([^<>\s]+)>`__", readme)
    assert len(links) > 15
    assert all((ROOT / link.removeprefix(f"{HOME}/blob/HEAD/")).is_file() for link in links)


def test_without_an_address_there_are_no_links_and_no_broken_picture():
    assert SETUP["project_urls"]("") == {}
    readme = SETUP["readme"]("")
    assert "image::" not in readme
    assert ":alt:" not in readme
    assert "`__" not in readme
    assert "All pages, How-to" in readme
    assert readme.replace("\n\n\n", "\n\n").count("\n") > 150


def test_the_first_step_of_a_release_sets_the_address():
    steps = re.findall(r"^(\d+)\. ((?:.+\n)(?:   .+\n)*)", (ROOT / ".ci/RELEASING.rst").read_text(), re.MULTILINE)
    assert steps[0][0] == "1"
    assert "``HOME``" in steps[0][1]
    assert "``setup.py``" in steps[0][1]


# What developers install


def test_the_groups_of_developers_are_not_published_and_tox_takes_groups_and_extras_that_exist():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    extras = ini("setup.cfg")["options.extras_require"]
    assert groups.keys() == {"bench", "demo", "test"}
    assert groups.keys().isdisjoint(extras)
    for section in map(TOX.__getitem__, TOX.sections()):
        assert set(filter(None, section.get("dependency_groups", "").split())) <= groups.keys(), section
        assert set(filter(None, re.split(r"[,\s]+", section.get("extras", "")))) <= extras.keys(), section


# The workflows


def expand(env_list: str) -> set[str]:
    """Return the names that a list of tox means: ``py{312, 313}-django60`` means two."""
    names = set()
    for pattern in re.findall(r"(?:[^,{\s]|\{[^}]*\})+", env_list):
        parts = re.split(r"\{([^}]*)\}", pattern)
        choices = [[part] if n % 2 == 0 else re.split(r",\s*", part) for n, part in enumerate(parts)]
        names |= {"".join(choice) for choice in product(*choices)}
    return names


def environments(job: dict[str, Any]) -> set[str]:
    """Return the environments of tox that a job runs."""
    matrix = job.get("strategy", {}).get("matrix", {})
    found = set(chain.from_iterable(re.findall(r"tox run .*?-e (\S+)", step.get("run", "")) for step in job["steps"]))
    if '"$ENV"' in found:
        (step,) = [step for step in job["steps"] if "tox run" in step.get("run", "")]
        assert step["env"] == {"ENV": "${{ matrix.env }}"}
        found = found - {'"$ENV"'} | {*matrix.get("env", ()), *(each["env"] for each in matrix.get("include", ()))}
    return set(chain.from_iterable(name.split(",") for name in found))


JOBS = [(f"{file}: {name}", job) for file, flow in WORKFLOWS.items() for name, job in flow["jobs"].items()]


def is_environment(name: str) -> bool:
    """Whether tox has it: in its list, by a section, or either with the factors that choose versions of Celery."""
    listed, (plain, celery, version) = expand(TOX["tox"]["env_list"]), name.partition("-celery")
    return (plain in listed or f"testenv:{plain}" in TOX) and (not celery or f"celery{version}" in FACTORS)


@pytest.mark.parametrize("job", [job for _, job in JOBS], ids=[name for name, _ in JOBS])
def test_a_job_runs_environments_that_tox_has(job):
    assert [name for name in environments(job) if not is_environment(name)] == []


def test_every_check_of_tox_is_run_by_a_job():
    run = set().union(*map(environments, CI.values()))
    listed = {name for name in expand(TOX["tox"]["env_list"]) if not name.startswith("py")}
    assert {"coverage", "oldest", "quick", *listed} <= run


def test_a_name_that_tox_does_not_have_is_found():
    assert expand("lint, py{312, 313}-django{52, 60}") == {
        "lint",
        *(f"py{python}-django{django}" for python in (312, 313) for django in (52, 60)),
    }
    assert not any(map(is_environment, ["tests", "py310-django52", "py311-django61", "quick-celery57"]))


def of_classifiers(prefix: str) -> set[str]:
    text = ini("setup.cfg")["metadata"]["classifiers"]
    return set(re.findall(rf"^{prefix} :: (\d\.\d+)$", text, re.MULTILINE))


def test_the_classifiers_are_the_versions_that_ci_runs():
    include = CI["tests"]["strategy"]["matrix"]["include"]
    names = [each["env"] for each in include]
    assert {each["python"] for each in include} == of_classifiers("Programming Language :: Python")
    django = {f"{version[0]}.{version[1]}" for name in names for version in re.findall(r"django(\d\d)", name)}
    assert django == of_classifiers("Framework :: Django")
    for each in include:
        assert each["env"] == "oldest" or each["env"].startswith(f"py{each['python'].replace('.', '')}-")


def test_the_page_about_versions_names_those_that_ci_runs():
    page = (ROOT / "docs/upgrading.rst").read_text()
    rows = dict(re.findall(r"^(Python|Django|Redis|Valkey) {2,}(\d\.\d+(?:, \d\.\d+)*)", page, re.MULTILINE))
    assert set(rows["Python"].split(", ")) == of_classifiers("Programming Language :: Python")
    assert set(rows["Django"].split(", ")) == of_classifiers("Framework :: Django")
    images = CI["servers"]["strategy"]["matrix"]["image"]
    assert f"redis:{rows['Redis']}" in images
    assert len(images) == 5


def test_no_test_may_share_the_server_of_a_service_with_another_one(monkeypatch):
    (step,) = [step for step in CI["servers"]["steps"] if "REDISLOCK_TEST_URL" in step.get("env", {})]
    assert step["run"] == "tox run -e quick"
    assert "--numprocesses auto" in TOX["testenv:quick"]["commands"]
    monkeypatch.delenv("REDISLOCK_TEST_URL", raising=False)
    assert conftest.pytest_xdist_auto_num_workers() != 0
    monkeypatch.setenv("REDISLOCK_TEST_URL", step["env"]["REDISLOCK_TEST_URL"])
    assert conftest.pytest_xdist_auto_num_workers() == 0


def test_only_the_job_that_publishes_may_ask_for_a_token():
    for name, flow in WORKFLOWS.items():
        assert flow["permissions"] == {"contents": "read"}, name
    asking = [name for name, job in JOBS if "permissions" in job]
    assert asking == ["release.yml: publish"]
    publish = dict(JOBS)["release.yml: publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert not any("run" in step for step in publish["steps"])
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_every_file_that_a_template_names_exists():
    for path in (ROOT / ".github").rglob("*.md"):
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
        for name in re.findall(r"`((?:docs/)?[\w-]+\.rst)`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name}: {name}"


# Before a release


def filled_in(folder: Path) -> None:
    """Copy what the check looks at, with everything filled in."""
    for path in [ROOT / "setup.py", ROOT / "README.rst", ROOT / "CHANGELOG.rst", *ROOT.glob(".github/workflows/*.yml")]:
        text = path.read_text().replace('HOME = ""', f'HOME = "{HOME}"').replace("(unreleased)", "(2026-12-01)")
        copied = folder / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(re.sub(r"(uses: [\w./-]+)@\S+", rf"\1@{'0' * 40}", text))
    (folder / "django_redislock").mkdir()
    (folder / "django_redislock/__init__.py").write_text((ROOT / "django_redislock/__init__.py").read_text())


def test_what_is_to_be_filled_in_before_a_release_is_named_until_it_is(tmp_path):
    open_points = runpy.run_path(str(ROOT / ".ci/before_release.py"))["open_points"]
    named = list(open_points(ROOT))
    assert ("setup.py: set HOME, the address of the repository" in named) == (not SETUP["HOME"])
    assert any(point.startswith(".github/workflows/release.yml: pin actions/checkout@v5 to") for point in named)
    filled_in(tmp_path)
    version = re.findall(r'__version__ = "(.*)"', (tmp_path / "django_redislock/__init__.py").read_text())[0]
    assert list(open_points(tmp_path)) == list(open_points(tmp_path, f"v{version}")) == []
    assert list(open_points(tmp_path, "v0.9")) == [f"the tag is v0.9, and the version {version}"]
