"""Turn a prompt and its completion, both texts, into tokens of which the completion's are trained
on.

No chat template takes part: the model reads the prompt as it is, continues it with the completion,
and ends the text.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from monograph.data.conversations import Conversation, chat_only, conversation_text, keyed_records
from monograph.data.forms import COMPLETION, PROMPT, RecordKeys
from monograph.data.loss_mask import Answering, Row
from monograph.data.records import Fault, Record, Unusable, short
from monograph.data.sources import SourceFile
from monograph.text.tokenizer import Tokenizer


def completed_row(tokenizer: Tokenizer, prompt: str, completion: str) -> Row:
    """Return the tokens of a prompt and its completion, and the span of the completion with the end
    of the text.

    Both are encoded apart, since at inference the prompt is encoded before anything follows it.
    """
    before = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    # Only a text that begins the document has the space that some tokenizers put before a text.
    ids = [*before, *tokenizer.encode(completion, inside=bool(prompt)), tokenizer.eos_id]
    return Row(ids, ((len(before), len(ids)),))


def are_texts(record: Mapping[str, Any]) -> bool:
    """Return whether a record's prompt and completion are texts."""
    return isinstance(record.get(PROMPT), str) and isinstance(record.get(COMPLETION), str)


def completion_records(file: SourceFile, keys: RecordKeys) -> Iterator[Record]:
    """Yield (record number from 1, what `conversation_text` returns) for every record of texts;
    others are bad.

    Raises:
        InputRefused: a record has an unknown key.
    """
    for number, record in keyed_records(file, keys):
        yield number, record if isinstance(record, Fault) else _text_of(record)


def _text_of(record: Mapping[str, Any]) -> str | Fault:
    without = "needs a chat template, and the model has none"
    if not are_texts(record):
        return Fault(
            "a chat", f"is no text under {short(PROMPT)} and {short(COMPLETION)}: a chat {without}"
        )
    beside = chat_only(record)
    if beside is not None:
        return Fault(
            "a chat", f"{short(beside)} {without}: remove it, or name it in data.ignore_keys"
        )
    return conversation_text(record)


def texts_of(text: str) -> tuple[str, str]:
    """Return the prompt and the completion of a record's text, as `completion_records` yields it."""
    prompt, completion = Conversation.of_text(text).messages
    return prompt["content"], completion["content"]


class Completions:
    """A converter of records to rows, like `monograph.data.loss_mask.Answers`, which does it for
    chats.
    """

    def __init__(self, tokenizer: Tokenizer, how: Answering) -> None:
        self._tokenizer = tokenizer
        self._longest = how.longest

    def row(self, text: str) -> Row:
        """Return the row of a record's text.

        Raises:
            Unusable: it is longer than a row.
            InputRefused: the tokenizer would lose a part of it.
        """
        row = completed_row(self._tokenizer, *texts_of(text))
        if len(row.ids) - 1 > self._longest:
            raise Unusable(
                "too long",
                f"prompt and completion take {len(row.ids) - 1:,} tokens, more than data.sequence_length = "
                f"{self._longest}; raise it",
            )
        return row
