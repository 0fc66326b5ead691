# Run: pytest tests/laws/test_balance_is_its_equation.py
"""Laws 1, 2, 3, 5 and 9 for the balance of experts: every engine adds the gradient of its equation,
token for token.

Law 4 has it in the mixture of tests/streamed.py, law 13 in laws/sharded.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from batches import captured_to_train, flat_gradient, packed, ragged, rows_of, tiny_llama
from daily import pairwise
from monograph.ensemble import Ensemble
from monograph.errors import UsageError
from monograph.graph import experts
from monograph.graph.experts import Router
from monograph.graph.lora import Lora, adapt
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.laws.comparisons import relative_error
from monograph.loss import token_loss
from monograph.model.llama import Llama
from monograph.resident import Resident
from monograph.step import Step, accumulate

EXPERTS, CHOICES, COEFFICIENT, ROWS = 5, 2, 0.3, 8
ON = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
MIXTURE = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": CHOICES}


def mixture(dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: Any) -> Llama:
    """Its second of three layers is none."""
    return tiny_llama(
        dtype, seed, **{"num_hidden_layers": 3, "mlp_only_layers": (1,), **MIXTURE, **ON} | sizes
    )


def balance_loss(logits: Tensor, document: Tensor, trained: Tensor) -> Tensor:
    """sum over trained tokens of E sum_e f_de p_te: the equation, document after document."""
    shares, total = logits.softmax(-1), logits.new_zeros(())
    chosen = torch.zeros_like(shares).scatter(1, shares.topk(CHOICES).indices, 1.0)
    for number in document[trained].unique():
        own = (document == number) & trained
        total = total + EXPERTS * (chosen[own].mean(0) * shares[own]).sum()
    return total


def slow_gradient(
    model: Llama, batch: dict[str, Tensor], of_layer: Callable[..., Tensor] = balance_loss
) -> Tensor:
    """Of mean cross-entropy + coefficient times the mean of the mixtures' balance, in one backward
    pass.
    """
    logits: list[Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [
        r.register_forward_hook(lambda r, inputs, _: logits.append(inputs[0] @ r.weight.T))
        for r in routers
    ]
    hidden = model(
        batch["tokens"], segments=batch.get("segments"), positions=batch.get("positions")
    )
    for hook in hooks:
        hook.remove()
    segments = batch.get("segments", torch.zeros_like(batch["tokens"]))
    document = (segments + torch.arange(len(segments))[:, None] * (segments.max() + 1)).flatten()
    trained = batch["targets"].flatten() != -100
    loss = cross_entropy(
        (hidden @ model.lm_head.weight.T).flatten(0, 1), batch["targets"].flatten()
    )
    uneven = sum(of_layer(each, document, trained) for each in logits) / (
        trained.sum() * len(logits)
    )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss + COEFFICIENT * uneven, parameters)
    return torch.cat([gradient.flatten() for gradient in gradients])


def accumulated(engine: Any, batch: dict[str, Tensor]) -> Tensor:
    engine.accumulate(batch)
    return flat_gradient(engine.model)


def test_of_one_document_it_is_the_loss_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    # Theirs rounds probabilities; shares of 16 tokens are exact.
    monkeypatch.setattr(Tensor, "float", Tensor.double)

    def theirs(logits: Tensor, document: Tensor, trained: Tensor) -> Tensor:
        loss = load_balancing_loss_func((logits,), EXPERTS, CHOICES)
        assert relative_error(balance_loss(logits, document, trained) / 16, loss) <= 1e-12
        return loss * 16

    # Every position has a target.
    batch = {name: rows.clamp_min(1) for name, rows in ragged(1, length=16).items()}
    one = {"num_hidden_layers": 1, "mlp_only_layers": ()}
    exact = slow_gradient(mixture(**one), batch, theirs)
    assert relative_error(accumulated(Resident(mixture(**one)), batch), exact) <= 1e-12
    without = Resident(mixture(**one, router_aux_loss_coef=0.0))
    assert relative_error(accumulated(without, batch), exact) > 0.01


ENGINES: dict[str, Callable[[Llama], Any]] = {
    "at once": Resident,
    "row by row": lambda model: Resident(model, micro_batch=1),
    "filled up": lambda model: Resident(model, micro_batch=3),
    "recomputed": lambda model: Resident(model, micro_batch=3, remat=Remat.Full()),
    "a part recomputed": lambda model: Resident(model, micro_batch=3, remat=Remat.Budget(0.3)),
    "a member": lambda model: Ensemble([model, mixture(seed=1)], micro_batch=3),
}


@pytest.mark.parametrize(("kind", "rows"), pairwise(list(ENGINES), [ragged, packed]))
def test_every_engine_adds_its_gradient(
    kind: str, rows: Callable[[int], dict[str, Tensor]]
) -> None:
    batch, model = rows(ROWS), mixture()
    exact = slow_gradient(model, batch)
    engine = ENGINES[kind](model)
    engine.accumulate(batch)
    views = {name: view for plane in engine.step.planes for name, view in plane.views(plane.grad)}
    mine = [
        views[name] if kind != "a member" else views[name][0]
        for name, _ in model.named_parameters()
    ]
    assert relative_error(torch.cat([view.flatten() for view in mine]), exact) <= 1e-12


# A graph has the same lines for each layer more.
FEW = {"num_hidden_layers": 2, "mlp_only_layers": (0,)}


# By day test_compiled_is_eager.py captures a mixture whose loss has the term.
@pytest.mark.parametrize(
    ("scope", "remat", "backend"),
    [
        pytest.param("whole", Remat.Off(), "aot_eager", marks=pytest.mark.slow),
        pytest.param("blocks", Remat.Full(), "aot_eager", marks=pytest.mark.slow),
        pytest.param("blocks", Remat.Full(), "eager", marks=pytest.mark.slow),
    ],
)
def test_a_captured_step_adds_it(scope: Any, remat: Any, backend: str) -> None:
    batch, model = packed(ROWS), mixture(**FEW)
    exact = slow_gradient(model, batch)
    engine = Resident(model, micro_batch=3, remat=remat)
    captured_to_train(engine, batch, backend, scope)
    assert relative_error(accumulated(engine, batch), exact) <= 1e-12


@pytest.mark.slow  # by day members are not captured, and a captured step is one by blocks
@pytest.mark.parametrize("each", [False, True])
def test_a_captured_update_of_members_adds_it(each: bool) -> None:
    """Gradient and update are one graph; Dynamo would trace an autograd.Function's forward pass
    alone there.
    """
    batch, models = packed(ROWS), [mixture(seed=seed, **FEW) for seed in (0, 1)]
    exact = [float(slow_gradient(model, batch).norm()) for model in models]
    engine = Ensemble(models, each=each)
    window = (
        {name: rows.expand(2, *rows.shape).contiguous() for name, rows in batch.items()}
        if each
        else batch
    )
    captured_to_train(engine, window)
    engine.accumulate(window)
    assert engine.update().grad_norm.tolist() == pytest.approx(exact, rel=1e-12)


def test_adapters_and_scaled_losses_have_it() -> None:
    """Of frozen routers it reaches the adapters before them, and in fp16 it is scaled as the loss
    is.
    """
    batch, model = packed(ROWS), mixture(num_hidden_layers=2, mlp_only_layers=(0,))
    adapt(model, Lora(rank=4), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name and parameter.requires_grad:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    exact = slow_gradient(model, batch)
    assert exact.norm() > 0
    assert relative_error(accumulated(Resident(model, micro_batch=3), batch), exact) <= 1e-12
    exact = slow_gradient(mixture(), batch)
    scaled = Resident(mixture(torch.float32), micro_batch=3, precision=Precision("fp16"))
    assert relative_error(accumulated(scaled, batch) / scaled.step.loss_scale, exact) < 0.01


def test_packed_documents_have_the_gradient_that_they_have_in_rows_of_their_own() -> None:
    """Neither padding nor positions without a target count."""
    together = packed(ROWS)
    together["targets"][:, 3:5] = -100
    for name, empty in (("targets", -100), ("segments", 0), ("positions", 0)):
        together[name][:, 20:] = empty
    alone = {
        name: nn.functional.pad(
            torch.cat([together[name][:, :10], together[name][:, 10:20]]), (0, 4), value=empty
        )
        for name, empty in (("tokens", 0), ("targets", -100))
    }
    gradients = [
        accumulated(Resident(mixture(), micro_batch=3), batch) for batch in (together, alone)
    ]
    assert relative_error(*gradients) <= 1e-12


def test_values_and_reported_losses_are_the_cross_entropy_alone() -> None:
    batch, model = packed(ROWS), mixture()
    positions = {name: batch[name] for name in ("segments", "positions")}
    shares = torch.rand(batch["tokens"].shape)
    assert torch.equal(
        model(batch["tokens"], **positions), model(batch["tokens"], **positions, shares=shares)
    )
    with torch.no_grad():
        total, count = token_loss(model, batch)
    engine = Resident(model)
    assert torch.equal(engine.evaluate(batch)[0], total)
    engine.accumulate(batch)
    assert float(engine.update().loss) == pytest.approx(float(total / count), rel=1e-12)


@pytest.mark.parametrize(
    "off",
    [
        {"output_router_logits": False},
        {"router_aux_loss_coef": 0.0},
        {"mlp_only_layers": (0, 1, 2)},
    ],
)
def test_without_it_nothing_is_computed(
    off: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "balance_of", lambda *_: pytest.fail("computed"))
    monkeypatch.setattr("monograph.graph.experts.balanced", lambda *_: pytest.fail("computed"))
    step = Step(mixture(**off))
    accumulate(step, [rows_of(packed(ROWS), 0, 4)])


class Within(nn.Module):
    """Somebody's module around it, which is called with tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mixture()
        self.lm_head = self.inner.lm_head

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        return self.inner(tokens)


def test_where_tokens_have_no_known_share_it_is_refused_by_name() -> None:
    for model, options in (
        (mixture(), {"loss": lambda model, batch: token_loss(model, batch)}),
        (Within(), {}),
    ):
        with pytest.raises(
            UsageError, match=r"output_router_logits = true adds .* set it to false"
        ):
            Resident(model, **options).accumulate(packed(2))
