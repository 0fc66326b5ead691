"""A Python environment for one test, as pip makes it."""

from __future__ import annotations

import re
import subprocess
import venv
from pathlib import Path

import pytest


def installed(folder: Path, *wanted: str | Path) -> Path:
    """The Python of a new environment that has what `pip install` gets; skips where no index can be
    reached.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    pip = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *wanted], capture_output=True, text=True
    )
    if pip.returncode and re.search(
        r"(?i)connection|timed out|name resolution|max retries", pip.stderr
    ):
        pytest.skip("the package index cannot be reached")
    assert pip.returncode == 0, pip.stderr
    return python
