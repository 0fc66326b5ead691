"""Tokens that a base never saw: which they are, which of their rows adapters train, and what a person is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from monograph.config import Settings
from monograph.errors import InputRefused, UsageError
from monograph.measure.quantities import counted
from monograph.model.adapter import is_adapter, read_adapter, resolved_base
from monograph.run.recipe import Recipe
from monograph.run.vocabulary import Vocabulary, compared, own_file, tokenizer_of
from monograph.text.tokenizer import Tokenizer

AUTO = "auto"
MOST_SHOWN = 6  # tokens


class Words(NamedTuple):
    """The tokens of a run that begins from a model.

    Attributes:
        tokenizer: the run's.
        vocabulary: it beside the model's own, None where a function builds the model as large as it is asked to.
        listed: ids that `lora.tokens` names.
        stored: ids whose rows a stored adapter has, None where the run begins from none.
    """

    tokenizer: Tokenizer
    vocabulary: Vocabulary | None
    listed: tuple[int, ...]
    stored: tuple[int, ...] | None

    def new(self, rows: int) -> range:
        """The ids that a model of so many rows was not trained with."""
        return self.vocabulary.new(rows) if self.vocabulary else range(0)

    def trained(self, rows: int) -> tuple[int, ...]:
        """The ids whose rows are trained beside adapters: all new ones, those that are listed, or a stored adapter's.

        Raises:
            InputRefused: a stored adapter has none for a new token.
        """
        new = self.new(rows)
        if self.stored is None:
            return tuple(sorted({*new, *self.listed}))
        if missing := [index for index in new if index not in self.stored]:
            name = repr(self.tokenizer.texts()[missing[0]])
            raise InputRefused(
                f"data.tokenizer: {name} is new to the base and no row of the adapter: take the one beside it"
            )
        return self.stored


def words_of(settings: Settings, tokenizer: Tokenizer | None = None) -> Words | None:
    """What is known of a run's tokens, None of a new model.

    Args:
        settings: the run's.
        tokenizer: of its text; None: the one that the settings name, and nothing is known where it is to be trained.

    Raises:
        InputRefused: it is another one than the model's, by the first id that differs; or it cannot be read.
        UsageError: `lora.tokens` names what is no single token.
    """
    init, named = settings.model.init, settings.data.tokenizer
    if init is None or (tokenizer is None and named.startswith("bpe:")):
        return None
    adapter = init if is_adapter(init) else None
    base = resolved_base(read_adapter(adapter)) if adapter else init
    if tokenizer is None:
        file = str(tokenizer_of(init)) if named == AUTO else named
        tokenizer = Tokenizer.bytes() if file == "bytes" else Tokenizer.from_file(file)
    vocabulary = None if _is_function(base) else compared(tokenizer, base)
    stored = read_adapter(adapter).lora.tokens if adapter else None
    return Words(tokenizer, vocabulary, _listed(settings, tokenizer), stored)


def planned_words(settings: Settings) -> Words | None:
    """The same for a plan, which needs no tokenizer: what is not there, or not read here, is not known.

    Raises:
        InputRefused, UsageError: as `words_of`, of a tokenizer that is named.
    """
    try:
        return words_of(settings)
    except InputRefused:
        if settings.data.tokenizer != AUTO:
            raise
        return None


def require_tokens(settings: Settings) -> None:
    """Refuse, before any text is read, a tokenizer that is not the base's and tokens that are none.

    Raises:
        InputRefused, UsageError: as `words_of`.
    """
    init, named = settings.model.init, settings.data.tokenizer
    its_own = init is not None and not _is_function(init) and str(own_file(init)) == named
    if not its_own or settings.lora.tokens is not None:
        words_of(settings)


def require_no_new(settings: Settings, parent: str) -> None:
    """Refuse a tokenizer with which a run cannot go on with the weights and the optimizer of another.

    Raises:
        InputRefused: it is not the parent's, by the first id that differs.
        UsageError: it has more tokens.
    """
    words = words_of(settings.resolve({"model.init": parent}, "--from"))
    if words and words.vocabulary and (new := words.vocabulary.new(words.vocabulary.all)):
        raise UsageError(
            f"{settings.origins['data.tokenizer']}: data.tokenizer has {counted(len(new), 'token')} that {parent} has "
            f"no row for, nor an optimizer's state: --from goes on with both; start anew with model.init={parent}"
        )


def said(settings: Settings, words: Words | None, rows: int) -> tuple[str, ...]:
    """What `train` and `plan` say of the tokens of a run whose base has so many rows; nothing where all is as usual."""
    if words is None:
        return ()
    lines, new, adapted = list[str](), words.new(rows), settings.lora.rank is not None or words.stored is not None
    if new:
        begin = "its row begins as the mean" if len(new) == 1 else "their rows begin as the mean"
        trained = f" and {'is' if len(new) == 1 else 'are'} trained beside the adapters" if adapted else ""
        lines.append(f"{counted(len(new), 'new token')}: {_some(words, new)}; {begin}{trained}")
    if others := [index for index in words.trained(rows) if adapted and index not in new]:
        lines.append(f"{counted(len(others), 'token')} with rows beside the adapters: {_some(words, others)}")
    if words.vocabulary and words.vocabulary.own is None:
        base = settings.model.init
        lines.append(f"{base} has no tokenizer.json to compare data.tokenizer with: its ids are taken as they are")
    return tuple(lines)


def _some(words: Words, ids: Sequence[int]) -> str:
    texts = words.tokenizer.texts()
    more = f" and {len(ids) - MOST_SHOWN} more" if len(ids) > MOST_SHOWN else ""
    return ", ".join(texts[index] for index in ids[:MOST_SHOWN]) + more


def _is_function(init: str) -> bool:
    return Recipe(init, AUTO, {}, 0).file is not None


def _listed(settings: Settings, tokenizer: Tokenizer) -> tuple[int, ...]:
    asked = settings.lora.tokens
    if asked is None or asked == AUTO:
        return ()
    found = {text: tokenizer.id_of(text) for text in ([asked] if isinstance(asked, str) else asked)}
    if missing := [text for text, index in found.items() if index is None]:
        origin = settings.origins.get("lora.tokens", "lora.tokens")
        where = settings.data.tokenizer
        raise UsageError(f"{origin}: lora.tokens: {missing[0]!r} is no token of {where}: it has to be one as a whole")
    return tuple(index for index in found.values() if index is not None)
