"""Define the optimizers: they say which parameter is updated in which way, and with which rate and
decay.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.experts import ExpertLinear
from monograph.graph.inspect import blocks
from monograph.optim.formats import FORMATS
from monograph.optim.narrow import noise, stochastic
from monograph.optim.optimizer import Group, Kind, Optimizer, Rule, require_list
from monograph.optim.planes import Plane, trainable
from monograph.optim.rules import ADAMW, MUON
from monograph.optim.updates import ema_
from monograph.ranges import DECAY, NOT_NEGATIVE


@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW with weight decay on matrices only; its fields are those of `Optimizer`."""

    moments_each: ClassVar[float] = 2
    moments_of_matrices: ClassVar[int] = 2

    def kinds(self, module: nn.Module) -> dict[str, Kind]:
        """Return how each trainable parameter is updated, by name.

        Raises:
            UsageError: a group matches no parameter.
        """
        return kinds_of(trainable(module), ADAMW, self.weight_decay, self.groups)


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon for the matrices inside blocks, AdamW for all other parameters: embedding, head, norm
    gains, biases.

    Both take the same learning rate: see `muon_`. Fields that `Optimizer` has mean the same here;
    betas and eps are for the other parameters.

    Attributes:
        momentum: Nesterov momentum of the matrices.
        embedding_lr: factor of the embedding's learning rate.
        matrices: patterns of the names of the parameters that Muon takes; None: `hidden_matrices`.
    """

    momentum: float = 0.95
    embedding_lr: float = 1.0
    matrices: Sequence[str] | None = None

    # One for a block's matrix, and two for other parameters, which are about an eighth of a model.
    moments_each: ClassVar[float] = 1.125
    moments_of_matrices: ClassVar[int] = 1
    updates_matrices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse values outside their range, each in one line."""
        super().__post_init__()
        DECAY.require("momentum", self.momentum)
        NOT_NEGATIVE.require("embedding_lr", self.embedding_lr)
        require_list(
            "matrices", self.matrices or (), str, "patterns of names, such as ['*.weight']"
        )

    def kinds(self, module: nn.Module) -> dict[str, Kind]:
        """Return how each trainable parameter is updated, by name.

        Raises:
            UsageError: there is no matrix, a pattern or group matches no parameter, or a pattern
                matches a parameter that is no matrix.
        """
        parameters = trainable(module)
        names = (
            hidden_matrices(module) if self.matrices is None else _named(parameters, self.matrices)
        )
        if not names:
            raise UsageError(
                "muon finds no matrix inside a block, which is a module with parts inside an nn.ModuleList or "
                'nn.Sequential: name the matrices, Muon(matrices=["*.weight"]), or use adamw'
            )
        kinds = kinds_of(parameters, ADAMW, self.weight_decay, self.groups)
        shapes = {name: tuple(parameters[name].shape) for name in names}
        embeddings = _embeddings(module)
        for name, kind in kinds.items():
            if name in shapes:
                kinds[name] = kind._replace(
                    rule=MUON, matrix=shapes[name], momentum=self.momentum, eps=1.0
                )
            elif id(parameters[name]) in embeddings:
                kinds[name] = kind._replace(lr=kind.lr * self.embedding_lr)
        return kinds


# By their values of the key `optim.name`.
OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon}


def name_of(optim: Optimizer) -> str:
    """Return an optimizer's value of the key `optim.name`."""
    return next(name for name, kind in OPTIMIZERS.items() if type(optim) is kind)


def checked(optim: Optimizer) -> Optimizer:
    """Return the optimizer, if it is one.

    Raises:
        UsageError: it is another object.
    """
    if not isinstance(optim, Optimizer):
        raise UsageError(
            f"optim is a {type(optim).__name__}: expected monograph.AdamW(...) or monograph.Muon(...)"
        )
    return optim


def initialise(plane: Plane, optim: Optimizer) -> None:
    """Give the plane its state: zero moments, and the average, which equals the weights before the
    first update.
    """
    for name in plane.kind.rule.moments:
        plane.state |= FORMATS[optim.state].zeros(plane.grad, name, plane.before)
    if optim.ema is not None:
        # It is copied, as an average that is a view of the weights would move with them.
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
    """Update a plane in the way of its kind, matrices of one shape all at once, and the average
    after it.

    `grad` [size] is the clipped mean gradient; `lr`, `applied`, `accepted` and `compute` are those
    of the functions in `monograph.optim.updates`. For a stack of N modules, `grad` is [N, size],
    and the next three are [N], as knobs may be. Buffers in fewer bits are unpacked before and
    packed again afterwards.
    """
    kind = plane.kind
    state = plane.state
    form = FORMATS[optim.state]
    # All arithmetic is in the gradient's dtype, so that one formula serves every form of the state.
    moments = {
        name: form.unpack(state, name, grad.dtype, plane.before) for name in kind.rule.moments
    }
    param = plane.param.to(grad.dtype)
    stacks = [param, grad, *moments.values()]
    if kind.matrix is not None and plane.orthogonal is None:
        stacks = [_matrices(flat, plane) for flat in stacks]
    over = functools.partial(_over, stacks[0])
    kind.rule.update_(
        *stacks,
        kind=kind,
        optim=optim,
        lr=over(lr * kind.lr),
        weight_decay=over(kind.weight_decay),
        applied=over(applied),
        accepted=over(accepted),
        compute=compute,
        orthogonal=plane.orthogonal,
        over=over,
    )
    # Words 1 and 2 round the moments, word 0 the weights, as roundings of one update must be
    # independent.
    words = (
        noise(param, optim.seed, applied, plane.number, plane.start) if form.stochastic else None
    )
    for number, (name, values) in enumerate(moments.items(), start=1):
        word = None if words is None else words[number]
        form.pack_(state, name, values, accepted, word, plane.before, plane.ends.get(name))
    if words is not None and not optim.master_weights:
        plane.param.copy_(stochastic(param, words[0]))
    if optim.ema is not None:
        average = state["ema"]
        of_members = {"applied": _over(average, applied), "accepted": _over(average, accepted)}
        ema_(average, plane.param.to(average.dtype), decay=optim.ema, **of_members)


def _matrices(flat: Tensor, plane: Plane) -> Tensor:
    """Return a plane of matrices or stacks of one shape as [..., slots, *shape], without the zeros
    between them.
    """
    shape = plane.kind.matrix or ()
    matrices: Tensor = flat.unflatten(-1, (len(plane.slots), -1))[
        ..., : math.prod(shape)
    ].unflatten(-1, shape)
    return matrices


def _over(stack: Tensor, knob: object) -> Any:
    """Return a knob, which may have a value for each member [N], in a shape that broadcasts against
    [N, ...].
    """
    return (
        knob.view(-1, *[1] * (stack.ndim - 1)) if isinstance(knob, Tensor) and knob.ndim else knob
    )


def hidden_matrices(module: nn.Module) -> list[str]:
    """Return the names of trainable matrices and stacks of experts' matrices in a module's
    `blocks`, not embeddings.
    """
    # An embedding's rows are looked up, not multiplied, and orthogonalising its gradient would mix
    # rows of different tokens.
    inside = {id(p) for block in blocks(module).values() for p in block.parameters()}
    experts = [m for m in module.modules() if isinstance(m, ExpertLinear)]
    stacks = {id(p) for m in experts for p in m.parameters(recurse=False)}
    biases = {id(m.bias) for m in experts}
    matrices = {id(p) for p in module.parameters() if p.ndim == 2 or id(p) in stacks} - biases
    hidden = (inside - _embeddings(module)) & matrices
    return [name for name, p in module.named_parameters() if id(p) in hidden and p.requires_grad]


def _embeddings(module: nn.Module) -> set[int]:
    return {
        id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
    }


def _named(parameters: Mapping[str, nn.Parameter], patterns: Sequence[str]) -> list[str]:
    if idle := [
        pattern
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in parameters)
    ]:
        raise UsageError(_matches_none("muon's pattern", idle[0], parameters))
    names = [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if odd := [name for name in names if parameters[name].ndim != 2]:
        raise UsageError(
            f"muon updates matrices, but {odd[0]} has {parameters[odd[0]].ndim} dimensions, not 2"
        )
    return names


def kinds_of(
    parameters: Mapping[str, nn.Parameter], rule: Rule, weight_decay: float, groups: Sequence[Group]
) -> dict[str, Kind]:
    """Return how each parameter is updated by one rule, by name, with the rates and decays of
    groups.

    Raises:
        UsageError: a group matches no parameter.
    """
    idle = {group.pattern for group in groups}
    kinds: dict[str, Kind] = {}
    for name, parameter in parameters.items():
        # The first match counts, so that an exception is written before its rule.
        group = next((group for group in groups if fnmatchcase(name, group.pattern)), Group("*"))
        idle.discard(group.pattern)
        # Gains and biases are not decayed: pulling a gain to zero shrinks activations without
        # regularising them.
        vector = parameter.ndim < 2 or name.endswith(".bias")  # experts' biases are in one tensor
        usual = 0.0 if vector else weight_decay
        decay = usual if group.weight_decay is None else group.weight_decay
        kinds[name] = Kind(rule, group.lr, decay, eps=group.eps, vector=vector)
    if idle:
        raise UsageError(_matches_none("the optimizer's group", min(idle), parameters))
    return kinds


def _matches_none(what: str, pattern: str, parameters: Mapping[str, nn.Parameter]) -> str:
    return (
        f"{what} {pattern!r} matches no trainable parameter that is not another's already; "
        f"names are such as {next(iter(parameters))!r}"
    )
