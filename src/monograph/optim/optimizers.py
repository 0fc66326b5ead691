"""The optimizers: how, and with which rate and decay, each parameter is updated."""

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
from monograph.optim.formats import FORMATS, Moment
from monograph.optim.narrow import noise, stochastic
from monograph.optim.optimizer import Group, Kind, Optimizer, Rule, require_list
from monograph.optim.planes import Plane, trainable
from monograph.optim.updates import (
    adamw_,
    adamw_moments,
    ema_,
    muon_,
    muon_direction,
    muon_moments,
    newton_schulz,
)
from monograph.ranges import DECAY, NOT_NEGATIVE

ADAMW = Rule((Moment("exp_avg"), Moment("exp_avg_sq", never_negative=True)), adamw_, adamw_moments)
MUON = Rule((Moment("momentum_buffer"),), muon_, muon_moments, muon_direction, newton_schulz)


class Elementwise(Optimizer):
    """An optimizer that updates all parameters by its only rule, element by element."""

    def kinds(self, module: nn.Module) -> dict[str, Kind]:
        """Return how each trainable parameter is updated, by name.

        Raises:
            UsageError: a group matches no parameter.
        """
        [rule] = self.rules
        return kinds_of(trainable(module), rule, self)


@dataclass(frozen=True)
class AdamW(Elementwise):
    """AdamW with weight decay on matrices only; its fields are those of `Optimizer`."""

    about: ClassVar[str] = "AdamW for all weights"
    rules: ClassVar[tuple[Rule, ...]] = (ADAMW,)
    moments_each: ClassVar[float] = 2
    moments_of_matrices: ClassVar[int] = 2


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon for the matrices inside blocks, AdamW for all other parameters.

    The others are embedding, head, norm gains and biases. Both use the same learning rate, see
    `muon_`. The fields of `Optimizer` mean the same here; betas and eps are AdamW's.

    Attributes:
        momentum: Nesterov momentum of the matrices.
        embedding_lr: factor of the embedding's learning rate.
        matrices: patterns of the names of the parameters that Muon updates; None: those of
            `hidden_matrices`.
    """

    momentum: float = 0.95
    embedding_lr: float = 1.0
    matrices: Sequence[str] | None = None

    about: ClassVar[str] = "Muon for the matrices of blocks, AdamW for the rest"
    rules: ClassVar[tuple[Rule, ...]] = (ADAMW, MUON)
    # One for a block's matrix, and two for other parameters, which are about an eighth of a model.
    moments_each: ClassVar[float] = 1.125
    moments_of_matrices: ClassVar[int] = 1
    updates_matrices: ClassVar[bool] = True
    # The rate is AdamW's as the updates have the same size, but better numbers were measured for
    # two presets (dev/log.md, benchmarks/recipe.py).
    tuned: ClassVar[Mapping[str, Mapping[str, Any]]] = dict.fromkeys(
        ("nano", "micro"), {"lr": 6e-3, "momentum": 0.9, "embedding_lr": 6.0}
    )
    may_differ: ClassVar[tuple[str, ...]] = (*Optimizer.may_differ, "momentum")

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
                matches a parameter that is not a matrix.
        """
        parameters = trainable(module)
        if self.matrices is None:
            names = hidden_matrices(module)
        else:
            names = _matrices_named(parameters, self.matrices)
        if not names:
            raise UsageError(
                "muon finds no matrix inside a block, which is a module with submodules inside an nn.ModuleList or "
                'nn.Sequential: name the matrices, Muon(matrices=["*.weight"]), or use adamw'
            )
        kinds = kinds_of(parameters, ADAMW, self)
        shapes = {name: tuple(parameters[name].shape) for name in names}
        embeddings = _embeddings(module)
        for name, kind in kinds.items():
            if name in shapes:
                kinds[name] = kind._replace(
                    rule=MUON, matrix=shapes[name], betas=(self.momentum,), eps=self.eps
                )
            elif id(parameters[name]) in embeddings:
                kinds[name] = kind._replace(lr=kind.lr * self.embedding_lr)
        return kinds

    @property
    def names_parameters(self) -> bool:
        """Return whether a field has patterns of parameters' names."""
        return super().names_parameters or self.matrices is not None

    def width_factor(self, wide: Sequence[int], narrow: Sequence[int]) -> float:
        """See Optimizer."""
        # For activations to keep their size, Muon's |dW| must grow as sqrt(rows / cols). It is
        # lr * 0.2 sqrt(max(rows, cols)) already, and the second square root cancels that.
        growth = math.sqrt(wide[0] * narrow[1] / (narrow[0] * wide[1]))
        return growth * math.sqrt(max(narrow) / max(wide))


# By their names in the key `optim.name`.
OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon}


def name_of(optim: Optimizer) -> str:
    """Return an optimizer's name in the key `optim.name`."""
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


def hidden_matrices(module: nn.Module) -> list[str]:
    """Return the names of the trainable matrices in a module's `blocks`.

    These include stacks of experts' matrices, but not embeddings: an embedding's rows are looked up
    instead of multiplied, and orthogonalising its gradient would mix rows of different tokens.
    """
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


def _matrices_named(parameters: Mapping[str, nn.Parameter], patterns: Sequence[str]) -> list[str]:
    """Return the names that match a pattern, in the order of the parameters.

    Raises:
        UsageError: a pattern matches no parameter, or one that is not a matrix.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise UsageError(_no_match_message("muon's pattern", pattern, parameters))
    names = [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in names:
        dimensions = parameters[name].ndim
        if dimensions != 2:
            raise UsageError(
                f"muon updates matrices, but {name} has {dimensions} dimensions, not 2"
            )
    return names


def kinds_of(
    parameters: Mapping[str, nn.Parameter], rule: Rule, optim: Optimizer
) -> dict[str, Kind]:
    """Return the kind of each parameter, by name.

    Args:
        parameters: the parameters by name.
        rule: the rule of all kinds.
        optim: the optimizer, for its numbers and groups.

    Raises:
        UsageError: a group matches no parameter.
    """
    groups = optim.groups
    unmatched = {group.pattern for group in groups}
    kinds: dict[str, Kind] = {}
    for name, parameter in parameters.items():
        # The first match counts, so that an exception is written before its rule.
        group = next((group for group in groups if fnmatchcase(name, group.pattern)), Group("*"))
        unmatched.discard(group.pattern)
        # By name too, because the biases of all experts are one matrix.
        is_vector = parameter.ndim < 2 or name.endswith(".bias")
        if group.weight_decay is not None:
            decay = group.weight_decay
        else:
            # Gains and biases are not decayed: pulling a gain to zero shrinks activations without
            # regularising them.
            decay = 0.0 if is_vector else optim.weight_decay
        eps = optim.eps * group.eps
        kinds[name] = Kind(rule, group.lr, decay, optim.betas, eps, vector=is_vector)
    if unmatched:
        raise UsageError(_no_match_message("the optimizer's group", min(unmatched), parameters))
    return kinds


def _no_match_message(what: str, pattern: str, parameters: Mapping[str, nn.Parameter]) -> str:
    return (
        f"{what} {pattern!r} matches no trainable parameter that is not another's already; "
        f"names are such as {next(iter(parameters))!r}"
    )
