"""The types of rules on which choices of a run exclude one another.

A *choice* is that a key has a certain value, such as train.memory = stream. A rule names two of
them and the message of their refusal. `monograph.session.requirements` has the table of all rules,
each objective adds its own, and docs/support.md is made from them.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from monograph.errors import UsageError
from monograph.session.by_key import of_key


@dataclass(frozen=True)
class Chosen:
    """What the settings of a run choose.

    Attributes:
        is_code: whether `model.init` is a Python function.
        is_adapted: whether adapters are trained: new ones, or those that the run begins from.

    Each of the other attributes is the value of the key with which it is declared.
    """

    is_code: bool
    is_adapted: bool
    init: str | None = of_key("model.init")
    rank: int | None = of_key("lora.rank")
    precision: str = of_key("train.precision")
    remat: str | float = of_key("train.remat")
    compile: str = of_key("train.compile")
    memory: str = of_key("train.memory")
    parallel: str = of_key("train.parallel")
    gather_dtype: str = of_key("train.gather_dtype")
    tokens: int | None = of_key("train.tokens")
    packing: str = of_key("data.packing")
    state: str = of_key("optim.state")
    master_weights: bool = of_key("optim.master_weights")
    ema: float | str = of_key("optim.ema")
    grad_clip: float | str = of_key("optim.grad_clip")
    skip_spikes: bool | str = of_key("optim.skip_spikes")
    schedule: str = of_key("optim.schedule")
    min_lr_ratio: float | None = of_key("optim.min_lr_ratio")
    transfer: str = of_key("optim.transfer")
    transfer_base: int | None = of_key("optim.transfer_base")

    def named(self, text: str) -> str:
        """Return a text with the names in braces, such as {tokens}, replaced by these values."""
        return text.format_map(vars(self))


class Condition(NamedTuple):
    """One choice.

    Attributes:
        said: how an error names the choice, such as "train.tokens = {tokens}".
        is_made: returns whether the settings made the choice.
        among: the text that docs/support.md has in place of a name in braces; "" without one.
    """

    said: str
    is_made: Callable[[Chosen], bool]
    among: str = ""

    @property
    def shown(self) -> str:
        """Return `said` as docs/support.md has it."""
        return _filled(self.said, self)


def _filled(text: str, *choices: Condition) -> str:
    """Return a text on choices with the names in braces replaced by the choices' `among`."""
    for choice in choices:
        for name in re.findall(r"{\w+}", choice.said):
            text = text.replace(name, choice.among)
    return text


class Exclusion(NamedTuple):
    """Two choices that do not go together.

    Attributes:
        one: a choice.
        other: another choice.
        refusal: the message of their refusal, with names in braces for the chosen values.
    """

    one: Condition
    other: Condition
    refusal: str

    @property
    def shown(self) -> str:
        """Return `refusal` as docs/support.md has it."""
        return _filled(self.refusal, self.one, self.other)


def without(chosen: Condition, other: Condition, instead: str) -> Exclusion:
    """Return a rule with a message of the usual form.

    Args:
        chosen: a choice.
        other: the choice that does not go with it.
        instead: what the user should do.
    """
    return Exclusion(chosen, other, f"{chosen.said} does not go with {other.said}: {instead}")


def refuse_excluded(choices: Chosen, exclusions: Iterable[Exclusion]) -> None:
    """Refuse choices that exclude one another.

    Args:
        choices: what the settings choose.
        exclusions: the rules; the first that applies is reported.

    Raises:
        UsageError: a rule applies; the message names both choices.
    """
    for exclusion in exclusions:
        if exclusion.one.is_made(choices) and exclusion.other.is_made(choices):
            raise UsageError(choices.named(exclusion.refusal))


# ── the choices of several rules ────────────────────────────────────────────────────────────────

OF_CODE = Condition("model.init = {init}", lambda made: made.is_code, "FILE.py:FUNCTION")
ADAPTED = Condition("lora.rank", lambda made: made.is_adapted)
STREAMED = Condition("train.memory = stream", lambda made: made.memory == "stream")
WHOLE = Condition("train.compile = whole", lambda made: made.compile == "whole")
OFFLOADED = Condition("train.remat = offload", lambda made: made.remat == "offload")
FP8 = Condition("train.precision = fp8", lambda made: made.precision == "fp8")
NARROW = Condition("optim.master_weights = false", lambda made: not made.master_weights)
