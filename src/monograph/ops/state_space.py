"""Compute the scan of Mamba 2, a linear attention whose state is a matrix that only decays.

The state S maps keys to values. For each token, the state decays, the token's value is added for the
token's key, and the state is read with the token's query:

    S[t]   = exp(g[t]) S[t-1] + k[t] v[t]^T
    out[t] = S[t]^T q[t]

At the first token of a document S[t-1] is 0. In the words of Mamba 2, k is B, q is C, v is the input
times its time step, and g is the time step times A. Heads come in groups, and the heads of a group have
the same keys and queries.

`recurrent` computes these equations. `chunked` computes the same for whole chunks of tokens by products
of matrices, in a chunk and from chunk to chunk alike.

Shapes: B rows, T positions, G groups, R heads of a group, H = G R heads, E key dimension, V value
dimension, X = R V values of all heads of a group, N chunks, C positions of a chunk.

Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # positions of a chunk; fewer for short rows


def recurrent(
    query_BGTE: Tensor,
    key_BGTE: Tensor,
    value_BHTV: Tensor,
    decay_BHT: Tensor,
    starts_BT: Tensor | None = None,
    state_BHEV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, H, T, V] and the last state [B, H, E, V], token by token.

    Args:
        query_BGTE: q.
        key_BGTE: k.
        value_BHTV: v.
        decay_BHT: g, at most 0, best in float64. A token with g = 0 and v = 0 does not change the
            state.
        starts_BT: whether a token is the first of its document; None: the row is one document.
        state_BHEV: the state before the first token; None: 0.
    """
    state = _zero_state(key_BGTE, value_BHTV) if state_BHEV is None else state_BHEV
    outs = []
    for t in range(value_BHTV.shape[2]):
        decay_BH = decay_BHT[..., t]
        if starts_BT is not None:
            decay_BH = torch.where(starts_BT[:, None, t], float("-inf"), decay_BH)
        state = step(key_BGTE[:, :, t], value_BHTV[:, :, t], decay_BH, state)
        outs.append(read(query_BGTE[:, :, t], state))
    return torch.stack(outs, dim=2), state


def step(key_BGE: Tensor, value_BHV: Tensor, decay_BH: Tensor, state_BHEV: Tensor) -> Tensor:
    """Return the state after one more token."""
    key_BHE = _for_each_head(key_BGE, value_BHV.shape[1])
    remaining_BHEV = state_BHEV * decay_BH.exp().to(state_BHEV.dtype)[..., None, None]
    return remaining_BHEV + key_BHE[..., None] * value_BHV[..., None, :]


def read(query_BGE: Tensor, state_BHEV: Tensor) -> Tensor:
    """Return the output of each head for its group's query, [B, H, V]."""
    query_BHE = _for_each_head(query_BGE, state_BHEV.shape[1])
    return (state_BHEV * query_BHE[..., None]).sum(dim=-2)


def _for_each_head(each_BGE: Tensor, heads: int) -> Tensor:
    """Repeat what a group has for each of its heads."""
    return each_BGE.repeat_interleave(heads // each_BGE.shape[1], dim=1)


def chunked(
    query_BGTE: Tensor,
    key_BGTE: Tensor,
    value_BHTV: Tensor,
    decay_BHT: Tensor,
    starts_BT: Tensor | None = None,
    state_BHEV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `recurrent` returns, up to rounding."""
    groups = key_BGTE.shape[1]
    length = value_BHTV.shape[2]
    # For a short row, the smallest power of two that is at least its length.
    size = min(CHUNK, 1 << (length - 1).bit_length())
    dtype = value_BHTV.dtype

    def cut(tensor: Tensor) -> Tensor:
        """Cut the axis T of [B, H or G, T, ...] into [N, C], padded with tokens of g = 0 and v = 0."""
        # `F.pad` takes the numbers of zeros before and after, from the last axis back to T.
        unpadded_axes = (0, 0) * (tensor.ndim - 3)
        padded = F.pad(tensor, (*unpadded_axes, 0, -length % size))
        return padded.unflatten(2, (-1, size))

    query_BGNCE = cut(query_BGTE)
    key_BGNCE = cut(key_BGTE)
    value_BGRNCV = cut(value_BHTV).unflatten(1, (groups, -1))
    # The sums are in float64, because differences of them are used, which are small compared with the sums.
    # In fp32 these differences would have large rounding errors.
    decay_sum_BGRNC = cut(decay_BHT).unflatten(1, (groups, -1)).double().cumsum(dim=-1)
    # The number of documents that began in the row up to each position.
    documents_B11NC = torch.zeros_like(decay_sum_BGRNC[:, :1, :1], dtype=torch.int64)
    if starts_BT is not None:
        starts_B1NC = cut(starts_BT[:, None].to(torch.int64))
        documents_B11NC = starts_B1NC.flatten(2).cumsum(dim=-1).view_as(documents_B11NC)
    # How much of what position j added remains at position i of its chunk.
    remains_BGRNCC = _remaining(decay_sum_BGRNC, documents_B11NC, dtype)
    scores_BG1NCC = (query_BGNCE @ key_BGNCE.mT)[:, :, None]
    from_chunk_BGRNCV = (scores_BG1NCC * remains_BGRNCC) @ value_BGRNCV
    # What each chunk adds to the state after it. The values are scaled, not the keys, because all heads of
    # a group have the same keys, which one product then reads once.
    remaining_value_BGRNCV = value_BGRNCV * remains_BGRNCC[..., -1, :, None]
    added_BGNEX = key_BGNCE.mT @ _heads_together(remaining_value_BGRNCV)
    added_BGRNEV = _heads_apart(added_BGNEX, value_BHTV.shape[-1])
    # How much of what chunk m added remains after chunk n, by the same rule.
    last_documents_B11N = documents_B11NC[..., -1]
    chunk_decay_sum_BGRN = decay_sum_BGRNC[..., -1].cumsum(dim=-1)
    chunk_remains_BGRNN = _remaining(chunk_decay_sum_BGRN, last_documents_B11N, dtype)
    states_after = (chunk_remains_BGRNN @ added_BGRNEV.flatten(-2)).view_as(added_BGRNEV)
    first = _zero_state(key_BGTE, value_BHTV) if state_BHEV is None else state_BHEV
    first_BGR1EV = first.unflatten(1, (groups, -1))[:, :, :, None]
    if state_BHEV is not None:
        first_remains_BGRN = chunk_decay_sum_BGRN.to(dtype).exp() * (last_documents_B11N == 0)
        states_after = states_after + first_remains_BGRN[..., None, None] * first_BGR1EV
    states_before = torch.cat([first_BGR1EV, states_after[:, :, :, :-1]], dim=3)
    # How much of the state before a chunk remains at each of its positions: 0 if a document began since.
    documents_before_B11N1 = F.pad(last_documents_B11N[..., :-1], (1, 0))[..., None]
    is_same_B11NC = documents_B11NC == documents_before_B11N1
    state_remains_BGRNC = decay_sum_BGRNC.to(dtype).exp() * is_same_B11NC
    read_BGNCX = query_BGNCE @ _heads_together(states_before)
    read_BGRNCV = _heads_apart(read_BGNCX, value_BHTV.shape[-1])
    out_BGRNCV = read_BGRNCV * state_remains_BGRNC[..., None] + from_chunk_BGRNCV
    out_BHTV = out_BGRNCV.flatten(3, 4)[:, :, :, :length].flatten(1, 2)
    return out_BHTV, states_after[:, :, :, -1].flatten(1, 2)


def _heads_together(each_BGRNYV: Tensor) -> Tensor:
    """Return [B, G, R, N, Y, V] as [B, G, N, Y, X], where Y is any axis."""
    return each_BGRNYV.permute(0, 1, 3, 4, 2, 5).flatten(-2)


def _heads_apart(each_BGNYX: Tensor, value_size: int) -> Tensor:
    """Return [B, G, N, Y, X] as [B, G, R, N, Y, V], where Y is any axis."""
    return each_BGNYX.unflatten(-1, (-1, value_size)).permute(0, 1, 4, 2, 3, 5)


def _remaining(decay_sum: Tensor, documents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how much of what index j added remains at index i, [..., i, j], from 0 to 1.

    It is 0 if j is later than i, or in another document.

    Args:
        decay_sum: the sum of g up to each index, [..., n] in float64.
        documents: the number of documents that began up to each index.
        dtype: the dtype of the result.
    """
    is_visible = (documents[..., :, None] == documents[..., None, :]).tril()
    decay_between = decay_sum[..., :, None] - decay_sum[..., None, :]
    return decay_between.to(dtype).masked_fill(~is_visible, float("-inf")).exp()


def _zero_state(key_BGTE: Tensor, value_BHTV: Tensor) -> Tensor:
    rows, heads, _, value_size = value_BHTV.shape
    return value_BHTV.new_zeros(rows, heads, key_BGTE.shape[-1], value_size)
