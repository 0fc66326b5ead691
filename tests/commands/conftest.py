"""A command server that the tests of the commands share, and small inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import with_texts


@pytest.fixture(scope="session")
def server() -> Iterator[CommandServer]:
    with CommandServer() as forks:
        yield forks


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a few texts in it."""
    return with_texts(tmp_path)
