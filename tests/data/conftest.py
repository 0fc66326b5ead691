"""Shared by the data tests (run them with `pytest tests/data`): small texts, and a cache of their
own.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clocks import HANG_S
from monograph.data.corpus import Corpus, corpus
from monograph.text.tokenizer import Tokenizer

WORDS = "the a loop reads_line 3.14 ==  \n\n\n\t naïve 数据 🙂 don't (x) { } import return self, of and\n é İ ̈u".split(
    " "
)


def random_text(length: int, seed: int) -> str:
    """About `length` characters of words, symbols, blanks and non-Latin letters."""
    choice = random.Random(seed)
    return "".join(
        choice.choice(WORDS) + choice.choice([" ", " ", "\n", ""]) for _ in range(length // 4 + 1)
    )


def write_texts(folder: Path, documents: int = 30, longest: int = 3000) -> Path:
    """A folder of text files with lengths from one character up, a third of them in a subfolder."""
    (folder / "sub").mkdir(parents=True)
    for i in range(documents):
        length = 1 if i == 0 else random.Random(i).randrange(2, longest)
        path = folder / ("sub" if i % 3 == 0 else ".") / f"{i:03}.txt"
        path.write_text(random_text(length, seed=i), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOGRAPH_HOME", str(tmp_path / "monograph-home"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 30 text files."""
    return write_texts(tmp_path_factory.mktemp("texts") / "corpus")


@pytest.fixture(scope="session")
def small(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Corpus]:
    """small(packing=..., ...) is a corpus of these texts with rows of 32."""
    cache = tmp_path_factory.mktemp("cache")

    def build(**settings: object) -> Corpus:
        return corpus(
            texts,
            **(
                {"tokenizer": "bpe", "vocab_size": 400, "sequence_length": 32, "cache": cache}
                | settings
            ),
        )  # type: ignore[arg-type]

    return build


@pytest.fixture(scope="session")
def trained(texts: Path) -> Tokenizer:
    """A byte-level BPE with 400 entries."""
    return Tokenizer.train_bpe(
        [path.read_text(encoding="utf-8") for path in sorted(texts.rglob("*.txt"))], 400
    )


@pytest.fixture
def python() -> Callable[..., str]:
    """python(script, *arguments) runs a script in a new interpreter and returns what it prints."""

    def run(script: str, *arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-W", "error", "-c", script, *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=HANG_S
        ).stdout

    return run
