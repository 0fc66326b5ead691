"""Compute the loss of a model that learns from the averaged probabilities of teachers, in chunks.

Shapes: N tokens, C tokens of one chunk, D hidden size of any model, V vocabulary.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from monograph.ops.autograd import Context
from monograph.ops.cross_entropy import chunk_count, linear_cross_entropy
from monograph.ops.fused_gradients import add_product_
from monograph.ops.token_rows import ReplacementRows, replaced


def mixture_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    teachers: Sequence[tuple[Tensor, Tensor]] = (),
    share: float = 1.0,
    impl: Literal["chunked", "reference"] = "chunked",
    rows: ReplacementRows | None = None,
    chunks: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a mixture of the cross-entropy with targets and the divergence from the teachers.

        loss = sum over targets of  share * -log q(target) + (1 - share) * KL(m || q)
        KL(m || q) = sum over v of m(v) * (log m(v) - log q(v))
        q = softmax(hidden @ weight.T),   m = mean over teachers of softmax(theirs @ head.T), a constant

    A chunk's loss and both its gradients are computed together. At most two tensors [C, V] of the
    teachers' probabilities exist at a time: the sum so far and the next teacher's.

    Source: Kim et al. 2025, arXiv 2509.14786.

    Args:
        hidden_ND: float; products run in this dtype (or in autocast's), softmax and sums in fp32
            (fp64 for fp64).
        weight_VD: the head; it is cast to the dtype of the products.
        targets_N: int64 in [0, V), or -100 for a place that does not count.
        teachers: of each teacher, the hidden states [N, D] and the head [V, D]; (): this is
            `linear_cross_entropy`.
        share: the targets' share of the loss, from 0 to 1.
        impl: "chunked", or "reference" for all places at once.
        rows: trained rows that replace some rows of a frozen weight; None: there are none.
        chunks: number of chunks into which N is cut; None: chosen by the size of a chunk's logits.

    Returns:
        (loss, count): 0-d fp32 (fp64 for fp64 input) sum in nats, differentiable by `hidden_ND` and
        `weight_VD`; 0-d int64 number of targets.
    """
    if not teachers:
        return linear_cross_entropy(hidden_ND, weight_VD, targets_N, impl=impl, rows=rows)
    kind = hidden_ND.device.type
    weight_VD = weight_VD if rows is None else replaced(weight_VD, rows)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype
    chunks = (
        1 if impl == "reference" else chunks or chunk_count(len(targets_N), len(weight_VD), kind)
    )
    kept_N = targets_N != -100
    states, heads = ([each.to(dtype) for each in side] for side in zip(*teachers, strict=True))
    loss: Tensor = _Mixed.apply(
        hidden_ND.to(dtype), weight_VD, targets_N, (share, chunks), *states, *heads
    )
    return loss, kept_N.sum()


class _MixedContext(Context):
    dtype: torch.dtype
    taught_count: int


class _Mixed(torch.autograd.Function):
    """Compute the loss and both gradients in one pass.

    The gradient of the logits is q - share * onehot - (1 - share) * m.
    """

    @staticmethod
    def forward(
        ctx: _MixedContext,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        how: tuple[float, int],
        *taught: Tensor,
    ) -> Tensor:
        share, chunks = how
        teacher_count = len(taught) // 2
        # If the weight were cast outside of this Function, autograd would round its gradient to the
        # dtype of the hidden states.
        narrow_VD = weight_VD.to(hidden_ND.dtype)
        total_VD = torch.zeros_like(
            weight_VD, dtype=torch.promote_types(hidden_ND.dtype, torch.float32)
        )
        parts: list[tuple[Tensor, Tensor]] = []
        pieces = (
            each.tensor_split(chunks) for each in (targets_N, hidden_ND, *taught[:teacher_count])
        )
        for targets_C, hidden_CD, *states in zip(*pieces, strict=True):
            pairs = [*zip(states, taught[teacher_count:], strict=True)]
            term, grad_CV = _chunk_gradient(share, targets_C, hidden_CD @ narrow_VD.T, pairs)
            parts.append((term, grad_CV @ narrow_VD))
            add_product_(total_VD, grad_CV, hidden_CD)
        terms, grads = zip(*parts, strict=True)
        ctx.save_for_backward(torch.cat(grads), total_VD)
        ctx.dtype = weight_VD.dtype
        ctx.taught_count = len(taught)
        return torch.stack(terms).sum()

    @staticmethod
    def backward(ctx: _MixedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, total_VD = ctx.saved_tensors
        own = (hidden_ND * grad).to(hidden_ND.dtype), (total_VD * grad).to(ctx.dtype)
        return *own, *(None,) * (2 + ctx.taught_count)


def _chunk_gradient(
    share: float, targets_C: Tensor, logits_CV: Tensor, taught: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return a chunk's loss, 0-d, and its gradient by the logits, [C, V] in their dtype."""
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    mixed_CV = torch.zeros_like(logits_CV, dtype=wide)
    for theirs_CD, head_VD in taught:
        mixed_CV = mixed_CV + (theirs_CD @ head_VD.T).to(wide).softmax(-1) / len(taught)
    log_CV = logits_CV.to(wide).log_softmax(-1)
    is_target_CV = torch.arange(log_CV.shape[1], device=log_CV.device) == targets_C.unsqueeze(-1)
    teachers_part_CV = (1 - share) * mixed_CV
    counts_C1 = (targets_C != -100).unsqueeze(-1)
    wanted_probability_CV = torch.where(is_target_CV, teachers_part_CV + share, teachers_part_CV)
    terms_CV = (1 - share) * torch.special.xlogy(
        mixed_CV, mixed_CV
    ) - wanted_probability_CV * log_CV
    grad_CV = torch.where(counts_C1, log_CV.exp() - wanted_probability_CV, 0.0).to(logits_CV.dtype)
    return torch.where(counts_C1, terms_CV, 0.0).sum(), grad_CV
