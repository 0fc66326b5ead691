"""Report how each part of the members' module runs, and why a part cannot run for all members at
once. Replace recurrent layers and dropout by versions that run for all members at once.

Recurrent layers are written here as loops over time, which vmap can batch over members; it cannot
batch torch's own kernels. Dropout needs no random generator: a mask is a pure function of (seed,
draw, site, element), see `Dropout`. So a member of an ensemble drops the same elements as when it
is trained alone, and recomputation drops the same elements as the first pass.

Shapes: T time, B batch, I inputs, H hidden, L layers times directions, G gates times H.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from monograph import compat
from monograph.errors import InputRefused
from monograph.graph.inspect import running_modules
from monograph.ops.philox import LOW32, philox

OUTSIDE = "outside of the module"


class Layer(NamedTuple):
    """A part of the members' module.

    Attributes:
        name: its path and class.
        how: how it runs, in words: "batched", "not called", or looped over the members and why.
        looped: the operators in it that run once for each member.
    """

    name: str
    how: str
    looped: tuple[str, ...]


class Layers(list[Layer]):
    """The parts in the module's order. `str` gives a table with one line for each part."""

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self), default=0)
        return "\n".join(f"{layer.name:{width}}  {layer.how}" for layer in self)


class PassObserver:
    """An observer of one forward pass of a module.

    Attributes:
        module: the observed module.
        running: the names of the parts that are running, innermost last. After an error they are
            those that were running when it was raised.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.running = list[str]()
        self._called = set[nn.Module]()
        self._looped_operators = dict[str, list[str]]()  # by the name of a part, or OUTSIDE

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Observe what runs in the block."""
        with (
            register_module_forward_pre_hook(lambda module, _: self._called.add(module)),
            running_modules(self.module) as self.running,
            compat.report_vmap_loops(self._note_loop),
        ):
            yield

    def _note_loop(self, operator: str) -> None:
        part = self.running[-1] if self.running else OUTSIDE
        operators = self._looped_operators.setdefault(part, [])
        if operator not in operators:  # it is listed once, however often it runs
            operators.append(operator)

    def layers(self) -> Layers:
        """Return all parts that hold tensors, contain no other part, or are looped."""
        layers = Layers()
        for path, part in self.module.named_modules():
            name = f"{path or type(part).__name__} ({type(part).__name__})"
            looped = self._looped_operators.get(name, [])
            holds_tensors = bool(part._parameters or part._buffers)
            contains_none = next(part.children(), None) is None
            if not (looped or holds_tensors or contains_none):
                continue
            if looped:
                how = _looped_text(looped)
            elif part not in self._called:
                how = "not called"
            elif isinstance(part, nn.RNNBase):
                how = "batched, step by step in time"
            else:
                how = "batched"
            layers.append(Layer(name, how, tuple(looped)))
        looped_outside = self._looped_operators.get(OUTSIDE)
        if looped_outside:
            layers.append(Layer(OUTSIDE, _looped_text(looped_outside), tuple(looped_outside)))
        return layers

    def warn(self) -> None:
        """Warn of each looped part."""
        for name, operators in self._looped_operators.items():
            warnings.warn(
                f"{name} is {_looped_text(operators)}; ensemble.layers(...) shows every layer",
                stacklevel=2,
            )


def _looped_text(operators: list[str]) -> str:
    return f"looped over the members, because torch has no batched form of {', '.join(operators)}"


# For a part of torch's message: what is wrong, and what to do.
_REASONS = {
    "data-dependent control flow": "it decides by a tensor's value, which members may differ in: use torch.where",
    ".item()": "it reads a tensor's value, which members may differ in: keep it a tensor",
    "dynamic shape": "the shape of what it computes depends on values, which members may differ in: use a mask",
    "randomness": "it draws random numbers by torch's generator: use nn.Dropout, or draw before",
    "requires_grad_()": "it takes a gradient as it runs: torch.func.grad has a batched form",
    "rrelu": "it draws random numbers by torch's generator: use nn.LeakyReLU, or nn.Dropout",
    "vmap: inplace arithmetic": "it writes members' values into a tensor that they share: make it a buffer",
    "return Tensors": "it returns something that is not a tensor: ask for tensors only (use_cache=False)",
    "setup_context staticmethod": "its autograd.Function lacks what torch.func needs: write setup_context, and set "
    "generate_vmap_rule = True",
    "Batching rule not implemented for": "torch has no batched form of an operator in it",
}


class CannotBatch(RuntimeError):
    """Raised by code that has no batched form although it runs for one module; the message says
    why, and what to do.
    """


def refusal(failure: BaseException, running: list[str]) -> InputRefused:
    """Return the error for a forward pass that one member can run but a batch of members cannot.

    Args:
        failure: what the batched forward pass raised.
        running: the parts of the module that were running, innermost last.
    """
    text = str(failure) or type(failure).__name__
    part = f"in {running[-1]}" if running else OUTSIDE
    if isinstance(failure, CannotBatch):
        reason = text
    else:
        known = [meaning for symptom, meaning in _REASONS.items() if symptom in text]
        meaning = known[0] if known else "torch.vmap cannot run it"
        reason = f"{meaning} ({text.splitlines()[0][:120]})"
    return InputRefused(
        f"the members cannot be batched: {part}: {reason}; or train such members one after another, each in a Resident"
    )


F = torch.nn.functional
RecurrentState = tuple[Tensor, ...]  # the hidden state [B, H], and an LSTM's cell state [B, H]
# A recurrent layer's step in time: (the input's share of the gates [B, G], the state, weight_hh,
# bias_hh, an LSTM's projection) -> the next state.
RecurrentStep = Callable[..., RecurrentState]


def _lstm(
    input_gates: Tensor,
    state: RecurrentState,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None = None,
) -> RecurrentState:
    hidden, cell = state
    into, forget, new, out = (input_gates + F.linear(hidden, weight, bias)).chunk(4, -1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    hidden = out.sigmoid() * cell.tanh()
    return hidden if projection is None else F.linear(hidden, projection), cell


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
    # For a packed sequence torch passes its rows per step before the state, so the state arrives in
    # the place of the weights.
    if not isinstance(weights, list):
        raise CannotBatch(
            "it is given a packed sequence, whose steps have different numbers of rows: give it the padded rows, and "
            "take each row's output at its last token"
        )
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    first_states = state if isinstance(state, tuple) else (state,)
    # The weights are listed layer by layer, in each layer direction by direction.
    weights_each = len(weights) // (layers * directions)
    last_states: list[RecurrentState] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = weights[index * weights_each : (index + 1) * weights_each]
            weight_ih, weight_hh, *rest = own
            if bias:
                bias_ih, bias_hh, *projection = rest
            else:
                bias_ih, bias_hh, projection = None, None, rest
            # One product gives the input's share of the gates for all steps. Only the hidden
            # state's share depends on the step before.
            gates_of_steps = F.linear(x, weight_ih, bias_ih).unbind(0)
            backwards = direction == 1
            hidden = []
            current = tuple(states[index] for states in first_states)
            for input_gates in gates_of_steps[::-1] if backwards else gates_of_steps:
                current = step(input_gates, current, weight_hh, bias_hh, *projection)
                hidden.append(current[0])
            outputs.append(torch.stack(hidden[::-1] if backwards else hidden))
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


class DropoutCounter(nn.Module):
    """A module that holds, as buffers, the two numbers by which dropout tells passes apart.

    Attributes:
        seed: the member's seed, 0-d int64.
        draw: the number of the pass, 0-d int64. Each pass drops other elements.
    """

    seed: Tensor
    draw: Tensor

    def __init__(self, seed: Tensor, draw: Tensor):
        super().__init__()
        self.register_buffer("seed", seed, persistent=False)
        self.register_buffer("draw", draw, persistent=False)


class Dropout:
    """The replacement of torch's dropout functions in a forward pass.

    keep[i] = word_i >= p 2^32,   word_i = Philox(key = seed, counter = (i, draw, site))

    Attributes:
        site: the number of calls of dropout in this pass so far.
    """

    def __init__(self, counter: DropoutCounter) -> None:
        self._counter = counter
        self.site = 0

    def keep_mask(self, shape: tuple[int, ...], rate: float | Tensor) -> Tensor:
        """Return which elements are kept, bool of that shape, and count this call as a site."""
        size = math.prod(shape)
        site = self.site
        seed = self._counter.seed
        draw = self._counter.draw
        self.site += 1
        # Philox gives four words for each counter: element i has word i mod 4 of counter i // 4.
        block_count = -(-size // 4)  # size / 4, rounded up
        blocks = torch.arange(block_count, device=seed.device)
        zero = torch.zeros_like(blocks)
        counter = (blocks, zero + (draw & LOW32), zero + site, zero + (draw >> 32 & LOW32))
        key = (zero + (seed & LOW32), zero + (seed >> 32 & LOW32))
        words = torch.stack(philox(counter, key), -1).flatten()[:size].view(shape)
        threshold = (_as_tensor(rate, zero) * 2.0**32).to(torch.int64)
        return words >= threshold

    def apply(
        self, hidden: Tensor, rate: float | Tensor, mask: tuple[int, ...], inplace: bool = False
    ) -> Tensor:
        """Return `hidden` with dropped elements at zero and the others divided by 1 - p.

        Args:
            hidden: any shape.
            rate: p, a number or a 0-d tensor.
            mask: the mask's shape, which broadcasts to that of `hidden`.
            inplace: whether to write the result into `hidden`.
        """
        if not isinstance(rate, Tensor) and rate == 0:
            # The site is counted, as another member may have a higher rate here. Its later sites
            # must have the same numbers.
            self.site += 1
            return hidden
        # The scale is computed in fp64 and rounded once, so that a rate in a tensor gives the same
        # bits as a number.
        scale = (1.0 / (1.0 - _as_tensor(rate, hidden))).to(hidden.dtype)
        factor = torch.where(self.keep_mask(mask, rate), scale, 0.0)
        return hidden.mul_(factor) if inplace else hidden * factor

    def apply_alpha(
        self, hidden: Tensor, rate: float, mask: tuple[int, ...], inplace: bool = False
    ) -> Tensor:
        """Return `hidden` with dropped elements at SELU's limit, scaled and shifted to keep mean 0
        and variance 1. The arguments are those of `apply`.
        """
        # The limit of SELU for very negative inputs, -lambda alpha.
        limit = -1.7580993408473766
        scale = ((1 - rate) * (1 + rate * limit**2)) ** -0.5 if rate < 1 else 0.0
        out = torch.where(self.keep_mask(mask, rate), hidden, limit) * scale - scale * limit * rate
        return hidden.copy_(out) if inplace else out

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """Return the replacements of functions of `torch.nn.functional`, by name."""

        def replacement(
            apply: Callable[..., Tensor],
            leading: int | None = None,
            trailing: int = 0,
            training_by_default: bool = True,
        ) -> Any:
            """Return a dropout function that calls `apply`.

            Args:
                apply: `self.apply` or `self.apply_alpha`.
                leading: how many first dimensions the mask has; None: all but the `trailing` ones.
                trailing: how many last dimensions the mask does not have.
                training_by_default: torch's default of the argument `training`.
            """

            def dropout(
                hidden: Tensor,
                p: float | Tensor = 0.5,
                training: bool = training_by_default,
                inplace: bool = False,
            ) -> Tensor:
                # Spatial dropout drops whole channels, so the mask has size 1 in the dimensions of
                # positions.
                masked = hidden.ndim - trailing if leading is None else leading
                mask = tuple(hidden.shape[:masked]) + (1,) * (hidden.ndim - masked)
                return apply(hidden, p, mask, inplace) if training else hidden

            return dropout

        return {
            "dropout": replacement(self.apply),
            # torch reads an input of dropout1d or dropout3d that has one dimension fewer as a batch
            # of one, but three dimensions in dropout2d as [N, C, L].
            "dropout1d": replacement(self.apply, trailing=1),
            "dropout2d": replacement(self.apply, leading=2),
            "dropout3d": replacement(self.apply, trailing=3),
            "alpha_dropout": replacement(self.apply_alpha, training_by_default=False),
            "feature_alpha_dropout": replacement(
                self.apply_alpha, leading=2, training_by_default=False
            ),
        }


def _as_tensor(rate: float | Tensor, like: Tensor) -> Tensor:
    """Return a rate as a tensor on the device of `like`; a number becomes 0-d fp64."""
    if isinstance(rate, Tensor):
        return rate
    return torch.full((), rate, dtype=torch.float64, device=like.device)
