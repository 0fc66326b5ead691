"""Update a plane by the rule of its kind, and the moving average of its weights."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from monograph.ops.materialize import materialize
from monograph.optim.formats import FORMATS
from monograph.optim.narrow import noise, stochastic
from monograph.optim.optimizer import Knob, Optimizer
from monograph.optim.planes import Plane


def initialise(plane: Plane, optim: Optimizer) -> None:
    """Give the plane its state: moments of zero, and the average, which equals the weights."""
    for moment in plane.kind.rule.moments:
        plane.state |= FORMATS[optim.state].zeros(plane.grad, moment, plane.before)
    if optim.ema is not None:
        # A copy, because an average that is a view of the weights would change with them.
        plane.state["ema"] = plane.param.to(plane.grad.dtype, copy=True)


def update_(
    plane: Plane,
    optim: Optimizer,
    grad: Tensor,
    *,
    lr: Tensor,
    applied: Tensor,
    accepted: Tensor,
    compute: torch.dtype,
) -> None:
    """Update a plane by the rule of its kind, and then the average.

    Matrices of one shape are updated all at once. Buffers in fewer bits are unpacked before the
    update, and packed after it.

    Args:
        plane: the plane, which may be that of a stack of N modules.
        optim: the optimizer, whose numbers may be [N] for a stack.
        grad: the mean gradient after clipping, [size]; [N, size] for a stack.
        lr: see `monograph.optim.updates`; [N] for a stack.
        applied: see `monograph.optim.updates`; [N] for a stack.
        accepted: see `monograph.optim.updates`; [N] for a stack.
        compute: the dtype of matrix products.
    """
    kind = plane.kind
    rule = kind.rule
    state = plane.state
    form = FORMATS[optim.state]
    # All arithmetic is in the gradient's dtype, so that one formula serves every form.
    moments = [form.read(state, moment, grad, plane.before) for moment in rule.moments]
    param = plane.param.to(grad.dtype)
    stacks = [param, grad, *moments]
    if kind.matrix is not None and plane.orthogonal is None:
        stacks = [_matrices(flat, plane) for flat in stacks]
    hyper = kind.hyperparameters(
        lr=lr,
        applied=applied,
        accepted=accepted,
        compute=compute,
        orthogonal=plane.orthogonal,
        over=functools.partial(_over, stacks[0]),
    )
    rule.update_(stacks[0], stacks[1], stacks[2:], hyper)
    # Word 0 rounds the weights, the others the moments, because the roundings of one update must be
    # independent.
    words = None
    if form.stochastic:
        count = 1 + max(2, len(moments))
        words = noise(param, optim.seed, applied, plane.number, plane.start, count)
    for number, (moment, values) in enumerate(zip(rule.moments, moments, strict=True), start=1):
        form.write_(
            state,
            moment,
            values,
            accepted,
            word_N=None if words is None else words[number],
            before=plane.before,
            ends_2=plane.ends.get(moment.name),
        )
    if words is not None and not optim.master_weights:
        plane.param.copy_(stochastic(param, words[0]))
    if optim.ema is not None:
        average = state["ema"]
        of_members = {"applied": _over(average, applied), "accepted": _over(average, accepted)}
        ema_(average, plane.param.to(average.dtype), decay=optim.ema, **of_members)


def _matrices(flat: Tensor, plane: Plane) -> Tensor:
    """Return a plane's matrices, or stacks of matrices, as [..., slots, *shape].

    The zeros between them are left out.
    """
    shape = plane.kind.matrix or ()
    by_slot = flat.unflatten(-1, (len(plane.slots), -1))
    matrices: Tensor = by_slot[..., : math.prod(shape)].unflatten(-1, shape)
    return matrices


def _over(stack: Tensor, knob: object) -> Any:
    """Return a knob; if it is [N], in a shape that broadcasts against `stack`, [N, ...]."""
    if isinstance(knob, Tensor) and knob.ndim:
        return knob.view(-1, *[1] * (stack.ndim - 1))
    return knob


def ema_(average: Tensor, param: Tensor, *, decay: Knob, applied: Tensor, accepted: Tensor) -> None:
    """Update the exponential moving average of parameters, with bias correction.

        w = (1 - d) / (1 - d^t)         average <- average + w (p - average)

    The average is sum_i d^(t-i) p_i / sum_i d^(t-i). So initial weights have no part in it, and it
    is a mean of weights from the first update on. Source: Kingma and Ba 2015, section 3.

    Args:
        average: any shape.
        param: p, the parameters after their update, of the same shape.
        decay: d.
        applied: t, the number of updates applied, including this one, int64.
        accepted: whether the update was made, bool.
    """
    # In fp64, like AdamW's bias correction: with d = 0.9999, fp32 has only three digits of 1 - d^t
    # in the first updates.
    weight = materialize(((1 - decay) / (1 - decay ** applied.to(torch.float64))).to(param.dtype))
    average.copy_(torch.where(accepted, torch.lerp(average, param, weight), average))
