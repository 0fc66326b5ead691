"""Decide the adapters of a run from its settings, and the tokens whose rows are trained with them."""

from collections.abc import Sequence
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


def lora_of(settings: Settings, tokens: tuple[int, ...] = ()) -> Lora | None:
    """Return the adapters that the settings ask for, with usual values for open keys; None without adapters.

    Args:
        settings: the run's settings.
        tokens: ids of the tokens whose rows are trained together with the adapters.
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
        tokens=tokens,
        rslora=bool(asked.rslora),
        dora=bool(asked.dora),
    )


def rates(settings: Settings, usual: float) -> dict[str, Any]:
    """Return the optimizer's peak learning rate, and the group of adapters' parameters that have a multiple of it.

    These are B and, as in PEFT, the magnitudes (LoRA+, Hayou et al. 2024, arXiv 2402.12354).
    """
    rate = usual if settings.optim.lr == "auto" else settings.optim.lr
    ratio = settings.lora.lr_ratio
    groups = () if ratio is None else (Group("*.lora_[Bm]*", ratio),)
    return {"lr": rate, "groups": groups}


def fixed_lora(settings: Settings) -> dict[str, Any]:
    """Return values for all [lora] keys in FIXED and the base's full path; an empty mapping without adapters.

    Raises:
        UsageError: there is no base or no rank, or the adapters differ from the stored ones that they begin from.
    """
    init = settings.model.init
    given = {key: settings.origins[key] for key in (*ADAPTER_KEYS, "lora.lr_ratio") if key in settings.origins}
    if init and is_adapter(init):
        return {**_as_stored(settings, init, given), "model.init": folder_named(without_links(init))}
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


def _as_stored(settings: Settings, init: str, given: dict[str, str]) -> dict[str, Any]:
    stored = _values(read_adapter(init).lora)
    asked = settings.values()
    free = {key: asked[key] for key in ("lora.dropout", "lora.base")}
    if asked["lora.tokens"] not in (None, "auto"):
        raise UsageError(f"{given['lora.tokens']}: lora.tokens: the adapter in {init} says which it has: leave it out")
    for key in given.keys() & (stored.keys() - free.keys()):
        value, own = asked[key], stored[key]
        if value != own:
            raise UsageError(f"{settings.said(key)}, but the adapter in {init} has {own}: leave it out")
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
    """

    tokenizer: Tokenizer
    vocabulary: Vocabulary | None
    listed: tuple[int, ...]
    stored: tuple[int, ...] | None

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


def new_tokens_of(settings: Settings, tokenizer: Tokenizer | None = None) -> NewTokens | None:
    """Compare a run's tokens with those of the model that it begins from; return None for a new model.

    Args:
        settings: the run's settings.
        tokenizer: the text's tokenizer; None means the one that the settings name. If that is still to be trained, its
            tokens are unknown, and the function returns None.

    Raises:
        InputRefused: the tokenizer differs from the model's (the first such id is named), or cannot be read.
        UsageError: `lora.tokens` names a text that is not a single token.
    """
    init = settings.model.init
    named = tokenizer_named(settings.data.tokenizer)
    if init is None or (tokenizer is None and named == "bpe"):
        return None
    adapter = init if is_adapter(init) else None
    base = resolved_base(read_adapter(adapter)) if adapter else init
    if tokenizer is None:
        file = str(tokenizer_of(init)) if named == AUTO else named
        tokenizer = Tokenizer.bytes() if file == "bytes" else Tokenizer.from_file(file)
    vocabulary = None if code_named(base) else compared(tokenizer, base)
    stored = read_adapter(adapter).lora.tokens if adapter else None
    return NewTokens(tokenizer, vocabulary, _listed(settings, tokenizer), stored)


def planned_tokens(settings: Settings) -> NewTokens | None:
    """Return `new_tokens_of` for a plan, which needs no tokenizer: None if the model's own is missing or refused.

    Raises:
        InputRefused, UsageError: see `new_tokens_of`, for a tokenizer that the settings name.
    """
    try:
        return new_tokens_of(settings)
    except InputRefused:
        if settings.data.tokenizer != AUTO:
            raise
        return None


def require_tokens(settings: Settings) -> None:
    """Refuse, before any text is read, a tokenizer that does not fit the base, and listed texts that are not tokens.

    Raises:
        InputRefused, UsageError: see `new_tokens_of`.
    """
    init, named = settings.model.init, settings.data.tokenizer
    its_own = init is not None and not code_named(init) and str(own_file(init)) == named
    if not its_own or settings.lora.tokens is not None:
        new_tokens_of(settings)


def require_no_new(settings: Settings, parent: str) -> None:
    """Refuse a tokenizer with which a run cannot go on from another run's weights and optimizer state.

    Raises:
        InputRefused: the tokenizer differs from the parent's; the first such id is named.
        UsageError: the tokenizer has more tokens than the parent's.
    """
    tokens = new_tokens_of(settings.resolve({"model.init": parent}, "--from"))
    if tokens and tokens.vocabulary and (new := tokens.vocabulary.new(tokens.vocabulary.all)):
        raise UsageError(
            f"{settings.origins['data.tokenizer']}: data.tokenizer has {counted(len(new), 'token')} that {parent} has "
            f"no row for, nor an optimizer's state: --from goes on with both; start anew with model.init={parent}"
        )


def token_notes(settings: Settings, tokens: NewTokens | None, rows: int) -> tuple[str, ...]:
    """Return the lines on tokens that `train` and `plan` print for a base with `rows` rows; usually none."""
    if tokens is None:
        return ()
    lines = list[str]()
    new = tokens.new(rows)
    adapted = settings.lora.rank is not None or tokens.stored is not None
    if new:
        begin = "its row begins as the mean" if len(new) == 1 else "their rows begin as the mean"
        trained = f" and {'is' if len(new) == 1 else 'are'} trained with the adapters" if adapted else ""
        lines.append(f"{counted(len(new), 'new token')}: {_some(tokens, new)}; {begin}{trained}")
    if others := [index for index in tokens.trained(rows) if adapted and index not in new]:
        lines.append(f"{counted(len(others), 'token')} with rows of their own: {_some(tokens, others)}")
    if tokens.vocabulary and tokens.vocabulary.own is None:
        base = settings.model.init
        lines.append(f"{base} has no tokenizer.json to compare data.tokenizer with: its ids are taken as they are")
    return tuple(lines)


def _some(tokens: NewTokens, ids: Sequence[int]) -> str:
    texts = tokens.tokenizer.texts()
    more = f" and {len(ids) - MOST_SHOWN} more" if len(ids) > MOST_SHOWN else ""
    return ", ".join(texts[index] for index in ids[:MOST_SHOWN]) + more


def _listed(settings: Settings, tokenizer: Tokenizer) -> tuple[int, ...]:
    asked = settings.lora.tokens
    if asked is None or asked == AUTO:
        return ()
    ids = {text: tokenizer.id_of(text) for text in ([asked] if isinstance(asked, str) else asked)}
    if missing := [text for text, index in ids.items() if index is None]:
        origin = settings.origins.get("lora.tokens", "lora.tokens")
        where = settings.data.tokenizer
        raise UsageError(f"{origin}: lora.tokens: {missing[0]!r} is no token of {where}: it has to be one as a whole")
    return tuple(index for index in ids.values() if index is not None)
