"""Recurrent layers as loops over time, which vmap can batch over members; it cannot batch torch's own
kernels.

Shapes: T time, B batch, I inputs, H hidden, L layers times directions, G gates times H.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monograph.ensemble.layers import CannotBatch

F = torch.nn.functional
RecurrentState = tuple[Tensor, ...]  # the hidden state [B, H], and an LSTM's cell state [B, H]
# A recurrent layer's step in time. It takes the input's contribution to the gates [B, G], the state,
# weight_hh, bias_hh, and for an LSTM optionally its projection, and returns the next state.
RecurrentStep = Callable[..., RecurrentState]


def _lstm(
    input_gates: Tensor,
    state: RecurrentState,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None = None,
) -> RecurrentState:
    hidden, cell = state
    gates = input_gates + F.linear(hidden, weight, bias)
    # The gates of torch's weights are in this order.
    input_gate, forget_gate, new, output_gate = gates.chunk(4, -1)
    cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * new.tanh()
    hidden = output_gate.sigmoid() * cell.tanh()
    if projection is not None:
        hidden = F.linear(hidden, projection)
    return hidden, cell


def _gru(
    input_gates: Tensor, state: RecurrentState, weight: Tensor, bias: Tensor | None
) -> RecurrentState:
    (hidden,) = state
    input_reset, input_keep, input_new = input_gates.chunk(3, -1)
    hidden_reset, hidden_keep, hidden_new = F.linear(hidden, weight, bias).chunk(3, -1)
    reset = (input_reset + hidden_reset).sigmoid()
    keep = (input_keep + hidden_keep).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    return (new + keep * (hidden - new),)


def _rnn(
    act: Callable[[Tensor], Tensor],
    input_gates: Tensor,
    state: RecurrentState,
    weight: Tensor,
    bias: Tensor | None,
) -> RecurrentState:
    return (act(input_gates + F.linear(state[0], weight, bias)),)


def _run_cell(
    step: RecurrentStep,
    x: Tensor,
    state: Tensor | RecurrentState,
    weight_ih: Tensor,
    weight_hh: Tensor | None = None,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> Tensor | RecurrentState:
    """Run one step in time. The arguments after `step` are those of torch's cell kernels."""
    input_gates = F.linear(x, weight_ih, bias_ih)
    if isinstance(state, tuple):
        return step(input_gates, state, weight_hh, bias_hh)
    return step(input_gates, (state,), weight_hh, bias_hh)[0]


def _run_layers(
    step: RecurrentStep,
    x: Tensor,
    state: Tensor | RecurrentState,
    weights: list[Tensor] | Tensor | RecurrentState,
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> RecurrentState:
    """Run a recurrent layer over x [T, B, I]. The arguments after `step` are those of torch's
    kernels.

    Returns:
        The outputs [T, B, H], then each last state [L, B, H].
    """
    # With a packed sequence torch passes one more argument before the state: the number of rows of each step.
    # So the state is then in the place of the weights.
    if not isinstance(weights, list):
        raise CannotBatch(
            "it is given a packed sequence, whose steps have different numbers of rows: give it the padded rows, and "
            "take each row's output at its last token"
        )
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    first_states = state if isinstance(state, tuple) else (state,)
    # The weights are listed layer by layer, and in each layer direction by direction.
    weights_per_direction = len(weights) // (layers * directions)
    last_states: list[RecurrentState] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            begin = index * weights_per_direction
            weight_ih, weight_hh, *rest = weights[begin : begin + weights_per_direction]
            if bias:
                bias_ih, bias_hh, *projection = rest
            else:
                bias_ih, bias_hh, projection = None, None, rest
            # One product gives the input's contribution to the gates of all steps. Only the hidden
            # state's contribution depends on the step before.
            gates_of_steps = F.linear(x, weight_ih, bias_ih).unbind(0)
            is_backward = direction == 1
            if is_backward:
                gates_of_steps = gates_of_steps[::-1]
            hidden = []
            current = tuple(states[index] for states in first_states)
            for input_gates in gates_of_steps:
                current = step(input_gates, current, weight_hh, bias_hh, *projection)
                hidden.append(current[0])
            outputs.append(torch.stack(hidden[::-1] if is_backward else hidden))
            last_states.append(current)
        x = torch.cat(outputs, -1)
        if dropout and layer < layers - 1:
            x = F.dropout(x, dropout, training)
    output = x.transpose(0, 1) if batch_first else x
    stacked_states = [torch.stack(states) for states in zip(*last_states, strict=True)]
    return output, *stacked_states


# torch's names of the kernels of recurrent layers and cells, and their replacements.
_STEPS: dict[str, RecurrentStep] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": functools.partial(_rnn, torch.tanh),
    "rnn_relu": functools.partial(_rnn, torch.relu),
}
KERNELS: dict[str, Callable[..., Any]] = {
    name: functools.partial(_run_layers, step) for name, step in _STEPS.items()
}
KERNELS |= {f"{name}_cell": functools.partial(_run_cell, step) for name, step in _STEPS.items()}
