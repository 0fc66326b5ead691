"""A run's tokenizer beside the one of the model that it begins from: the same tokens, and what it has more.

Shapes: V rows of the model's embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from monograph.errors import InputRefused
from monograph.model import adapter, hub
from monograph.model.llama import Llama
from monograph.model.vocabulary import extend
from monograph.run.recipe import is_weight_file, run_named
from monograph.storage.reading import is_file
from monograph.text import tokenizer_file
from monograph.text.tokenizer import Tokenizer

LONGEST = 40  # characters of a token in a message


class Vocabulary(NamedTuple):
    """How many tokens there are.

    Attributes:
        own: in the tokenizer of the model; None where it has none.
        all: in the tokenizer that is used with it, the first of them the same.
    """

    own: int | None
    all: int

    def new(self, rows: int) -> range:
        """The ids that a model of V rows was not trained with; where nobody knows, those that it has no row for."""
        return range(min(rows if self.own is None else self.own, rows), self.all)


def tokenizer_of(folder: str | Path) -> Path:
    """The tokenizer.json of a run or of a Hugging Face folder, or beside a weight file.

    Raises:
        InputRefused: there is none.
    """
    path = own_file(folder)
    if path is None and adapter.is_adapter(folder):
        return tokenizer_of(adapter.resolved_base(adapter.read_adapter(folder)))
    if path is None or not is_file(path):
        raise InputRefused(
            f"{folder}: there is no tokenizer.json; put the model's beside its weights, "
            "or to train on it name it as data.tokenizer"
        )
    return path


def own_file(folder: str | Path) -> Path | None:
    """The tokenizer.json that belongs to weights themselves, None where there is none."""
    run = run_named(folder)
    return run.tokenizer if run else hub.tokenizer_file(Path(folder).parent if is_weight_file(folder) else folder)


def compared(tokenizer: Tokenizer, base: str, named: str = "data.tokenizer") -> Vocabulary:
    """A tokenizer beside that of the model in `base`, token by token.

    Raises:
        InputRefused: an id that both have stands for another text, or the model's file cannot be read.
    """
    path = own_file(base)
    if path is None or not is_file(path):
        return Vocabulary(None, tokenizer.vocab_size)
    own, ours = tokenizer_file.texts(tokenizer_file.read(path), str(path)), tokenizer.texts()
    for index in sorted(own.keys() & ours.keys()):
        if own[index] != ours[index]:
            raise InputRefused(
                f"{named}: another tokenizer than {path}: id {index} is {_shown(ours[index])}, and of the model "
                f"{_shown(own[index])}, whose row it has: take the model's own with tokens added at its end"
            )
    return Vocabulary(max(own, default=-1) + 1, tokenizer.vocab_size)


def extended(model: Llama, vocabulary: Vocabulary, base: str) -> list[int] | None:
    """Give a model the rows that it lacks.

    Args:
        model: as it was loaded.
        vocabulary: as `compared` found it.
        base: where the model is from.

    Returns:
        What `monograph.model.vocabulary.extend` was told, to be told again; None where there was nothing to do.

    Raises:
        InputRefused: rows are missing, and which of the tokens are new cannot be known.
    """
    rows = model.config.vocab_size
    new = vocabulary.new(rows)
    if not new:
        return None
    if vocabulary.own is None:
        raise InputRefused(
            f"model.vocab_size = {rows} of {base} is smaller than the tokenizer's {vocabulary.all}, and no "
            "tokenizer.json beside its weights says which tokens are new: put the model's own there"
        )
    extend(model, new.start, new.stop)
    return [new.start, new.stop]


def _shown(text: str) -> str:
    return repr(text if len(text) <= LONGEST else text[:LONGEST] + "...")
