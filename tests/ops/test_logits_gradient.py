"""Run: pytest tests/ops/test_logits_gradient.py

The gradient that replaces a chunk's logits is as exact as PyTorch's operators, on a CPU and by the
kernel, and a captured loss holds its logits once.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monograph import compat
from monograph.laws.comparisons import error_within
from monograph.ops.cross_entropy import linear_cross_entropy
from monograph.ops.logits_gradient import COLUMNS, replace_logits_

TOKENS = 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Below, at and beyond what the kernel computes at once, and two times that with a rest. Rows of an odd
# length do not begin where a word of 32 bits does.
VOCABULARIES = (1, 2, 101, 4096, COLUMNS, COLUMNS + 1, 2 * COLUMNS + 96)


def inputs(vocabulary: int, scale: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in float64, targets of which one is the first and one the last class, and a mask."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = scale * torch.randn(TOKENS, vocabulary, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, vocabulary - 1
    return logits, targets, torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])


def equation(
    logits: Tensor, targets: Tensor, mask: Tensor, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Losses, and gradients, in the logits' own dtype."""
    slope: Tensor | float = 1.0
    if cap is not None:
        slope = 1 - torch.tanh(logits / cap) ** 2
        logits = cap * torch.tanh(logits / cap)
    one_hot = torch.nn.functional.one_hot(targets, logits.shape[-1]).to(logits.dtype)
    losses = torch.logsumexp(logits, -1) - (logits * one_hot).sum(-1)
    mask = mask.to(logits.dtype)
    return losses * mask, (logits.softmax(-1) - one_hot) * slope * mask[:, None]


def replaced(
    logits: Tensor, targets: Tensor, mask: Tensor, device: str, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Losses, and what has become of the logits."""
    placed = logits.to(device, copy=True)
    losses = replace_logits_(placed, targets.to(device), mask.to(device), cap)
    return losses.cpu(), placed.cpu()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_losses_and_gradients_are_as_exact_as_pytorch_s(
    vocabulary: int, dtype: torch.dtype, device: str
) -> None:
    assert_as_exact(vocabulary, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_of_which_registers_hold_a_part_are_as_exact(dtype: torch.dtype) -> None:
    assert_as_exact(12 * COLUMNS + 2, dtype, "cuda")


@pytest.mark.parametrize("vocabulary", [101, 2 * COLUMNS + 96])
@pytest.mark.parametrize("device", DEVICES)
def test_capped_logits_are_as_exact(vocabulary: int, device: str) -> None:
    """A cap of 3 bends most of these logits, and one of 30 hardly any."""
    for cap in (3.0, 30.0):
        assert_as_exact(vocabulary, torch.float32, device, cap)
        assert_as_exact(vocabulary, torch.bfloat16, device, cap)


def assert_as_exact(
    vocabulary: int, dtype: torch.dtype, device: str, cap: float | None = None
) -> None:
    logits, targets, mask = inputs(vocabulary)
    logits = logits.to(dtype)
    ours = replaced(logits, targets, mask, device, cap)
    naive = equation(logits.float(), targets, mask, cap)
    exact = equation(logits.double(), targets, mask, cap)
    assert error_within(ours[0], naive[0], exact[0])
    assert error_within(ours[1], naive[1].to(dtype), exact[1])


@pytest.mark.parametrize("device", DEVICES)
def test_impossible_classes_and_large_logits_stay_finite(device: str) -> None:
    """A class whose logit is -inf has the probability 0, even where all of a kernel's first columns do."""
    vocabulary = COLUMNS + 7
    logits, targets, mask = inputs(vocabulary, scale=1e4)
    logits[:, : COLUMNS + 1] = -torch.inf
    targets.fill_(vocabulary - 1)
    losses, gradients = replaced(logits.float(), targets, mask, device)
    finite = logits[:, COLUMNS + 1 :]
    exact = equation(finite, targets - COLUMNS - 1, mask)
    naive = equation(finite.float(), targets - COLUMNS - 1, mask)
    assert not gradients[:, : COLUMNS + 1].any()
    assert error_within(losses, naive[0], exact[0])
    assert error_within(gradients[:, COLUMNS + 1 :], naive[1], exact[1])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_be_padded_and_no_row_is_no_error(device: str) -> None:
    logits, targets, mask = inputs(101)
    padded = torch.full((TOKENS, 112), 7.0, device=device)
    view = padded[:, :101]
    view.copy_(logits)
    losses = replace_logits_(view, targets.to(device), mask.to(device))
    # Not the bits of rows without padding: the compiler lets a thread read more of a row at once if it
    # knows that each row's address is a multiple of 16, and then a row is summed in another order.
    naive, exact = equation(logits.float(), targets, mask), equation(logits, targets, mask)
    assert error_within(losses.cpu(), naive[0], exact[0])
    assert error_within(view.cpu(), naive[1], exact[1])
    assert bool((padded[:, 101:] == 7.0).all())
    none = [tensor[:0].to(device) for tensor in (logits.float(), targets, mask)]
    assert replace_logits_(*none).shape == (0,)


@pytest.mark.gpu
def test_a_captured_loss_has_the_gradients_of_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(*shape, generator=generator).double() for shape in ((37, 16), (101, 16))]
    targets = torch.randint(101, (37,), generator=generator)
    targets[::3] = -100

    def gradients(tensors: list[Tensor], **options) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        function = options.pop("function", linear_cross_entropy)
        loss, _ = function(*leaves, targets.to(leaves[0].device), **options)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    low = [tensor.to(torch.bfloat16).cuda() for tensor in exact]
    captured = torch.compile(linear_cross_entropy, fullgraph=True)
    ours = gradients(low, function=captured, chunks=3)
    naive = gradients(low, impl="reference")
    truth = gradients([tensor.double() for tensor in low], impl="reference")
    for mine, theirs, true in zip(ours, naive, truth, strict=True):
        assert error_within(mine, theirs, true)


def test_a_transform_is_seen_where_the_code_is_compiled() -> None:
    """A frozen head would otherwise get a gradient, and a member the kernel of a single model."""

    def is_seen(x: Tensor) -> Tensor:
        return x + float(compat.in_transform())

    compiled = torch.compile(is_seen, backend="eager", fullgraph=True)
    members = torch.compile(lambda x: torch.func.vmap(is_seen)(x), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2)).tolist() == [0.0, 0.0]
    assert members(torch.zeros(2)).tolist() == [1.0, 1.0]
