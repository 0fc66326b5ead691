"""The classes of rules that forbid combinations of settings.

A rule (`Exclusion`) has two conditions, such as train.memory = stream, and the error message if the
settings meet both. `monograph.session.requirements` has the table of rules, each objective adds its
own, and docs/support.md is made from them.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from monograph.errors import UsageError
from monograph.session.by_key import of_key


@dataclass(frozen=True)
class Choices:
    """The values of a run's settings on which rules depend.

    Attributes:
        is_code: whether `model.init` is a Python function.
        is_adapted: whether adapters are trained: new ones, or those that the run begins from.

    Each of the other attributes is the value of the key with which it is declared.
    """

    is_code: bool
    is_adapted: bool
    init: str | None = of_key("model.init")
    mtp: int | None = of_key("model.mtp_num_hidden_layers")
    mtp_weight: float | None = of_key("train.mtp_weight")
    rank: int | None = of_key("lora.rank")
    dropout: float | None = of_key("lora.dropout")
    precision: str = of_key("train.precision")
    quantize: str = of_key("train.quantize")
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

    def fill_in(self, text: str) -> str:
        """Return a text in which names in braces, such as {tokens}, are replaced by the values of
        the attributes with these names.
        """
        return text.format_map(vars(self))


class Condition(NamedTuple):
    """A condition on the settings.

    Attributes:
        text: how an error names the condition, such as "train.tokens = {tokens}". A field of
            `Choices` in braces stands for its value.
        holds: returns whether the settings meet the condition.
        values: the values that meet it, in words; docs/support.md has them in place of the braces.
            "" if `text` has no braces.
    """

    text: str
    holds: Callable[[Choices], bool]
    values: str = ""

    @property
    def text_in_docs(self) -> str:
        """Return `text` as docs/support.md has it."""
        return _with_values_in_words(self.text, self)


def _with_values_in_words(text: str, *conditions: Condition) -> str:
    """Return a text in which each {field} that a condition's text has is replaced by its `values`.

    Args:
        text: a text that contains the conditions' texts.
        conditions: the conditions.
    """
    for condition in conditions:
        for field_in_braces in re.findall(r"{\w+}", condition.text):
            text = text.replace(field_in_braces, condition.values)
    return text


class Exclusion(NamedTuple):
    """The rule that two conditions must not both hold.

    Attributes:
        one: a condition.
        other: another condition.
        refusal: the error message. A field of `Choices` in braces stands for its value.
    """

    one: Condition
    other: Condition
    refusal: str

    @property
    def refusal_in_docs(self) -> str:
        """Return `refusal` as docs/support.md has it."""
        return _with_values_in_words(self.refusal, self.one, self.other)


def excludes(one: Condition, other: Condition, remedy: str) -> Exclusion:
    """Return a rule with the usual error message.

    Args:
        one: a condition.
        other: the condition that must not hold with it.
        remedy: why the two do not go together or what the user should do, which ends the message.
    """
    return Exclusion(one, other, f"{one.text} does not go with {other.text}: {remedy}")


def refuse_excluded(choices: Choices, exclusions: Iterable[Exclusion]) -> None:
    """Refuse settings that break a rule.

    Args:
        choices: the values of the settings.
        exclusions: the rules; the first that is broken is reported.

    Raises:
        UsageError: a rule is broken; the message names both conditions.
    """
    for exclusion in exclusions:
        if exclusion.one.holds(choices) and exclusion.other.holds(choices):
            raise UsageError(choices.fill_in(exclusion.refusal))


# ── conditions that several rules have ──────────────────────────────────────────────────────────

MODEL_FROM_CODE = Condition(
    "model.init = {init}", lambda choices: choices.is_code, "FILE.py:FUNCTION"
)
MTP = Condition("model.mtp_num_hidden_layers = 1", lambda choices: bool(choices.mtp))
ADAPTED = Condition("lora.rank", lambda choices: choices.is_adapted)
STREAMED = Condition("train.memory = stream", lambda choices: choices.memory == "stream")
COMPILED_WHOLE = Condition("train.compile = whole", lambda choices: choices.compile == "whole")
REMAT_OFFLOADED = Condition("train.remat = offload", lambda choices: choices.remat == "offload")
FP8 = Condition(
    "train.precision = {precision}",
    lambda choices: choices.precision in ("fp8", "fp8_head"),
    "fp8 or fp8_head",
)
FP8_HEAD = Condition("train.precision = fp8_head", lambda choices: choices.precision == "fp8_head")
QUANTIZED = Condition(
    "train.quantize = {quantize}", lambda choices: choices.quantize != "none", "int4 or int8"
)
NO_MASTER_WEIGHTS = Condition(
    "optim.master_weights = false", lambda choices: not choices.master_weights
)
