# Run: pytest tests/laws/test_mtp_is_its_equation.py
"""Laws 1, 2, 3, 5 and 9 for the loss of a head for multi-token prediction: every engine adds the gradient
of its equation, token for token, and no target is of another document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from batches import (
    LENGTH,
    VOCABULARY,
    captured_to_train,
    flat_gradient,
    ragged,
    rows_of,
    tiny_llama,
)
from daily import pairwise
from monograph import loss as loss_module
from monograph.ensemble import Ensemble
from monograph.graph.remat import Remat
from monograph.laws.comparisons import relative_error
from monograph.loss import IGNORE, MtpLoss, ahead, token_loss
from monograph.model.llama import Llama
from monograph.resident import Resident
from monograph.step import OnDevice, Step, accumulate

WEIGHT, ROWS = 0.7, 6
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2}
# Far from linear, so that what attends to what matters.
SHAPE = {"mtp_num_hidden_layers": 1, "initializer_range": 0.3, "num_hidden_layers": 1}


def with_head(dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: Any) -> Llama:
    return tiny_llama(dtype, seed, **SHAPE | sizes)


def packed(rows: int) -> dict[str, Tensor]:
    """Rows of documents of 1 to 9 tokens and padding; a sixth of the tokens is no target."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        name: torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
        for name in ("tokens", "targets")
    }
    batch |= {
        name: torch.zeros(rows, LENGTH, dtype=torch.int64) for name in ("segments", "positions")
    }
    batch["targets"][torch.rand(rows, LENGTH, generator=generator) < 1 / 6] = IGNORE
    for row in range(rows):
        begin = 0
        number = 1
        while begin < LENGTH - 3:
            length = int(torch.randint(1, 10, (1,), generator=generator))
            own = slice(begin, min(begin + length, LENGTH))
            batch["segments"][row, own] = number
            batch["positions"][row, own] = torch.arange(own.stop - own.start)
            begin = own.stop
            number += 1
        batch["targets"][row, begin:] = IGNORE
    return batch


def documents(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each document of each row alone, as a batch of one row."""
    alone = []
    for row in range(len(batch["tokens"])):
        own = {name: tensor[row] for name, tensor in batch.items()}
        segments = own.get("segments", torch.ones_like(own["tokens"]))
        for number in segments.unique():
            kept = segments == number
            alone.append({name: own[name][kept][None] for name in ("tokens", "targets")})
    return alone


def slow_losses(model: Llama, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    """The sums of the two losses, and the number of targets ahead, document by document."""
    next_sum = torch.zeros((), dtype=torch.float64)
    ahead_sum = torch.zeros((), dtype=torch.float64)
    count = 0
    for document in documents(batch):
        tokens, targets = document["tokens"], document["targets"][0]
        hidden = model(tokens)
        logits = model.logits(hidden)[0]
        next_sum = next_sum + cross_entropy(logits, targets, reduction="sum")
        if len(targets) == 1:
            continue  # no token follows the next one
        logits = model.logits(model.predict_ahead(hidden[:, :-1], tokens[:, 1:]))[0]
        ahead_sum = ahead_sum + cross_entropy(logits, targets[1:], reduction="sum")
        count += int((targets[1:] != IGNORE).sum())
    return next_sum, ahead_sum, count


def slow_gradient(model: Llama, batch: dict[str, Tensor]) -> Tensor:
    """Of (sum + weight * sum ahead) / number of targets."""
    next_sum, ahead_sum, _ = slow_losses(model, batch)
    total = (next_sum + WEIGHT * ahead_sum) / (batch["targets"] != IGNORE).sum()
    gradients = torch.autograd.grad(total, [*model.parameters()])
    return torch.cat([gradient.flatten() for gradient in gradients])


ENGINES: dict[str, Callable[[Llama], Any]] = {
    "at once": lambda model: Resident(model, loss=MtpLoss(WEIGHT)),
    "row by row": lambda model: Resident(model, loss=MtpLoss(WEIGHT), micro_batch=1),
    "filled up": lambda model: Resident(model, loss=MtpLoss(WEIGHT), micro_batch=4),
    "recomputed": lambda model: Resident(
        model, loss=MtpLoss(WEIGHT), micro_batch=4, remat=Remat.Full()
    ),
    "a part recomputed": lambda model: Resident(
        model, loss=MtpLoss(WEIGHT), micro_batch=4, remat=Remat.Budget(0.3)
    ),
    "a member": lambda model: Ensemble(
        [model, with_head(seed=1, **sizes_of(model))], loss=MtpLoss(WEIGHT), micro_batch=4
    ),
}


def sizes_of(model: Llama) -> dict[str, Any]:
    """What the shape of a tied or a mixture has besides `SHAPE`."""
    config = model.config
    sizes = {"tie_word_embeddings": config.tie_word_embeddings}
    return sizes | (MIXTURE if config.num_experts else {})


CASES = [
    (ragged, {}),
    (packed, {}),
    (packed, {"tie_word_embeddings": True}),
    (packed, MIXTURE),
]


@pytest.mark.parametrize(("kind", "case"), pairwise(list(ENGINES), CASES))
def test_every_engine_adds_its_gradient(kind, case):
    rows, sizes = case
    batch, model = rows(ROWS), with_head(**sizes)
    exact = slow_gradient(model, batch)
    engine = ENGINES[kind](model)
    engine.accumulate(batch)
    views = {name: view for plane in engine.step.planes for name, view in plane.views(plane.grad)}
    mine = [
        views[name] if kind != "a member" else views[name][0]
        for name, _ in model.named_parameters()
    ]
    assert relative_error(torch.cat([view.flatten() for view in mine]), exact) <= 1e-12


@pytest.mark.parametrize("sizes", [{}, {"tie_word_embeddings": True}])
def test_products_that_add_gradients_themselves_add_its_gradient(sizes):
    """The head and the embedding are read twice, so each adds to its sum twice."""
    batch, model = packed(ROWS), with_head(**sizes)
    exact = slow_gradient(model, batch)
    step = Step(model, loss=MtpLoss(WEIGHT), parameters=OnDevice(fused=True))
    for _ in range(2):
        # The second window begins with the sums of the first one in the buffers.
        step.discard()
        accumulate(step, [rows_of(batch, 0, 2), rows_of(batch, 2, ROWS)])
        assert relative_error(flat_gradient(model), exact) <= 1e-12


@pytest.mark.parametrize(
    ("scope", "remat"),
    [
        ("blocks", Remat.Off()),
        pytest.param("whole", Remat.Off(), marks=pytest.mark.slow),
        pytest.param("whole", Remat.Budget(0.5), marks=pytest.mark.slow),
        pytest.param("blocks", Remat.Full(), marks=pytest.mark.slow),
    ],
)
def test_a_captured_step_adds_it(scope, remat):
    batch, model = packed(ROWS), with_head()
    exact = slow_gradient(model, batch)
    engine = Resident(model, loss=MtpLoss(WEIGHT), micro_batch=3, remat=remat)
    captured_to_train(engine, batch, "aot_eager", scope)
    engine.step.discard()
    engine.accumulate(batch)
    assert relative_error(flat_gradient(model), exact) <= 1e-12


# ---- planted leaks -----------------------------------------------------------------------------


def with_targets_of_other_documents(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    next_tokens, targets = ahead({name: batch[name] for name in ("tokens", "targets")})
    return next_tokens, targets


def with_the_row_end(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return batch["tokens"].roll(-1, dims=1), batch["targets"].roll(-1, dims=1)


def with_the_targets_themselves(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    next_tokens, _ = ahead(batch)
    return next_tokens, batch["targets"]


@pytest.mark.parametrize(
    "leak", [with_targets_of_other_documents, with_the_row_end, with_the_targets_themselves]
)
def test_a_target_of_another_document_is_seen(leak, monkeypatch):
    batch, model = packed(ROWS), with_head()
    exact = slow_gradient(model, batch)
    monkeypatch.setattr(loss_module, "ahead", leak)
    engine = ENGINES["at once"](model)
    engine.accumulate(batch)
    assert relative_error(flat_gradient(model), exact) > 1e-3


def test_an_attention_over_documents_is_seen(monkeypatch):
    batch, model = packed(ROWS), with_head()
    exact = slow_gradient(model, batch)
    original = Llama.predict_ahead

    def leaking(self: Llama, *args: Any, segments: Tensor, **more: Any) -> Tensor:
        return original(self, *args, **more)

    monkeypatch.setattr(Llama, "predict_ahead", leaking)
    engine = ENGINES["at once"](model)
    engine.accumulate(batch)
    assert relative_error(flat_gradient(model), exact) > 1e-3


# ---- what is said of the loss ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["at once", "filled up"])
def test_the_loss_is_that_of_the_next_tokens_and_the_other_is_told_apart(kind):
    batch, model = packed(ROWS), with_head()
    next_sum, ahead_sum, count = slow_losses(model, batch)
    engine = ENGINES[kind](model)
    for _ in range(2):  # the totals of the first update are not those of the second
        engine.step.discard()
        engine.accumulate(batch)
        assert relative_error(engine.step.loss_sum, next_sum.detach()) <= 1e-12
        assert relative_error(engine.loss.take_mean(), (ahead_sum / count).detach()) <= 1e-12


def test_each_member_has_its_own_loss():
    batch, models = packed(ROWS), [with_head(), with_head(seed=1)]
    expected = [
        float(ahead_sum.detach()) / count
        for _, ahead_sum, count in (slow_losses(model, batch) for model in models)
    ]
    engine = Ensemble(models, loss=MtpLoss(WEIGHT), micro_batch=4)
    engine.accumulate(batch)
    means = [float(engine.member_loss(member).take_mean()) for member in range(2)]
    assert means == pytest.approx(expected, rel=1e-12)
    assert means[0] != means[1]


def test_an_evaluation_does_not_compute_it():
    batch, model = packed(ROWS), with_head()
    plain = Resident(with_head()).evaluate(batch)
    engine = ENGINES["filled up"](model)
    assert [*map(float, engine.evaluate(batch))] == [*map(float, plain)]
    assert not engine.loss.totals.any()
    with torch.no_grad():
        assert torch.equal(MtpLoss(WEIGHT)(model, batch)[0], token_loss(model, batch)[0])


def test_a_head_that_is_not_finite_changes_no_weight():
    batch, model = packed(ROWS), with_head()
    engine = ENGINES["at once"](model)
    model.mtp.norm.weight.data[0] = float("inf")
    before = model.lm_head.weight.clone()
    engine.accumulate(batch)
    assert int(engine.update().skipped) == 1
    assert torch.equal(model.lm_head.weight, before)
