"""The text that members of sweeps train on."""

from __future__ import annotations

import pytest

from commands.inputs import with_texts
from monograph.data.corpus import Corpus, corpus


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A few texts as bytes, in rows of 32, a fifth of them held out."""
    folder = with_texts(tmp_path_factory.mktemp("texts"))
    return corpus(
        folder / "texts",
        tokenizer="bytes",
        sequence_length=32,
        held_out=0.2,
        cache=folder / "cache",
    )
