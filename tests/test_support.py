# Run: pytest tests/test_support.py
"""docs/support.md says what the code does."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from monograph.config import load
from monograph.graph.remat import policy_named
from monograph.session.objectives import OBJECTIVES
from monograph.session.requirements import (
    OPTIMIZER_EXCLUSIONS,
    STEP_EXCLUSIONS,
    choices_of,
    exclusions,
    exclusions_of,
)
from scripts import script


@pytest.fixture(scope="module")
def made():
    return script("docs/make_support.py")


def test_the_page_is_what_the_script_makes(made):
    assert made.PAGE.read_text() == made.page(made.PAGE.read_text()), (
        "run: python docs/make_support.py"
    )


# Values of what rules depend on; those of a group meet no rule of another one.
GROUPS = (
    {
        "precision": ("auto", "fp32", "fp8", "fp8_head"), "memory": ("auto", "stream"), "compile": ("auto", "whole"),
        "remat": ("auto", "offload"), "parallel": ("none", "fsdp"), "gather_dtype": ("fp32", "bf16"),
        "state": ("fp32", "bf16"), "master_weights": (True, False), "rank": (None, 8), "is_adapted": (False, True),
        "dropout": (None, 0.1),
        "is_code": (False, True), "init": (None, "FILE.py:f"), "quantize": ("none", "int4"),
    },
    {
        "tokens": (None, 9), "packing": ("packed", "padded"), "ema": ("none", 0.9), "grad_clip": (1.0, "none"),
        "skip_spikes": ("auto", True), "quantize": ("none", "int8"), "schedule": ("cosine", "constant"),
        "min_lr_ratio": (None, 0.1), "transfer": ("none", "width"), "transfer_base": (None, 64),
    },
    {
        "mtp": (None, 1), "mtp_weight": (None, 0.1), "memory": ("auto", "stream"), "parallel": ("none", "ddp"),
        "precision": ("auto", "fp8"), "is_adapted": (False, True), "is_code": (False, True),
        "transfer": ("none", "width"), "quantize": ("none", "int4"),
    },
)  # fmt: skip


def test_no_rule_of_what_does_not_go_together_is_hidden_behind_another():
    usual = choices_of(load(None, {}, {}))
    tables = [
        (*STEP_EXCLUSIONS, *OPTIMIZER_EXCLUSIONS),
        *([*exclusions_of(objective)] for objective in OBJECTIVES),
    ]
    met = set()
    for group in GROUPS:
        for values in itertools.product(*group.values()):
            choices = replace(usual, **dict(zip(group, values, strict=True)))
            for table in tables:
                broken = (
                    rule for rule in table if rule.one.holds(choices) and rule.other.holds(choices)
                )
                met |= {rule.refusal for rule in itertools.islice(broken, 1)}
    assert met == {rule.refusal for rule in exclusions()}


def test_combinations_with_adapters_that_the_page_says_are_tested_are_in_their_law(made):
    from laws.test_lora import CROSS, OPTIMIZERS
    from laws.test_streamed_adapters import EVERY_CASE

    tested = {
        "train.precision": {(precision, base) for precision, _, _, _, base, _ in CROSS},
        "train.remat": {(str(remat), base) for _, remat, _, _, base, _ in CROSS},
        "train.compile": {(scope, base) for _, _, scope, _, base, _ in CROSS},
        "train.memory": {
            *(("device", base) for base in made.BASES),
            *(("stream", base) for _, _, base, _ in EVERY_CASE),
        },
        "data.packing": {(each, base) for each in ("packed", "padded") for base in made.BASES},
        "optim.name": {(name, base) for name in OPTIMIZERS for base in made.BASES},
        "optim.state": {
            (name.removeprefix("adamw, "), base) for name in OPTIMIZERS for base in made.BASES
        },
        "optim.master_weights": {
            ("false", base) for base in made.BASES if "adamw, no masters" in OPTIMIZERS
        },
        "optim.ema": {(each, base) for each in ("none", "0.9") for base in made.BASES},
        "lora.dora": {("true", base) for *_, base, kind in CROSS if kind == "dora"},
        "lora.rslora": {("true", base) for base in made.BASES},  # a number in the same graph
        "lora.lr_ratio": {("16", base) for base in made.BASES},
    }
    assert {"ema", "lora+"} <= OPTIMIZERS.keys()
    for key, values in made.WITH_ADAPTERS.items():
        for value in values:
            name = (
                str(policy_named(float(value) if value == "0.3" else value))
                if key == "train.remat"
                else value
            )
            for base in made.BASES:
                asked = {"model.init": "FOLDER", "lora.rank": "16", "lora.base": base, key: value}
                asked |= made.NEEDED.get(key, {})
                assert ((name, base) in tested[key]) == (made.refusal(**asked) is None), (
                    key,
                    value,
                )


def test_combinations_that_the_page_says_are_tested_are_in_the_law(made):
    from laws.test_cross import CROSS

    held = {(p, remat, scope) for p, remat, scope, _ in CROSS}
    for precision in made.PRECISIONS:
        for remat in made.REMATS:
            for scope in made.SCOPES:
                policy = policy_named(float(remat) if remat == "0.3" else remat)
                refused = made.refusal(precision=precision, remat=remat, compile=scope)
                assert ((precision, policy, scope) in held) == (refused is None)
