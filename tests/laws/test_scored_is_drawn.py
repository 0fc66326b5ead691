"""Run: pytest tests/laws/test_scored_is_drawn.py (laws 16, 7, 19: answers come from the weights in
training).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batches import captured_to_train
from daily import nightly
from monograph.decode.generator import Generator
from monograph.graph import grouped
from monograph.graph.precision import Precision
from monograph.laws.comparisons import LOG_PROBABILITY_BOUND, differing_draws
from monograph.optim import AdamW
from monograph.rl import rollouts as room
from monograph.rl.rollouts import Drawer, Rollouts
from rewarded import OPTIONS, apart, drawer, products_have_rows_of_their_own, windows

MIXTURE = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2}
HYBRID = {"model_type": "qwen3_5_text", "layer_types": ("linear_attention", "full_attention")}
# Sums of 256 and 384 terms, and of 128 in attention: with 4, 8 or 12 rows an Intel Xeon rounds them otherwise.
WIDE = {
    "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 128,
}  # fmt: skip
BATCHED = replace(OPTIONS, packed=True, exact=False)


SHAPES = {
    "fp32": ("fp32", {}), "bf16": ("bf16", {}), "hybrid": ("fp32", HYBRID), "mixture": ("fp32", MIXTURE),
    "mixture, in a loop": ("fp32", MIXTURE), "six answers": ("fp32", {}), "long sums": ("fp32", WIDE),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", nightly(SHAPES, {"bf16", "hybrid", "mixture, in a loop", "six answers"})
)
def test_an_answer_is_scored_in_the_bits_in_which_it_was_drawn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision, shape = SHAPES[name]
    if "loop" in name:  # over experts, as on processors for which there are no products of our own
        monkeypatch.setattr(grouped, "_uses_own_code", lambda rows: False)
    # Six rows: four does not divide them, and there are fewer than 16.
    options = replace(OPTIONS, group=2) if name in ("six answers", "long sums") else OPTIONS
    more: dict[str, Any] = {"precision": Precision(precision), "shape": shape}
    if name == "long sums":
        more |= {"layers": 1, "optim": AdamW(lr=1e-3)}
    rollouts = windows(options, **more)
    engine, found = rollouts.drawer.engine, 0.0
    for _ in range(3):
        engine.accumulate(next(rollouts))
        largest, number = apart(rollouts)
        found = max(found, largest)
        assert number > 10
        assert bool(engine.update().skipped == 0)
    own_rows = products_have_rows_of_their_own(
        rollouts.drawer.model, torch.float32 if precision == "fp32" else torch.bfloat16
    )
    largest = LOG_PROBABILITY_BOUND if precision == "fp32" else 0.2
    assert found == 0 if own_rows else found < largest


class Counted(TorchDispatchMode):
    """Notes the rows of the left side of each product: of weights, and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.rows_of_attention = set[int](), set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.rows.add(args[0].shape[-2])
        if func is torch.ops.aten.bmm.default:
            self.rows_of_attention.add(args[0].shape[-2])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("texts", "most"),
    [
        (("a",), 1),
        pytest.param(("a",), 3, marks=pytest.mark.slow),
        (("ab", "a", "cd"), 4),
        pytest.param(("ab", "abcd"), 6, marks=pytest.mark.slow),
    ],
)
def test_products_have_rows_filled_up_whatever_the_lengths(
    texts: tuple[str, ...], most: int
) -> None:
    """Law 16 on every processor: with fewer than 16 rows, or a number that four does not divide, MKL
    rounds otherwise on some alone (dev/log.md). Sums of attention are short here: four rows do.
    """
    options = replace(OPTIONS, prompts=len(texts), max_new_tokens=most)
    rollouts = Rollouts(drawer(options, micro_batch=1, texts=texts))
    counted = Counted()
    with counted:
        window = next(rollouts)
        wanted = rollouts._wanted_answers(range(len(texts)))
        completions = rollouts.drawer.draw(*wanted)
        made = rollouts.drawer.rollouts(wanted.prompts, completions)
        rollouts.drawer.log_probabilities_of(made, rollouts.drawer.model)
    assert window["tokens"].shape[1] == rollouts.drawer.slots
    assert counted.rows and all(rows % 4 == 0 for rows in counted.rows), counted.rows
    assert min(counted.rows) >= 16
    assert counted.rows_of_attention
    assert all(rows % 4 == 0 for rows in counted.rows_of_attention), counted.rows_of_attention
    rollouts.drawer.engine.accumulate(window)
    if products_have_rows_of_their_own(rollouts.drawer.model):
        assert apart(rollouts)[0] == 0


class Captured(NamedTuple):
    """Rollouts, the window on which their step was captured, and how its answers were drawn before
    that.
    """

    rollouts: Rollouts
    window: dict[str, torch.Tensor]
    compiled: bool
    in_training: bool


@pytest.fixture(scope="module", params=["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def captured(request: pytest.FixtureRequest) -> Captured:
    """Once for two tests, and of one layer, as tracing takes longer than all else that they do."""
    rollouts = windows(BATCHED, micro_batch=2, layers=1)
    drawing = rollouts.drawer
    drawing.model.train()
    window = next(rollouts)
    assert drawing._cached_generator
    before = Captured(
        rollouts, window, drawing._cached_generator[1].compiled, drawing.model.training
    )
    captured_to_train(drawing.engine, window, request.param)
    apart(rollouts)
    return before


def scored_within_1e_5(rollouts: Rollouts, window: dict[str, torch.Tensor]) -> None:
    rollouts.drawer.engine.accumulate(window)
    largest, number = apart(rollouts)
    assert number == int((window["targets"] != -100).sum())
    assert 0 < largest < LOG_PROBABILITY_BOUND


@pytest.mark.parametrize(
    "options", [BATCHED, replace(OPTIONS, exact=False)], ids=["packed", "padded"]
)
def test_packed_or_padded_it_is_scored_within_1e_5(options: Any) -> None:
    rollouts = windows(options, micro_batch=2)
    scored_within_1e_5(rollouts, next(rollouts))


def test_captured_it_is_scored_within_1e_5(captured: Captured) -> None:
    scored_within_1e_5(captured.rollouts, captured.window)


def test_the_temperature_is_that_of_the_draws() -> None:
    rollouts = windows(replace(OPTIONS, temperature=0.5))
    rollouts.drawer.engine.accumulate(next(rollouts))
    assert apart(rollouts)[0] < LOG_PROBABILITY_BOUND


def drawn(rollouts: Rollouts) -> list[Any]:
    """The ids and log-probabilities of one answer to each prompt."""
    prompts = rollouts.drawer.prompts.train
    return [
        (one.token_ids, one.logprobs) for one in rollouts.drawer.draw(prompts, range(len(prompts)))
    ]


def test_an_answer_does_not_depend_on_what_is_drawn_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = drawn(windows())
    monkeypatch.setattr(room, "MAX_DECODED_ROWS", 4)
    rollouts = windows(replace(OPTIONS, prompts=1, group=2))
    prompts = rollouts.drawer.prompts.train
    alone = [rollouts.drawer.draw([prompt], [seed])[0] for seed, prompt in enumerate(prompts)]
    assert [one.token_ids for one in alone] == [ids for ids, _ in together]


def same_weights(rollouts: Rollouts) -> Rollouts:
    """Another engine with equal weights, which has drawn nothing yet."""
    fresh = windows()
    fresh.drawer.engine.load_state(rollouts.drawer.engine.state())
    return fresh


def test_after_an_update_nothing_of_the_old_weights_is_read() -> None:
    rollouts = windows()
    before = drawn(rollouts)
    rollouts.drawer.engine.accumulate(next(rollouts))
    rollouts.drawer.engine.update()
    drawn(rollouts)
    rollouts.drawer.engine.accumulate(next(rollouts))
    rollouts.drawer.engine.update()
    after = drawn(rollouts)
    assert after != before
    assert not differing_draws(after, drawn(same_weights(rollouts)))


@pytest.mark.parametrize(
    "fault", ["none", "the prompt read last is kept", "answers come from a copy of the weights"]
)
def test_an_answer_from_old_weights_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = windows()
    drawing, last = rollouts.drawer, rollouts.drawer.prompts.train[-1:]
    if fault == "the prompt read last is kept":
        monkeypatch.setattr(Generator, "forget", lambda generator: None)
    if fault == "answers come from a copy of the weights":
        drawing.model = deepcopy(drawing.model)
        monkeypatch.setattr(Drawer, "_gather_model", lambda drawer: None)
    drawing.draw(last, [3])
    drawing.engine.accumulate(next(rollouts))
    drawing.draw(last, [3])
    drawing.engine.update()
    later = drawing.draw(last, [3])[0].logprobs
    monkeypatch.undo()
    assert (later == same_weights(rollouts).drawer.draw(last, [3])[0].logprobs) == (fault == "none")


def test_drawing_leaves_the_modes_of_training_and_compiles_if_the_step_is_captured(
    captured: Captured,
) -> None:
    assert captured.in_training and not captured.compiled
    drawing = captured.rollouts.drawer
    drawing.updates = lambda: 10**6
    assert drawing.generator.compiled and drawing.model.training
