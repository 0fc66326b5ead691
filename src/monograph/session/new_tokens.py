"""Decide which tokens of a run are new to the model that the run begins from, and for which tokens
the embedding rows are trained together with adapters.

A token's *row* is its row of the embedding and of the output matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from monograph.config import Settings
from monograph.errors import InputRefused, UsageError
from monograph.report.quantities import counted
from monograph.run.recipe import TokenizerSizes, compare_tokenizers
from monograph.run.source import ModelSource
from monograph.text.tokenizer import Tokenizer

AUTO = "auto"
MAX_SHOWN = 6  # a note names at most this many tokens


class NewTokens(NamedTuple):
    """The tokens of a run that begins from an existing model.

    Attributes:
        tokenizer: the run's tokenizer.
        sizes: the sizes of the model's tokenizer and of the run's. None for a model that a
            Python function builds, which has rows for any number of tokens.
        listed: the ids that `lora.tokens` names.
        stored: the ids of the tokens whose rows a stored adapter has; None if the run does not
            begin from a stored adapter.
        init: the model, as `model.init` names it.
        is_adapted: whether adapters are trained.
    """

    tokenizer: Tokenizer
    sizes: TokenizerSizes | None
    listed: tuple[int, ...]
    stored: tuple[int, ...] | None
    init: str
    is_adapted: bool

    def new_ids(self, rows: int) -> range:
        """Return the ids that are new to the model, which has `rows` rows."""
        return self.sizes.new_ids(rows) if self.sizes else range(0)

    def trained_ids(self, rows: int) -> tuple[int, ...]:
        """Return the ids whose rows are trained together with adapters.

        These are the new and the listed ids, or those of the stored adapter if there is one.

        Args:
            rows: the number of rows of the model.

        Raises:
            InputRefused: a stored adapter has no row for a new token.
        """
        new = self.new_ids(rows)
        if self.stored is None:
            return tuple(sorted({*new, *self.listed}))
        missing = [index for index in new if index not in self.stored]
        if missing:
            text = self.tokenizer.texts()[missing[0]]
            raise InputRefused(
                f"data.tokenizer: {text!r} is new to the base, and the adapter has no row for it: take the tokenizer "
                "next to the adapter"
            )
        return self.stored


@dataclass(frozen=True)
class TokenSource:
    """The model and the settings that decide which tokens are new to the model.

    Attributes:
        source: the model; None for a new model, to which no token is new.
        is_adapted: whether adapters are trained.
        tokenizer: data.tokenizer; if that names a run, the run's tokenizer file.
        tokenizer_origin: where data.tokenizer comes from.
        listed: the texts in lora.tokens; None if the key is not given.
        listed_origin: where lora.tokens comes from.
    """

    source: ModelSource | None
    is_adapted: bool
    tokenizer: str
    tokenizer_origin: str
    listed: tuple[str, ...] | None
    listed_origin: str

    def compare(self, tokenizer: Tokenizer | None = None) -> NewTokens | None:
        """Compare the run's tokenizer with the tokenizer of the model that the run begins from, and
        return the run's tokens; None for a new model.

        Args:
            tokenizer: the tokenizer of the run's text; None means the one that the settings name.
                If that one is still to be trained, its tokens are unknown, and the result is None.

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
        sizes = None if source.code else compare_tokenizers(tokenizer, source.base)
        stored = source.adapter.lora.tokens if source.adapter else None
        return NewTokens(
            tokenizer, sizes, self._listed_ids(tokenizer), stored, source.name, self.is_adapted
        )

    def _listed_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of the listed texts, each once."""
        ids = list[int]()
        for text in dict.fromkeys(self.listed or ()):
            token_id = tokenizer.id_of(text)
            if token_id is None:
                raise UsageError(
                    f"{self.listed_origin}: lora.tokens: {text!r} is not a single token of {self.tokenizer}"
                )
            ids.append(token_id)
        return tuple(ids)

    def compare_if_readable(self) -> NewTokens | None:
        """Return the result of `compare`, or None if the model's own tokenizer is missing or cannot
        be read. A plan can be made without it.

        Raises:
            InputRefused, UsageError: see `compare`, for a tokenizer that the settings name.
        """
        try:
            return self.compare()
        except InputRefused:
            if self.tokenizer != AUTO:
                raise
            return None

    def require_fit(self) -> None:
        """Refuse a tokenizer that does not fit the model, and listed texts that are not tokens.

        This is called before any text is read.

        Raises:
            InputRefused, UsageError: see `compare`.
        """
        source = self.source
        is_models_own = (
            source is not None and not source.code and source.own_tokenizer == self.tokenizer
        )
        # The model's own tokenizer fits. To save time, it is read only for the listed texts.
        if not is_models_own or self.listed is not None:
            self.compare()

    def require_no_new(self, parent: str) -> None:
        """Refuse a tokenizer with tokens that the run's parent does not have.

        A run that begins with its parent's weights and optimizer state has none for new tokens.

        Args:
            parent: the parent, as an error calls it.

        Raises:
            InputRefused: the tokenizer differs from the parent's; the first such id is named.
            UsageError: the tokenizer has more tokens than the parent's.
        """
        tokens = self.compare()
        if not tokens or not tokens.sizes:
            return
        # For a model with a row for each token of the run, these are the ids that the parent's
        # tokenizer lacks. So it does not matter here how many rows the parent's model has.
        new = tokens.sizes.new_ids(tokens.sizes.run)
        if new:
            raise UsageError(
                f"{self.tokenizer_origin}: data.tokenizer has {counted(len(new), 'token')} that {parent} has "
                f"no row and no optimizer state for, which --from needs: begin with model.init={parent} instead"
            )


def token_source_of(
    settings: Settings, source: ModelSource | None, tokenizer: str, is_adapted: bool
) -> TokenSource:
    """Return the model and the settings that decide which tokens of a run are new.

    Args:
        settings: the run's settings.
        source: the model that the run starts from; None for a new one.
        tokenizer: data.tokenizer; if that names a run, the run's tokenizer file.
        is_adapted: whether new adapters are trained.
    """
    given = settings.lora.tokens
    listed: tuple[str, ...] | None
    if given is None:
        listed = None
    elif given == AUTO:
        listed = ()  # the new tokens alone
    else:
        listed = (given,) if isinstance(given, str) else tuple(given)
    return TokenSource(
        source=source,
        is_adapted=is_adapted or (source is not None and source.adapter is not None),
        tokenizer=tokenizer,
        tokenizer_origin=settings.origins.get("data.tokenizer", "data.tokenizer"),
        listed=listed,
        listed_origin=settings.origins.get("lora.tokens", "lora.tokens"),
    )


def token_notes(tokens: NewTokens | None, rows: int) -> tuple[str, ...]:
    """Return the notes on tokens that `train` and `plan` print; usually none.

    Args:
        tokens: the run's tokens; None for a new model.
        rows: the number of rows of the model that the run begins from.
    """
    if tokens is None:
        return ()
    lines = list[str]()
    new = tokens.new_ids(rows)
    if new:
        is_one = len(new) == 1
        begin = "its row begins as the mean" if is_one else "their rows begin as the mean"
        trained = ""
        if tokens.is_adapted:
            trained = f" and {'is' if is_one else 'are'} trained with the adapters"
        lines.append(
            f"{counted(len(new), 'new token')}: {_first_texts(tokens, new)}; {begin}{trained}"
        )
    # This is called even without adapters, since it refuses an adapter that lacks a row.
    trained_ids = tokens.trained_ids(rows)
    known_ids = [index for index in trained_ids if index not in new]
    if known_ids and tokens.is_adapted:
        texts = _first_texts(tokens, known_ids)
        lines.append(f"{counted(len(known_ids), 'token')} with rows of their own: {texts}")
    if tokens.sizes and tokens.sizes.base is None:
        lines.append(
            f"{tokens.init} has no tokenizer.json to compare data.tokenizer with: its ids are taken as they are"
        )
    return tuple(lines)


def _first_texts(tokens: NewTokens, ids: Sequence[int]) -> str:
    """Return the texts of the first of these tokens, and how many more there are."""
    texts = tokens.tokenizer.texts()
    shown = ", ".join(texts[token_id] for token_id in ids[:MAX_SHOWN])
    more = f" and {len(ids) - MAX_SHOWN} more" if len(ids) > MAX_SHOWN else ""
    return f"{shown}{more}"
