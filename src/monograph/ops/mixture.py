"""Compute the loss of a model that learns from the averaged probabilities of teachers, in chunks.

Shapes: N tokens, C tokens of one chunk, D hidden size of any model, V vocabulary.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from monograph.ops.autograd import Context
from monograph.ops.cross_entropy import chunk_count, linear_cross_entropy
from monograph.ops.fused_gradients import add_product_
from monograph.ops.logit_cap import cap_slope, capped
from monograph.ops.token_rows import ReplacementRows, with_replaced_rows


class Teacher(NamedTuple):
    """What the loss reads of a teacher.

    Attributes:
        hidden_ND: the hidden states, or those of a chunk.
        head_VD: the head.
        cap: the cap of its logits (`monograph.ops.logit_cap`); None: there is none.
    """

    hidden_ND: Tensor
    head_VD: Tensor
    cap: float | None = None


def mixture_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    teachers: Sequence[Teacher] = (),
    share: float = 1.0,
    impl: Literal["chunked", "reference"] = "chunked",
    rows: ReplacementRows | None = None,
    chunks: int | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a mixture of the cross-entropy with targets and the divergence from the teachers.

        loss = sum over targets of  share * -log q(target) + (1 - share) * KL(m || q)
        KL(m || q) = sum over v of m(v) * (log m(v) - log q(v))
        q = softmax(hidden @ weight.T)
        m = mean over teachers of softmax(their hidden @ their weight.T), a constant

    With a cap, a model's logits z become cap tanh(z / cap) before the softmax.

    A chunk's loss is computed together with the gradients of its hidden states and of the weight. At most two
    tensors [C, V] of the teachers' probabilities exist at a time: the sum so far and the next teacher's.

    Source: Kim et al. 2025, arXiv 2509.14786.

    Args:
        hidden_ND: float; products run in this dtype (or in autocast's), softmax and sums in fp32
            (fp64 for fp64).
        weight_VD: the head; it is cast to the dtype of the products.
        targets_N: int64 in [0, V), or -100 for a token that does not count.
        teachers: the teachers; (): this is `linear_cross_entropy`.
        share: the targets' share of the loss, from 0 to 1.
        impl: "chunked", or "reference" for all tokens at once.
        rows: trained rows that replace some rows of a frozen weight; None: there are none.
        chunks: number of chunks into which N is cut; None: chosen by the size of a chunk's logits.
        cap: the cap of the logits of the model that learns; None: there is none.

    Returns:
        loss: 0-d fp32 (fp64 for fp64 input), the sum in nats, differentiable with respect to
            `hidden_ND` and `weight_VD`.
        count: 0-d int64, the number of targets.
    """
    if not teachers:
        return linear_cross_entropy(hidden_ND, weight_VD, targets_N, impl=impl, rows=rows, cap=cap)
    device_type = hidden_ND.device.type
    weight_VD = weight_VD if rows is None else with_replaced_rows(weight_VD, rows)
    dtype = hidden_ND.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    if impl == "reference":
        chunks = 1
    elif not chunks:
        chunks = chunk_count(len(targets_N), len(weight_VD), device_type)
    count = (targets_N != -100).sum()
    states = [teacher.hidden_ND.to(dtype) for teacher in teachers]
    heads = [teacher.head_VD.to(dtype) for teacher in teachers]
    settings = _Settings(share, chunks, cap, tuple(teacher.cap for teacher in teachers))
    loss: Tensor = _Mixed.apply(
        hidden_ND.to(dtype), weight_VD, targets_N, settings, *states, *heads
    )
    return loss, count


class _Settings(NamedTuple):
    """The arguments of `_Mixed` that are not tensors: `share`, `chunks` and `cap` of
    `mixture_cross_entropy`, and the cap of each teacher's logits.
    """

    share: float
    chunks: int
    cap: float | None
    caps_of_teachers: tuple[float | None, ...]


class _MixedContext(Context):
    dtype: torch.dtype
    teacher_tensor_count: int


class _Mixed(torch.autograd.Function):
    """Compute the loss and both gradients in one pass.

    The gradient of the logits is q - share * onehot - (1 - share) * m, with a cap times its slope.
    """

    @staticmethod
    def forward(
        ctx: _MixedContext,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        settings: _Settings,
        *states_and_heads: Tensor,
    ) -> Tensor:
        teacher_count = len(states_and_heads) // 2
        teacher_states = states_and_heads[:teacher_count]
        teacher_heads = states_and_heads[teacher_count:]
        # If the weight were cast outside of this Function, autograd would round its gradient to the
        # dtype of the hidden states.
        rounded_VD = weight_VD.to(hidden_ND.dtype)
        weight_grad_VD = torch.zeros_like(
            weight_VD, dtype=torch.promote_types(hidden_ND.dtype, torch.float32)
        )
        losses: list[Tensor] = []
        hidden_grads: list[Tensor] = []
        pieces = (
            each.tensor_split(settings.chunks) for each in (targets_N, hidden_ND, *teacher_states)
        )
        for targets_C, hidden_CD, *states in zip(*pieces, strict=True):
            teachers = [
                Teacher(*each)
                for each in zip(states, teacher_heads, settings.caps_of_teachers, strict=True)
            ]
            loss, grad_CV = _chunk_gradient(
                settings.share, targets_C, hidden_CD @ rounded_VD.T, settings.cap, teachers
            )
            losses.append(loss)
            hidden_grads.append(grad_CV @ rounded_VD)
            add_product_(weight_grad_VD, grad_CV, hidden_CD)
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad_VD)
        ctx.dtype = weight_VD.dtype
        ctx.teacher_tensor_count = len(states_and_heads)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: _MixedContext, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad_ND, weight_grad_VD = ctx.saved_tensors
        no_grads = [None] * (2 + ctx.teacher_tensor_count)  # of the arguments after the weight
        return (
            (hidden_grad_ND * loss_grad).to(hidden_grad_ND.dtype),
            (weight_grad_VD * loss_grad).to(ctx.dtype),
            *no_grads,
        )


def _chunk_gradient(
    share: float,
    targets_C: Tensor,
    logits_CV: Tensor,
    cap: float | None,
    teachers: Sequence[Teacher],
) -> tuple[Tensor, Tensor]:
    """Return a chunk's loss, 0-d, and its gradient by the logits, [C, V] in their dtype.

    Args:
        share: see `mixture_cross_entropy`.
        targets_C: the targets.
        logits_CV: the logits of the model that learns, before the cap.
        cap: the cap of these logits.
        teachers: the teachers, with the hidden states of the chunk.
    """
    wide_dtype = torch.promote_types(logits_CV.dtype, torch.float32)
    teachers_mean_CV = torch.zeros_like(logits_CV, dtype=wide_dtype)  # m
    for states_CD, head_VD, cap_of_teacher in teachers:
        logits_of_teacher_CV = capped((states_CD @ head_VD.T).to(wide_dtype), cap_of_teacher)
        teachers_mean_CV = teachers_mean_CV + logits_of_teacher_CV.softmax(-1) / len(teachers)
    capped_CV = capped(logits_CV.to(wide_dtype), cap)
    log_q_CV = capped_CV.log_softmax(-1)
    classes_V = torch.arange(log_q_CV.shape[1], device=log_q_CV.device)
    is_target_CV = classes_V == targets_C.unsqueeze(-1)
    # The loss is the cross-entropy with this distribution, plus a constant.
    teachers_part_CV = (1 - share) * teachers_mean_CV
    wanted_CV = torch.where(is_target_CV, teachers_part_CV + share, teachers_part_CV)
    constant_CV = (1 - share) * torch.special.xlogy(teachers_mean_CV, teachers_mean_CV)
    terms_CV = constant_CV - wanted_CV * log_q_CV
    is_counted_C1 = (targets_C != -100).unsqueeze(-1)
    grad_CV = torch.where(is_counted_C1, log_q_CV.exp() - wanted_CV, 0.0)
    if cap is not None:
        grad_CV = grad_CV * cap_slope(capped_CV, cap)
    return torch.where(is_counted_C1, terms_CV, 0.0).sum(), grad_CV.to(logits_CV.dtype)
