"""Compute the loss of a model that learns from the averaged probabilities of others, chunk by chunk.

Shapes: N tokens, C tokens of one chunk, D hidden size of any model, V vocabulary.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from monograph.ops.cross_entropy import chunk_count, linear_cross_entropy
from monograph.ops.token_rows import Rows, replaced


def mixture_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    teachers: Sequence[tuple[Tensor, Tensor]] = (),
    share: float = 1.0,
    impl: Literal["chunked", "reference"] = "chunked",
    rows: Rows | None = None,
    chunks: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy with the targets and the divergence from the teachers' mixture, summed over the targets.

        sum over targets of  share * -log q(target)  +  (1 - share) * sum over v of m(v) * (log m(v) - log q(v))

    q = softmax(hidden @ weight.T), and m is the mean over teachers of softmax(theirs @ head.T), a constant. The second
    term is KL(m || q). A chunk's probabilities are computed once for the loss and once more for its gradient; of the
    teachers' there are two at a time, [C, V]: the sum so far and the next. Source: Kim et al. 2025, arXiv 2509.14786.

    Args:
        hidden_ND: [N, D] float; products run in this dtype (or in autocast's), softmax and sums in fp32, of fp64 in it.
        weight_VD: [V, D]; it is cast to the hidden dtype.
        targets_N: [N] int64 in [0, V), or -100 for a place that counts nothing.
        teachers: hidden states [N, D] and head [V, D] of each; without any this is `linear_cross_entropy`.
        share: the targets' share of the loss, from 0 to 1.
        impl: "chunked", or "reference" for all places at once.
        rows: trained rows that replace some of a frozen weight's.
        chunks: number of pieces into which N is cut; None: chosen by the size of a chunk's logits.

    Returns:
        (loss, count): 0-d fp32 (fp64 for fp64 input) sum in nats, differentiable by `hidden_ND` and `weight_VD`; 0-d
        int64 number of targets.
    """
    if not teachers:
        return linear_cross_entropy(hidden_ND, weight_VD, targets_N, impl=impl, rows=rows)
    kind, weight_VD = hidden_ND.device.type, weight_VD if rows is None else replaced(weight_VD, rows)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype
    states, heads = ([each.to(dtype) for each in side] for side in zip((hidden_ND, weight_VD), *teachers, strict=True))
    chunks = 1 if impl == "reference" else chunks or chunk_count(len(targets_N), len(weight_VD), kind)
    kept_N = targets_N != -100
    columns = (each.tensor_split(chunks) for each in (torch.where(kept_N, targets_N, 0), kept_N, *states))
    pieces: list[tuple[Tensor, ...]] = [*zip(*columns, strict=True)]
    if chunks == 1:  # its probabilities are the first that the backward pass needs
        return _divergence(heads, share, *pieces[0]), kept_N.sum()
    terms = [checkpoint(_divergence, heads, share, *piece, use_reentrant=False) for piece in pieces]
    return torch.stack(terms).sum(), kept_N.sum()


def _divergence(
    heads: Sequence[Tensor], share: float, targets_C: Tensor, kept_C: Tensor, hidden_CD: Tensor, *taught: Tensor
) -> Tensor:
    wide = torch.promote_types(hidden_CD.dtype, torch.float32)
    pairs = zip(taught[1:], heads[2:], strict=True)
    mixed_CV = (taught[0] @ heads[1].T).to(wide).softmax(-1)
    for theirs_CD, head_VD in pairs:
        mixed_CV = mixed_CV + (theirs_CD @ head_VD.T).to(wide).softmax(-1)
    mixed_CV = mixed_CV / len(taught)
    log_CV = (hidden_CD @ heads[0].T).to(wide).log_softmax(-1)
    chosen_C = log_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    apart_C = (torch.special.xlogy(mixed_CV, mixed_CV) - mixed_CV * log_CV).sum(-1)
    return torch.where(kept_C, (1 - share) * apart_C - share * chosen_C, 0.0).sum()
