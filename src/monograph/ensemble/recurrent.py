"""Run recurrent layers as loops over time, which vmap can batch over members; it cannot batch torch's own kernels.

Shapes: T time, B batch, I inputs, H hidden, L layers times directions.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monograph.ensemble.layers import CannotBatch

F = torch.nn.functional
State = tuple[Tensor, ...]  # the hidden state [B, H], and an LSTM's cell state [B, H]
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
    """Run one step in time with the arguments of torch's cell kernels; `of` is weight_hh, bias_ih, bias_hh."""
    weight_hh, bias, bias_hh = (*of, None, None)[:3]
    many = isinstance(state, tuple)
    after = step(F.linear(x, weight, bias), state if many else (state,), weight_hh, bias_hh)
    return after if many else after[0]


def _layers(step: Step, x: Tensor, state: Any, weights: Any, *options: Any) -> State:
    """Return outputs [T, B, H] and last states [L, B, H] for x [T, B, I]; arguments are those of torch's kernels."""
    bias, layers, dropout, training, bidirectional, batch_first = (*options, False)[:6]
    if not isinstance(weights, list):
        raise CannotBatch(
            "it is given a packed sequence, whose steps have other numbers of rows: give it the padded rows, and take "
            "each row's output at its last token"
        )
    ends: list[State] = []
    x, directions = x.transpose(0, 1) if batch_first else x, 1 + bidirectional
    first = state if isinstance(state, tuple) else (state,)
    per = len(weights) // (layers * directions)
    for layer in range(layers):
        outputs = []
        for backwards in range(directions):
            of_input, of_hidden, *own = weights[len(ends) * per : (len(ends) + 1) * per]
            bias_input, bias_hidden, *project = own if bias else (None, None, *own)
            # One product gives the input's share of the gates for all steps; only the hidden state's share depends on
            # the step before.
            given = F.linear(x, of_input, bias_input).unbind(0)
            hidden, now = [], tuple(of[len(ends)] for of in first)
            for at in given[::-1] if backwards else given:
                now = step(at, now, of_hidden, bias_hidden, *project)
                hidden.append(now[0])
            outputs.append(torch.stack(hidden[::-1] if backwards else hidden))
            ends.append(now)
        x = torch.cat(outputs, -1)
        if dropout and layer < layers - 1:
            x = F.dropout(x, dropout, training)
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(of) for of in zip(*ends, strict=True))


_RNNS = {f"rnn_{act.__name__}": functools.partial(_rnn, act) for act in (torch.tanh, torch.relu)}
_STEPS: dict[str, Step] = {"lstm": _lstm, "gru": _gru, **_RNNS}
KERNELS: dict[str, Callable[..., Any]] = {name: functools.partial(_layers, step) for name, step in _STEPS.items()}
KERNELS |= {f"{name}_cell": functools.partial(_cell, step) for name, step in _STEPS.items()}
