from __future__ import annotations

import http.client
import os
from importlib.resources import files
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "example_project"


def part_of_tzdata(folder: Path, one_of: int) -> dict[str, str]:
    """Make a tzdata of one of so many zones in the folder, and return a path for Python on which it comes first.

    The reports of the example are of all zones, and take as much less time. Berlin and Tokyo are among them.
    """
    real, kept = files("tzdata"), {"Europe/Berlin", "Asia/Tokyo"}
    names = (real / "zones").read_text().split()
    (folder / "tzdata").mkdir()
    (folder / "tzdata" / "__init__.py").touch()
    (folder / "tzdata" / "zoneinfo").symlink_to(str(real / "zoneinfo"))
    (folder / "tzdata" / "zones").write_text("\n".join(n for i, n in enumerate(names) if i % one_of == 0 or n in kept))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{PROJECT.parent}"}


class Site:
    """The site as served by a process of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    def request(self, method: str, path: str, body: str = "", **headers: str) -> tuple[http.client.HTTPResponse, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response, text

    def get(self, path: str) -> str:
        response, text = self.request("GET", path)
        assert response.status == 200, text[:2000]
        return text


def environment(**variables: str) -> dict[str, str]:
    """Return the environment for the example's settings, without Python's development mode, as its users have it."""
    ours = ("DJANGO_SETTINGS_MODULE", "PYTHONDEVMODE")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return env | {"PYTHONPATH": str(PROJECT.parent)} | variables
