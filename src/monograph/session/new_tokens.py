"""Decide which tokens of a run are new to the model that it begins from, and whose rows are trained
with adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from monograph.config import Settings
from monograph.errors import InputRefused, UsageError
from monograph.report.quantities import counted
from monograph.run.recipe import Vocabulary, compare_tokenizers
from monograph.run.source import ModelSource
from monograph.text.tokenizer import Tokenizer

AUTO = "auto"
MOST_SHOWN = 6  # tokens named in a line


class NewTokens(NamedTuple):
    """The tokens of a run that begins from an existing model.

    Attributes:
        tokenizer: the run's tokenizer.
        vocabulary: the sizes of the model's tokenizer and the run's; None for a model that a Python
            function builds, for any number of tokens.
        listed: ids that `lora.tokens` names.
        stored: ids whose rows a stored adapter has; None if the run begins from no stored adapter.
        init: the model, as `model.init` names it.
        adapted: whether adapters are trained.
    """

    tokenizer: Tokenizer
    vocabulary: Vocabulary | None
    listed: tuple[int, ...]
    stored: tuple[int, ...] | None
    init: str
    adapted: bool

    def new(self, rows: int) -> range:
        """Return the ids that a model with `rows` rows was not trained with."""
        return self.vocabulary.new(rows) if self.vocabulary else range(0)

    def trained(self, rows: int) -> tuple[int, ...]:
        """Return the ids whose rows are trained together with adapters: new and listed ones, or a
        stored adapter's.

        Raises:
            InputRefused: a stored adapter has no row for a new token.
        """
        new = self.new(rows)
        if self.stored is None:
            return tuple(sorted({*new, *self.listed}))
        if missing := [index for index in new if index not in self.stored]:
            unknown = f"{self.tokenizer.texts()[missing[0]]!r} is new to the base"
            raise InputRefused(
                f"data.tokenizer: {unknown} and no row of the adapter: take the one next to it"
            )
        return self.stored


@dataclass(frozen=True)
class TokenSource:
    """What decides which tokens are new to the model that a run begins from.

    Attributes:
        source: the model, of whose tokenizer new ones are told; None: a new model.
        adapted: whether adapters are trained.
        tokenizer: data.tokenizer, with the file of a run in its place.
        tokenizer_origin: where data.tokenizer comes from.
        listed: the texts in lora.tokens.
        listed_origin: where lora.tokens comes from.
    """

    source: ModelSource | None
    adapted: bool
    tokenizer: str
    tokenizer_origin: str
    listed: tuple[str, ...] | None
    listed_origin: str

    def compared(self, tokenizer: Tokenizer | None = None) -> NewTokens | None:
        """Compare a run's tokens with those of the model that it begins from; return None for a new
        model.

        Args:
            tokenizer: the text's tokenizer; None means the one that the settings name. If that is
                still to be trained, its tokens are unknown, and the function returns None.

        Raises:
            InputRefused: the tokenizer differs from the model's (the first such id is named), or
                cannot be read.
            UsageError: `lora.tokens` names a text that is not a single token.
        """
        source = self.source
        if source is None:
            return None
        if tokenizer is None:
            if self.tokenizer == "bpe":
                return None
            file = source.tokenizer if self.tokenizer == AUTO else self.tokenizer
            tokenizer = Tokenizer.bytes() if file == "bytes" else Tokenizer.from_file(file)
        vocabulary = None if source.code else compare_tokenizers(tokenizer, source.base)
        stored = source.adapter.lora.tokens if source.adapter else None
        return NewTokens(
            tokenizer, vocabulary, self._ids(tokenizer), stored, source.name, self.adapted
        )

    def _ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        ids = {text: tokenizer.id_of(text) for text in self.listed or ()}
        if missing := [text for text, index in ids.items() if index is None]:
            whole = f"{missing[0]!r} is no token of {self.tokenizer}: it has to be one as a whole"
            raise UsageError(f"{self.listed_origin}: lora.tokens: {whole}")
        return tuple(index for index in ids.values() if index is not None)

    def planned(self) -> NewTokens | None:
        """Return `compared` for a plan, which needs no tokenizer: None if the model's own is
        missing or refused.

        Raises:
            InputRefused, UsageError: see `compared`, for a tokenizer that the settings name.
        """
        try:
            return self.compared()
        except InputRefused:
            if self.tokenizer != AUTO:
                raise
            return None

    def require(self) -> None:
        """Refuse, before any text is read, a tokenizer that does not fit the base, and listed texts
        that are no tokens.

        Raises:
            InputRefused, UsageError: see `compared`.
        """
        source = self.source
        its_own = source is not None and not source.code and source.own_tokenizer == self.tokenizer
        if not its_own or self.listed is not None:
            self.compared()

    def require_no_new(self, parent: str) -> None:
        """Refuse a tokenizer with which a run cannot go on from another run's weights and optimizer
        state.

        Raises:
            InputRefused: the tokenizer differs from the parent's; the first such id is named.
            UsageError: the tokenizer has more tokens than the parent's.
        """
        tokens = self.compared()
        if tokens and tokens.vocabulary and (new := tokens.vocabulary.new(tokens.vocabulary.all)):
            raise UsageError(
                f"{self.tokenizer_origin}: data.tokenizer has {counted(len(new), 'token')} that {parent} has "
                f"no row for, nor an optimizer's state: --from goes on with both; start anew with model.init={parent}"
            )


def tokens_of(
    settings: Settings, source: ModelSource | None, tokenizer: str, is_adapted: bool
) -> TokenSource:
    """Return what the settings say of a run's tokens.

    Args:
        settings: the run's settings.
        source: the model that the run starts from; None for a new one.
        tokenizer: data.tokenizer, with the file of a run in its place.
        is_adapted: whether adapters are trained.
    """
    listed = settings.lora.tokens
    texts = (listed,) if isinstance(listed, str) else listed
    return TokenSource(
        source=source,
        adapted=is_adapted or (source is not None and source.adapter is not None),
        tokenizer=tokenizer,
        tokenizer_origin=settings.origins.get("data.tokenizer", "data.tokenizer"),
        listed=None if texts is None else () if listed == AUTO else tuple(texts),
        listed_origin=settings.origins.get("lora.tokens", "lora.tokens"),
    )


def token_notes(tokens: NewTokens | None, rows: int) -> tuple[str, ...]:
    """Return the lines on tokens that `train` and `plan` print for a base with `rows` rows; usually
    none.
    """
    if tokens is None:
        return ()
    lines = list[str]()
    new = tokens.new(rows)
    if new:
        begin = "its row begins as the mean" if len(new) == 1 else "their rows begin as the mean"
        trained = (
            f" and {'is' if len(new) == 1 else 'are'} trained with the adapters"
            if tokens.adapted
            else ""
        )
        lines.append(f"{counted(len(new), 'new token')}: {_some(tokens, new)}; {begin}{trained}")
    if others := [index for index in tokens.trained(rows) if tokens.adapted and index not in new]:
        lines.append(
            f"{counted(len(others), 'token')} with rows of their own: {_some(tokens, others)}"
        )
    if tokens.vocabulary and tokens.vocabulary.own is None:
        untold = (
            "has no tokenizer.json to compare data.tokenizer with: its ids are taken as they are"
        )
        lines.append(f"{tokens.init} {untold}")
    return tuple(lines)


def _some(tokens: NewTokens, ids: Sequence[int]) -> str:
    texts = tokens.tokenizer.texts()
    more = f" and {len(ids) - MOST_SHOWN} more" if len(ids) > MOST_SHOWN else ""
    return ", ".join(texts[index] for index in ids[:MOST_SHOWN]) + more
