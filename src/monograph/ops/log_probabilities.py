"""Compute the log-probabilities of given tokens without ever holding the [tokens, vocabulary] logits.

Shapes: N tokens, C tokens of one chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from monograph.ops.cross_entropy import chunk_count
from monograph.ops.token_rows import Rows, replaced


def token_log_probabilities(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    temperature: float = 1.0,
    *,
    rows: Rows | None = None,
    among: tuple[Callable[[Tensor], Tensor], Tensor] | None = None,
    chunks: int | None = None,
) -> Tensor:
    """Return the log-probability of a token at each place under a linear classifier.

    out[n] = z[n, tokens[n]] / temperature - logsumexp(z[n] / temperature),   z = hidden @ weight.T

    With `among` the logsumexp is over the tokens that are allowed at each place.

    Any function of the result can be differentiated: of several chunks, a backward pass computes the logits of one at
    a time once more. `linear_cross_entropy`, which knows what is minimised, saves that pass.

    Args:
        hidden_ND: [N, D] float; the products run in this dtype (or in autocast's), softmax and sums in fp32 (fp64 for
            fp64).
        weight_VD: [V, D]; it is cast to the hidden dtype.
        tokens_N: [N] int64, in [0, V).
        temperature: above 0; it divides the logits.
        rows: trained rows that replace some of a frozen weight's.
        among: a function of states [C] that returns which tokens they allow, bool [C, at most V], and the state of each
            place, [N]; None: all are.
        chunks: number of pieces into which N is cut; None: chosen by the size of a chunk's logits.

    Returns:
        [N] fp32 (fp64 for fp64 input), in nats.
    """
    if torch.is_autocast_enabled(hidden_ND.device.type):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(hidden_ND.device.type))
    weight_VD = (weight_VD if rows is None else replaced(weight_VD, rows)).to(hidden_ND.dtype)
    chunks = chunks or chunk_count(hidden_ND.shape[0], weight_VD.shape[0], hidden_ND.device.type)
    allowed, states_N = among or (None, tokens_N)
    parts = (part.tensor_split(chunks) for part in (hidden_ND, tokens_N, states_N))
    pieces: list[tuple[Tensor, Tensor, Tensor]] = [*zip(*parts, strict=True)]
    # A single chunk's logits are the first that the backward pass needs, so to drop them saves no memory.
    if chunks == 1 or not torch.is_grad_enabled():
        return torch.cat([_chosen(*piece, weight_VD, temperature, allowed) for piece in pieces])
    return torch.cat(
        [checkpoint(_chosen, *piece, weight_VD, temperature, allowed, use_reentrant=False) for piece in pieces]
    )


def _chosen(
    hidden_CD: Tensor, tokens_C: Tensor, states_C: Tensor, weight_VD: Tensor, temperature: float,
    allowed: Callable[[Tensor], Tensor] | None,
) -> Tensor:  # fmt: skip
    logits_CV = hidden_CD @ weight_VD.T
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature
    if allowed is not None:
        allowed_CV = allowed(states_C)
        logits_CV = torch.where(allowed_CV, logits_CV[:, : allowed_CV.shape[-1]], -torch.inf)
    return logits_CV.log_softmax(-1).gather(-1, tokens_C[:, None])[:, 0]
