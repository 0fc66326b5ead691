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
        begun: the text, or the token ids, that the model continues.
        stop: ids that end a sample, in addition to the end-of-text token.
        arguments: the arguments after the run's name of the command that writes such a sample.
        command: this command: "generate", or "chat" for a model of chats.
    """

    text: str
    begun: str | list[int]
    stop: tuple[int, ...]
    arguments: tuple[str, ...]
    command: str = "generate"


def opening_of_prompt(
    text: str, ids: Sequence[int], is_chat: bool, form: tuple[str, ...]
) -> Opening:
    """Return the opening of a run that samples answers to prompts.

    Args:
        text: the prompt.
        ids: the prompt's token ids.
        is_chat: whether the prompt is a message of a chat.
        form: the arguments that constrain an answer, as the run constrains it.
    """
    if is_chat:
        return Opening(text, [*ids], (), form, "chat")
    return Opening(text, [*ids], (), (*form, *_dashes(text), text))


def opening_of(corpus: Corpus, config: LlamaConfig | None, is_chat: bool) -> Opening:
    """Return the opening of a run on text: a prompt from the held-out text, or from the training
    text if none is held out.

    The prompt is short enough to be continued.

    Args:
        corpus: the run's text.
        config: the model's shape; None if it is not a Llama.
        is_chat: whether the text's records, if it has any, are chats.
    """
    rows = corpus.held_out if len(corpus.held_out) else corpus.train
    room = None  # the maximum number of the prompt's tokens
    if config:
        # Half of the positions. Two are left in any case: for the token that begins a document and
        # for a written token.
        positions = config.max_position_embeddings
        room = max(0, min(positions // 2, positions - 2))
    if rows.conversations:
        ids = rows.first_prompt()
        if room is not None:
            ids = ids[-max(1, room) :]
        prompt = corpus.tokenizer.decode(ids).strip()
        if not is_chat:
            return Opening(prompt, ids, (), (*_dashes(prompt), prompt))
        shown = prompt
        if len(prompt) > _SHOWN_CHARS:
            # The first word may be cut, so it is left out.
            last_words = prompt[-_SHOWN_CHARS:].split(maxsplit=1) or [""]
            shown = f"… {last_words[-1]}"
        stop = stop_ids(corpus.tokenizer, config.eos_token_ids if config else ())
        return Opening(f"{shown} ", ids, stop, (), "chat")
    first_line = next(iter(rows.texts())).decode("utf-8", "replace").lstrip().partition("\n")[0]
    if corpus.name == "stdlib":
        text = _shortened(corpus, STDLIB_PROMPT, room)
        # The command that is suggested has another prompt than the samples shown so far.
        prompt = _shortened(corpus, "class Cache:", room)
    else:
        first_words = " ".join(first_line.split(" ")[:4])[:_SHOWN_CHARS]
        text = prompt = _shortened(corpus, first_words, room)
    return Opening(text, text, (), (*_dashes(prompt), prompt))


def _dashes(prompt: str) -> tuple[str, ...]:
    """Return the argument after which a command line takes a prompt with a dash for a prompt, not
    for an option.
    """
    return ("--",) if prompt.startswith("-") else ()


def _shortened(corpus: Corpus, text: str, room: int | None) -> str:
    """Return the beginning of a text that has at most `room` tokens; None means no limit."""
    while room is not None and len(corpus.tokenizer.encode(text)) > room:
        text = text[: len(text) // 2]
    return text
