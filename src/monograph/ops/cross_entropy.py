"""Compute linear cross-entropy and log-probabilities of tokens without [N, V] logits in memory.

The tokens are cut into chunks. Only the logits of one chunk are in memory at a time.

A frozen weight may have trained rows (`ReplacementRows`), which replace some of its own rows. A
fused weight (`monograph.ops.fused_gradients.Fused`) has a buffer `total`, to which the backward
pass adds the weight's gradient instead of returning it.

Shapes: N tokens, C tokens of a chunk, R tokens of a block (the part of a chunk whose softmax is
computed at once), D hidden size, V vocabulary, K trained rows of a frozen weight.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from monograph import compat
from monograph.ops.fused_gradients import add_product_, block_rows, fused_of
from monograph.ops.logits_gradient import replace_logits_, replaces_logits
from monograph.ops.token_rows import ReplacementRows, change, replaced

# The maximum size of a chunk's fp32 logits, if MAX_CHUNKS chunks are enough for it. It is small
# enough for a CPU's cache, and large enough for matrix products that keep a GPU busy.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
# A compiled graph unrolls the loop over chunks, so each chunk takes time to compile. Each chunk also
# reads and writes the weight's whole gradient, [V, D]. With eight chunks, the logits take an eighth
# of the memory of dense logits (benchmarks/loss.py).
MAX_CHUNKS = 8
# A chunk's hidden states [C, D], targets [C] and mask [C], 1 for a target and 0 for an ignored one.
TokenChunk = tuple[Tensor, Tensor, Tensor]


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    chunks: int | None = None,
    impl: Literal["chunked", "reference"] = "chunked",
    rows: ReplacementRows | None = None,
    device_type: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropies of a linear classifier and the number of targets.

    loss = sum over n with targets[n] != -100 of  logsumexp(z[n]) - z[n, targets[n]],   z = hidden @ weight.T
    d loss / d z[n] = softmax(z[n]) - onehot(targets[n])

    "chunked" computes loss and gradients chunk by chunk in the forward pass, so that at most one
    chunk's logits are alive. Under `torch.no_grad()` it computes only the loss. The idea is that of
    chunked and fused linear cross-entropy (pytorch/pytorch#124480, Liger-Kernel, Wijmans et al. 2024).
    "reference" is `F.cross_entropy` on the whole logits.

    Args:
        hidden_ND: [N, D] float; the matrix products run in this dtype (or in autocast's), softmax
            and sums in fp32 (fp64 for fp64).
        weight_VD: [V, D]; it is cast to the hidden dtype, its gradient has its own dtype.
        targets_N: [N] int64 class ids in [0, V), or -100 where nothing is predicted.
        chunks: number of pieces into which N is cut; None: chosen by the size of a chunk's logits.
        impl: "chunked" or "reference".
        rows: trained rows that replace some rows of a frozen weight. Only they get a gradient, and
            the weight is not copied. Their change to the logits is computed separately, so the
            logits of the other rows have the same bits as without `rows`.
        device_type: "cpu" or "cuda": the device whose limits decide how the tokens are cut. The
            planner names it, because its fake tensors may be on another device. None: the device of the
            tensors.

    Returns:
        loss: 0-d fp32 (fp64 for fp64 input), the sum in nats, differentiable.
        count: 0-d int64, the number of targets.
    """
    if torch.is_autocast_enabled(hidden_ND.device.type):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(hidden_ND.device.type))
    kept_N = targets_N != -100
    count = kept_N.sum()
    # An ignored target must still be a valid index. The mask multiplies its loss by zero.
    valid_targets_N = torch.where(kept_N, targets_N, 0)
    mask_N = kept_N.to(torch.promote_types(hidden_ND.dtype, torch.float32))
    if impl == "reference":
        weight_VD = weight_VD if rows is None else replaced(weight_VD, rows)
        logits_NV = (hidden_ND @ weight_VD.to(hidden_ND.dtype).T).to(mask_N.dtype)
        return F.cross_entropy(logits_NV, targets_N, reduction="sum"), count
    if impl != "chunked":
        raise ValueError(f"impl must be 'chunked' or 'reference', not {impl!r}")
    device_type = device_type or hidden_ND.device.type
    chunks = chunks or chunk_count(hidden_ND.shape[0], weight_VD.shape[0], device_type)
    if torch.is_grad_enabled():
        # Inside a transform of torch.func, `requires_grad` is False even for a trained weight.
        learned = rows is None and (weight_VD.requires_grad or compat.in_transform())
        fused_VD, total_VD = fused_of(weight_VD) or (None, None)
        values_KD, index_K, slot_V = rows or (None, None, None)
        # An autograd.Function takes no keyword arguments, and does not see tensors inside of tuples. Only
        # the three settings are packed.
        loss, _, _ = _ChunkedLoss.apply(
            hidden_ND,
            weight_VD,
            valid_targets_N,
            mask_N,
            (chunks, device_type, learned),
            values_KD,
            index_K,
            slot_V,
            fused_VD,
            total_VD,
        )
        return loss, count
    return _loss_only(hidden_ND, weight_VD, valid_targets_N, mask_N, chunks, rows), count


def chunk_count(tokens: int, vocabulary: int, device_type: str) -> int:
    """Return how many chunks keep a chunk's fp32 logits within CHUNK_BYTES; at most MAX_CHUNKS."""
    limit = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"])
    return max(1, min(MAX_CHUNKS, tokens, -(-tokens * vocabulary * 4 // limit)))


def _added(weight_VD: Tensor, rows: ReplacementRows | None) -> ReplacementRows | None:
    """Return `rows` with their differences to the weight's own rows as values."""
    return None if rows is None else rows._replace(values_KD=change(weight_VD, rows))


def _logits(hidden_CD: Tensor, weight_VD: Tensor, added: ReplacementRows | None) -> Tensor:
    """Return the logits, [C, V]; `added` has the differences of trained rows (`_added`)."""
    logits_CV = hidden_CD @ weight_VD.T
    if added is None:
        return logits_CV
    return logits_CV.index_add_(-1, added.index_K, hidden_CD @ added.values_KD.T)


def _chunk_loss(piece: TokenChunk, weight_VD: Tensor, added: ReplacementRows | None) -> Tensor:
    hidden_CD, targets_C, mask_C = piece
    logits_CV = _logits(hidden_CD, weight_VD, added).to(mask_C.dtype)
    target_logit_C = logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    return ((logits_CV.logsumexp(-1) - target_logit_C) * mask_C).sum()


def _loss_only(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    mask_N: Tensor,
    chunks: int,
    rows: ReplacementRows | None,
) -> Tensor:
    weight_VD = weight_VD.to(hidden_ND.dtype)
    added = _added(weight_VD, rows)
    pieces = _pieces(hidden_ND, targets_N, mask_N, chunks)
    return torch.stack([_chunk_loss(piece, weight_VD, added) for piece in pieces]).sum()


def _pieces(
    hidden_ND: Tensor, targets_N: Tensor, mask_N: Tensor, chunks: int
) -> Iterator[TokenChunk]:
    return zip(
        *(tensor.tensor_split(chunks) for tensor in (hidden_ND, targets_N, mask_N)), strict=True
    )


def _chunk_gradients(
    piece: TokenChunk, weight_VD: Tensor, device_type: str, added: ReplacementRows | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a chunk's loss and gradients.

    It is a separate function so that no tensor of a chunk is still alive in the next one.

    Returns:
        loss: 0-d; on CUDA in a graph, the losses [C].
        grad_CD: the gradient of the hidden states.
        kept_CD: the hidden states, a factor of the weight's gradient grad_CV^T kept_CD. Except on
            CUDA in a graph, they are zero for ignored tokens.
        grad_CV: softmax - onehot, the other factor. On CUDA in a graph, it is zero for ignored
            tokens.
    """
    hidden_CD, targets_C, mask_C = piece
    compiles = torch.compiler.is_compiling()
    if compiles and device_type == "cuda" and added is None:
        loss, grad_CV = _traced_gradients_on_cuda(hidden_CD, weight_VD, targets_C, mask_C)
        return loss, grad_CV @ weight_VD, hidden_CD, grad_CV
    # The hidden states of ignored tokens become zero, so that they add nothing to the weight's
    # gradient. Under vmap the product is batched if the targets are batched. The logits are then
    # batched, too, and `_eager_gradients` can write to them in place.
    kept_C1 = mask_C.unsqueeze(-1).to(hidden_CD.dtype)
    hidden_CD = hidden_CD * kept_C1
    if compiles:
        losses_C, grad_CV = _traced_gradients(hidden_CD, weight_VD, targets_C, mask_C.dtype, added)
    else:
        block = block_rows(device_type, weight_VD.shape[0])
        losses_C, grad_CV = _eager_gradients(
            hidden_CD, weight_VD, targets_C, mask_C.dtype, added, block
        )
    grad_CD = grad_CV @ weight_VD
    if added is not None:
        grad_CD = grad_CD + grad_CV.index_select(-1, added.index_K) @ added.values_KD
    return (losses_C * mask_C).sum(), grad_CD * kept_C1, hidden_CD, grad_CV


def _traced_gradients(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    dtype: torch.dtype,
    added: ReplacementRows | None,
) -> tuple[Tensor, Tensor]:
    """Return losses [C] and softmax - onehot [C, V] in the dtype of `hidden_CD`.

    Nothing is written in place, so that a compiler can fuse the operations.
    """
    logits_CV = (hidden_CD @ weight_VD.T).to(dtype)
    if added is not None:
        # slot_V has each row's place in `values_KD`, and -1 for a row that is not replaced.
        more_CV = (hidden_CD @ added.values_KD.T).to(dtype)[:, added.slot_V.clamp_min(0)]
        logits_CV = logits_CV + torch.where(added.slot_V >= 0, more_CV, 0)
    lse_C1 = logits_CV.logsumexp(-1, keepdim=True)
    target_C1 = targets_C.unsqueeze(-1)
    softmax_CV = (logits_CV - lse_C1).exp()
    classes_V = torch.arange(weight_VD.shape[0], device=weight_VD.device)
    grad_CV = torch.where(classes_V == target_C1, softmax_CV - 1, softmax_CV)
    return (lse_C1 - logits_CV.gather(-1, target_C1)).squeeze(-1), grad_CV.to(hidden_CD.dtype)


def _traced_gradients_on_cuda(
    hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, mask_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Return losses [C] and softmax - onehot [C, V], both zero for ignored tokens.

    In the form for fp64 and for transforms of torch.func, Inductor needs only two passes over the
    logits. On a CPU this form would not be faster, because it computes the exponentials twice.
    """
    logits_CV = hidden_CD @ weight_VD.T
    if replaces_logits(logits_CV) and not compat.in_transform():
        losses_C = replace_logits_(logits_CV, targets_C, mask_C)
        return losses_C, logits_CV
    logits_CV = logits_CV.to(mask_C.dtype)
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    exp_CV = (logits_CV - largest_C1).exp()
    sum_C1 = exp_CV.sum(-1, keepdim=True)
    is_target_CV = torch.arange(weight_VD.shape[0], device=weight_VD.device) == targets_C.unsqueeze(
        -1
    )
    # The target's logit is a sum over the row, because a gather would be a separate kernel.
    losses_C1 = (
        sum_C1.log() + largest_C1 - torch.where(is_target_CV, logits_CV, 0.0).sum(-1, keepdim=True)
    )
    mask_C1 = mask_C.unsqueeze(-1)
    grad_CV = (exp_CV / sum_C1 - is_target_CV.to(exp_CV.dtype)) * mask_C1
    return (losses_C1 * mask_C1).squeeze(-1), grad_CV.to(hidden_CD.dtype)


def _eager_gradients(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    dtype: torch.dtype,
    added: ReplacementRows | None,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Return losses [C] and softmax - onehot [C, V], as `_traced_gradients` does.

    The logits are overwritten, those of `block` tokens at a time, because on a CPU the allocation of
    a new [C, V] tensor takes longer than the arithmetic.
    """
    logits_CV = _logits(hidden_CD, weight_VD, added)
    losses: list[Tensor] = []
    for logits_RV, targets_R in zip(logits_CV.split(block), targets_C.split(block), strict=True):
        log_RV = logits_RV.to(dtype).log_softmax(-1)
        target_R1 = targets_R.unsqueeze(-1)
        losses_R1 = -log_RV.gather(-1, target_R1)
        losses.append(losses_R1.squeeze(-1))
        softmax_RV = log_RV.exp_()
        # softmax - onehot replaces the logits.
        logits_RV.copy_(softmax_RV.scatter_add_(-1, target_R1, torch.full_like(losses_R1, -1.0)))
    return torch.cat(losses), logits_CV


class _ChunkedLoss(torch.autograd.Function):
    """Compute the loss and both gradients in one pass.

    In a trace, torch's own operators must not write to a returned tensor in place: Dynamo's trace of
    an autograd.Function would then have wrong gradients (pytorch/pytorch#180642). `add_product_` may
    do so, because it is a custom operator, into which Dynamo does not look. vmap cannot write a
    batched value into an unbatched buffer.

    A frozen weight gets no gradient, which saves a third of the arithmetic and one [V, D] tensor.
    The gradient of trained rows is the sum over chunks of (softmax - onehot)[:, index].T @ hidden.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        hidden_ND,
        weight_VD,
        targets_N,
        mask_N,
        how,
        values_KD,
        index_K,
        slot_V,
        fused_VD,
        total_VD,
    ):
        chunks, device_type, learned = how
        # If the weight were cast outside of this Function, autograd would round its gradient to the
        # dtype of the hidden states.
        weight_VD = (weight_VD if fused_VD is None else fused_VD).to(hidden_ND.dtype)
        added = (
            None
            if values_KD is None
            else _added(weight_VD, ReplacementRows(values_KD, index_K, slot_V))
        )
        # A buffer for the gradient of a fused weight or of trained rows; None for any other weight.
        like = total_VD if added is None else added.values_KD
        grad = None if like is None else torch.zeros_like(like, dtype=mask_N.dtype)
        terms: list[Tensor] = []
        grads: list[Tensor] = []
        for piece in _pieces(hidden_ND, targets_N, mask_N, chunks):
            term, grad_CD, kept_CD, grad_CV = _chunk_gradients(piece, weight_VD, device_type, added)
            terms.append(term)
            grads.append(grad_CD)
            if grad is not None and learned:  # a fused weight, or any chunk but the first
                add_product_(grad, grad_CV, kept_CD)
            elif learned:  # the first chunk of a weight that is not fused
                grad = (grad_CV.T @ kept_CD).to(mask_N.dtype)
            elif grad is not None:  # trained rows of a frozen weight
                grad = grad + (grad_CV.index_select(-1, index_K).T @ kept_CD).to(mask_N.dtype)
            # Otherwise they stay in memory while the next chunk is computed.
            del kept_CD, grad_CV
        # In a graph on a GPU a term has the losses [C] of a chunk, so that one kernel adds up the
        # losses of all chunks.
        return torch.cat([term.view(-1) for term in terms]).sum(), torch.cat(grads), grad

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.mark_non_differentiable(*(grad for grad in output[1:] if grad is not None))
        # Otherwise both unused outputs get a full-size gradient of zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])
        _, weight_VD, _, _, (_, _, learned), values_KD, _, _, _, total_VD = inputs
        ctx.learned = learned
        ctx.total_VD = total_VD
        # The gradient's dtype; None if neither the weight nor a row is trained.
        ctx.dtype = getattr(weight_VD if learned else values_KD, "dtype", None)

    @staticmethod
    def backward(ctx, grad_loss, _grad_hidden, _grad):  # type: ignore[no-untyped-def]
        if grad_loss is None:  # nothing depends on the loss
            return (None,) * 10  # one for each argument of `forward`
        grad_hidden_ND, grad = ctx.saved_tensors
        hidden = (grad_hidden_ND * grad_loss).to(grad_hidden_ND.dtype)
        if ctx.total_VD is not None:
            ctx.total_VD.add_(grad * grad_loss)
            grad = None
        elif grad is not None:
            grad = (grad * grad_loss).to(ctx.dtype)
        weight, rows = (grad, None) if ctx.learned else (None, grad)
        return hidden, weight, None, None, None, rows, None, None, None, None


def token_log_probabilities(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    temperature: float = 1.0,
    *,
    rows: ReplacementRows | None = None,
    among: tuple[Callable[[Tensor], Tensor], Tensor] | None = None,
    chunks: int | None = None,
) -> Tensor:
    """Return the log-probability of a token at each place under a linear classifier.

    out[n] = z[n, tokens[n]] / temperature - logsumexp(z[n] / temperature),   z = hidden @ weight.T

    With `among` the logsumexp is over the tokens that are allowed at each place.

    Any function of the result can be differentiated. With several chunks, the backward pass
    recomputes the logits, one chunk at a time. `linear_cross_entropy` does not recompute them,
    because it computes the gradient of its sum in the forward pass.

    Args:
        hidden_ND: [N, D] float; the products run in this dtype (or in autocast's), softmax and sums
            in fp32 (fp64 for fp64).
        weight_VD: [V, D]; it is cast to the hidden dtype.
        tokens_N: [N] int64, in [0, V).
        temperature: above 0; it divides the logits.
        rows: trained rows that replace some rows of a frozen weight.
        among: a function that returns which tokens are allowed in the given states of a grammar's
            automaton: states [C] to bool [C, at most V] (`monograph.decode.automaton_tables`); and the state at
            each place, [N]. None: all tokens are allowed.
        chunks: number of pieces into which N is cut; None: chosen by the size of a chunk's logits.

    Returns:
        [N] fp32 (fp64 for fp64 input), in nats.
    """
    if torch.is_autocast_enabled(hidden_ND.device.type):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(hidden_ND.device.type))
    weight_VD = (weight_VD if rows is None else replaced(weight_VD, rows)).to(hidden_ND.dtype)
    chunks = chunks or chunk_count(hidden_ND.shape[0], weight_VD.shape[0], hidden_ND.device.type)
    # Without `among` the states are not used, and any tensor with N elements can be split.
    allowed, states_N = among or (None, tokens_N)
    parts = (part.tensor_split(chunks) for part in (hidden_ND, tokens_N, states_N))
    pieces: list[tuple[Tensor, Tensor, Tensor]] = [*zip(*parts, strict=True)]
    # The logits of a single chunk are kept. The backward pass begins with them, so recomputing them
    # would save no memory.
    if chunks == 1 or not torch.is_grad_enabled():
        return torch.cat(
            [_chunk_log_probabilities(*piece, weight_VD, temperature, allowed) for piece in pieces]
        )
    return torch.cat(
        [
            checkpoint(
                _chunk_log_probabilities,
                *piece,
                weight_VD,
                temperature,
                allowed,
                use_reentrant=False,
            )
            for piece in pieces
        ]
    )


def _chunk_log_probabilities(
    hidden_CD: Tensor,
    tokens_C: Tensor,
    states_C: Tensor,
    weight_VD: Tensor,
    temperature: float,
    allowed: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    logits_CV = hidden_CD @ weight_VD.T
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature
    if allowed is not None:
        allowed_CV = allowed(states_C)
        logits_CV = torch.where(allowed_CV, logits_CV[:, : allowed_CV.shape[-1]], -torch.inf)
    return logits_CV.log_softmax(-1).gather(-1, tokens_C[:, None])[:, 0]
