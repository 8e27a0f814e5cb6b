from __future__ import annotations

import http.client
import os
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "example_project"


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
