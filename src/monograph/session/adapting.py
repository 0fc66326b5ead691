"""Decide the adapters of a run from its settings, and the tokens whose rows are trained with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from monograph.config import Settings
from monograph.errors import InputRefused, UsageError
from monograph.graph.inspect import ALL_LINEAR
from monograph.graph.lora import Lora
from monograph.model.adapter import is_adapter, read_adapter, resolved_base
from monograph.optim import Group
from monograph.report.quantities import counted
from monograph.run.recipe import Vocabulary, compared, own_file, tokenizer_named, tokenizer_of
from monograph.storage.code import code_named, folder_named
from monograph.storage.reading import exists, without_links
from monograph.text.tokenizer import Tokenizer

FIXED = ("lora.rank", "lora.alpha", "lora.rslora", "lora.dora", "lora.targets", "lora.dropout", "lora.base")
# What the adapters are; new tokens are known only once the text's tokenizer is, so they are not fixed early.
ADAPTER_KEYS = (*FIXED, "lora.tokens")
USUAL = Lora()
RANK = f"lora.rank = {USUAL.rank}"


def lora_of(settings: Settings) -> Lora | None:
    """Return the adapters that the settings ask for, with usual values for open keys; None without adapters.

    The ids of tokens whose rows are trained together with them are left out.
    """
    asked = settings.lora
    if asked.rank is None:
        return None
    targets = asked.targets if asked.targets is not None else ALL_LINEAR
    return Lora(
        rank=asked.rank,
        alpha=USUAL.alpha if asked.alpha is None else asked.alpha,
        targets=targets if isinstance(targets, str) else tuple(targets),
        dropout=asked.dropout or 0.0,
        base=asked.base or USUAL.base,
        rslora=bool(asked.rslora),
        dora=bool(asked.dora),
    )


def fixed_lora(settings: Settings) -> dict[str, Any]:
    """Return values for all [lora] keys in FIXED and the base's full path; an empty mapping without adapters.

    Raises:
        UsageError: there is no base or no rank, or the adapters differ from the stored ones that they begin from.
    """
    init = settings.model.init
    given = {key: settings.origins[key] for key in (*ADAPTER_KEYS, "lora.lr_ratio") if key in settings.origins}
    if init and is_adapter(init):
        values = settings.values()
        said = {key: settings.said(key) for key in given}
        fixed = _as_stored(init, {key: values[key] for key in ADAPTER_KEYS}, given, said)
        return {**fixed, "model.init": folder_named(without_links(init))}
    if not given:
        return {}
    key, origin = next(iter(given.items()))
    lora = lora_of(settings)
    if lora is None:
        raise UsageError(f"{origin}: {key} is of adapters, and none are trained: give their rank too, such as {RANK}")
    if init is None:
        raise UsageError(
            f"{origin}: {key}: adapters are added to weights that exist and stay frozen, which those of a new model "
            "would at random: name the model with model.init = FOLDER (a plan takes model.preset as its shape, too)"
        )
    values = _values(lora)
    if exists(init) and not code_named(init):
        return {**values, "model.init": folder_named(without_links(init))}
    return values


def rates(rate: float | str, ratio: float | None, usual: float) -> dict[str, Any]:
    """Return the optimizer's peak learning rate, and the group of adapters' parameters that have a multiple of it.

    These are B and, as in PEFT, the magnitudes (LoRA+, Hayou et al. 2024, arXiv 2402.12354).

    Args:
        rate: optim.lr.
        ratio: lora.lr_ratio.
        usual: the rate if optim.lr leaves it open.
    """
    groups = () if ratio is None else (Group("*.lora_[Bm]*", ratio),)
    return {"lr": usual if rate == "auto" else rate, "groups": groups}


def _values(lora: Lora) -> dict[str, Any]:
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    return {
        "lora.rank": lora.rank,
        "lora.alpha": lora.alpha,
        "lora.rslora": lora.rslora,
        "lora.dora": lora.dora,
        "lora.targets": targets,
        "lora.dropout": lora.dropout,
        "lora.base": lora.base,
    }


def _as_stored(
    init: str, asked: Mapping[str, Any], given: Mapping[str, str], said: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of a stored adapter, of which a run may change dropout and base.

    Args:
        init: its folder.
        asked: the values of all keys in ADAPTER_KEYS.
        given: the origins of those that were given.
        said: what they say, as an error begins with it.
    """
    stored = _values(read_adapter(init).lora)
    free = {key: asked[key] for key in ("lora.dropout", "lora.base")}
    if asked["lora.tokens"] not in (None, "auto"):
        raise UsageError(f"{given['lora.tokens']}: lora.tokens: the adapter in {init} says which it has: leave it out")
    for key in given.keys() & (stored.keys() - free.keys()):
        value, own = asked[key], stored[key]
        if value != own:
            raise UsageError(f"{said[key]}, but the adapter in {init} has {own}: leave it out")
    return stored | {key: value for key, value in free.items() if value is not None}


AUTO = "auto"
MOST_SHOWN = 6  # tokens named in a line


class NewTokens(NamedTuple):
    """The tokens of a run that begins from an existing model.

    Attributes:
        tokenizer: the run's tokenizer.
        vocabulary: the sizes of the model's tokenizer and the run's; None for a model that a Python function builds,
            for any number of tokens.
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
        """Return the ids whose rows are trained together with adapters: new and listed ones, or a stored adapter's.

        Raises:
            InputRefused: a stored adapter has no row for a new token.
        """
        new = self.new(rows)
        if self.stored is None:
            return tuple(sorted({*new, *self.listed}))
        if missing := [index for index in new if index not in self.stored]:
            unknown = f"{self.tokenizer.texts()[missing[0]]!r} is new to the base"
            raise InputRefused(f"data.tokenizer: {unknown} and no row of the adapter: take the one next to it")
        return self.stored


@dataclass(frozen=True)
class Tokens:
    """What decides which tokens are new to the model that a run begins from.

    Attributes:
        init: the model, as `model.init` names it; None: a new model.
        base: the model whose tokenizer is compared: of an adapter its base.
        stored: ids whose rows a stored adapter has; None if the run begins from no stored adapter.
        adapted: whether adapters are trained.
        tokenizer: data.tokenizer.
        tokenizer_origin: where data.tokenizer comes from.
        listed: the texts in lora.tokens.
        listed_origin: where lora.tokens comes from.
    """

    init: str | None
    base: str | None
    stored: tuple[int, ...] | None
    adapted: bool
    tokenizer: str
    tokenizer_origin: str
    listed: tuple[str, ...] | None
    listed_origin: str

    def compared(self, tokenizer: Tokenizer | None = None) -> NewTokens | None:
        """Compare a run's tokens with those of the model that it begins from; return None for a new model.

        Args:
            tokenizer: the text's tokenizer; None means the one that the settings name. If that is still to be trained,
                its tokens are unknown, and the function returns None.

        Raises:
            InputRefused: the tokenizer differs from the model's (the first such id is named), or cannot be read.
            UsageError: `lora.tokens` names a text that is not a single token.
        """
        if self.init is None or self.base is None:
            return None
        if tokenizer is None:
            named = tokenizer_named(self.tokenizer)
            if named == "bpe":
                return None
            file = str(tokenizer_of(self.init)) if named == AUTO else named
            tokenizer = Tokenizer.bytes() if file == "bytes" else Tokenizer.from_file(file)
        vocabulary = None if code_named(self.base) else compared(tokenizer, self.base)
        return NewTokens(tokenizer, vocabulary, self._ids(tokenizer), self.stored, self.init, self.adapted)

    def _ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        ids = {text: tokenizer.id_of(text) for text in self.listed or ()}
        if missing := [text for text, index in ids.items() if index is None]:
            whole = f"{missing[0]!r} is no token of {self.tokenizer}: it has to be one as a whole"
            raise UsageError(f"{self.listed_origin}: lora.tokens: {whole}")
        return tuple(index for index in ids.values() if index is not None)

    def planned(self) -> NewTokens | None:
        """Return `compared` for a plan, which needs no tokenizer: None if the model's own is missing or refused.

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
        """Refuse, before any text is read, a tokenizer that does not fit the base, and listed texts that are no tokens.

        Raises:
            InputRefused, UsageError: see `compared`.
        """
        its_own = self.init is not None and not code_named(self.init) and str(own_file(self.init)) == self.tokenizer
        if not its_own or self.listed is not None:
            self.compared()

    def require_no_new(self, parent: str) -> None:
        """Refuse a tokenizer with which a run cannot go on from another run's weights and optimizer state.

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


def tokens_of(settings: Settings) -> Tokens:
    """Return what the settings say of a run's tokens.

    Raises:
        InputRefused: the adapter that the run begins from cannot be read.
    """
    init = settings.model.init
    stored = read_adapter(init) if init is not None and is_adapter(init) else None
    listed = settings.lora.tokens
    texts = (listed,) if isinstance(listed, str) else listed
    return Tokens(
        init=init,
        base=resolved_base(stored) if stored else init,
        stored=stored.lora.tokens if stored else None,
        adapted=lora_of(settings) is not None or stored is not None,
        tokenizer=settings.data.tokenizer,
        tokenizer_origin=settings.origins.get("data.tokenizer", "data.tokenizer"),
        listed=None if texts is None else () if listed == AUTO else tuple(texts),
        listed_origin=settings.origins.get("lora.tokens", "lora.tokens"),
    )


def token_notes(tokens: NewTokens | None, rows: int) -> tuple[str, ...]:
    """Return the lines on tokens that `train` and `plan` print for a base with `rows` rows; usually none."""
    if tokens is None:
        return ()
    lines = list[str]()
    new = tokens.new(rows)
    if new:
        begin = "its row begins as the mean" if len(new) == 1 else "their rows begin as the mean"
        trained = f" and {'is' if len(new) == 1 else 'are'} trained with the adapters" if tokens.adapted else ""
        lines.append(f"{counted(len(new), 'new token')}: {_some(tokens, new)}; {begin}{trained}")
    if others := [index for index in tokens.trained(rows) if tokens.adapted and index not in new]:
        lines.append(f"{counted(len(others), 'token')} with rows of their own: {_some(tokens, others)}")
    if tokens.vocabulary and tokens.vocabulary.own is None:
        untold = "has no tokenizer.json to compare data.tokenizer with: its ids are taken as they are"
        lines.append(f"{tokens.init} {untold}")
    return tuple(lines)


def _some(tokens: NewTokens, ids: Sequence[int]) -> str:
    texts = tokens.tokenizer.texts()
    more = f" and {len(ids) - MOST_SHOWN} more" if len(ids) > MOST_SHOWN else ""
    return ", ".join(texts[index] for index in ids[:MOST_SHOWN]) + more
