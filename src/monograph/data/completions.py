"""Turn prompts and completions that are plain texts into tokens. Only the completions are trained on.

No chat template is needed: the row has the tokens of the prompt, the tokens of the completion, and the end
token.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from monograph.data.conversations import (
    Conversation,
    conversation_text,
    first_chat_only_key,
    keyed_records,
)
from monograph.data.forms import COMPLETION, PROMPT, RecordKeys
from monograph.data.loss_mask import AnswerOptions, MaskedRow
from monograph.data.records import Fault, NumberedText, Unusable, quote
from monograph.data.sources import SourceFile
from monograph.text.tokenizer import Tokenizer


def completed_row(tokenizer: Tokenizer, prompt: str, completion: str) -> MaskedRow:
    """Return the row of a prompt and its completion. The completion and the end token are trained on.

    The two texts are encoded separately, because at inference the prompt is encoded alone.
    """
    prompt_ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    # Some tokenizers put a space before the text that begins a document. The completion begins the
    # document only if the prompt is empty.
    completion_ids = tokenizer.encode(completion, inside=bool(prompt))
    ids = [*prompt_ids, *completion_ids, tokenizer.eos_id]
    return MaskedRow(ids, ((len(prompt_ids), len(ids)),))


def are_texts(record: Mapping[str, Any]) -> bool:
    """Return whether a record's prompt and completion are texts."""
    return isinstance(record.get(PROMPT), str) and isinstance(record.get(COMPLETION), str)


def completion_records(file: SourceFile, keys: RecordKeys) -> Iterator[NumberedText]:
    """Yield (record number from 1, conversation as a text or a fault) for every record of a file.

    The text is what `conversation_text` returns. A record whose prompt and completion are not both texts
    has a fault.

    Raises:
        InputRefused: a record has an unknown key.
    """
    for number, record in keyed_records(file, keys):
        if isinstance(record, Fault):
            yield number, record
        else:
            yield number, _text_of(record)


def _text_of(record: Mapping[str, Any]) -> str | Fault:
    """Return the text of a record, or its fault if its prompt and completion are not both texts."""
    needs_template = "needs a chat template, and the model has none"
    if not are_texts(record):
        return Fault(
            "a chat",
            f"is no text under {quote(PROMPT)} and {quote(COMPLETION)}: a chat {needs_template}",
        )
    chat_key = first_chat_only_key(record)
    if chat_key is not None:
        return Fault(
            "a chat",
            f"{quote(chat_key)} {needs_template}: remove it, or name it in data.ignore_keys",
        )
    return conversation_text(record)


def prompt_and_completion(text: str) -> tuple[str, str]:
    """Return the prompt and the completion of a record's text.

    Args:
        text: as `completion_records` yields it.
    """
    prompt, completion = Conversation.of_text(text).messages
    return prompt["content"], completion["content"]


class CompletionEncoder:
    """A converter of prompts and completions to rows, both of them texts.

    The converter of chats is `monograph.data.loss_mask.ConversationConverter`.
    """

    def __init__(self, tokenizer: Tokenizer, answer_options: AnswerOptions) -> None:
        self._tokenizer = tokenizer
        self._max_inputs = answer_options.max_inputs

    def row(self, text: str) -> MaskedRow:
        """Return the row of a record's text, as `completion_records` yields it.

        Raises:
            Unusable: the record is longer than a row.
            InputRefused: the tokenizer would change the text.
        """
        prompt, completion = prompt_and_completion(text)
        row = completed_row(self._tokenizer, prompt, completion)
        inputs = len(row.ids) - 1
        if inputs > self._max_inputs:
            raise Unusable(
                "too long",
                f"prompt and completion take {inputs:,} tokens, more than data.sequence_length = {self._max_inputs}; "
                "raise it",
            )
        return row
