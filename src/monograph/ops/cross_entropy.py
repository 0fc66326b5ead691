"""Linear cross-entropy, summed over targets, without ever holding the [tokens, vocabulary] logits.

Shapes: N tokens, C tokens of one chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# A chunk's fp32 logits stay under this many bytes as long as MAX_CHUNKS allows it: small enough to stay near a CPU's
# cache, large enough that the matrix products keep a GPU busy.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
# The chunk loop is unrolled in a compiled graph, so its length is compile time.
MAX_CHUNKS = 16


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    ignore_index: int = -100,
    chunks: int | None = None,
    impl: Literal["chunked", "reference"] = "chunked",
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of a linear classifier, and how many targets were summed.

    loss = sum over n with targets[n] != ignore_index of  logsumexp(z[n]) - z[n, targets[n]],   z = hidden @ weight.T
    d loss / d z[n] = softmax(z[n]) - onehot(targets[n])

    "chunked" computes loss and gradients chunk by chunk in the forward pass, so that at most one chunk's logits are
    alive (the idea of chunked and fused linear cross-entropy: pytorch/pytorch#124480, Liger-Kernel, Wijmans et al.
    2024); under `torch.no_grad()` it computes the loss alone. "reference" is `F.cross_entropy` on the whole logits.

    Args:
        hidden_ND: [N, D] float; the matrix products run in this dtype (or in autocast's), softmax and sums in fp32
            (fp64 for fp64).
        weight_VD: [V, D]; cast to the hidden dtype, its gradient has its own dtype.
        targets_N: [N] int64 class ids in [0, V), or `ignore_index`.
        ignore_index: the target value that is not predicted (torch's default).
        chunks: how many pieces N is cut into; None chooses by the size of a chunk's logits.
        impl: "chunked" or "reference".

    Returns:
        (loss, count): 0-d fp32 (fp64 for fp64 input) sum in nats, differentiable; 0-d int64 number of targets.
    """
    if torch.is_autocast_enabled(hidden_ND.device.type):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(hidden_ND.device.type))
    weight_VD = weight_VD.to(hidden_ND.dtype)
    kept_N = targets_N != ignore_index
    count = kept_N.sum()
    # A target that is not predicted still indexes a row of logits; its term is multiplied by zero.
    safe_N = torch.where(kept_N, targets_N, 0)
    weights_N = kept_N.to(_sum_dtype(hidden_ND.dtype))
    if impl == "reference":
        logits_NV = (hidden_ND @ weight_VD.T).to(weights_N.dtype)
        return torch.nn.functional.cross_entropy(
            logits_NV, targets_N, ignore_index=ignore_index, reduction="sum"
        ), count
    if impl != "chunked":
        raise ValueError(f"impl must be 'chunked' or 'reference', not {impl!r}")
    chunks = chunks or chunk_count(hidden_ND.shape[0], weight_VD.shape[0], hidden_ND.device.type)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        if torch.is_grad_enabled():
            return _ChunkedLoss.apply(hidden_ND, weight_VD, safe_N, weights_N, chunks)[0], count
        return _loss_only(hidden_ND, weight_VD, safe_N, weights_N, chunks), count


def chunk_count(tokens: int, vocabulary: int, device_type: str) -> int:
    """Pieces into which `tokens` are cut so that one piece's fp32 logits stay under CHUNK_BYTES; at most MAX_CHUNKS."""
    limit = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"])
    return max(1, min(MAX_CHUNKS, tokens, -(-tokens * vocabulary * 4 // limit)))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunk_terms(
    hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, weights_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits_CV = (hidden_CD @ weight_VD.T).to(weights_C.dtype)
    lse_C = logits_CV.logsumexp(-1)
    picked_C = logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    return ((lse_C - picked_C) * weights_C).sum(), logits_CV, lse_C


def _loss_only(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, chunks: int) -> Tensor:
    pieces = zip(
        hidden_ND.tensor_split(chunks), targets_N.tensor_split(chunks), weights_N.tensor_split(chunks), strict=True
    )
    terms = [_chunk_terms(h, weight_VD, t, w)[0] for h, t, w in pieces]
    return torch.stack(terms).sum()


class _ChunkedLoss(torch.autograd.Function):
    """Loss and both gradients in one pass; every step is out of place.

    In-place writes to a returned tensor give wrong gradients when Dynamo traces an autograd.Function
    (pytorch/pytorch#180642), and vmap cannot write a batched value into an unbatched buffer.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden_ND, weight_VD, targets_N, weights_N, chunks):  # type: ignore[no-untyped-def]
        classes_V = torch.arange(weight_VD.shape[0], device=weight_VD.device)
        loss = weights_N.new_zeros(())
        grad_hidden: list[Tensor] = []
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=weights_N.dtype)
        pieces = zip(
            hidden_ND.tensor_split(chunks), targets_N.tensor_split(chunks), weights_N.tensor_split(chunks), strict=True
        )
        for hidden_CD, targets_C, weights_C in pieces:
            term, logits_CV, lse_C = _chunk_terms(hidden_CD, weight_VD, targets_C, weights_C)
            loss = loss + term
            softmax_CV = (logits_CV - lse_C.unsqueeze(-1)).exp()
            grad_CV = torch.where(classes_V == targets_C.unsqueeze(-1), softmax_CV - 1, softmax_CV)
            grad_CV = (grad_CV * weights_C.unsqueeze(-1)).to(hidden_CD.dtype)
            grad_hidden.append(grad_CV @ weight_VD)
            grad_weight_VD = grad_weight_VD + grad_CV.T @ hidden_CD
        return loss, torch.cat(grad_hidden), grad_weight_VD

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _, grad_hidden_ND, grad_weight_VD = output
        ctx.mark_non_differentiable(grad_hidden_ND, grad_weight_VD)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.weight_dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx, grad_loss, _grad_hidden, _grad_weight):  # type: ignore[no-untyped-def]
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        hidden = (grad_hidden_ND * grad_loss).to(grad_hidden_ND.dtype)
        weight = (grad_weight_VD * grad_loss).to(ctx.weight_dtype)
        return hidden, weight, None, None, None
