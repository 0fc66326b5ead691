"""Choose the prompt of the samples that a run shows."""

from collections.abc import Sequence
from typing import NamedTuple

from monograph.data.corpus import Corpus
from monograph.model.config import LlamaConfig
from monograph.text.chat import stop_ids

STDLIB_PROMPT = "def read(self, size"
_SHOWN_CHARS = 40


class Opening(NamedTuple):
    """The prompt of the samples.

    Attributes:
        text: the text shown before a sample.
        begun: the text or the ids that the model continues.
        stop: ids that end a sample, in addition to the end-of-text token.
        arguments: the arguments, after the run, of the command that writes such a sample.
        command: that command: generate, or chat for a model of chats.
    """

    text: str
    begun: str | list[int]
    stop: tuple[int, ...]
    arguments: tuple[str, ...]
    command: str = "generate"


def opening_of_prompt(
    text: str, ids: Sequence[int], is_chat: bool, form: tuple[str, ...]
) -> Opening:
    """Return a prompt that answers are drawn to.

    Args:
        text: the prompt.
        ids: its tokens.
        is_chat: whether it is a message of a chat.
        form: the arguments that give answers their form.
    """
    if is_chat:
        return Opening(text, [*ids], (), form, "chat")
    return Opening(text, [*ids], (), (*form, *_dashes(text), text))


def opening_of(corpus: Corpus, config: LlamaConfig | None, is_chat: bool) -> Opening:
    """Return a prompt from the held-out text, or else from the training text, short enough to be
    continued.

    Args:
        corpus: the run's text.
        config: the model's shape; None if it is no Llama.
        is_chat: whether the text's records, if it has any, are chats.
    """
    rows = corpus.held_out if len(corpus.held_out) else corpus.train
    # It may fill half of the positions; the first token of a document and a written token must fit
    # in any case.
    room = (
        max(0, min(config.max_position_embeddings // 2, config.max_position_embeddings - 2))
        if config
        else None
    )
    if rows.conversations:
        ids = rows.first_prompt()
        ids = ids if room is None else ids[-max(1, room) :]
        asked = corpus.tokenizer.decode(ids).strip()
        if not is_chat:
            return Opening(asked, ids, (), (*_dashes(asked), asked))
        if len(asked) > _SHOWN_CHARS:  # keep the last whole words
            asked = "… " + (asked[-_SHOWN_CHARS:].split(maxsplit=1) or [""])[-1]
        return Opening(
            f"{asked} ", ids, stop_ids(corpus.tokenizer, config.ends if config else ()), (), "chat"
        )
    first_line = next(iter(rows.texts())).decode("utf-8", "replace").lstrip().partition("\n")[0]
    python = corpus.name == "stdlib"
    text = STDLIB_PROMPT if python else " ".join(first_line.split(" ")[:4])[:_SHOWN_CHARS]
    text = _shortened(corpus, text, room)
    prompt = _shortened(corpus, "class Cache:", room) if python else text
    return Opening(text, text, (), (*_dashes(prompt), prompt))


def _dashes(prompt: str) -> tuple[str, ...]:
    # Otherwise the prompt would be taken for an option.
    return ("--",) if prompt.startswith("-") else ()


def _shortened(corpus: Corpus, text: str, room: int | None) -> str:
    while room is not None and len(corpus.tokenizer.encode(text)) > room:
        text = text[: len(text) // 2]
    return text
