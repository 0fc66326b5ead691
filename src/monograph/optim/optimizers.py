"""The optimizers that a step takes: which parameter is updated in which way, with which rate and decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.optim.planes import Kind, Plane, trainable
from monograph.optim.updates import adamw_, muon_

BLOCKS = nn.ModuleList, nn.Sequential


@dataclass(frozen=True)
class Group:
    """Parameters, by the pattern of their names, that have a learning rate or a weight decay of their own.

    Attributes:
        pattern: as of a shell: "lm_head.*", "*.bias"; a star crosses dots. The first group that matches counts.
        lr: factor of the optimizer's learning rate.
        weight_decay: instead of the optimizer's; None leaves it: the optimizer's for matrices, none for the rest.
    """

    pattern: str
    lr: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class AdamW:
    """AdamW with weight decay on matrices only. The defaults are the usual ones for pretraining small language models.

    Attributes:
        lr: peak learning rate; a schedule multiplies it.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of parameters with two dimensions or more.
        groups: parameters with a rate or a decay of their own.
        ema: decay of a moving average of the weights, which evaluation then uses; None for no average.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    groups: Sequence[Group] = ()
    ema: float | None = None

    def kinds(self, module: nn.Module) -> dict[str, Kind]:
        """How each trainable parameter is updated.

        Raises:
            UsageError: a group that matches none.
        """
        return _kinds(trainable(module), self.weight_decay, self.groups)

    def initialise(self, plane: Plane) -> None:
        """Give the plane its state: both moments, zero."""
        _initialise_adamw(plane)

    def update_(
        self, plane: Plane, grad: Tensor, *, lr: Tensor, applied: Tensor, accepted: Tensor, compute: torch.dtype
    ) -> None:
        """Apply `adamw_` to the plane with `grad` [size], the clipped mean gradient; it has no products to compute."""
        _update_adamw(plane, grad, lr, applied, accepted, self.betas, self.eps)


@dataclass(frozen=True)
class Muon:
    """Muon for the matrices inside blocks, AdamW for the rest: embedding, head, norm gains, biases.

    Both take the same learning rate: see `muon_`. Attributes that `AdamW` has mean the same here.

    Attributes:
        lr: peak learning rate.
        momentum: of the matrices, Nesterov.
        betas: decay rates of the moments of the rest.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of parameters with two dimensions or more.
        groups: parameters with a rate or a decay of their own.
        ema: decay of a moving average of the weights.
        matrices: patterns of the names of the parameters that Muon takes; None: `hidden_matrices`.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    groups: Sequence[Group] = ()
    ema: float | None = None
    matrices: Sequence[str] | None = None

    def kinds(self, module: nn.Module) -> dict[str, Kind]:
        """How each trainable parameter is updated.

        Raises:
            UsageError: no matrix is found, a pattern or a group matches none, or a pattern one that is no matrix.
        """
        parameters = trainable(module)
        names = hidden_matrices(module) if self.matrices is None else _named(parameters, self.matrices)
        if not names:
            raise UsageError(
                "muon finds no matrix inside a block, which is a module with parts inside an nn.ModuleList or "
                'nn.Sequential: name the matrices, Muon(matrices=["*.weight"]), or use adamw'
            )
        return _kinds(parameters, self.weight_decay, self.groups, names)

    def initialise(self, plane: Plane) -> None:
        """Give the plane its state, zero: the momentum of matrices, both moments of the rest."""
        if plane.kind.matrix:
            plane.state = {"momentum_buffer": torch.zeros_like(plane.param)}
        else:
            _initialise_adamw(plane)

    def update_(
        self, plane: Plane, grad: Tensor, *, lr: Tensor, applied: Tensor, accepted: Tensor, compute: torch.dtype
    ) -> None:
        """Apply `muon_` (all matrices of the plane's shape at once) or `adamw_` to the plane, with `grad` [size]."""
        if plane.kind.matrix is None:
            _update_adamw(plane, grad, lr, applied, accepted, self.betas, self.eps)
            return
        stacked = (-1, *plane.kind.matrix)
        muon_(
            plane.param.view(stacked),
            grad.view(stacked),
            plane.state["momentum_buffer"].view(stacked),
            lr=lr * plane.kind.lr,
            accepted=accepted,
            momentum=self.momentum,
            weight_decay=plane.kind.weight_decay,
            compute=compute,
        )


Optimizer = AdamW | Muon


def hidden_matrices(module: nn.Module) -> list[str]:
    """The matrices of a module's blocks: what stands between its embedding and its head.

    A block is a module that has parts and lies in an `nn.ModuleList` or `nn.Sequential`; of its trainable parameters
    those with two dimensions count, but not those of an embedding.
    """
    holders = [holder for holder in module.modules() if isinstance(holder, BLOCKS)]
    blocks = [child for holder in holders for child in holder if next(child.children(), None) is not None]
    inside = {id(p) for block in blocks for p in block.parameters()}
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    hidden = inside - embeddings
    return [name for name, p in module.named_parameters() if id(p) in hidden and p.ndim == 2 and p.requires_grad]


def _named(parameters: Mapping[str, nn.Parameter], patterns: Sequence[str]) -> list[str]:
    if idle := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in parameters)]:
        raise UsageError(_matches_none("muon's pattern", idle[0], parameters))
    names = [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if odd := [name for name in names if parameters[name].ndim != 2]:
        raise UsageError(f"muon updates matrices, but {odd[0]} has {parameters[odd[0]].ndim} dimensions, not 2")
    return names


def _kinds(
    parameters: Mapping[str, nn.Parameter], weight_decay: float, groups: Sequence[Group], matrices: Sequence[str] = ()
) -> dict[str, Kind]:
    idle, kinds, hidden = {group.pattern for group in groups}, dict[str, Kind](), {*matrices}
    for name, parameter in parameters.items():
        group = next((group for group in groups if fnmatchcase(name, group.pattern)), Group("*"))
        idle.discard(group.pattern)
        usual = weight_decay if parameter.ndim >= 2 else 0.0
        decay = usual if group.weight_decay is None else group.weight_decay
        matrix = (parameter.shape[0], parameter.shape[1]) if name in hidden else None
        kinds[name] = Kind(group.lr, decay, matrix)
    if idle:
        raise UsageError(_matches_none("the optimizer's group", min(idle), parameters))
    return kinds


def _matches_none(what: str, pattern: str, parameters: Mapping[str, nn.Parameter]) -> str:
    return (
        f"{what} {pattern!r} matches no trainable parameter that is not another's already; "
        f"names are such as {next(iter(parameters))!r}"
    )


def _initialise_adamw(plane: Plane) -> None:
    plane.state = {name: torch.zeros_like(plane.param) for name in ("exp_avg", "exp_avg_sq")}


def _update_adamw(
    plane: Plane,
    grad: Tensor,
    lr: Tensor,
    applied: Tensor,
    accepted: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    adamw_(
        plane.param,
        grad,
        plane.state["exp_avg"],
        plane.state["exp_avg_sq"],
        lr=lr * plane.kind.lr,
        applied=applied,
        accepted=accepted,
        betas=betas,
        eps=eps,
        weight_decay=plane.kind.weight_decay,
    )
