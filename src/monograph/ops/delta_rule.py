"""Compute the gated delta rule, a linear attention whose state is a matrix.

The state S maps keys to values. For each token, the state decays, the value that it has for the token's
key is corrected, and it is read with the token's query:

    S'[t]  = exp(g[t]) S[t-1]
    u[t]   = beta[t] (v[t] - S'[t]^T k[t])       the correction
    S[t]   = S'[t] + k[t] u[t]^T
    out[t] = S[t]^T q[t]

At the first token of a document S[t-1] is 0. `recurrent` computes these equations. `chunked` computes
the same for whole chunks of tokens: inside a chunk the corrections are the solution of a triangular
system, so that only one matrix is carried from chunk to chunk.

Shapes: B rows, T positions, H heads, E key dimension, V value dimension, N chunks, C positions of
a chunk, M = B H.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464; for chunks, Yang et
al., arXiv 2406.06484.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from monograph.ops.autograd import Context, VmapInfo

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
    stored_value_BHV = (state_BHEV * key_BHE[..., None]).sum(dim=-2)
    correction_BHV = (value_BHV - stored_value_BHV) * beta_BH[..., None]
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
    # For a short row, the smallest power of two that is at least its length.
    size = min(CHUNK, 1 << (length - 1).bit_length())

    def cut(tensor: Tensor) -> Tensor:
        """Return [B, H, T, ...] as [N, M, C, ...], padded with tokens of g = beta = 0."""
        # `F.pad` takes the numbers of zeros before and after, from the last axis back to T.
        unpadded_axes = (0, 0) * (tensor.ndim - 3)
        padded = F.pad(tensor, (*unpadded_axes, 0, -length % size))
        return padded.flatten(0, 1).unflatten(1, (-1, size)).transpose(0, 1)

    query_NMCE = cut(query_BHTE)
    key_NMCE = cut(key_BHTE)
    value_NMCV = cut(value_BHTV)
    decay_NMC = cut(decay_BHT)
    beta_NMC = cut(beta_BHT)
    # The number of documents that began in the chunk, up to each position.
    documents_NMC = torch.zeros_like(decay_NMC, dtype=torch.int64)
    if starts_BT is not None:
        documents_NMC = cut(starts_BT[:, None].expand(-1, heads, -1)).cumsum(dim=-1)
    # The sums are in float64, because differences of them are used, which are small compared with the sums.
    # In fp32 these differences would have large rounding errors.
    decay_sum_NMC = decay_NMC.double().cumsum(dim=-1)
    # How much of what position j wrote remains at position i, from 0 to 1: 0 if j is later or in
    # another document.
    is_visible_NMCC = (documents_NMC[..., :, None] == documents_NMC[..., None, :]).tril()
    decay_between_NMCC = decay_sum_NMC[..., :, None] - decay_sum_NMC[..., None, :]
    remains_NMCC = (
        decay_between_NMCC.to(key_NMCE.dtype).masked_fill(~is_visible_NMCC, float("-inf")).exp()
    )
    # How much of the state before the chunk remains at each position.
    state_remains_NMC1 = (decay_sum_NMC.to(key_NMCE.dtype).exp() * (documents_NMC == 0))[..., None]
    # The corrections u of a chunk solve the triangular system
    #     u[i] + beta[i] sum over j < i of remains[i, j] (k[i] . k[j]) u[j]
    #         = beta[i] (v[i] - state_remains[i] S^T k[i])
    beta_key_NMCE = key_NMCE * beta_NMC[..., None]
    inverse_NMCC = unit_inverse((beta_key_NMCE @ key_NMCE.mT * remains_NMCC).tril(-1))
    state = _zero_state(key_BHTE, value_BHTV) if state_BHEV is None else state_BHEV
    # Of `remains`, the last row says what remains at the chunk's last position.
    states_NMEV, correction_NMCV, last_MEV = scan(
        value_NMCV=inverse_NMCC @ (value_NMCV * beta_NMC[..., None]),
        read_NMCE=inverse_NMCC @ (beta_key_NMCE * state_remains_NMC1),
        key_NMCE=key_NMCE * remains_NMCC[..., -1, :, None],
        remains_NM=state_remains_NMC1[..., -1, 0],
        state_MEV=state.flatten(0, 1),
    )
    from_state_NMCV = (query_NMCE * state_remains_NMC1) @ states_NMEV
    from_chunk_NMCV = (query_NMCE @ key_NMCE.mT * remains_NMCC) @ correction_NMCV
    out_NMCV = from_state_NMCV + from_chunk_NMCV
    out_MTV = out_NMCV.transpose(0, 1).flatten(1, 2)[:, :length]
    return out_MTV.unflatten(0, (rows, heads)), last_MEV.unflatten(0, (rows, heads))


def _zero_state(key_BHTE: Tensor, value_BHTV: Tensor) -> Tensor:
    return key_BHTE.new_zeros(*key_BHTE.shape[:2], key_BHTE.shape[-1], value_BHTV.shape[-1])


def unit_inverse(strict: Tensor) -> Tensor:
    """Return (1 + L)^-1 for strictly lower triangular L, [..., C, C]."""
    return torch.ops.monograph.unit_inverse(strict)


def scan(
    value_NMCV: Tensor, read_NMCE: Tensor, key_NMCE: Tensor, remains_NM: Tensor, state_MEV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state S through the chunks, and compute the corrections u of each.

        u[n] = value[n] - read[n] S[n]        S[n+1] = remains[n] S[n] + key[n]^T u[n]

    `state_MEV` is S before the first chunk. The other arguments are not the keys and values of `chunked`
    themselves, but what it computes from them.

    Returns:
        S before each chunk, [N, M, E, V]; u, [N, M, C, V]; and S after the last chunk, [M, E, V].
    """
    states, corrections = torch.ops.monograph.carry(
        value_NMCV, read_NMCE, key_NMCE, remains_NM, state_MEV
    )
    return states[:-1], corrections, states[-1]


# These are custom operators, because a compiler would unroll their loops, and would take longer to
# compile a longer row.
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
def _carry(value: Tensor, read: Tensor, key: Tensor, remains: Tensor, state: Tensor) -> TensorPair:
    """Return the states, [N + 1, M, E, V], and the corrections; see `scan`."""
    states = state.new_empty(len(key) + 1, *state.shape)
    corrections = value.contiguous().clone()
    states[0] = state
    for n in range(len(key)):
        corrections[n].baddbmm_(read[n], states[n], alpha=-1)
        torch.mul(states[n], remains[n, :, None, None], out=states[n + 1])
        states[n + 1].baddbmm_(key[n].mT, corrections[n])
    return states, corrections


@_carry.register_fake
def _(value: Tensor, read: Tensor, key: Tensor, remains: Tensor, state: Tensor) -> TensorPair:
    return state.new_empty(len(key) + 1, *state.shape), value.new_empty(value.shape)


@torch.library.custom_op("monograph::carry_back", mutates_args=())
def _carry_back(
    grad_states: Tensor, grad_corrections: Tensor, read: Tensor, key: Tensor, remains: Tensor
) -> TensorPair:
    """Return the total gradients of the states and of the corrections.

    The given gradients come from the readers of the outputs of `_carry`. The total gradients also
    include the effect of a state or a correction on later chunks.
    """
    states, corrections = (each.contiguous().clone() for each in (grad_states, grad_corrections))
    for n in range(len(key) - 1, -1, -1):
        corrections[n].baddbmm_(key[n], states[n + 1])
        states[n].addcmul_(states[n + 1], remains[n, :, None, None])
        states[n].baddbmm_(read[n].mT, corrections[n], alpha=-1)
    return states, corrections


@_carry_back.register_fake
def _(
    grad_states: Tensor, grad_corrections: Tensor, read: Tensor, key: Tensor, remains: Tensor
) -> TensorPair:
    return grad_states.new_empty(grad_states.shape), grad_corrections.new_empty(
        grad_corrections.shape
    )


def _save_for_carry_backward(ctx: Context, inputs: tuple[Tensor, ...], output: TensorPair) -> None:
    _value, read, key, remains, _state = inputs
    ctx.save_for_backward(read, key, remains, *output)


def _carry_backward(
    ctx: Context, grad_states: Tensor, grad_corrections: Tensor
) -> tuple[Tensor, ...]:
    read, key, remains, states, corrections = ctx.saved_tensors
    state_grads, value_grad = torch.ops.monograph.carry_back(
        grad_states, grad_corrections, read, key, remains
    )
    states_before = states[:-1]  # each chunk
    grads_after = state_grads[1:]
    return (
        value_grad,
        -(value_grad @ states_before.mT),  # of `read`
        corrections @ grads_after.mT,  # of `key`
        (states_before * grads_after).sum(dim=(-2, -1)),  # of `remains`
        state_grads[0].clone(),
    )


_carry.register_autograd(_carry_backward, setup_context=_save_for_carry_backward)


def _vmap_rule(
    operator: Callable[..., Tensor | tuple[Tensor, ...]],
) -> Callable[..., tuple[object, object]]:
    """Return the operator's rule for vmap, which computes members as further indices of the axis M."""

    def rule(
        info: VmapInfo, in_dims: tuple[int | None, ...], *tensors: Tensor
    ) -> tuple[object, object]:
        inputs = []
        for tensor, dim in zip(tensors, in_dims, strict=True):
            if dim is None:
                by_member = tensor.expand(info.batch_size, *tensor.shape)
            else:
                by_member = tensor.movedim(dim, 0)
            axis = _rows_axis(by_member.ndim - 1)
            inputs.append(by_member.movedim(0, axis).flatten(axis, axis + 1))
        result = operator(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        axes = tuple(_rows_axis(output.ndim) for output in outputs)
        outputs_by_member = tuple(
            output.unflatten(axis, (info.batch_size, -1))
            for output, axis in zip(outputs, axes, strict=True)
        )
        if isinstance(result, tuple):
            return outputs_by_member, axes
        return outputs_by_member[0], axes[0]

    return rule


def _rows_axis(dimensions: int) -> int:
    """Return the axis M of a tensor with this number of dimensions.

    It is axis 1, after the axis of chunks, as in [N, M] and [N, M, C, V]. Only a state, [M, E, V], has no
    axis of chunks, and only a state has three dimensions.
    """
    return 0 if dimensions == 3 else 1


for _operator in (_unit_inverse, _carry, _carry_back):
    _operator.register_vmap(_vmap_rule(_operator))
