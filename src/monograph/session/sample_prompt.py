"""Choose the prompt of the samples that a run shows."""

from collections.abc import Sequence
from typing import NamedTuple

from monograph.data.corpus import Corpus
from monograph.model.config import LlamaConfig
from monograph.text.chat import stop_ids

STDLIB_PROMPT = "def read(self, size"  # for a model of Python's standard library
# The suggested command has another prompt, so that its sample is new to the user.
_STDLIB_PROMPT_OF_COMMAND = "class Cache:"
_MAX_SHOWN_CHARACTERS = 40


class SamplePrompt(NamedTuple):
    """The prompt of the samples.

    Attributes:
        shown: the text that is shown before a sample.
        input: the text, or the token ids, that the model continues.
        stop_ids: ids that end a sample, in addition to the end-of-text token.
        arguments: the arguments, after the run's name, of the command that writes such a sample.
        command: the name of this command: "generate", or "chat" for a model of chats.
    """

    shown: str
    input: str | list[int]
    stop_ids: tuple[int, ...]
    arguments: tuple[str, ...]
    command: str = "generate"


def sample_prompt_from_ids(
    text: str, ids: Sequence[int], is_chat: bool, form_arguments: tuple[str, ...]
) -> SamplePrompt:
    """Return the prompt of the samples of a run that learns from answers to prompts.

    Args:
        text: one of the run's prompts.
        ids: its token ids.
        is_chat: whether the prompt is a message of a chat.
        form_arguments: the arguments with which a command constrains answers as the run does.
    """
    if is_chat:
        return SamplePrompt(text, [*ids], (), form_arguments, "chat")
    return SamplePrompt(text, [*ids], (), (*form_arguments, *_end_of_options(text), text))


def sample_prompt_from_corpus(
    corpus: Corpus, config: LlamaConfig | None, is_chat: bool
) -> SamplePrompt:
    """Return a prompt from the held-out text, or from the training text if none is held out.

    The prompt is short enough that the model has positions left to continue it.

    Args:
        corpus: the run's text.
        config: the model's shape; None if it is not a Llama.
        is_chat: whether the text's records, if it has any, are chats.
    """
    rows = corpus.held_out if len(corpus.held_out) else corpus.train
    max_tokens = None  # of the prompt; None means no limit
    if config:
        # Half of the positions. Two are left in any case: for the token that begins a document and
        # for a sampled token.
        positions = config.max_position_embeddings
        max_tokens = max(0, min(positions // 2, positions - 2))
    if rows.conversations:
        ids = rows.first_prompt()
        if max_tokens is not None:
            # The end of the prompt is kept, since the answer follows it; at least one token.
            ids = ids[-max(1, max_tokens) :]
        prompt = corpus.tokenizer.decode(ids).strip()
        if not is_chat:
            return SamplePrompt(prompt, ids, (), (*_end_of_options(prompt), prompt))
        shown = prompt
        if len(prompt) > _MAX_SHOWN_CHARACTERS:
            end = prompt[-_MAX_SHOWN_CHARACTERS:]
            # The first word may be cut, so it is left out, unless it is the only one.
            first_word_and_rest = end.split(maxsplit=1)
            shown = f"… {first_word_and_rest[-1]}"
        end_ids = config.eos_token_ids if config else ()
        stop = stop_ids(corpus.tokenizer, end_ids)
        return SamplePrompt(f"{shown} ", ids, stop, (), "chat")
    if corpus.name == "stdlib":
        prompt = _shortened(corpus, STDLIB_PROMPT, max_tokens)
        prompt_of_command = _shortened(corpus, _STDLIB_PROMPT_OF_COMMAND, max_tokens)
    else:
        first_text = next(iter(rows.texts())).decode("utf-8", "replace")
        first_line, _, _ = first_text.lstrip().partition("\n")
        first_words = " ".join(first_line.split(" ")[:4])
        prompt = _shortened(corpus, first_words[:_MAX_SHOWN_CHARACTERS], max_tokens)
        prompt_of_command = prompt
    arguments = (*_end_of_options(prompt_of_command), prompt_of_command)
    return SamplePrompt(prompt, prompt, (), arguments)


def _end_of_options(prompt: str) -> tuple[str, ...]:
    """Return the argument "--" if a command line would take the prompt for an option."""
    return ("--",) if prompt.startswith("-") else ()


def _shortened(corpus: Corpus, text: str, max_tokens: int | None) -> str:
    """Return the beginning of a text that has at most `max_tokens` tokens; None means no limit."""
    while max_tokens is not None and len(corpus.tokenizer.encode(text)) > max_tokens:
        text = text[: len(text) // 2]
    return text
