"""Muon: its formula, its rule, and the optimizer that applies it to the matrices of blocks."""

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
from monograph.ops.materialize import materialize
from monograph.optim.adamw import ADAMW
from monograph.optim.kinds import cast_like, kinds_of, no_match_message
from monograph.optim.optimizer import (
    Hyperparameters,
    Knob,
    Optimizer,
    ParameterKind,
    Rule,
    require_list,
)
from monograph.optim.planes import trainable
from monograph.optim.state_format import Moment
from monograph.ranges import DECAY, NOT_NEGATIVE, WHOLE

# The coefficients of Keller Jordan's quintic polynomial (https://kellerjordan.github.io/posts/muon/). It
# is so steep at 0 that five iterations are enough. Singular values then end between 0.68 and 1.21 instead
# of at 1, which does not harm training.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MIN_NORM = 1e-7  # the smallest divisor, so that zeros stay zeros
# The RMS (root mean square) of the elements of AdamW's usual update, divided by the learning rate (Liu
# et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, eq. 4).
ADAMW_RMS = 0.2


def newton_schulz(matrices: Tensor, compute: torch.dtype) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrices.

        X <- G / |G| (Frobenius);   5 times:   A = X X^T,   X <- 3.4445 X + (-4.7750 A + 2.0315 A^2) X

    With U S V^T = G / |G|, the result is U f(S) V^T. For s > 0.002, 0.68 < f(s) < 1.21; smaller
    values stay small, with f(s) ~ 3.4445^5 s. A tall G is transposed first, so that A has the
    smaller side. The divisor is at least 1e-7, so that a gradient of zeros gives zeros.

    Args:
        matrices: G, [..., rows, cols].
        compute: the dtype of the products. Norms are computed in the dtype of `matrices`.

    Returns:
        Matrices of the same shape and dtype.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    norms = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    # The iteration needs singular values of at most 1. No singular value is above the Frobenius norm.
    X = (wide / norms.clamp_min(MIN_NORM)).flatten(0, -3).to(compute)
    for _ in range(ITERATIONS):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    orthogonal: Tensor = X.to(matrices.dtype).view(wide.shape)
    return orthogonal.mT if is_tall else orthogonal


def muon_(param: Tensor, grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters) -> None:
    """Make one Muon update with Nesterov momentum, scaled to AdamW's RMS.

    Source: Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982.

        m <- mu m + (1 - mu) g          u = mu m + (1 - mu) g
        p <- p (1 - lr wd) - lr * 0.2 sqrt(max(rows, cols)) * newton_schulz(u)

    A matrix of full rank whose singular values are 1 has elements with an RMS of
    1 / sqrt(max(rows, cols)). So the update's RMS is about 0.2 lr, like that of AdamW, and one
    learning rate serves both.

    Args:
        param: matrices p of one shape, [..., rows, cols] with at least one leading dimension. If
            `hyper.orthogonal` has newton_schulz(u) already, p may be any flat part of the matrices.
        grad: g, of the same shape.
        moments: the momentum m, of the same shape.
        hyper: lr, betas (mu,) or those of `Muon.momentum_warmup`, weight_decay wd, whether it is
            accepted, the dtype of products, and the matrices' shape.
    """
    (momentum_buffer,) = moments
    m, direction = _nesterov(grad, moments, hyper)
    orthogonal = hyper.orthogonal
    if orthogonal is None:
        orthogonal = newton_schulz(direction, hyper.compute)
    decay = materialize((hyper.lr * hyper.weight_decay).to(param.dtype))
    rows_and_cols = (hyper.matrix_shape or param.shape)[-2:]
    rms_factor = ADAMW_RMS * math.sqrt(max(rows_and_cols))
    step_size = materialize((hyper.lr * rms_factor).to(param.dtype))
    new = param - (decay * param + step_size * orthogonal)
    param.copy_(torch.where(hyper.accepted, new, param))
    momentum_buffer.copy_(torch.where(hyper.accepted, m, momentum_buffer))


def muon_moments(grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters) -> tuple[Tensor]:
    """Return Muon's next momentum m; see `muon_`."""
    return (_nesterov(grad, moments, hyper)[0],)


def muon_direction(grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters) -> Tensor:
    """Return the direction u that Muon orthogonalises; see `muon_`."""
    return _nesterov(grad, moments, hyper)[1]


def _nesterov(
    grad: Tensor, moments: Sequence[Tensor], hyper: Hyperparameters
) -> tuple[Tensor, Tensor]:
    """Return the next momentum m and the direction u; see `muon_`."""
    (momentum_buffer,) = moments
    momentum = _momentum(hyper)
    m = torch.lerp(momentum_buffer, grad, cast_like(1 - momentum, grad))
    return m, torch.lerp(grad, m, cast_like(momentum, grad))


def _momentum(hyper: Hyperparameters) -> Knob:
    """Return the momentum mu of an update.

        mu_t = first + (last - first) min(1, (t - 1) / warmup)

    The betas are (last, first, warmup), or (mu,) without warm-up.
    """
    last, *warmup = hyper.betas
    if not warmup:
        return last
    first, updates = warmup
    # In an update that is not applied, t may be 0.
    share = ((hyper.applied.to(torch.float64) - 1) / updates).clamp(0, 1)
    return first + (last - first) * share


MUON = Rule(
    (Moment("momentum_buffer"),),
    muon_,
    muon_moments,
    direction=muon_direction,
    orthogonalise=newton_schulz,
)


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon for the matrices inside blocks, AdamW for all other parameters.

    The others are the embedding, the head, gains of norms and biases. Both use the same learning
    rate, see `muon_`. The fields of `Optimizer` mean the same here, and betas and eps are AdamW's.

    Attributes:
        momentum: Nesterov momentum of the matrices.
        embedding_lr: factor of the embedding's learning rate.
        matrices: patterns of the names of the parameters that Muon updates; None: those of
            `hidden_matrices`.
        first_momentum: the momentum of the first update, if it warms up.
        momentum_warmup: the number of updates over which the momentum changes linearly from
            `first_momentum` to `momentum`; 0: it is always `momentum`.
    """

    momentum: float = 0.95
    embedding_lr: float = 1.0
    matrices: Sequence[str] | None = None
    first_momentum: float = 0.85
    momentum_warmup: int = 0

    rules: ClassVar[tuple[Rule, ...]] = (ADAMW, MUON)
    updates_matrices: ClassVar[bool] = True
    # Muon's usual learning rate is that of AdamW, because updates have the same size. For two presets,
    # better values were measured (dev/log.md, benchmarks/recipe.py).
    tuned: ClassVar[Mapping[str, Mapping[str, Any]]] = dict.fromkeys(
        ("nano", "micro"), {"lr": 6e-3, "momentum": 0.9, "embedding_lr": 6.0}
    )
    may_differ: ClassVar[tuple[str, ...]] = (*Optimizer.may_differ, "momentum")

    def __post_init__(self) -> None:
        """Refuse values outside their range, each in one line."""
        super().__post_init__()
        DECAY.require("momentum", self.momentum)
        DECAY.require("first_momentum", self.first_momentum)
        WHOLE.require("momentum_warmup", self.momentum_warmup)
        NOT_NEGATIVE.require("embedding_lr", self.embedding_lr)
        require_list(
            "matrices", self.matrices or (), str, "patterns of names, such as ['*.weight']"
        )

    def kinds(self, module: nn.Module) -> dict[str, ParameterKind]:
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
        betas: tuple[float, ...] = (self.momentum,)
        if self.momentum_warmup:
            betas += (self.first_momentum, self.momentum_warmup)
        embeddings = _embeddings(module)
        for name, kind in kinds.items():
            if name in shapes:
                kinds[name] = kind._replace(
                    rule=MUON, matrix_shape=shapes[name], betas=betas, eps=self.eps
                )
            elif id(parameters[name]) in embeddings:
                kinds[name] = kind._replace(lr=kind.lr * self.embedding_lr)
        return kinds

    @property
    def moments_per_parameter(self) -> float:
        """Return how many moments a parameter has, on average over a language model."""
        # Muon has one moment and AdamW has two. About an eighth of a model's parameters are AdamW's, so
        # that the mean is 7/8 * 1 + 1/8 * 2.
        return 1.125

    @property
    def moments_per_block_matrix(self) -> int:
        """Return how many moments each element of a matrix in a block has."""
        return len(MUON.moments)

    @property
    def has_name_patterns(self) -> bool:
        """Return whether a field of this optimizer has patterns of parameters' names."""
        return super().has_name_patterns or self.matrices is not None

    def width_factor(self, wide: Sequence[int], narrow: Sequence[int]) -> float:
        """Return the factor of the learning rate for a block's matrix that is made wider."""
        # So that activations keep their size, the spectral norm of Muon's update must grow as
        # sqrt(rows / cols). Without a factor, the norm is lr * 0.2 sqrt(max(rows, cols)), so it grows
        # as sqrt(max(rows, cols)). The factor is the wanted growth divided by this one.
        growth = math.sqrt(wide[0] * narrow[1] / (narrow[0] * wide[1]))
        return growth * math.sqrt(max(narrow) / max(wide))


def hidden_matrices(module: nn.Module) -> list[str]:
    """Return the names of the trainable matrices in a module's `blocks`.

    Stacks of experts' matrices are among them. Embeddings are not, because their rows are looked up and
    not multiplied: orthogonalising a gradient would mix the rows of different tokens.
    """
    in_blocks = {id(p) for block in blocks(module).values() for p in block.parameters()}
    expert_layers = [m for m in module.modules() if isinstance(m, ExpertLinear)]
    of_experts = {id(p) for layer in expert_layers for p in layer.parameters(recurse=False)}
    # The biases of all experts are one tensor with two dimensions.
    expert_biases = {id(layer.bias) for layer in expert_layers}
    matrices = {id(p) for p in module.parameters() if p.ndim == 2 or id(p) in of_experts}
    hidden = (in_blocks & matrices) - expert_biases - _embeddings(module)
    return [name for name, p in module.named_parameters() if id(p) in hidden and p.requires_grad]


def _embeddings(module: nn.Module) -> set[int]:
    """Return the ids of the weights of a module's embeddings."""
    return {
        id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
    }


def _matrices_named(parameters: Mapping[str, nn.Parameter], patterns: Sequence[str]) -> list[str]:
    """Return the names that match a pattern, in the order of the parameters.

    Raises:
        UsageError: a pattern matches no parameter, or a parameter that is not a matrix.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise UsageError(no_match_message("muon's pattern", pattern, parameters))
    names = [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in names:
        dimensions = parameters[name].ndim
        if dimensions != 2:
            raise UsageError(
                f"muon updates matrices, but {name} has {dimensions} dimensions, not 2"
            )
    return names
