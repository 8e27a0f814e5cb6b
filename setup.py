"""The addresses of the project, and the README that names them. Everything else is in setup.cfg."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HOME = ""
"""The address of the repository, without a slash at its end. This is its only place; it is not known yet."""

ROOT = Path(__file__).resolve().parent


def project_urls(home: str) -> dict[str, str]:
    """Return the links that a package index shows."""
    if not home:
        return {}
    return {
        "Homepage": home,
        "Documentation": f"{home}/tree/HEAD/docs",
        "Changelog": f"{home}/blob/HEAD/CHANGELOG.rst",
        "Issues": f"{home}/issues",
        "Security": f"{home}/security/policy",
        "Source": home,
    }


def readme(home: str) -> str:
    """Return the README as a package index shows it: pictures and links to files need an absolute address there."""
    text = (ROOT / "README.rst").read_text(encoding="utf-8")
    if not home:  # no address, no picture and no link
        text = re.sub(r"^\.\. image:: docs/.*\n(?:   .*\n)+\n", "", text, flags=re.MULTILINE)
        return re.sub(r"`([^`<]+) <[\w/-]+\.rst>`__", r"\1", text)
    text = text.replace(".. image:: docs/", f".. image:: {home}/raw/HEAD/docs/")
    return re.sub(r"<([\w/-]+\.rst)>`__", rf"<{home}/blob/HEAD/\1>`__", text)


if __name__ == "__main__":
    setup(
        long_description=readme(HOME),
        long_description_content_type="text/x-rst",
        project_urls=project_urls(HOME),
    )
