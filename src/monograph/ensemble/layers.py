"""Tell how members' layers run, and why where they cannot run as one; make recurrent layers and
dropout run as one.

Recurrent layers are loops over time, which vmap can batch over members; it cannot batch torch's own
kernels. Dropout needs no random generator: a mask is a pure function of (seed, draw, site,
element). So a member of an ensemble drops the same elements as when trained alone, and so does a
repeated pass.

Shapes: T time, B batch, I inputs, H hidden, L layers times directions.
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
    """The parts in their order; `str` gives a table with a line for each."""

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self), default=0)
        return "\n".join(f"{layer.name:{width}}  {layer.how}" for layer in self)


class Watch:
    """An observer of a forward pass.

    Attributes:
        where: the names of the parts that are running, innermost last; after an error, those that
            were running.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.where = list[str]()
        self._called = set[nn.Module]()
        self._looped = dict[str, list[str]]()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """In the block, observe what runs."""
        with (
            register_module_forward_pre_hook(lambda module, _: self._called.add(module)),
            running_modules(self.module) as self.where,
            compat.report_vmap_loops(self._tell),
        ):
            yield

    def _tell(self, operator: str) -> None:
        operators = self._looped.setdefault(self.where[-1] if self.where else OUTSIDE, [])
        if operator not in operators:  # it is listed once, however often it runs
            operators.append(operator)

    def layers(self) -> Layers:
        """Return all parts that hold tensors, have no parts, or are looped."""
        layers = Layers()
        for path, part in self.module.named_modules():
            name = f"{path or type(part).__name__} ({type(part).__name__})"
            looped = self._looped.get(name, [])
            own = [*part._parameters, *part._buffers]
            if looped or own or next(part.children(), None) is None:
                how = "batched, step by step in time" if isinstance(part, nn.RNNBase) else "batched"
                how = how if part in self._called else "not called"
                layers.append(Layer(name, _looped(looped) if looped else how, tuple(looped)))
        if outside := self._looped.get(OUTSIDE):
            layers.append(Layer(OUTSIDE, _looped(outside), tuple(outside)))
        return layers

    def warn(self) -> None:
        """Warn of each looped part."""
        for name, operators in self._looped.items():
            warnings.warn(
                f"{name} is {_looped(operators)}; ensemble.layers(...) shows every layer",
                stacklevel=2,
            )


def _looped(operators: list[str]) -> str:
    return f"looped over the members, because torch has no batched form of {', '.join(operators)}"


# A part of torch's message, and what it means.
_REASONS = {
    "data-dependent control flow": "it decides by a tensor's value, which members may differ in: use torch.where",
    ".item()": "it reads a tensor's value, which members may differ in: keep it a tensor",
    "dynamic shape": "the shape of what it computes depends on values, which members may differ in: use a mask",
    "randomness": "it draws random numbers by torch's generator: use nn.Dropout, or draw before",
    "requires_grad_()": "it takes a gradient as it runs: torch.func.grad has a batched form",
    "rrelu": "it draws random numbers by torch's generator: use nn.LeakyReLU, or nn.Dropout",
    "vmap: inplace arithmetic": "it writes members' values into a tensor that they share: make it a buffer",
    "return Tensors": "it returns something that is no tensor: ask for none (use_cache=False)",
    "setup_context staticmethod": "its autograd.Function lacks what torch.func needs: write setup_context, and set "
    "generate_vmap_rule = True",
    "Batching rule not implemented for": "torch has no batched form of an operator in it",
}


class CannotBatch(RuntimeError):
    """Raised where code that runs alone has no batched form; the message says why, and what to do."""


def refusal(failure: BaseException, where: list[str]) -> InputRefused:
    """Return the error for a forward pass that one member can run but a batch of members cannot."""
    text = str(failure) or type(failure).__name__
    reason = next(
        (of for symptom, of in _REASONS.items() if symptom in text), "torch.vmap cannot run it"
    )
    said = text if isinstance(failure, CannotBatch) else f"{reason} ({text.splitlines()[0][:120]})"
    return InputRefused(
        f"the members cannot be batched: {f'in {where[-1]}' if where else OUTSIDE}: {said}; or train such members one "
        "after another, each in a Resident"
    )


F = torch.nn.functional
State = tuple[Tensor, ...]  # the hidden state [B, H], and an LSTM's cell state [B, H]
# (the input's share of the gates, state, weight_hh, bias_hh, ...) -> the next state.
Step = Callable[..., State]


def _lstm(
    given: Tensor, state: State, weight: Tensor, bias: Tensor | None, project: Tensor | None = None
) -> State:
    hidden, cell = state
    into, forget, new, out = (given + F.linear(hidden, weight, bias)).chunk(4, -1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    hidden = out.sigmoid() * cell.tanh()
    return hidden if project is None else F.linear(hidden, project), cell


def _gru(given: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (hidden,) = state
    ours = given.chunk(3, -1)
    theirs = F.linear(hidden, weight, bias).chunk(3, -1)
    reset = (ours[0] + theirs[0]).sigmoid()
    keep = (ours[1] + theirs[1]).sigmoid()
    new = (ours[2] + reset * theirs[2]).tanh()
    return (new + keep * (hidden - new),)


def _rnn(
    act: Callable[[Tensor], Tensor],
    given: Tensor,
    state: State,
    weight: Tensor,
    bias: Tensor | None,
) -> State:
    return (act(given + F.linear(state[0], weight, bias)),)


def _cell(
    step: Step, x: Tensor, state: Tensor | State, weight: Tensor, *of: Tensor | None
) -> Tensor | State:
    """Run one step in time with the arguments of torch's cell kernels; `of` is weight_hh, bias_ih,
    bias_hh.
    """
    weight_hh, bias, bias_hh = (*of, None, None)[:3]
    given = F.linear(x, weight, bias)
    if isinstance(state, tuple):
        return step(given, state, weight_hh, bias_hh)
    return step(given, (state,), weight_hh, bias_hh)[0]


def _layers(
    step: Step,
    x: Tensor,
    state: Tensor | State,
    weights: list[Tensor] | Tensor | State,
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> State:
    """Return outputs [T, B, H] and last states [L, B, H] for x [T, B, I]; arguments are those of
    torch's kernels.
    """
    # For a packed sequence torch gives the numbers of its rows before the state, so the state comes
    # as the weights.
    if not isinstance(weights, list):
        raise CannotBatch(
            "it is given a packed sequence, whose steps have other numbers of rows: give it the padded rows, and take "
            "each row's output at its last token"
        )
    ends: list[State] = []
    x = x.transpose(0, 1) if batch_first else x
    directions = 1 + bidirectional
    first = state if isinstance(state, tuple) else (state,)
    per = len(weights) // (layers * directions)
    for layer in range(layers):
        outputs = []
        for backwards in range(directions):
            of_input, of_hidden, *own = weights[len(ends) * per : (len(ends) + 1) * per]
            bias_input, bias_hidden, *project = own if bias else (None, None, *own)
            # One product gives the input's share of the gates for all steps; only the hidden
            # state's share depends on the step before.
            given = F.linear(x, of_input, bias_input).unbind(0)
            hidden = []
            now = tuple(of[len(ends)] for of in first)
            for at in given[::-1] if backwards else given:
                now = step(at, now, of_hidden, bias_hidden, *project)
                hidden.append(now[0])
            outputs.append(torch.stack(hidden[::-1] if backwards else hidden))
            ends.append(now)
        x = torch.cat(outputs, -1)
        if dropout and layer < layers - 1:
            x = F.dropout(x, dropout, training)
    return x.transpose(0, 1) if batch_first else x, *(
        torch.stack(of) for of in zip(*ends, strict=True)
    )


_RNNS = {f"rnn_{act.__name__}": functools.partial(_rnn, act) for act in (torch.tanh, torch.relu)}
_STEPS: dict[str, Step] = {"lstm": _lstm, "gru": _gru, **_RNNS}
KERNELS: dict[str, Callable[..., Any]] = {
    name: functools.partial(_layers, step) for name, step in _STEPS.items()
}
KERNELS |= {f"{name}_cell": functools.partial(_cell, step) for name, step in _STEPS.items()}


class Counter(nn.Module):
    """A module whose buffers are the numbers that tell a member's passes apart.

    Attributes:
        seed: the member's seed, 0-d int64.
        draw: the number of the pass, 0-d int64; each pass drops other elements.
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

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.site = 0

    def kept(self, shape: tuple[int, ...], rate: float | Tensor) -> Tensor:
        """Return the mask of elements that stay at the next site, bool of that shape."""
        size = math.prod(shape)
        site = self.site
        seed = self._counter.seed
        draw = self._counter.draw
        self.site += 1
        # Philox gives four words for each counter: element i has word i mod 4 of counter i // 4.
        fours = torch.arange(-(-size // 4), device=seed.device)
        zero = torch.zeros_like(fours)
        counter = (fours, zero + (draw & LOW32), zero + site, zero + (draw >> 32 & LOW32))
        words = philox(counter, (zero + (seed & LOW32), zero + (seed >> 32 & LOW32)))
        return torch.stack(words, -1).flatten()[:size].view(shape) >= (
            _number(rate, zero) * 2.0**32
        ).to(torch.int64)

    def of(
        self, hidden: Tensor, rate: float | Tensor, mask: tuple[int, ...], inplace: bool = False
    ) -> Tensor:
        """Return `hidden` with dropped elements zero and others divided by 1 - p; the shape `mask`
        broadcasts to it.
        """
        if not isinstance(rate, Tensor) and rate == 0:
            self.site += 1  # other members may have a higher rate here, and count the site
            return hidden
        # It is computed in fp64 and rounded once, so that a rate in a tensor gives the same bits as
        # a number.
        scale = (1.0 / (1.0 - _number(rate, hidden))).to(hidden.dtype)
        factor = torch.where(self.kept(mask, rate), scale, 0.0)
        return hidden.mul_(factor) if inplace else hidden * factor

    def alpha(
        self, hidden: Tensor, rate: float, mask: tuple[int, ...], inplace: bool = False
    ) -> Tensor:
        """Return `hidden` with dropped elements at SELU's limit, scaled and shifted to keep mean 0
        and variance 1.
        """
        # The limit of SELU for very negative inputs, -lambda alpha.
        limit = -1.7580993408473766
        scale = ((1 - rate) * (1 + rate * limit**2)) ** -0.5 if rate < 1 else 0.0
        out = torch.where(self.kept(mask, rate), hidden, limit) * scale - scale * limit * rate
        return hidden.copy_(out) if inplace else out

    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """Return the replacements of functions of `torch.nn.functional`, by name."""

        def made(
            of: Callable[..., Tensor], kept: int | None, last: int = 0, default: bool = True
        ) -> Any:
            """Return a dropout whose mask has the first `kept` dimensions, or all but the `last`
            ones.
            """

            def dropout(
                hidden: Tensor,
                p: float | Tensor = 0.5,
                training: bool = default,
                inplace: bool = False,
            ) -> Tensor:
                # Spatial dropout drops whole channels, so the mask has size 1 in the dimensions of
                # positions.
                own = hidden.ndim - last if kept is None else kept
                mask = tuple(hidden.shape[:own]) + (1,) * (hidden.ndim - own)
                return of(hidden, p, mask, inplace) if training else hidden

            return dropout

        kinds = {"alpha_dropout": None, "feature_alpha_dropout": 2}
        alphas = {name: made(self.alpha, kept, 0, False) for name, kept in kinds.items()}
        # torch reads three dimensions in dropout2d as [N, C, L], and one fewer in the others as a
        # batch of one.
        spatial = {"dropout2d": made(self.of, 2)} | {
            f"dropout{n}d": made(self.of, None, n) for n in (1, 3)
        }
        return {"dropout": made(self.of, None)} | spatial | alphas


def _number(rate: float | Tensor, like: Tensor) -> Tensor:
    return (
        rate
        if isinstance(rate, Tensor)
        else torch.full((), rate, dtype=torch.float64, device=like.device)
    )
