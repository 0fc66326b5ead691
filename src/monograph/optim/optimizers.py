"""Define the optimizers: they say which parameter is updated in which way, and with which rate and decay."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.experts import ExpertLinear
from monograph.graph.inspect import blocks
from monograph.optim.formats import FORMATS
from monograph.optim.narrow import noise, stochastic
from monograph.optim.planes import Kind, Plane, trainable
from monograph.optim.updates import adamw_, ema_, muon_
from monograph.ranges import ABOVE_0, DECAY, FRACTION, NOT_NEGATIVE


@dataclass(frozen=True)
class Group:
    """Parameters, by a pattern of their names, that have a learning rate, weight decay or eps of their own.

    Attributes:
        pattern: a pattern as in a shell: "lm_head.*", "*.bias"; a star matches dots, too. The first group that matches
            a name counts.
        lr: factor of the optimizer's learning rate.
        weight_decay: the decay of these parameters; None: the optimizer's for matrices, none for other parameters.
        eps: factor of the optimizer's eps; Muon's matrices have no eps.
    """

    pattern: str
    lr: float = 1.0
    weight_decay: float | None = None
    eps: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a pattern that is no text, and numbers outside their range."""
        if not isinstance(self.pattern, str):
            raise UsageError(f"pattern = {self.pattern!r}: expected a text such as '*.bias'")
        NOT_NEGATIVE.require(f"lr of the group {self.pattern!r}", self.lr)
        ABOVE_0.require(f"eps of the group {self.pattern!r}", self.eps)
        if self.weight_decay is not None:
            NOT_NEGATIVE.require(f"weight_decay of the group {self.pattern!r}", self.weight_decay)


@dataclass(frozen=True)
class AdamW:
    """AdamW with weight decay on matrices only. The defaults are the usual ones for pretraining small language models.

    Attributes:
        lr: peak learning rate; a schedule multiplies it. With 0 no weight changes.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of parameters with two dimensions or more.
        groups: parameters with a rate or a decay of their own.
        ema: decay of a moving average of the weights, which evaluation then uses; None for no average.
        state: the form in which moments are kept; the update computes in the gradient's dtype in any case.
            "fp32": exact, 8 bytes a parameter (in the parameters' dtype, to be precise).
            "bf16": stochastically rounded, 4 bytes; 8 bits of a moment are left, which are right on average.
            "8bit": codes in blocks of 256, 2 bytes; errors up to 1 % of a block's largest moment, not random.
        master_weights: whether weights keep their dtype. False, which goes with the state "bf16" alone, rounds them
            stochastically to bf16: a weight moves by 2^-8 of itself or not at all.
        seed: the seed of stochastic rounding.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    groups: Sequence[Group] = ()
    ema: float | None = None
    state: str = "fp32"
    master_weights: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their range, each in one line."""
        _require_ranges(self)

    def kinds(self, module: nn.Module) -> dict[str, Kind]:
        """Return how each trainable parameter is updated, by name.

        Raises:
            UsageError: a group matches no parameter.
        """
        return _kinds(trainable(module), self.weight_decay, self.groups)


@dataclass(frozen=True)
class Muon:
    """Muon for the matrices inside blocks, AdamW for all other parameters: embedding, head, norm gains, biases.

    Both take the same learning rate: see `muon_`. Fields that `AdamW` has mean the same here; betas and eps are for the
    other parameters.

    Attributes:
        momentum: Nesterov momentum of the matrices.
        embedding_lr: factor of the embedding's learning rate.
        matrices: patterns of the names of the parameters that Muon takes; None: `hidden_matrices`.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    embedding_lr: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    groups: Sequence[Group] = ()
    ema: float | None = None
    state: str = "fp32"
    master_weights: bool = True
    seed: int = 0
    matrices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Refuse values outside their range, each in one line."""
        _require_ranges(self)
        DECAY.require("momentum", self.momentum)
        NOT_NEGATIVE.require("embedding_lr", self.embedding_lr)
        _require_list("matrices", self.matrices or (), str, "patterns of names, such as ['*.weight']")

    def kinds(self, module: nn.Module) -> dict[str, Kind]:
        """Return how each trainable parameter is updated, by name.

        Raises:
            UsageError: there is no matrix, a pattern or group matches no parameter, or a pattern matches a parameter
                that is no matrix.
        """
        parameters = trainable(module)
        names = hidden_matrices(module) if self.matrices is None else _named(parameters, self.matrices)
        if not names:
            raise UsageError(
                "muon finds no matrix inside a block, which is a module with parts inside an nn.ModuleList or "
                'nn.Sequential: name the matrices, Muon(matrices=["*.weight"]), or use adamw'
            )
        kinds = _kinds(parameters, self.weight_decay, self.groups)
        shapes = {name: tuple(parameters[name].shape) for name in names}
        embeddings = _embeddings(module)
        for name, kind in kinds.items():
            if name in shapes:
                kinds[name] = kind._replace(matrix=shapes[name], momentum=self.momentum, eps=1.0)
            elif id(parameters[name]) in embeddings:
                kinds[name] = kind._replace(lr=kind.lr * self.embedding_lr)
        return kinds


Optimizer = AdamW | Muon


def checked(optim: Optimizer) -> Optimizer:
    """Return the optimizer, if it is one.

    Raises:
        UsageError: it is another object.
    """
    if not isinstance(optim, AdamW | Muon):
        raise UsageError(f"optim is a {type(optim).__name__}: expected monograph.AdamW(...) or monograph.Muon(...)")
    return optim


def _require_ranges(optim: Optimizer) -> None:
    NOT_NEGATIVE.require("lr", optim.lr)
    NOT_NEGATIVE.require("weight_decay", optim.weight_decay)
    # Tensors come from an ensemble, whose members' own optimizers were checked.
    betas: Any = optim.betas
    eps: Any = optim.eps
    two = isinstance(betas, tuple | list) and len(betas) == 2
    if not two or not all(isinstance(beta, Tensor) or DECAY.holds(beta) for beta in betas):
        raise UsageError(f"betas = {betas!r}: expected two numbers, 0 or more and below 1")
    if not isinstance(eps, Tensor):
        ABOVE_0.require("eps", eps)
    if optim.ema is not None and not FRACTION.holds(optim.ema):
        raise UsageError(f"ema = {optim.ema!r}: expected a decay between 0 and 1, or None for no average")
    if optim.state not in FORMATS:
        raise UsageError(f"state = {optim.state!r}: expected one of {', '.join(FORMATS)}")
    if not optim.master_weights and optim.state != "bf16":
        raise UsageError(f"master_weights = False keeps weights in bf16: its state is bf16, not {optim.state}")
    _require_list("groups", optim.groups, Group, "monograph.Group(...)")


def _require_list(name: str, values: Any, kind: type, words: str) -> None:
    if isinstance(values, str) or not isinstance(values, Iterable) or not all(isinstance(v, kind) for v in values):
        raise UsageError(f"{name} = {values!r}: expected a list of {words}")


def initialise(plane: Plane, optim: Optimizer) -> None:
    """Give the plane its state: zero moments, and the average, which equals the weights before the first update."""
    for name in moments_of(plane):
        plane.state |= FORMATS[optim.state].zeros(plane.grad, name, plane.before)
    if optim.ema is not None:
        # It is copied, as an average that is a view of the weights would move with them.
        plane.state["ema"] = plane.param.to(plane.grad.dtype, copy=True)


def update_(
    plane: Plane, optim: Optimizer, grad: Tensor, *, lr: Tensor, applied: Tensor, accepted: Tensor, compute: torch.dtype
) -> None:
    """Update a plane in the way of its kind, matrices of one shape all at once, and the average after it.

    `grad` [size] is the clipped mean gradient; `lr`, `applied`, `accepted` and `compute` are those of the functions in
    `monograph.optim.updates`. For a stack of N modules, `grad` is [N, size], and the next three are [N], as knobs may
    be. Buffers in fewer bits are unpacked before and packed again afterwards.
    """
    kind = plane.kind
    state = plane.state
    form = FORMATS[optim.state]
    # All arithmetic is in the gradient's dtype, so that one formula serves every form of the state.
    moments = {name: form.unpack(state, name, grad.dtype, plane.before) for name in moments_of(plane)}
    param = plane.param.to(grad.dtype)
    stacks = [param, grad, *moments.values()]
    if kind.matrix is not None and plane.orthogonal is None:
        stacks = [_matrices(flat, plane) for flat in stacks]
    over = functools.partial(_over, stacks[0])
    shared = {"lr": over(lr * kind.lr), "accepted": over(accepted), "weight_decay": over(kind.weight_decay)}
    if kind.matrix is None:
        beta1, beta2 = optim.betas
        betas = over(beta1), over(beta2)
        adamw_(*stacks, applied=over(applied), betas=betas, eps=over(optim.eps * kind.eps), **shared)
    else:
        muon_(
            *stacks, momentum=over(kind.momentum), compute=compute, orthogonal=plane.orthogonal, sides=kind.matrix[-2:],
            **shared,
        )  # fmt: skip
    # Words 1 and 2 round the moments, word 0 the weights, as roundings of one update must be independent.
    words = noise(param, optim.seed, applied, plane.number, plane.start) if form.stochastic else None
    for number, (name, values) in enumerate(moments.items(), start=1):
        word = None if words is None else words[number]
        form.pack_(state, name, values, accepted, word, plane.before, plane.ends.get(name))
    if words is not None and not optim.master_weights:
        plane.param.copy_(stochastic(param, words[0]))
    if optim.ema is not None:
        average = state["ema"]
        of_members = {"applied": _over(average, applied), "accepted": _over(average, accepted)}
        ema_(average, plane.param.to(average.dtype), decay=optim.ema, **of_members)


def moments_of(plane: Plane) -> tuple[str, ...]:
    """Return the names of the moments that an update of the plane has."""
    return ("momentum_buffer",) if plane.kind.matrix else ("exp_avg", "exp_avg_sq")


def _matrices(flat: Tensor, plane: Plane) -> Tensor:
    """Return a plane of matrices or stacks of one shape as [..., slots, *shape], without the zeros between them."""
    shape = plane.kind.matrix or ()
    return flat.unflatten(-1, (len(plane.slots), -1))[..., : math.prod(shape)].unflatten(-1, shape)


def _over(stack: Tensor, knob: Any) -> Any:
    """Return a knob, which may have a value for each member [N], in a shape that broadcasts against [N, ...]."""
    return knob.view(-1, *[1] * (stack.ndim - 1)) if isinstance(knob, Tensor) and knob.ndim else knob


def hidden_matrices(module: nn.Module) -> list[str]:
    """Return the names of trainable matrices and stacks of experts' matrices in a module's `blocks`, not embeddings."""
    # An embedding's rows are looked up, not multiplied, and orthogonalising its gradient would mix rows of different
    # tokens.
    inside = {id(p) for block in blocks(module).values() for p in block.parameters()}
    experts = [m for m in module.modules() if isinstance(m, ExpertLinear)]
    stacks, biases = {id(p) for m in experts for p in m.parameters(recurse=False)}, {id(m.bias) for m in experts}
    matrices = {id(p) for p in module.parameters() if p.ndim == 2 or id(p) in stacks} - biases
    hidden = (inside - _embeddings(module)) & matrices
    return [name for name, p in module.named_parameters() if id(p) in hidden and p.requires_grad]


def _embeddings(module: nn.Module) -> set[int]:
    return {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}


def _named(parameters: Mapping[str, nn.Parameter], patterns: Sequence[str]) -> list[str]:
    if idle := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in parameters)]:
        raise UsageError(_matches_none("muon's pattern", idle[0], parameters))
    names = [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if odd := [name for name in names if parameters[name].ndim != 2]:
        raise UsageError(f"muon updates matrices, but {odd[0]} has {parameters[odd[0]].ndim} dimensions, not 2")
    return names


def _kinds(parameters: Mapping[str, nn.Parameter], weight_decay: float, groups: Sequence[Group]) -> dict[str, Kind]:
    idle, kinds = {group.pattern for group in groups}, dict[str, Kind]()
    for name, parameter in parameters.items():
        # The first match counts, so that an exception is written before its rule.
        group = next((group for group in groups if fnmatchcase(name, group.pattern)), Group("*"))
        idle.discard(group.pattern)
        # Gains and biases are not decayed: pulling a gain to zero shrinks activations without regularising them.
        vector = parameter.ndim < 2 or name.endswith(".bias")  # experts' biases are in one tensor
        usual = 0.0 if vector else weight_decay
        decay = usual if group.weight_decay is None else group.weight_decay
        kinds[name] = Kind(group.lr, decay, eps=group.eps, vector=vector)
    if idle:
        raise UsageError(_matches_none("the optimizer's group", min(idle), parameters))
    return kinds


def _matches_none(what: str, pattern: str, parameters: Mapping[str, nn.Parameter]) -> str:
    return (
        f"{what} {pattern!r} matches no trainable parameter that is not another's already; "
        f"names are such as {next(iter(parameters))!r}"
    )
