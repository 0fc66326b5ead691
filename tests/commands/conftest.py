"""Small inputs of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.inputs import with_texts


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a few texts in it."""
    return with_texts(tmp_path)
