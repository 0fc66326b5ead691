"""The choices of a run that can exclude one another, and rules that say which do, with the line of
their refusal.

A rule is a value: `monograph.session.requirements` has the table of all, each objective adds its
own, and docs/support.md is made from them.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from monograph.errors import UsageError


@dataclass(frozen=True)
class Chosen:
    """What the settings of a run choose.

    Attributes:
        init: `model.init`; is_code: whether it is a Python function.
        rank: `lora.rank`; is_adapted: whether adapters are trained, perhaps those that a run begins
        from. precision, remat, compile, memory, parallel, gather_dtype, tokens: the keys of
        [train].
        packing: that of [data].
        state, master_weights, ema, grad_clip, skip_spikes, schedule, min_lr_ratio, transfer,
        transfer_base: those of
            [optim].
    """

    init: str | None
    is_code: bool
    rank: int | None
    is_adapted: bool
    precision: str
    remat: str | float
    compile: str
    memory: str
    parallel: str
    gather_dtype: str
    tokens: int | None
    packing: str
    state: str
    master_weights: bool
    ema: float | str
    grad_clip: float | str
    skip_spikes: bool | str
    schedule: str
    min_lr_ratio: float | None
    transfer: str
    transfer_base: int | None

    def named(self, text: str) -> str:
        """Return a text in which names in braces stand for what was chosen."""
        return text.format_map(vars(self))


class Condition(NamedTuple):
    """One choice.

    Attributes:
        said: how an error names it, such as "train.tokens = {tokens}".
        is_made: whether it was made.
        among: what the name in braces, if there is one, stands for, as a page says it.
    """

    said: str
    is_made: Callable[[Chosen], bool]
    among: str = ""

    @property
    def shown(self) -> str:
        """Return it as a page names it."""
        return _filled(self.said, self)


def _filled(text: str, *choices: Condition) -> str:
    """Return a text of some choices in which a name in braces stands for all that can be chosen."""
    for choice in choices:
        for name in re.findall(r"{\w+}", choice.said):
            text = text.replace(name, choice.among)
    return text


class Exclusion(NamedTuple):
    """Two choices that do not go together, and the line of their refusal, with names in braces for
    what was chosen.
    """

    one: Condition
    other: Condition
    refusal: str

    @property
    def shown(self) -> str:
        """Return the line as a page has it."""
        return _filled(self.refusal, self.one, self.other)


def without(chosen: Condition, other: Condition, instead: str) -> Exclusion:
    """Return the exclusion of another choice by one that stays; `instead` says what to do."""
    return Exclusion(chosen, other, f"{chosen.said} does not go with {other.said}: {instead}")


def refuse_excluded(choices: Chosen, exclusions: Iterable[Exclusion]) -> None:
    """Refuse the first pair of choices that exclude one another.

    Raises:
        UsageError: there is one; the message names both.
    """
    for exclusion in exclusions:
        if exclusion.one.is_made(choices) and exclusion.other.is_made(choices):
            raise UsageError(choices.named(exclusion.refusal))


# ── choices that several rules name ─────────────────────────────────────────────────────────────

OF_CODE = Condition("model.init = {init}", lambda made: made.is_code, "FILE.py:FUNCTION")
ADAPTED = Condition("lora.rank", lambda made: made.is_adapted)
STREAMED = Condition("train.memory = stream", lambda made: made.memory == "stream")
WHOLE = Condition("train.compile = whole", lambda made: made.compile == "whole")
OFFLOADED = Condition("train.remat = offload", lambda made: made.remat == "offload")
FP8 = Condition("train.precision = fp8", lambda made: made.precision == "fp8")
NARROW = Condition("optim.master_weights = false", lambda made: not made.master_weights)
