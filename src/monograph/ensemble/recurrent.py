"""Recurrent layers as loops over time, which vmap batches over members; it has no rules for torch's own kernels.

Shapes: T time, B batch, I inputs, H hidden, L layers times directions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monograph.ensemble.layers import CannotBatch

F = torch.nn.functional
State = tuple[Tensor, ...]  # [B, H] each: the hidden state, and an LSTM's cell
Step = Callable[..., State]  # (the input's share of the gates, state, weight_hh, bias_hh, ...) -> the next state


def _lstm(given: Tensor, state: State, weight: Tensor, bias: Tensor | None, project: Tensor | None = None) -> State:
    hidden, cell = state
    into, forget, new, out = (given + F.linear(hidden, weight, bias)).chunk(4, -1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    hidden = out.sigmoid() * cell.tanh()
    return hidden if project is None else F.linear(hidden, project), cell


def _gru(given: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (hidden,) = state
    ours, theirs = given.chunk(3, -1), F.linear(hidden, weight, bias).chunk(3, -1)
    reset, keep = (ours[0] + theirs[0]).sigmoid(), (ours[1] + theirs[1]).sigmoid()
    new = (ours[2] + reset * theirs[2]).tanh()
    return (new + keep * (hidden - new),)


def _rnn(act: Callable[[Tensor], Tensor], given: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    return (act(given + F.linear(state[0], weight, bias)),)


def _cell(step: Step, x: Tensor, state: Any, weight: Tensor, *of: Tensor | None) -> Any:
    """One step in time, as torch's cells call their kernels: of = weight_hh, bias_ih, bias_hh."""
    weight_hh, bias, bias_hh = (*of, None, None)[:3]
    many = isinstance(state, tuple)
    after = step(F.linear(x, weight, bias), state if many else (state,), weight_hh, bias_hh)
    return after if many else after[0]


def _layers(  # noqa: PLR0913 - as torch's layers call their kernels
    step: Step,
    x: Tensor,
    state: Any,
    weights: Any,
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> State:
    """Outputs [T, B, H] and the last states [L, B, H] of x [T, B, I]."""
    if not isinstance(weights, list):
        raise CannotBatch(
            "it is given a packed sequence, whose steps have other numbers of rows: give it the padded rows, and take "
            "each row's output at its last token"
        )
    ends: list[State] = []
    x, directions = x.transpose(0, 1) if batch_first else x, 1 + bidirectional
    first = state if isinstance(state, tuple) else (state,)
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            at, per = layer * directions + direction, len(weights) // (layers * directions)
            own = weights[at * per : (at + 1) * per]
            given = F.linear(x, own[0], own[2] if bias else None).unbind(0)
            one = functools.partial(_over_time, step, given[::-1] if direction else given)
            hidden, end = one(tuple(of[at] for of in first), own[1], own[3] if bias else None, *own[2 + 2 * bias :])
            outputs.append(torch.stack(hidden[::-1] if direction else hidden))
            ends.append(end)
        x = torch.cat(outputs, -1)
        if dropout and layer < layers - 1:
            x = F.dropout(x, dropout, training)
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(of) for of in zip(*ends, strict=True))


def _over_time(step: Step, given: Sequence[Tensor], state: State, *of: Tensor | None) -> tuple[list[Tensor], State]:
    hidden = []
    for now in given:
        state = step(now, state, *of)
        hidden.append(state[0])
    return hidden, state


STEPS: dict[str, Step] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": functools.partial(_rnn, torch.tanh),
    "rnn_relu": functools.partial(_rnn, torch.relu),
}
KERNELS = {name: functools.partial(_layers, step) for name, step in STEPS.items()} | {
    f"{name}_cell": functools.partial(_cell, step) for name, step in STEPS.items()
}
