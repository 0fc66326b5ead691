"""Run: pytest tests/ops/test_delta_net_kernels.py (needs a CUDA device)

A token of a gated delta net by its kernels is as exact as by the model's own layer, and leaves the same
state; a row has the same bits alone as among others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from batches import tiny_llama
from monograph.graph.siblings import fuse_known
from monograph.laws.comparisons import error_within
from monograph.model.layer_types import FULL_ATTENTION, LINEAR_ATTENTION
from monograph.model.mixer import Cache, LayerCache
from monograph.model.recurrent import LayerState

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
HIDDEN, ROWS, STEPS = 48, 4, 7
# Key heads, value heads, channels of a key and of a value, taps of the convolution.
SIZES = {
    "three value heads of a key head, padded": (2, 6, 12, 24, 3),
    "as many value heads, many channels": (1, 1, 64, 128, 4),
}
CASES = [(kind, sizes) for kind in ("qwen3_5_text", "qwen3_next") for sizes in SIZES]


class State(NamedTuple):
    """What a row has at its beginning, and what it has after some tokens."""

    inputs_BKC: Tensor
    state_BHEV: Tensor
    count_B: Tensor


class OneLayer:
    """A cache whose only layer is a delta net."""

    def __init__(self, recurrence: LayerState):
        self._recurrence = recurrence

    def recurrence(self, layer_index: int) -> LayerState:
        return self._recurrence

    def keep_call(self, call: Callable[[Cache], object]) -> None:
        """Keep nothing: no pass here is tried and taken back."""


class Case:
    """A block's norm and delta net in float64, the tokens of some rows, and their state before."""

    def __init__(self, kind: str, sizes: str):
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        values = SIZES[sizes]
        config: dict[str, Any] = {
            f"linear_{name}": value
            for name, value in zip((*names, "conv_kernel_dim"), values, strict=True)
        }
        if kind == "qwen3_next":
            config |= {"num_experts": 2, "num_experts_per_tok": 1}
        block = tiny_llama(
            torch.float64,
            model_type=kind,
            hidden_size=HIDDEN,
            layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
            **config,
        ).model.layers[0]
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.norm, self.layer = block.input_layernorm, block.linear_attn
        with torch.no_grad():
            for parameter in self.layer.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(normal(*parameter.shape) / parameter.shape[1] ** 0.5)
            for norm in (self.norm, self.layer.norm):
                norm.weight.add_(0.2 * normal(*norm.weight.shape))
        key_heads, value_heads, key_dim, value_dim, taps = values
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.tokens_TBD = normal(STEPS, ROWS, HIDDEN)
        self.before = State(
            normal(ROWS, taps, channels),
            normal(ROWS, value_heads, key_dim, value_dim),
            torch.tensor([0, 3, 50, 7])[:ROWS],
        )

    def computed(
        self,
        dtype: torch.dtype,
        by_kernels: bool,
        rows: Sequence[int] = range(ROWS),
        limit: int = 1 << 40,
        repeats: int = 1,
    ) -> tuple[Tensor, State]:
        """Return the outputs of all steps, [T, B, D], and the state after them, on the CPU."""
        device = "cuda" if by_kernels else "cpu"
        chosen = list(rows)
        modules = nn.ModuleList([deepcopy(self.norm), deepcopy(self.layer)]).to(device, dtype)
        norm, layer = modules
        fuse_known(modules)
        wide = torch.promote_types(dtype, torch.float32)
        recurrence = LayerState(
            self.before.inputs_BKC[chosen].to(device, dtype),
            self.before.state_BHEV[chosen].to(device, wide),
            self.before.count_B[chosen].to(device, copy=True),
            torch.full((len(chosen),), limit, device=device),
        )
        outputs = []
        for step, token_BD in enumerate(self.tokens_TBD[:, chosen].to(device, dtype)):
            position_B = (self.before.count_B[chosen] + step).to(device)
            for _ in range(repeats):
                compute = kernel_step if by_kernels else module_step
                with torch.no_grad():
                    output_BD = compute(layer, norm, token_BD, position_B, recurrence)
            outputs.append(output_BD.cpu())
        return torch.stack(outputs), State(*(each.cpu() for each in recurrence[:3]))


def module_step(
    layer: Any, norm: Any, token_BD: Tensor, position_B: Tensor, recurrence: LayerState
) -> Tensor:
    cache = LayerCache(OneLayer(recurrence), 0, position_B[:, None], None)  # type: ignore[arg-type]
    return token_BD + layer(norm(token_BD)[:, None], None, None, cache)[:, 0]


def kernel_step(
    layer: Any, norm: Any, token_BD: Tensor, position_B: Tensor, recurrence: LayerState
) -> Tensor:
    # These import Triton.
    from monograph.decode.fast_delta_net import delta_net_step, obstacle_of_delta_net
    from monograph.decode.fast_projections import norm_of
    from monograph.ops.layer_kernels import project

    assert obstacle_of_delta_net(layer, token_BD.dtype) is None
    return delta_net_step(layer, token_BD, norm_of(norm), position_B, recurrence, project)


def same(found: tuple[Tensor, State], expected: tuple[Tensor, State]) -> bool:
    pairs = zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@DTYPES
@pytest.mark.parametrize(("kind", "sizes"), CASES)
def test_tokens_are_as_exact_as_by_the_layer_and_leave_its_state(
    kind: str, sizes: str, dtype: torch.dtype
) -> None:
    case = Case(kind, sizes)
    ours, after = case.computed(dtype, by_kernels=True)
    naive, expected = case.computed(dtype, by_kernels=False)
    exact, exact_after = case.computed(torch.float64, by_kernels=False)
    for step in range(STEPS):
        assert error_within(ours[step], naive[step], exact[step])
    assert error_within(after.state_BHEV, expected.state_BHEV, exact_after.state_BHEV)
    assert error_within(after.inputs_BKC, expected.inputs_BKC, exact_after.inputs_BKC)
    assert torch.equal(after.count_B, expected.count_B)


@DTYPES
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    case = Case(*CASES[0])
    output_TBD, after = case.computed(dtype, by_kernels=True)
    for rows in ([2], [3, 1], [3, 2, 1, 0]):
        of_rows = output_TBD[:, rows], State(*(each[rows] for each in after))
        assert same(case.computed(dtype, by_kernels=True, rows=rows), of_rows)


@DTYPES
@pytest.mark.parametrize(("kind", "sizes"), CASES)
def test_a_repeated_token_is_added_once(kind: str, sizes: str, dtype: torch.dtype) -> None:
    case = Case(kind, sizes)
    once = case.computed(dtype, by_kernels=True)
    assert same(case.computed(dtype, by_kernels=True, repeats=3), once)


def test_a_token_from_the_limit_on_changes_nothing() -> None:
    """The limit is 9: of its seven tokens the first row adds all, the second one six, the third none
    and the fourth two.
    """
    case = Case(*CASES[0])
    ours, after = case.computed(torch.float32, by_kernels=True, limit=9)
    assert after.count_B.tolist() == [7, 9, 50, 9]
    naive, expected = case.computed(torch.float32, by_kernels=False, limit=9)
    exact, exact_after = case.computed(torch.float64, by_kernels=False, limit=9)
    assert error_within(ours, naive, exact)
    assert error_within(after.state_BHEV, expected.state_BHEV, exact_after.state_BHEV)
    assert torch.equal(after.inputs_BKC[2], case.before.inputs_BKC[2].float())
    assert torch.equal(after.state_BHEV[2], case.before.state_BHEV[2].float())


def test_a_decay_near_one_has_all_digits() -> None:
    """Computed as ln(1 + x) in fp32, softplus would have four digits here."""
    case = Case(*CASES[0])
    with torch.no_grad():
        case.layer.in_proj_a.weight.zero_()
        case.layer.dt_bias.fill_(-9)
        case.layer.A_log.fill_(2.7)
    _, after = case.computed(torch.float32, by_kernels=True)
    _, expected = case.computed(torch.float32, by_kernels=False)
    _, exact = case.computed(torch.float64, by_kernels=False)
    assert error_within(after.state_BHEV, expected.state_BHEV, exact.state_BHEV)
