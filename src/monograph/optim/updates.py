"""Update a plane by the rule of its kind, and the moving average of its weights.

A plane is a flat buffer of all parameters of a module that are updated by the same rule, with the same
hyperparameters (`monograph.optim.planes`). The modules of an ensemble, which are trained together as
one graph, have one plane.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from monograph.ops.materialize import materialize
from monograph.ops.weight_blocks import round_to_blocks
from monograph.optim.formats import FORMATS
from monograph.optim.narrow import random_words, round_stochastically
from monograph.optim.optimizer import Knob, Optimizer
from monograph.optim.planes import Plane

# The buffer of unrounded weights of a plane whose parameters are rounded to blocks.
MASTER = "master"


def initialise(plane: Plane, optim: Optimizer) -> None:
    """Give a plane its state: moments of zero, and the moving average, which equals the weights.

    If the plane's kind has a `block_format`, the weights become part of the state, and the parameters
    are rounded.
    """
    for moment in plane.kind.rule.moments:
        plane.state |= FORMATS[optim.state].zeros(plane.grad, moment, plane.block_offset)
    if optim.ema is not None:
        # A copy, because an average that is a view of the weights would change with them.
        plane.state["ema"] = plane.param.to(plane.grad.dtype, copy=True)
    if plane.kind.block_format is not None:
        plane.state[MASTER] = plane.param.clone()
        round_parameters(plane)


def round_parameters(plane: Plane) -> None:
    """Set a plane's parameters to its unrounded weights, rounded. Without a `block_format`, do nothing."""
    if plane.kind.block_format is not None:
        plane.param.copy_(round_to_blocks(plane.state[MASTER], plane.kind.block_format))


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
    """Update a plane by the rule of its kind, and then the moving average of its weights.

    All matrices of one shape are updated at once. Moments that are kept in fewer bits are unpacked
    before the update, and packed after it.

    With a `block_format`, the gradient is that of the rounded parameters, the rule changes the unrounded
    weights by it, and the parameters are these weights rounded again:

        m <- rule(m, gradient at p)          p <- round(m)

    Args:
        plane: the plane, which may be that of an ensemble of N modules.
        optim: the optimizer, whose hyperparameters may be [N] for an ensemble.
        grad: the mean gradient after clipping, [size]; [N, size] for an ensemble.
        lr: the optimizer's learning rate for this update; [N] for an ensemble.
        applied: the number of updates applied, including this one, int64; [N] for an ensemble.
        accepted: whether the update is made, bool; [N] for an ensemble.
        compute: the dtype of matrix products.
    """
    kind = plane.kind
    rule = kind.rule
    state = plane.state
    state_format = FORMATS[optim.state]
    # All arithmetic is in the gradient's dtype, so that one formula serves every format.
    moments = [
        state_format.read(state, moment, grad, plane.block_offset) for moment in rule.moments
    ]
    if kind.block_format is not None:
        param = state[MASTER]
    else:
        param = plane.param.to(grad.dtype)
    # The tensors that the rule gets: parameters, gradient and moments, each flat or as matrices.
    tensors = [param, grad, *moments]
    if kind.matrix_shape is not None and plane.orthogonal is None:
        tensors = [_matrices(flat, plane) for flat in tensors]
    hyper = kind.hyperparameters(
        lr=lr,
        applied=applied,
        accepted=accepted,
        compute=compute,
        orthogonal=plane.orthogonal,
        broadcast=functools.partial(_broadcast, tensors[0]),
    )
    rule.update_(tensors[0], tensors[1], tensors[2:], hyper)
    # Each element gets one random word for its weight and one for each moment, because the roundings of
    # one update must be independent.
    words = None
    if state_format.stochastic:
        words = random_words(
            param, optim.seed, applied, plane.number, plane.start, count=1 + len(moments)
        )
    for number, (moment, values) in enumerate(zip(rule.moments, moments, strict=True), start=1):
        state_format.write_(
            state,
            moment,
            values,
            accepted,
            word_N=None if words is None else words[number],
            block_offset=plane.block_offset,
            edge_maxima_2=plane.edge_maxima.get(moment.name),
        )
    round_parameters(plane)
    if words is not None and not optim.master_weights:
        plane.param.copy_(round_stochastically(param, words[0]))
    if optim.ema is not None:
        average = state["ema"]
        ema_(
            average,
            plane.param.to(average.dtype),
            decay=optim.ema,
            applied=_broadcast(average, applied),
            accepted=_broadcast(average, accepted),
        )


def _matrices(flat: Tensor, plane: Plane) -> Tensor:
    """Return a flat buffer of a plane of matrices as a stack, [..., parameters, *matrix_shape].

    All parameters of the plane have this shape. The gaps between them are left out.
    """
    shape = plane.kind.matrix_shape or ()
    by_parameter = flat.unflatten(-1, (len(plane.placed), -1))
    matrices: Tensor = by_parameter[..., : math.prod(shape)].unflatten(-1, shape)
    return matrices


def _broadcast(stack: Tensor, knob: object) -> Any:
    """Return a hyperparameter; if it is [N], as [N, 1, ...] with as many axes as `stack`."""
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
