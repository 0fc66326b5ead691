"""Run: pytest tests/ops/test_fp8_head.py [-m slow]

The head's products in fp8: against float64 within a bound that is derived from what is rounded, what
they leave alone, what is refused, and a short run beside bf16.

Shapes: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from batches import flat_gradient, large_batch_gradient, ragged, tiny_llama
from monograph.errors import UsageError
from monograph.graph.capture import compiled
from monograph.graph.fp8 import Float8Head, convert_head_
from monograph.graph.lora import Lora, adapt
from monograph.graph.precision import Precision
from monograph.laws.comparisons import relative_error
from monograph.loss import TokenLoss, token_loss
from monograph.ops.cross_entropy import linear_cross_entropy
from monograph.ops.fp8 import BACKWARD_DTYPE, FORWARD_DTYPE, quantised_to_fp8
from monograph.ops.fused_gradients import FusedGradient, fused_gradients
from monograph.optim import AdamW
from monograph.resident import Resident
from monograph.step import Step

# Half of the distance between neighbours: relative, and of the smallest numbers.
ROUNDING = {FORWARD_DTYPE: (2.0**-4, 2.0**-10), BACKWARD_DTYPE: (2.0**-3, 2.0**-17)}
HALF_BF16 = 2.0**-9
TOKENS, WIDTH, VOCABULARY, CHUNKS = 50, 48, 64, 3
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 96}


def drawn(*shape: int, seed: int) -> Tensor:
    """Numbers that bf16 holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16()


def off(values: Tensor, dtype: torch.dtype, largest: float | None = None) -> Tensor:
    """The most by which rounding to fp8 changes each element, in float64."""
    relative, smallest = ROUNDING[dtype]
    _, unit = quantised_to_fp8(values, dtype, largest)
    return torch.maximum(values.double().abs() * relative, smallest * unit.double())


def product_bound(left: Tensor, off_left: Tensor, right: Tensor, off_right: Tensor) -> Tensor:
    """How far a product of rounded operands is from that of the operands, element by element."""
    left, right = left.double().abs(), right.double().abs()
    of_operands = off_left @ right + left @ off_right + off_left @ off_right
    largest = (left + off_left) @ (right + off_right)
    # The sum has as many terms as the inner side, in fp32; the result is rounded to bf16.
    return of_operands + (HALF_BF16 + left.shape[1] * 2.0**-23) * largest


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_loss_and_gradients_are_within_the_bound_of_what_is_rounded(
    fused: bool, device: str
) -> None:
    """Of logits that are off by at most e, the softmax is off by at most a factor of exp(2 e), and
    a loss by 2 e. The gradients of the logits are then rounded to bf16 and, for the hidden states, to e5m2.
    """
    hidden, weight = drawn(TOKENS, WIDTH, seed=0), 0.02 * drawn(VOCABULARY, WIDTH, seed=1)
    weight = weight.bfloat16()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(2))
    targets[::7] = -100
    kept = (targets != -100).double()[:, None]
    scale = 0.003  # by which the step multiplies the loss

    leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in (hidden, weight)]
    total = torch.zeros(VOCABULARY, WIDTH, device=device)
    if fused:
        leaves[1].fused_gradient = FusedGradient(weight.to(device), total)  # type: ignore[attr-defined]
    with fused_gradients():
        on_device = targets.to(device)
        loss, _ = linear_cross_entropy(*leaves, on_device, chunks=CHUNKS, in_fp8=True)
    (loss * scale).backward()
    hidden_grad = leaves[0].grad
    weight_grad = total if fused else leaves[1].grad
    assert hidden_grad is not None and weight_grad is not None

    exact_leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    exact, _ = linear_cross_entropy(*exact_leaves, targets, impl="reference")
    (exact * scale).backward()

    off_weight = off(weight, FORWARD_DTYPE)
    off_hidden = torch.cat([off(part, FORWARD_DTYPE) for part in hidden.tensor_split(CHUNKS)])
    off_logits = product_bound(hidden, off_hidden, weight.T, off_weight.T)
    off_loss_N1 = 2 * off_logits.amax(1, keepdim=True)
    assert (loss.cpu() - exact).abs() <= (off_loss_N1 * kept).sum() + 1e-6 * exact
    onehot = nn.functional.one_hot(targets.clamp_min(0), VOCABULARY).double()
    softmax = (hidden.double() @ weight.double().T).softmax(-1)
    grad = (softmax - onehot) * kept
    off_softmax = softmax * (off_loss_N1.exp() - 1) * kept
    rounded = off_softmax + HALF_BF16 * 1.01 * (grad.abs() + off_softmax)
    off_grad = rounded + off(grad.abs() + rounded, BACKWARD_DTYPE, 1.0)
    hidden_bound = scale * product_bound(grad, off_grad, weight, off_weight)
    # The backward pass multiplies what was rounded, and rounds once more.
    hidden_bound = hidden_bound + HALF_BF16 * (hidden_bound + exact_leaves[0].grad.abs())
    weight_bound = rounded.T @ hidden.double().abs()
    summed = (grad.abs() + rounded).T @ hidden.double().abs()
    # A chunk's product is rounded to bf16 on a CPU, which cannot add it to fp32 numbers.
    weight_bound = scale * (weight_bound + (CHUNKS * HALF_BF16 + TOKENS * 2.0**-23) * summed)
    for found, true, bound in (
        (hidden_grad, exact_leaves[0].grad, hidden_bound),
        (weight_grad, exact_leaves[1].grad, weight_bound),
    ):
        error = (found.cpu().double() - true).abs()
        assert (error <= bound).all()
        assert bound.norm() < true.norm(), "twice the gradient, or none, would be seen"


def test_what_is_scored_is_in_bf16() -> None:
    hidden, weight = drawn(TOKENS, WIDTH, seed=0), drawn(VOCABULARY, WIDTH, seed=1)
    targets = torch.arange(TOKENS)
    with torch.no_grad():
        ours, _ = linear_cross_entropy(hidden, weight, targets, in_fp8=True)
        plain, _ = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(ours, plain)


def engine_of(name: str, micro_batch: int = 4) -> Resident:
    return Resident(
        tiny_llama(**SIZES),
        optim=AdamW(lr=1e-2),
        precision=Precision(name),
        micro_batch=micro_batch,
    )


def test_the_head_and_nothing_else() -> None:
    engine = engine_of("fp8_head")
    kinds = {name for name, layer in engine.model.named_modules() if isinstance(layer, Float8Head)}
    assert kinds == {"lm_head"}
    assert list(engine.model.state_dict()) == list(tiny_llama(**SIZES).state_dict())
    ours, theirs = (each.evaluate(ragged(4))[0] for each in (engine, engine_of("bf16")))
    assert torch.equal(ours, theirs), "scored in bf16"


def gradient(engine: Resident, batch: dict[str, Tensor]) -> Tensor:
    engine.accumulate(batch)
    return flat_gradient(engine.model)


@pytest.fixture(scope="module")
def eight() -> tuple[dict[str, Tensor], Tensor, float]:
    """A window, its gradient in float64, and the error of an fp8 head on the whole of it at once."""
    batch = ragged(8, seed=1)
    truth = large_batch_gradient(tiny_llama(torch.float64, **SIZES), batch)
    error = relative_error(gradient(engine_of("fp8_head", 8), batch), truth)
    bf16 = relative_error(gradient(engine_of("bf16", 8), batch), truth)
    assert 1.5 * bf16 < error < 0.2, (bf16, error)
    return batch, truth, error


@pytest.mark.parametrize("size", [1, 3])
def test_any_split_is_as_close_as_the_large_batch(eight, size: int) -> None:  # type: ignore[no-untyped-def]
    batch, truth, error = eight
    assert relative_error(gradient(engine_of("fp8_head", size), batch), truth) <= 2 * error


@pytest.mark.parametrize(
    "backend",
    ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))],
)
def test_captured_is_as_close_as_eager(eight, backend) -> None:  # type: ignore[no-untyped-def]
    batch, truth, error = eight
    engine = engine_of("fp8_head", 8)
    engine.step.forward.function = compiled(engine.step.forward.function, backend)
    assert relative_error(gradient(engine, batch), truth) <= 2 * error


def test_what_has_no_such_head_is_refused_by_name() -> None:
    eight_bits = Precision("fp8_head")

    class OwnLoss(TokenLoss):
        pass

    with pytest.raises(UsageError, match="multiples of 16, not 90 and 32: use bf16"):
        Step(tiny_llama(**{**SIZES, "vocab_size": 90}), precision=eight_bits)
    with pytest.raises(UsageError, match="lm_head is a plain linear layer: use bf16"):
        Step(nn.Sequential(nn.Linear(16, 16)), loss=token_loss, precision=eight_bits)
    with pytest.raises(UsageError, match="fp8_head is for the default loss"):
        Step(tiny_llama(**SIZES), loss=OwnLoss(), precision=eight_bits)
    adapted = tiny_llama(**SIZES)
    adapt(adapted, Lora(rank=2))
    with pytest.raises(UsageError, match="beside adapters it is frozen: use bf16"):
        convert_head_(adapted)


@pytest.mark.slow
def test_a_short_run_ends_where_bf16_s_does() -> None:
    """Memorising four rows for 30 updates: the last losses differ by less than seeds make them
    differ.
    """
    ends = {}
    for name, seed in (("fp8_head", 0), ("bf16", 0), ("bf16", 1), ("bf16", 2)):
        step = Step(
            tiny_llama(seed=seed, vocab_size=64),
            optim=AdamW(lr=1e-2),
            clip=1.0,
            precision=Precision(name),
        )
        losses = [float(step([ragged(4, seed=3)]).loss) for _ in range(30)]
        ends[name, seed] = sum(losses[-5:]) / 5
        print(name, seed, losses[0], ends[name, seed])
    assert ends["fp8_head", 0] < 0.7 * losses[0], "it must have learnt something"
    spread = max(ends["bf16", s] for s in range(3)) - min(ends["bf16", s] for s in range(3))
    assert abs(ends["fp8_head", 0] - ends["bf16", 0]) <= spread
