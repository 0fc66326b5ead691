"""What the tests of the endpoint share: a server of a small model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from monograph.text.tokenizer import Tokenizer
from served import Served, small


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One that all tests of a file talk to."""
    tokenizer = Tokenizer.bytes()
    with Served(small(tokenizer), tokenizer) as served:
        yield served


@pytest.fixture(scope="session")
def openai() -> Any:
    """OpenAI's client library, which takes longer to import than most tests take."""
    return pytest.importorskip("openai", reason="pip install openai")


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """The warnings of asyncio, which a server would have on its terminal."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
