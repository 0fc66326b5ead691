"""The options for reading records, as one object that is passed around above `monograph.data`."""

from collections.abc import Sequence
from dataclasses import dataclass

from monograph.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReadingOptions:
    """The options by which records are found and become rows of tokens.

    The fields are the arguments of `monograph.corpus`, where each is described. Preference pairs
    and prompts to reward use only some of them.
    """

    source: str | Sequence[str]
    weights: Sequence[float] | None = None
    tokenizer: str | Tokenizer = "bpe"
    vocab_size: int | None = None
    sequence_length: int = 256
    packing: str = "packed"
    held_out: float = 0.05
    text_key: str | None = None
    ignore_keys: str | Sequence[str] | None = None
    bad_records: str = "refuse"
    answers: str = "every"
    too_long: str = "truncate"

    @property
    def is_packed(self) -> bool:
        """Return whether a row may hold pieces of several documents."""
        return self.packing == "packed"

    @property
    def skips_bad(self) -> bool:
        """Return whether bad records are skipped and counted; otherwise they are refused."""
        return self.bad_records == "skip"
