"""What the tests of the endpoint share: a server of a small model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monograph.text.tokenizer import Tokenizer
from served import Served, small


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One that all tests of a file talk to."""
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        yield served
