"""Compute the gated delta rule, a linear attention whose state is a matrix.

Each token decays, corrects and reads the state:

    S[t] = exp(g[t]) S[t-1] + k[t] (beta[t] (v[t] - (exp(g[t]) S[t-1])^T k[t]))^T       out[t] = S[t]^T q[t]

At the first token of a document S[t-1] is 0. `recurrent` computes this equation. `chunked` computes
the same for whole chunks of tokens: inside a chunk the corrections are the solution of a triangular
system, so that only one matrix is carried from chunk to chunk.

Shapes: B batch, T positions, H heads, E key dimension, V value dimension, N chunks, C positions of
a chunk, M = B H.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464; for chunks, Yang et
al., arXiv 2406.06484.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from monograph.ops.autograd import Batched, Context

CHUNK = 64  # positions of a chunk; fewer for short rows
TensorPair = tuple[Tensor, Tensor]


def recurrent(
    query_BHTE: Tensor,
    key_BHTE: Tensor,
    value_BHTV: Tensor,
    decay_BHT: Tensor,
    beta_BHT: Tensor,
    starts_BT: Tensor | None = None,
    state_BHEV: Tensor | None = None,
) -> TensorPair:
    """Return the outputs [B, H, T, V] and the last state [B, H, E, V], token by token.

    Args:
        query_BHTE: q, scaled by the caller.
        key_BHTE: k, of length 1 or shorter.
        value_BHTV: v.
        decay_BHT: g, at most 0, best in float64.
        beta_BHT: how much of a correction is written, from 0 to 1. A token with g = 0 and beta = 0
            does not change the state.
        starts_BT: whether a token is the first of its document; None: the row is one document.
        state_BHEV: the state before the first token; None: 0.
    """
    state = _zero_state(key_BHTE, value_BHTV) if state_BHEV is None else state_BHEV
    outs = []
    for t in range(key_BHTE.shape[2]):
        decay_BH = decay_BHT[..., t]
        if starts_BT is not None:
            decay_BH = torch.where(starts_BT[:, None, t], float("-inf"), decay_BH)
        state = step(key_BHTE[:, :, t], value_BHTV[:, :, t], decay_BH, beta_BHT[..., t], state)
        outs.append(read(query_BHTE[:, :, t], state))
    return torch.stack(outs, dim=2), state


def step(
    key_BHE: Tensor, value_BHV: Tensor, decay_BH: Tensor, beta_BH: Tensor, state_BHEV: Tensor
) -> Tensor:
    """Return the state after one more token."""
    state_BHEV = state_BHEV * decay_BH.exp().to(state_BHEV.dtype)[..., None, None]
    known_BHV = (state_BHEV * key_BHE[..., None]).sum(dim=-2)
    correction_BHV = (value_BHV - known_BHV) * beta_BH[..., None]
    return state_BHEV + key_BHE[..., None] * correction_BHV[..., None, :]


def read(query_BHE: Tensor, state_BHEV: Tensor) -> Tensor:
    """Return the output of a query, [B, H, V]."""
    return (state_BHEV * query_BHE[..., None]).sum(dim=-2)


def chunked(
    query_BHTE: Tensor,
    key_BHTE: Tensor,
    value_BHTV: Tensor,
    decay_BHT: Tensor,
    beta_BHT: Tensor,
    starts_BT: Tensor | None = None,
    state_BHEV: Tensor | None = None,
) -> TensorPair:
    """Return what `recurrent` returns, up to rounding."""
    rows, heads, length, _ = key_BHTE.shape
    size = min(CHUNK, 1 << (length - 1).bit_length())

    def cut(tensor: Tensor) -> Tensor:
        """Return [B, H, T, ...] as [N, M, C, ...], padded with tokens of g = beta = 0."""
        padded = F.pad(tensor, (*(0,) * 2 * (tensor.ndim - 3), 0, -length % size))
        return padded.flatten(0, 1).unflatten(1, (-1, size)).transpose(0, 1)

    query = cut(query_BHTE)
    key = cut(key_BHTE)
    value = cut(value_BHTV)
    decay_NMC = cut(decay_BHT)
    beta_NMC = cut(beta_BHT)
    # The number of documents that began in the chunk, up to each position.
    begun_NMC = torch.zeros_like(decay_NMC, dtype=torch.int64)
    if starts_BT is not None:
        begun_NMC = cut(starts_BT[:, None].expand(-1, heads, -1)).cumsum(dim=-1)
    # The sums are in float64. Their differences are small compared with the sums, and would otherwise
    # have the rounding errors of the sums.
    sum_NMC = decay_NMC.double().cumsum(dim=-1)
    # The fraction of what position j writes that is left at position i: 0 if j is later or in
    # another document.
    seen_NMCC = (begun_NMC[..., :, None] == begun_NMC[..., None, :]).tril()
    between_NMCC = (sum_NMC[..., :, None] - sum_NMC[..., None, :]).to(key.dtype)
    left_NMCC = between_NMCC.masked_fill(~seen_NMCC, float("-inf")).exp()
    written_NMCE = key * beta_NMC[..., None]
    inverse_NMCC = unit_inverse((written_NMCE @ key.mT * left_NMCC).tril(-1))
    # The fraction of the state before the chunk that is left at each position.
    of_state_NMC1 = (sum_NMC.to(key.dtype).exp() * (begun_NMC == 0))[..., None]
    states_NMEV, correction_NMCV, last_MEV = scan(
        inverse_NMCC @ (value * beta_NMC[..., None]),
        inverse_NMCC @ (written_NMCE * of_state_NMC1),
        key * left_NMCC[..., -1, :, None],
        of_state_NMC1[..., -1, 0],
        (_zero_state(key_BHTE, value_BHTV) if state_BHEV is None else state_BHEV).flatten(0, 1),
    )
    out_NMCV = (query * of_state_NMC1) @ states_NMEV + (
        query @ key.mT * left_NMCC
    ) @ correction_NMCV
    out_MTV = out_NMCV.transpose(0, 1).flatten(1, 2)[:, :length]
    return out_MTV.unflatten(0, (rows, heads)), last_MEV.unflatten(0, (rows, heads))


def _zero_state(key_BHTE: Tensor, value_BHTV: Tensor) -> Tensor:
    return key_BHTE.new_zeros(*key_BHTE.shape[:2], key_BHTE.shape[-1], value_BHTV.shape[-1])


def unit_inverse(strict: Tensor) -> Tensor:
    """Return (1 + L)^-1 for strictly lower triangular L, [..., C, C]."""
    return torch.ops.monograph.unit_inverse(strict)


def scan(
    value_NMCV: Tensor, read_NMCE: Tensor, key_NMCE: Tensor, kept_NM: Tensor, state_MEV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state through the chunks.

        u[n] = value[n] - read[n] S[n]        S[n+1] = kept[n] S[n] + key[n]^T u[n]

    Returns:
        S before each chunk, [N, M, E, V]; u, [N, M, C, V]; and S after the last chunk, [M, E, V].
    """
    states, corrections = torch.ops.monograph.carry(
        value_NMCV, read_NMCE, key_NMCE, kept_NM, state_MEV
    )
    return states[:-1], corrections, states[-1]


# These are custom operators, because a compiler would unroll their loops, and would take longer for a
# longer row.
@torch.library.custom_op("monograph::unit_inverse", mutates_args=())
def _unit_inverse(strict: Tensor) -> Tensor:
    # The transposed system is solved, because the solver returns matrices in column-major order.
    one = torch.eye(strict.shape[-1], dtype=strict.dtype, device=strict.device).expand(strict.shape)
    return torch.linalg.solve_triangular(
        strict.mT, one, upper=True, unitriangular=True
    ).mT.contiguous()


@_unit_inverse.register_fake
def _(strict: Tensor) -> Tensor:
    return strict.new_empty(strict.shape)


def _keep_inverse(ctx: Context, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _unit_inverse_backward(ctx: Context, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    return -(inverse.mT @ grad @ inverse.mT).tril(-1)


_unit_inverse.register_autograd(_unit_inverse_backward, setup_context=_keep_inverse)


@torch.library.custom_op("monograph::carry", mutates_args=())
def _carry(value: Tensor, reading: Tensor, key: Tensor, kept: Tensor, state: Tensor) -> TensorPair:
    states = state.new_empty(len(key) + 1, *state.shape)
    corrections = value.contiguous().clone()
    states[0] = state
    for n in range(len(key)):
        corrections[n].baddbmm_(reading[n], states[n], alpha=-1)
        torch.mul(states[n], kept[n, :, None, None], out=states[n + 1])
        states[n + 1].baddbmm_(key[n].mT, corrections[n])
    return states, corrections


@_carry.register_fake
def _(value: Tensor, reading: Tensor, key: Tensor, kept: Tensor, state: Tensor) -> TensorPair:
    return state.new_empty(len(key) + 1, *state.shape), value.new_empty(value.shape)


@torch.library.custom_op("monograph::carry_back", mutates_args=())
def _carry_back(
    grad_states: Tensor, grad_corrections: Tensor, reading: Tensor, key: Tensor, kept: Tensor
) -> TensorPair:
    """Return the total gradients of the states and of the corrections.

    The given gradients come from the readers of the outputs of `_carry`. The total gradients also
    include the effect of a state or a correction on later chunks.
    """
    states, corrections = (each.contiguous().clone() for each in (grad_states, grad_corrections))
    for n in range(len(key) - 1, -1, -1):
        corrections[n].baddbmm_(key[n], states[n + 1])
        states[n].addcmul_(states[n + 1], kept[n, :, None, None])
        states[n].baddbmm_(reading[n].mT, corrections[n], alpha=-1)
    return states, corrections


@_carry_back.register_fake
def _(
    grad_states: Tensor, grad_corrections: Tensor, reading: Tensor, key: Tensor, kept: Tensor
) -> TensorPair:
    return grad_states.new_empty(grad_states.shape), grad_corrections.new_empty(
        grad_corrections.shape
    )


def _keep_carried(ctx: Context, inputs: tuple[Tensor, ...], output: TensorPair) -> None:
    _, reading, key, kept, _ = inputs
    ctx.save_for_backward(reading, key, kept, *output)


def _carry_backward(
    ctx: Context, grad_states: Tensor, grad_corrections: Tensor
) -> tuple[Tensor, ...]:
    reading, key, kept, states, corrections = ctx.saved_tensors
    state_grads, value_grad = torch.ops.monograph.carry_back(
        grad_states, grad_corrections, reading, key, kept
    )
    before = states[:-1]
    after_grad = state_grads[1:]
    kept_grad = (before * after_grad).sum(dim=(-2, -1))
    return (
        value_grad,
        -(value_grad @ before.mT),
        corrections @ after_grad.mT,
        kept_grad,
        state_grads[0].clone(),
    )


_carry.register_autograd(_carry_backward, setup_context=_keep_carried)


def _vmap_rule(
    operator: Callable[..., Tensor | tuple[Tensor, ...]],
) -> Callable[..., tuple[object, object]]:
    """Return a rule of vmap that computes members as further rows: further indices of the axis M."""

    def rule(
        info: Batched, in_dims: tuple[int | None, ...], *tensors: Tensor
    ) -> tuple[object, object]:
        members = []
        for tensor, dim in zip(tensors, in_dims, strict=True):
            front = (
                tensor.expand(info.batch_size, *tensor.shape)
                if dim is None
                else tensor.movedim(dim, 0)
            )
            axis = _rows_axis(front.ndim - 1)
            members.append(front.movedim(0, axis).flatten(axis, axis + 1))
        result = operator(*members)
        outputs = result if isinstance(result, tuple) else (result,)
        axes = [_rows_axis(output.ndim) for output in outputs]
        by_member = tuple(
            output.unflatten(axis, (info.batch_size, -1))
            for output, axis in zip(outputs, axes, strict=True)
        )
        return (by_member, tuple(axes)) if isinstance(result, tuple) else (by_member[0], axes[0])

    return rule


def _rows_axis(dimensions: int) -> int:
    """Return the axis M of a tensor with this number of dimensions."""
    return 0 if dimensions == 3 else 1  # a state [M, E, V] has no axis of chunks before it


for _operator in (_unit_inverse, _carry, _carry_back):
    _operator.register_vmap(_vmap_rule(_operator))
