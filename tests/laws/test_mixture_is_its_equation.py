"""Run: pytest tests/laws/test_mixture_is_its_equation.py (laws 1 and 2 for averaged probabilities,
and what learns).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from adapted import trained
from batches import captured_to_train, flat_gradient, packed, ragged, tiny_llama
from monograph import compat
from monograph.ensemble.one_base import OneBase, have_one_base
from monograph.errors import InputRefused
from monograph.graph.lora import Lora, adapt
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.graph.shared_base import copy_with_shared_base
from monograph.laws.comparisons import error_within, relative_error
from monograph.loss import Batch, MixtureLoss, token_loss
from monograph.model.llama import Llama
from monograph.ops import mixture
from monograph.resident import Resident
from monograph.session.evaluated_model import EvaluatedModel, mixture_of
from monograph.text.tokenizer import Tokenizer

READING = {"sequence_length": 24}
SHARE = 0.3  # not a half, so that the two terms cannot be taken for one another


def models(count: int, dtype: torch.dtype = torch.float64, **sizes: int) -> list[Llama]:
    """Models that are sure of different tokens: new ones would all find everything about equally
    likely.
    """
    made = [tiny_llama(dtype, seed=10 + seed, **sizes) for seed in range(count)]
    for model in made:
        model.lm_head.weight.data.mul_(20)
    return made


def logits(model: Llama, batch: Batch) -> Tensor:
    hidden = model(
        batch["tokens"], segments=batch.get("segments"), positions=batch.get("positions")
    )
    return (hidden @ model.lm_head.weight.T).flatten(0, -2)


def averaged(members: Sequence[Llama], batch: Batch) -> Tensor:
    """All probabilities of all members at once, [N, V]."""
    with torch.no_grad():
        return torch.stack([logits(member, batch).softmax(-1) for member in members]).mean(0)


def together(members: Sequence[Llama]) -> EvaluatedModel:
    subjects = [
        EvaluatedModel(each, token_loss, Tokenizer.bytes(), Precision("fp32"), READING)
        for each in members
    ]
    return mixture_of(subjects, "sweep/mixture")


@pytest.mark.parametrize("rows", [ragged, packed])
def test_the_score_is_that_of_the_averaged_probabilities(rows):
    members, batch = models(3), rows(5)
    targets = batch["targets"].flatten()
    kept = targets != -100
    expected = -averaged(members, batch)[kept, targets[kept]].log().sum()
    total, count = together(members).evaluate(batch)
    assert count == kept.sum() and total.dtype == torch.float64
    assert float(total) == pytest.approx(float(expected), rel=1e-12)
    alone = [float(token_loss(member, batch)[0].detach()) for member in members]
    assert min(alone) < 0.999 * sum(alone) / 3 and float(total) < sum(alone) / 3, (
        "members that differ help each other"
    )


def test_members_that_are_equal_are_one():
    [member], batch = models(1), ragged(4)
    own = float(token_loss(member, batch)[0].detach())
    assert float(together([member]).evaluate(batch)[0]) == pytest.approx(own, rel=1e-12)
    assert float(together([member] * 4).evaluate(batch)[0]) == pytest.approx(own, rel=1e-12)


def test_models_of_other_kinds_have_nothing_to_average():
    with pytest.raises(InputRefused, match="sweep/mixture: only language models of one tokenizer"):
        together([*models(1), torch.nn.Linear(2, 2)])


def naive(student: Llama, teachers: Sequence[Llama], batch: Batch) -> tuple[float, Tensor]:
    """The mean of the loss over the targets, as its equation says it, and the gradient that
    autograd finds.
    """
    targets, log_q, m = (
        batch["targets"].flatten(),
        logits(student, batch).log_softmax(-1),
        averaged(teachers, batch),
    )
    kept = targets != -100
    own = -log_q[kept, targets[kept]]
    apart = (m[kept] * (m[kept].log() - log_q[kept])).sum(-1)
    mean = (SHARE * own + (1 - SHARE) * apart).mean()
    parameters = [each for each in student.parameters() if each.requires_grad]
    return float(mean.detach()), torch.cat(
        [each.flatten() for each in torch.autograd.grad(mean, parameters)]
    )


def learning(dtype: torch.dtype, micro_batch: int, remat: object = None, **sizes: int) -> Resident:
    student, teachers = tiny_llama(dtype, **sizes), models(3, dtype, **sizes)
    return Resident(
        student, loss=MixtureLoss(teachers, SHARE), micro_batch=micro_batch, remat=remat
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [ragged, packed])
@pytest.mark.parametrize(("micro_batch", "chunks"), [(7, 1), (3, 1), (2, 5)])
def test_the_gradient_is_that_of_the_equation(rows, micro_batch, chunks, monkeypatch):
    """Ragged rows, ignored targets, a last micro-batch that is filled up, chunks that do not fit
    the rows.
    """
    monkeypatch.setattr(mixture, "chunk_count", lambda *_: chunks)
    batch, engine = rows(7), learning(torch.float64, micro_batch)
    loss, exact = naive(tiny_llama(torch.float64), models(3), batch)
    engine.accumulate(batch)
    assert relative_error(flat_gradient(engine.model), exact) <= 1e-12
    assert float(engine.update().loss) == pytest.approx(loss, rel=1e-12)


def test_without_teachers_of_its_own_mind_it_is_the_cross_entropy():
    """The targets alone at share 1; a student that is its own teacher learns from the targets
    alone.
    """
    batch, plain = ragged(4), Resident(tiny_llama(torch.float64))
    plain.accumulate(batch)
    for loss, factor in (
        (MixtureLoss(models(2), 1.0), 1.0),
        (MixtureLoss([tiny_llama(torch.float64)], 0.25), 0.25),
    ):
        engine = Resident(tiny_llama(torch.float64), loss=loss)
        engine.accumulate(batch)
        assert (
            relative_error(flat_gradient(engine.model), factor * flat_gradient(plain.model))
            <= 1e-12
        )


def test_teachers_stay_as_they_are_and_scores_are_everybodys():
    batch, engine = packed(6), learning(torch.float32, 3)
    teachers = engine.step.loss.teachers
    before = [
        {name: each.clone() for name, each in teacher.state_dict().items()} for teacher in teachers
    ]
    plain = Resident(tiny_llama(), micro_batch=3)
    assert torch.equal(engine.evaluate(batch)[0], plain.evaluate(batch)[0]), (
        "the same bits as TokenLoss's"
    )
    engine.accumulate(batch)
    engine.update()
    for teacher, kept in zip(teachers, before, strict=True):
        assert all(torch.equal(each, kept[name]) for name, each in teacher.state_dict().items())
        assert all(each.grad is None for each in teacher.parameters())


@pytest.mark.parametrize(
    ("scope", "remat", "backend"),
    [
        pytest.param("blocks", None, "eager", marks=pytest.mark.slow),
        pytest.param("blocks", None, "aot_eager", marks=pytest.mark.slow),
        pytest.param("whole", None, "aot_eager", marks=pytest.mark.slow),
        pytest.param("blocks", Remat.Full(), "aot_eager", marks=pytest.mark.slow),
        pytest.param("blocks", Remat.Budget(0.3), "aot_eager", marks=pytest.mark.slow),
    ],
    ids=["Dynamo's blocks", "blocks", "whole", "full", "budget"],
)
def test_captured_is_eager(scope, remat, backend, monkeypatch):
    """Full graphs: `capture` refuses a break. The head with all its teachers is one graph, in
    chunks.
    """
    monkeypatch.setattr(mixture, "chunk_count", lambda *_: 2)
    # One graph has the same lines for each layer more.
    layers = {"num_hidden_layers": 1 if scope == "whole" else 2}
    batch, eager = packed(6), learning(torch.float32, 3, **layers)
    captured = learning(torch.float32, 3, remat, **layers)
    captured_to_train(captured, batch, backend, scope)
    for each in (eager, captured):
        each.accumulate(batch)
    _, truth = naive(tiny_llama(torch.float64, **layers), models(3, **layers), batch)
    assert error_within(flat_gradient(captured.model), flat_gradient(eager.model), truth)
    captured.update()
    graphs = compat.captured_graphs()
    captured.accumulate(packed(5, seed=1))
    captured.update()
    assert compat.captured_graphs() == graphs and compat.graph_breaks() == 0


@pytest.mark.parametrize("rows", [ragged, packed])
def test_adapters_on_one_base_teach_by_one_pass_as_one_after_another(rows):
    """Of different ranks, in float64: the loss, and the gradient of the model that learns."""
    base = tiny_llama(torch.float64)
    loras = [Lora(2), Lora(4, alpha=6.0), Lora(3, dropout=0.2)]
    adapt(base, loras[1])
    teachers = [
        trained(copy_with_shared_base(base, lora, seed=number), seed=number, spread=0.5)
        for number, lora in enumerate(loras)
    ]
    student = trained(copy_with_shared_base(base, Lora(4), seed=7))
    assert have_one_base(teachers) and not have_one_base([tiny_llama(), tiny_llama()])
    batch = rows(5)
    found = []
    for hidden in (None, OneBase(teachers).hidden):
        student.zero_grad()
        total, count = MixtureLoss(teachers, SHARE, hidden)(student, batch)
        total.backward()
        found.append((total.detach(), count, flat_gradient(student)))
    (one_by_one, count, gradient), (together, same_count, same_gradient) = found
    assert count == same_count
    assert relative_error(together, one_by_one) <= 1e-12
    assert relative_error(same_gradient, gradient) <= 1e-11
    assert relative_error(one_by_one, token_loss(student, batch)[0].detach()) > 1e-3
