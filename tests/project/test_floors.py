"""The floors of the package: no module imports one of a higher floor, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import django_redislock

PACKAGE = Path(django_redislock.__file__).parent
FLOORS = [
    {
        "exceptions",
        "core.chance",
        "core.clock",
        "core.events",
        "core.validation",
        "core.driver.process",
        "name_template",
    },
    {"core.driver"},
    {"core"},
    {"cache.lease", "celery.execution_lock", "task_names"},
    {
        "conf",
        "connections",
        "locks",
        "run_once.election",
        "decorator",
        "transactions",
        "fencing",
        "signals",
        "inventory",
        "models",
        "server_url",
        "tenants",
        "texts",
    },
    {
        "checks",
        "doctor",
        "admin",
        "cache",
        "celery",
        "management",
        "run_once",
        "metrics",
        "tracing",
        "testing",
    },
    {"apps", "tasks", "pytest_plugin", ""},
]
"""The modules and packages of each floor, from the lowest; the most exact name counts. "" is the package itself."""
FLOOR_OF_DJANGO = 4
BESIDE = {
    ("checks", "doctor"),
    ("management", "doctor"),
    ("management", "run_once"),
}
"""The features of the same floor that may import each other."""
LAZY = {
    ("cache.refresh", "tasks"),
    ("checks", "celery.decorator"),
    ("doctor", "cache"),
    ("metrics", "cache"),
}
"""The imports within a function that lead up or aside: they need an extra, or Django's apps."""


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def imports(name: str) -> frozenset[tuple[str, bool]]:
    """Return the modules that the module imports, also for type checkers only, and whether a function does it."""
    path = MODULES[name]
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.split(".") if package else []
            base = base[: len(base) + 1 - node.level] + (node.module or "").split(".")
            target = ".".join(filter(None, base))
            for alias in node.names:
                within = f"{target}.{alias.name}".lstrip(".")
                found.add((within if within in MODULES else target, id(node) in lazy))
    return frozenset(found)


def floor_of(name: str) -> int:
    while True:
        for number, floor in enumerate(FLOORS):
            if name in floor:
                return number
        assert name, "the package itself has a floor"
        name = name.rpartition(".")[0]


def test_no_module_imports_a_module_of_a_higher_floor():
    wrong = [
        f"{name} (floor {floor_of(name)}) imports {other} (floor {floor_of(other)})"
        for name in MODULES
        for other, lazy in imports(name)
        if floor_of(other) > floor_of(name) and not (lazy and (name, other) in LAZY)
    ]
    assert wrong == []


def test_the_floors_below_django_import_neither_django_nor_celery():
    wrong = []
    for name in filter(lambda name: floor_of(name) < FLOOR_OF_DJANGO, MODULES):
        for node in ast.walk(ast.parse(MODULES[name].read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            foreign = {"django", "celery", "kombu"} & {module.partition(".")[0] for module in modules}
            wrong += [f"{name} imports {each}" for each in foreign]
    assert wrong == []


def test_the_features_do_not_import_each_other():
    features = FLOORS[5]
    wrong = []
    for name in MODULES:
        for other, lazy in imports(name):
            pair = name.partition(".")[0], other.partition(".")[0]
            beside = floor_of(name) == floor_of(other) == 5 and pair[0] != pair[1] and set(pair) <= features
            if beside and pair not in BESIDE and not (lazy and (name, other) in LAZY):
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: {other for other, lazy in imports(name) if not lazy and other != name} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_every_exception_from_the_floors_is_needed():
    seen = {(name, other) for name in MODULES for other, _ in imports(name)}
    pairs = {(name.partition(".")[0], other.partition(".")[0]) for name, other in seen}
    assert {pair for pair in BESIDE if pair not in pairs} == set()
    assert {pair for pair in LAZY if pair not in seen} == set()


def test_no_test_file_has_more_than_400_lines():
    tests = Path(__file__).parents[1]
    lengths = {str(path.relative_to(tests)): len(path.read_text().splitlines()) for path in tests.rglob("*.py")}
    assert {path: lines for path, lines in lengths.items() if lines > 400} == {}
