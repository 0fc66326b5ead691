"""What a run's samples go on from: the first words of the held-out text, or the first held-out question."""

from __future__ import annotations

from typing import NamedTuple

from monograph.data.corpus import Corpus
from monograph.model.config import LlamaConfig
from monograph.text.chat import stop_ids

STDLIB_PROMPT = "def read(self, size"
_SHOWN_CHARS = 40


class Opening(NamedTuple):
    """Where samples begin.

    Attributes:
        text: what is shown before what the model writes.
        begun: the text or the ids that it goes on from.
        stop: ids that end what it writes, beside the end of a text.
        arguments: what `monograph generate` is told to do the like.
    """

    text: str
    begun: str | list[int]
    stop: tuple[int, ...]
    arguments: tuple[str, ...]


def opening_of(corpus: Corpus, config: LlamaConfig | None) -> Opening:
    """As much of the held-out text, or of the training text, as leaves a model room to go on."""
    rows = corpus.held_out if len(corpus.held_out) else corpus.train
    # Half of the positions, or what the first token of a document and one that is written leave of two or three.
    room = max(0, min(config.max_position_embeddings // 2, config.max_position_embeddings - 2)) if config else None
    if rows.conversations:
        ids = rows.first_prompt()
        ids = ids if room is None else ids[-max(1, room) :]
        asked = corpus.tokenizer.decode(ids).strip()
        if len(asked) > _SHOWN_CHARS:  # whole words of its end
            asked = "… " + (asked[-_SHOWN_CHARS:].split(maxsplit=1) or [""])[-1]
        return Opening(f"{asked} ", ids, stop_ids(corpus.tokenizer, config.ends if config else ()), ("--chat",))
    first_line = next(iter(rows.texts())).decode("utf-8", "replace").lstrip().partition("\n")[0]
    python = corpus.name == "stdlib"
    text = STDLIB_PROMPT if python else " ".join(first_line.split(" ")[:4])[:_SHOWN_CHARS]
    text = _shortened(corpus, text, room)
    prompt = _shortened(corpus, "class Cache:", room) if python else text
    dashes = ("--",) if prompt.startswith("-") else ()  # or it would be taken for an option
    return Opening(text, text, (), (*dashes, prompt))


def _shortened(corpus: Corpus, text: str, room: int | None) -> str:
    while room is not None and len(corpus.tokenizer.encode(text)) > room:
        text = text[: len(text) // 2]
    return text
