# Run: pytest tests/test_support.py
"""docs/support.md says what the code does."""

from __future__ import annotations

import pytest

from monograph.graph.remat import named
from scripts import script


@pytest.fixture(scope="module")
def made():
    return script("docs/make_support.py")


def test_the_page_is_what_the_script_makes(made):
    assert made.PAGE.read_text() == made.page(made.PAGE.read_text()), "run: python docs/make_support.py"


def test_combinations_with_adapters_that_the_page_says_are_tested_are_in_their_law(made):
    from laws.test_lora import CROSS, OPTIMIZERS

    tested = {
        "train.precision": {(precision, base) for precision, _, _, _, base, _ in CROSS},
        "train.remat": {(str(remat), base) for _, remat, _, _, base, _ in CROSS},
        "train.compile": {(scope, base) for _, _, scope, _, base, _ in CROSS},
        "train.memory": {("device", base) for base in made.BASES},
        "data.packing": {(each, base) for each in ("packed", "padded") for base in made.BASES},
        "optim.name": {(name, base) for name in OPTIMIZERS for base in made.BASES},
        "optim.state": {(name.removeprefix("adamw, "), base) for name in OPTIMIZERS for base in made.BASES},
        "optim.master_weights": {("false", base) for base in made.BASES if "adamw, no masters" in OPTIMIZERS},
        "optim.ema": {(each, base) for each in ("none", "0.9") for base in made.BASES},
        "lora.dora": {("true", base) for *_, base, kind in CROSS if kind == "dora"},
        "lora.rslora": {("true", base) for base in made.BASES},  # a number in the same graph
        "lora.lr_ratio": {("16", base) for base in made.BASES},
    }
    assert {"ema", "lora+"} <= OPTIMIZERS.keys()
    for key, values in made.WITH_ADAPTERS.items():
        for value in values:
            name = str(named(float(value) if value == "0.3" else value)) if key == "train.remat" else value
            for base in made.BASES:
                asked = {"model.init": "FOLDER", "lora.rank": "16", "lora.base": base, key: value}
                asked |= made.NEEDED.get(key, {})
                assert ((name, base) in tested[key]) == (made.refusal(**asked) is None), (key, value)


def test_combinations_that_the_page_says_are_tested_are_in_the_law(made):
    from laws.test_cross import CROSS

    held = {(p, remat, scope) for p, remat, scope, _ in CROSS}
    for precision in made.PRECISIONS:
        for remat in made.REMATS:
            for scope in made.SCOPES:
                policy = named(float(remat) if remat == "0.3" else remat)
                refused = made.refusal(precision=precision, remat=remat, compile=scope)
                assert ((precision, policy, scope) in held) == (refused is None)
