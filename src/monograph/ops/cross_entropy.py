"""Compute linear cross-entropy and log-probabilities of tokens without [N, V] logits in memory.

The tokens are cut into chunks. Only the logits of one chunk are in memory at a time.

A frozen weight may have trained rows (`ReplacementRows`), which replace some of its own rows. A fused weight
(`monograph.ops.fused_gradients.FusedGradient`) has a buffer `total`. The backward pass adds the weight's
gradient to it instead of returning the gradient.

Shapes: N tokens, C tokens of a chunk, R tokens of a block (the part of a chunk whose softmax is
computed at once), D hidden size, V vocabulary, K trained rows of a frozen weight, M members of an
ensemble.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from monograph import compat
from monograph.ops.autograd import VmapInfo
from monograph.ops.fp8 import Float8Weight
from monograph.ops.fused_gradients import (
    add_product_,
    add_scaled_,
    block_rows,
    fused_gradient_of,
    product,
)
from monograph.ops.logit_cap import cap_slope, capped
from monograph.ops.logits_gradient import can_replace_logits, replace_logits_
from monograph.ops.token_rows import ReplacementRows, row_differences, with_replaced_rows

# The maximum size of a chunk's fp32 logits, if MAX_CHUNKS chunks are enough for it. On a CPU, the logits
# fit the cache. On a GPU, the matrix products of a chunk are large enough to keep it busy.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
# A compiled graph unrolls the loop over chunks, so each chunk takes time to compile. Each chunk also
# reads and writes the weight's whole gradient, [V, D]. With eight chunks, the logits take an eighth
# of the memory of dense logits (benchmarks/loss.py).
MAX_CHUNKS = 8


class TokenChunk(NamedTuple):
    """The tokens whose logits are in memory at the same time.

    Attributes:
        hidden_CD: their hidden states.
        targets_C: their targets.
        mask_C: 1 for a target, 0 for an ignored one.
    """

    hidden_CD: Tensor
    targets_C: Tensor
    mask_C: Tensor


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    chunks: int | None = None,
    impl: Literal["chunked", "reference"] = "chunked",
    rows: ReplacementRows | None = None,
    device_type: str | None = None,
    in_fp8: bool = False,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropies of a linear classifier and the number of targets.

    loss = sum over n with targets[n] != -100 of  logsumexp(z[n]) - z[n, targets[n]],   z = hidden @ weight.T
    d loss / d z[n] = softmax(z[n]) - onehot(targets[n])

    With a cap, y = cap tanh(z / cap) takes the place of z, and the gradient by z has the factor
    1 - (y / cap)^2.

    "chunked" computes loss and gradients chunk by chunk in the forward pass, so that at most one
    chunk's logits are alive. Under `torch.no_grad()` it computes only the loss. The idea is that of
    chunked and fused linear cross-entropy (pytorch/pytorch#124480, Liger-Kernel, Wijmans et al. 2024).
    "reference" is `F.cross_entropy` on the whole logits.

    Args:
        hidden_ND: [N, D] float; the matrix products run in this dtype (or in autocast's), softmax
            and sums in fp32 (fp64 for fp64).
        weight_VD: [V, D]; it is cast to the hidden dtype. Its gradient has the weight's own dtype.
        targets_N: [N] int64 class ids in [0, V), or -100 where nothing is predicted.
        chunks: number of pieces into which N is cut; None: chosen by the size of a chunk's logits.
        impl: "chunked" or "reference".
        rows: trained rows that replace some rows of a frozen weight. Only they get a gradient, and
            the weight is not copied. Their change to the logits is computed separately, so the
            logits of the other rows have the same bits as without `rows`.
        device_type: "cpu" or "cuda": the device whose limits decide how the tokens are cut. The
            planner names it, because its fake tensors may be on another device. None: the device of the
            tensors.
        in_fp8: whether the logits and the gradient of the hidden states are products in fp8
            (`Float8Weight`), for bf16 hidden states. The weight's gradient stays a product in bf16, since
            only such a product can add to fp32 sums. V and D must be multiples of 16, and there are no
            `rows`.
        cap: see above; None: logits have no cap.

    Returns:
        loss: 0-d fp32 (fp64 for fp64 input), the sum in nats, differentiable.
        count: 0-d int64, the number of targets.
    """
    if torch.is_autocast_enabled(hidden_ND.device.type):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(hidden_ND.device.type))
    has_target_N = targets_N != -100
    count = has_target_N.sum()
    # An ignored target must still be a valid index. The mask multiplies its loss by zero.
    valid_targets_N = torch.where(has_target_N, targets_N, 0)
    mask_N = has_target_N.to(torch.promote_types(hidden_ND.dtype, torch.float32))
    if impl == "reference":
        weight_VD = weight_VD if rows is None else with_replaced_rows(weight_VD, rows)
        logits_NV = (hidden_ND @ weight_VD.to(hidden_ND.dtype).T).to(mask_N.dtype)
        return F.cross_entropy(capped(logits_NV, cap), targets_N, reduction="sum"), count
    if impl != "chunked":
        raise ValueError(f"impl must be 'chunked' or 'reference', not {impl!r}")
    device_type = device_type or hidden_ND.device.type
    if chunks is None and rows is None and not in_fp8 and _is_frozen_in_members(weight_VD):
        # Inside vmap this is the loss of one member. The rule of `_MembersLoss` for vmap turns it into one
        # call for all members.
        losses_1, _ = _MembersLoss.apply(
            hidden_ND[None], weight_VD, valid_targets_N[None], mask_N[None], (device_type, cap)
        )
        return losses_1[0], count
    chunks = chunks or chunk_count(hidden_ND.shape[0], weight_VD.shape[0], device_type)
    if torch.is_grad_enabled():
        # A transform of torch.func wraps the weights that are trained, and `requires_grad` of a wrapped
        # weight is False. It does not wrap a frozen head that all members share, which stays an
        # `nn.Parameter`.
        is_wrapped = compat.in_transform() and not isinstance(weight_VD, nn.Parameter)
        trains_weight = rows is None and (weight_VD.requires_grad or is_wrapped)
        fused = fused_gradient_of(weight_VD)
        fused_VD, total_VD = (None, None) if fused is None else fused
        values_KD, index_K, slot_V = (None, None, None) if rows is None else rows
        # An autograd.Function takes no keyword arguments, and does not see tensors inside of tuples. So
        # only the five settings, which are no tensors, are packed.
        loss, _, _ = _ChunkedLoss.apply(
            hidden_ND,
            weight_VD,
            valid_targets_N,
            mask_N,
            (chunks, device_type, trains_weight, in_fp8, cap),
            values_KD,
            index_K,
            slot_V,
            fused_VD,
            total_VD,
        )
        return loss, count
    return _loss_only(hidden_ND, weight_VD, valid_targets_N, mask_N, chunks, rows, cap), count


def chunk_count(tokens: int, vocabulary: int, device_type: str) -> int:
    """Return how many chunks keep a chunk's fp32 logits within CHUNK_BYTES; at most MAX_CHUNKS."""
    return max(1, min(chunk_limit(tokens), needed_chunks(tokens, vocabulary, device_type)))


def chunk_limit(tokens: int) -> int:
    """Return the largest number of chunks into which this number of tokens is cut."""
    return min(MAX_CHUNKS, tokens)


def needed_chunks(tokens: int, vocabulary: int, device_type: str) -> int:
    """Return how many chunks keep a chunk's fp32 logits within CHUNK_BYTES, without an upper limit."""
    limit_bytes = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"])
    return -(-tokens * vocabulary * 4 // limit_bytes)  # rounded up


def _differences(weight_VD: Tensor, rows: ReplacementRows | None) -> ReplacementRows | None:
    """Return `rows`, whose values are now the differences between these rows and the weight's own."""
    return None if rows is None else rows._replace(values_KD=row_differences(weight_VD, rows))


class HeadWeight(NamedTuple):
    """A classifier's weight as its products read it.

    Attributes:
        weight_VD: the weight, in the dtype of the hidden states.
        rounded: the weight in fp8, if the products are in fp8.
        cap: the cap of the logits (`monograph.ops.logit_cap`), which `logits` does not apply; None:
            there is none.
    """

    weight_VD: Tensor
    rounded: Float8Weight | None = None
    cap: float | None = None

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return x W^T, [C, V]."""
        if self.rounded is None:
            return hidden_CD @ self.weight_VD.T
        return self.rounded.logits(hidden_CD)

    def hidden_gradient(self, grad_CV: Tensor) -> Tensor:
        """Return dz W, [C, D], for the gradient dz of the logits, whose elements are from -1 to 1."""
        if self.rounded is None:
            return grad_CV @ self.weight_VD
        return self.rounded.hidden_gradient(grad_CV, largest=1.0)


def _logits(hidden_CD: Tensor, weight_VD: Tensor, differences: ReplacementRows | None) -> Tensor:
    """Return the logits, [C, V], of a weight with `differences` added to some of its rows."""
    logits_CV = hidden_CD @ weight_VD.T
    if differences is None:
        return logits_CV
    return _add_differences(logits_CV, hidden_CD, differences)


def _add_differences(logits_CV: Tensor, hidden_CD: Tensor, differences: ReplacementRows) -> Tensor:
    """Add the change of some rows of the weight to the logits, in place, and return them."""
    return logits_CV.index_add_(-1, differences.index_K, hidden_CD @ differences.values_KD.T)


def _chunk_loss(
    chunk: TokenChunk,
    weight_VD: Tensor,
    differences: ReplacementRows | None,
    cap: float | None,
) -> Tensor:
    """Return the sum of a chunk's cross-entropies; for `differences` see `_logits`."""
    hidden_CD, targets_C, mask_C = chunk
    logits_CV = capped(_logits(hidden_CD, weight_VD, differences).to(mask_C.dtype), cap)
    target_logit_C = logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    return ((logits_CV.logsumexp(-1) - target_logit_C) * mask_C).sum()


def _loss_only(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    mask_N: Tensor,
    chunks: int,
    rows: ReplacementRows | None,
    cap: float | None,
) -> Tensor:
    """Return the sum of the cross-entropies, computed without gradients."""
    weight_VD = weight_VD.to(hidden_ND.dtype)
    differences = _differences(weight_VD, rows)
    return torch.stack(
        [
            _chunk_loss(chunk, weight_VD, differences, cap)
            for chunk in _split(hidden_ND, targets_N, mask_N, chunks)
        ]
    ).sum()


def _split(hidden_ND: Tensor, targets_N: Tensor, mask_N: Tensor, chunks: int) -> list[TokenChunk]:
    """Return the chunks of the tokens."""
    pieces = (tensor.tensor_split(chunks) for tensor in (hidden_ND, targets_N, mask_N))
    return [TokenChunk(*of_chunk) for of_chunk in zip(*pieces, strict=True)]


class _ChunkGradients(NamedTuple):
    """A chunk's loss, the gradient of its hidden states, and the factors of the weight's gradient.

    The weight's gradient is logits_grad_CV^T hidden_CD. Ignored tokens add nothing to it, because they
    are zeros in one of the factors: in `logits_grad_CV` in a compiled graph on CUDA, and otherwise in
    `hidden_CD`.

    Attributes:
        loss: the sum, 0-d; in a compiled graph on CUDA, the losses [C].
        hidden_grad_CD: the gradient of the hidden states.
        hidden_CD: the hidden states.
        logits_grad_CV: the gradient of the logits: softmax - onehot, with a cap times the cap's slope.
    """

    loss: Tensor
    hidden_grad_CD: Tensor
    hidden_CD: Tensor
    logits_grad_CV: Tensor


def _chunk_gradients(
    chunk: TokenChunk, head: HeadWeight, device_type: str, differences: ReplacementRows | None
) -> _ChunkGradients:
    """Return a chunk's loss and gradients.

    It is a separate function so that no tensor of a chunk is still alive in the next one.
    """
    hidden_CD, targets_C, mask_C = chunk
    is_traced = torch.compiler.is_compiling()
    if is_traced and device_type == "cuda" and differences is None:
        losses_C, grad_CV = _traced_gradients_on_cuda(hidden_CD, head, targets_C, mask_C)
        return _ChunkGradients(losses_C, head.hidden_gradient(grad_CV), hidden_CD, grad_CV)
    # The hidden states of ignored tokens become zero, so that they add nothing to the weight's
    # gradient. The product has a second use under vmap: if the targets are batched, it makes the hidden
    # states and so the logits batched, too, and `_eager_gradients` can write to them in place.
    mask_C1 = mask_C.unsqueeze(-1).to(hidden_CD.dtype)
    hidden_CD = hidden_CD * mask_C1
    if is_traced:
        losses_C, grad_CV = _traced_gradients(hidden_CD, head, targets_C, mask_C.dtype, differences)
    else:
        block_size = block_rows(device_type, head.weight_VD.shape[0])
        losses_C, grad_CV = _eager_gradients(
            hidden_CD, head, targets_C, mask_C.dtype, differences, block_size
        )
    grad_CD = head.hidden_gradient(grad_CV)
    if differences is not None:
        grad_CD = grad_CD + grad_CV.index_select(-1, differences.index_K) @ differences.values_KD
    return _ChunkGradients((losses_C * mask_C).sum(), grad_CD * mask_C1, hidden_CD, grad_CV)


def _traced_gradients(
    hidden_CD: Tensor,
    head: HeadWeight,
    targets_C: Tensor,
    dtype: torch.dtype,
    differences: ReplacementRows | None,
) -> tuple[Tensor, Tensor]:
    """Return losses [C] and their gradient by the logits [C, V], in the dtype of `hidden_CD`.

    The gradient is softmax - onehot, with a cap times the cap's slope. Nothing is written in place, so that
    a compiler can fuse the operations.
    """
    logits_CV = head.logits(hidden_CD).to(dtype)
    if differences is not None:
        # slot_V has each row's position in `values_KD`, and -1 for a row that is not replaced.
        added_CK = (hidden_CD @ differences.values_KD.T).to(dtype)
        added_CV = added_CK[:, differences.slot_V.clamp_min(0)]
        logits_CV = logits_CV + torch.where(differences.slot_V >= 0, added_CV, 0)
    logits_CV = capped(logits_CV, head.cap)
    lse_C1 = logits_CV.logsumexp(-1, keepdim=True)
    target_C1 = targets_C.unsqueeze(-1)
    softmax_CV = (logits_CV - lse_C1).exp()
    classes_V = torch.arange(logits_CV.shape[-1], device=logits_CV.device)
    grad_CV = torch.where(classes_V == target_C1, softmax_CV - 1, softmax_CV)
    if head.cap is not None:
        grad_CV = grad_CV * cap_slope(logits_CV, head.cap)
    return (lse_C1 - logits_CV.gather(-1, target_C1)).squeeze(-1), grad_CV.to(hidden_CD.dtype)


def _traced_gradients_on_cuda(
    hidden_CD: Tensor, head: HeadWeight, targets_C: Tensor, mask_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Return losses [C] and their gradient by the logits [C, V], both zero for ignored tokens.

    One kernel computes both (`replace_logits_`), except for fp64 and inside transforms of torch.func. For
    these the operators are in a form for which Inductor needs only two passes over the logits. On a CPU
    this form would not be faster, because it computes the exponentials twice.
    """
    logits_CV = head.logits(hidden_CD)
    if can_replace_logits(logits_CV) and not compat.in_transform():
        losses_C = replace_logits_(logits_CV, targets_C, mask_C, head.cap)
        return losses_C, logits_CV
    logits_CV = capped(logits_CV.to(mask_C.dtype), head.cap)
    largest_C1 = logits_CV.amax(-1, keepdim=True)
    exp_CV = (logits_CV - largest_C1).exp()
    sum_C1 = exp_CV.sum(-1, keepdim=True)
    classes_V = torch.arange(logits_CV.shape[-1], device=logits_CV.device)
    is_target_CV = classes_V == targets_C.unsqueeze(-1)
    # The target's logit is a sum over the row, because a gather would be a separate kernel.
    target_logit_C1 = torch.where(is_target_CV, logits_CV, 0.0).sum(-1, keepdim=True)
    losses_C1 = sum_C1.log() + largest_C1 - target_logit_C1
    mask_C1 = mask_C.unsqueeze(-1)
    grad_CV = (exp_CV / sum_C1 - is_target_CV.to(exp_CV.dtype)) * mask_C1
    if head.cap is not None:
        grad_CV = grad_CV * cap_slope(logits_CV, head.cap)
    return (losses_C1 * mask_C1).squeeze(-1), grad_CV.to(hidden_CD.dtype)


def _eager_gradients(
    hidden_CD: Tensor,
    head: HeadWeight,
    targets_C: Tensor,
    dtype: torch.dtype,
    differences: ReplacementRows | None,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Return losses [C] and their gradient by the logits [C, V], as `_traced_gradients` does.

    The logits are overwritten, those of `block_size` tokens at a time, because on a CPU the allocation of
    a new [C, V] tensor takes longer than the arithmetic.
    """
    logits_CV = head.logits(hidden_CD)
    if differences is not None:
        logits_CV = _add_differences(logits_CV, hidden_CD, differences)
    losses: list[Tensor] = []
    blocks = zip(logits_CV.split(block_size), targets_C.split(block_size), strict=True)
    for logits_RV, targets_R in blocks:
        capped_RV = capped(logits_RV.to(dtype), head.cap)
        log_softmax_RV = capped_RV.log_softmax(-1)
        target_R1 = targets_R.unsqueeze(-1)
        losses_R1 = -log_softmax_RV.gather(-1, target_R1)
        losses.append(losses_R1.squeeze(-1))
        grad_RV = log_softmax_RV.exp_()
        grad_RV.scatter_add_(-1, target_R1, torch.full_like(losses_R1, -1.0))
        if head.cap is not None:
            grad_RV.mul_(cap_slope(capped_RV, head.cap))
        logits_RV.copy_(grad_RV)
    return torch.cat(losses), logits_CV


class _ChunkedLoss(torch.autograd.Function):
    """Compute the loss and both gradients in one pass.

    In a trace, torch's own operators must not write to a returned tensor in place: Dynamo's trace of
    an autograd.Function would then have wrong gradients (pytorch/pytorch#180642). The gradient is added
    up in place all the same, by `add_product_`: it is a custom operator, into which Dynamo does not
    look.

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
        settings,
        values_KD,
        index_K,
        slot_V,
        fused_VD,
        total_VD,
    ):
        chunks, device_type, trains_weight, in_fp8, cap = settings
        # If the weight were cast outside of this Function, autograd would round its gradient to the
        # dtype of the hidden states.
        read_VD = weight_VD if fused_VD is None else fused_VD  # what the products read
        weight_VD = read_VD.to(hidden_ND.dtype)
        head = HeadWeight(weight_VD, Float8Weight.of(weight_VD) if in_fp8 else None, cap)
        differences = None
        if values_KD is not None:
            differences = _differences(weight_VD, ReplacementRows(values_KD, index_K, slot_V))
        # The gradient of the weight, [V, D], or of the trained rows, [K, D]. For trained rows it begins
        # as zeros. For a weight it begins as the first chunk's product, because vmap cannot add a batched
        # product to zeros that are not batched.
        grad = None
        if differences is not None:
            grad = torch.zeros_like(differences.values_KD, dtype=mask_N.dtype)
        losses: list[Tensor] = []
        hidden_grads: list[Tensor] = []
        for chunk in _split(hidden_ND, targets_N, mask_N, chunks):
            loss, hidden_grad_CD, hidden_CD, logits_grad_CV = _chunk_gradients(
                chunk, head, device_type, differences
            )
            losses.append(loss)
            hidden_grads.append(hidden_grad_CD)
            if trains_weight and grad is None and fused_VD is not None:
                grad = product(logits_grad_CV, hidden_CD, mask_N.dtype)
            elif trains_weight and grad is None:
                grad = (logits_grad_CV.T @ hidden_CD).to(mask_N.dtype)
            elif trains_weight:
                add_product_(grad, logits_grad_CV, hidden_CD)
            elif grad is not None:  # trained rows of a frozen weight
                rows_grad_CK = logits_grad_CV.index_select(-1, index_K)
                grad = grad + (rows_grad_CK.T @ hidden_CD).to(mask_N.dtype)
            # Otherwise these two would stay in memory while the next chunk is computed.
            del hidden_CD, logits_grad_CV
        # In a graph on a GPU, each entry has the losses [C] of a chunk, so that one kernel adds up the losses
        # of all chunks. Otherwise it is their sum.
        total_loss = torch.cat([loss.view(-1) for loss in losses]).sum()
        return total_loss, torch.cat(hidden_grads), grad

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _loss, *grads = output
        ctx.mark_non_differentiable(*(grad for grad in grads if grad is not None))
        # The gradients are outputs that nothing uses. Without this, autograd would make zeros of their size for
        # the backward pass.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*grads)
        _, weight_VD, _, _, settings, values_KD, _, _, _, total_VD = inputs
        _chunks, _device_type, trains_weight, _in_fp8, _cap = settings
        ctx.trains_weight = trains_weight
        ctx.total_VD = total_VD
        ctx.fused_weight_VD = None if total_VD is None else weight_VD
        trained = weight_VD if trains_weight else values_KD
        # The gradient's dtype; None if neither the weight nor a row is trained.
        ctx.dtype = None if trained is None else trained.dtype

    @staticmethod
    def backward(ctx, loss_grad, _hidden_grad, _grad):  # type: ignore[no-untyped-def]
        if loss_grad is None:  # nothing depends on the loss
            return (None,) * 10  # one for each argument of `forward`
        hidden_grad_ND, grad = ctx.saved_tensors
        hidden_grad_ND = (hidden_grad_ND * loss_grad).to(hidden_grad_ND.dtype)
        if ctx.total_VD is not None:
            add_scaled_(ctx.total_VD, grad, loss_grad, ctx.fused_weight_VD)
            grad = None
        elif grad is not None:
            grad = (grad * loss_grad).to(ctx.dtype)
        weight_grad = grad if ctx.trains_weight else None
        rows_grad = None if ctx.trains_weight else grad
        # One for each argument of `forward`.
        return hidden_grad_ND, weight_grad, None, None, None, rows_grad, None, None, None, None


# ---- many members, one frozen weight --------------------------------------------------------------


def _is_frozen_in_members(weight_VD: Tensor) -> bool:
    """Return whether eager code trains members of an ensemble, which share this frozen weight."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    # A transform of torch.func wraps a weight that is trained, and a weight of which each member has its own.
    # A wrapped weight is not an nn.Parameter.
    is_frozen = isinstance(weight_VD, nn.Parameter) and not weight_VD.requires_grad
    return is_frozen and compat.in_transform()


class _MembersLoss(torch.autograd.Function):
    """Compute the losses [M] of M members and the gradient of their hidden states.

    It computes what `_ChunkedLoss` computes for a frozen weight. But the tokens of all members are cut
    into chunks together. vmap of `_ChunkedLoss` would have chunks that are M times as large.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        hidden_MND, weight_VD, targets_MN, mask_MN, device_type_and_cap
    ):
        device_type, cap = device_type_and_cap
        members, tokens = targets_MN.shape
        # At most as many chunks as the members would have if they were computed one after another.
        chunks = min(
            members * chunk_limit(tokens),
            needed_chunks(members * tokens, len(weight_VD), device_type),
        )
        head = HeadWeight(weight_VD.to(hidden_MND.dtype), cap=cap)
        block_size = block_rows(device_type, len(weight_VD))
        losses: list[Tensor] = []
        hidden_grads: list[Tensor] = []
        pieces = _split(
            hidden_MND.flatten(0, 1), targets_MN.flatten(), mask_MN.flatten(), max(1, chunks)
        )
        for hidden_CD, targets_C, mask_C in pieces:
            losses_C, grad_CV = _eager_gradients(
                hidden_CD, head, targets_C, mask_C.dtype, None, block_size
            )
            losses.append(losses_C * mask_C)
            hidden_grad_CD = head.hidden_gradient(grad_CV)
            hidden_grads.append(hidden_grad_CD.mul_(mask_C[:, None]))
            del grad_CV  # or it would stay in memory while the next chunk is computed
        losses_M = torch.cat(losses).view(members, tokens).sum(1)
        return losses_M, torch.cat(hidden_grads).view_as(hidden_MND)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _losses, hidden_grad_MND = output
        ctx.mark_non_differentiable(hidden_grad_MND)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_grad_MND)

    @staticmethod
    def backward(ctx, loss_grad_M, _hidden_grad):  # type: ignore[no-untyped-def]
        if loss_grad_M is None:  # nothing depends on the loss
            return (None,) * 5
        (hidden_grad_MND,) = ctx.saved_tensors
        scaled_MND = (hidden_grad_MND * loss_grad_M[:, None, None]).to(hidden_grad_MND.dtype)
        return scaled_MND, None, None, None, None

    @staticmethod
    def vmap(  # type: ignore[no-untyped-def]
        info: VmapInfo, in_dims, hidden, weight_VD, targets, mask, device_type_and_cap
    ):
        hidden_dim, weight_dim, targets_dim, mask_dim, _ = in_dims
        if weight_dim is not None:
            raise RuntimeError("the weight of a loss of members must be one for all")

        def with_all_members(tensor: Tensor, dim: int | None) -> Tensor:
            """Return [M, N, ...], with the axis that is mapped over as a part of M."""
            if dim is None:
                return tensor.expand(info.batch_size, *tensor.shape).flatten(0, 1)
            return tensor.movedim(dim, 0).flatten(0, 1)

        outputs = _MembersLoss.apply(
            with_all_members(hidden, hidden_dim),
            weight_VD,
            with_all_members(targets, targets_dim),
            with_all_members(mask, mask_dim),
            device_type_and_cap,
        )
        losses, hidden_grad = (each.unflatten(0, (info.batch_size, -1)) for each in outputs)
        return (losses, hidden_grad), (0, 0)


def token_log_probabilities(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    temperature: float = 1.0,
    *,
    rows: ReplacementRows | None = None,
    among: tuple[Callable[[Tensor], Tensor], Tensor] | None = None,
    chunks: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the log-probability of a token at each place under a linear classifier.

    out[n] = z[n, tokens[n]] / temperature - logsumexp(z[n] / temperature),   z = hidden @ weight.T

    With a cap, cap tanh(z / cap) takes the place of z.

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
        among: (function, states). The states are those of a grammar's automaton, one at each place, [N].
            The function takes states [C] and returns which tokens are allowed in each, bool [C, at most V]
            (`monograph.decode.automaton_tables`). None: all tokens are allowed.
        chunks: number of pieces into which N is cut; None: chosen by the size of a chunk's logits.
        cap: see above; None: logits have no cap.

    Returns:
        [N] fp32 (fp64 for fp64 input), in nats.
    """
    if torch.is_autocast_enabled(hidden_ND.device.type):
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(hidden_ND.device.type))
    if rows is not None:
        weight_VD = with_replaced_rows(weight_VD, rows)
    weight_VD = weight_VD.to(hidden_ND.dtype)
    chunks = chunks or chunk_count(hidden_ND.shape[0], weight_VD.shape[0], hidden_ND.device.type)
    # Without `among` the states are not used, and any tensor with N elements can be split.
    allowed, states_N = among or (None, tokens_N)
    pieces_by_tensor = (each.tensor_split(chunks) for each in (hidden_ND, tokens_N, states_N))
    pieces: list[tuple[Tensor, Tensor, Tensor]] = [*zip(*pieces_by_tensor, strict=True)]
    # The logits of a single chunk are kept. The backward pass begins with them, so recomputing them
    # would save no memory.
    if chunks == 1 or not torch.is_grad_enabled():
        return torch.cat(
            [
                _chunk_log_probabilities(*piece, weight_VD, temperature, allowed, cap)
                for piece in pieces
            ]
        )
    return torch.cat(
        [
            checkpoint(
                _chunk_log_probabilities,
                *piece,
                weight_VD,
                temperature,
                allowed,
                cap,
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
    cap: float | None,
) -> Tensor:
    """Return the log-probabilities of a chunk's tokens, [C]; see `token_log_probabilities`."""
    logits_CV = hidden_CD @ weight_VD.T
    wide_dtype = torch.promote_types(logits_CV.dtype, torch.float32)
    # The cap's result is rounded to the dtype of the product, as the logits of `Llama.logits` are, so that a
    # sampled token has the same bits here.
    logits_CV = capped(logits_CV, cap).to(wide_dtype) / temperature
    if allowed is not None:
        allowed_CV = allowed(states_C)
        # Tokens for which `allowed_CV` has no column are not allowed, so their logits are left out.
        logits_CV = torch.where(allowed_CV, logits_CV[:, : allowed_CV.shape[-1]], -torch.inf)
    return logits_CV.log_softmax(-1).gather(-1, tokens_C[:, None])[:, 0]
