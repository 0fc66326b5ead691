"""Base classes of optimizers: their numbers, the kinds of parameters, and the rules that update them.

An optimizer sorts parameters into kinds, and each kind has a rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.optim.formats import FORMATS
from monograph.ranges import ABOVE_0, DECAY, FRACTION, NOT_NEGATIVE

Knob = float | Tensor  # a number, or [N] fp64 with one for each member of a stack


class Kind(NamedTuple):
    """A way to update parameters; parameters of one kind share a plane.

    Attributes:
        rule: the formula.
        lr: factor of the optimizer's learning rate.
        weight_decay: decoupled decay.
        matrix: (rows, cols) of a matrix that is updated as a whole, or (matrices, rows, cols) of a
            stack; None: each element is updated separately.
        momentum: Muon's momentum.
        eps: factor of the optimizer's eps.
        vector: whether the parameters have at most one dimension, such as gains and biases.
    """

    rule: Rule
    lr: Knob
    weight_decay: Knob
    matrix: tuple[int, ...] | None = None
    momentum: Knob = 0.0
    eps: Knob = 1.0
    vector: bool = False


class Rule(ABC):
    """A formula that updates parameters in place, and the moments that it keeps.

    Attributes:
        moments: the moments' names, as in a checkpoint and in torch.optim.
    """

    moments: tuple[str, ...]
    _all_moments: ClassVar[dict[str, None]] = {}  # a set in the order in which they came

    def __init_subclass__(cls) -> None:
        """Note the names of the new rule's moments."""
        super().__init_subclass__()
        cls._all_moments.update(dict.fromkeys(cls.moments))

    @staticmethod
    def all_moments() -> tuple[str, ...]:
        """Return the names of the moments of all rules, including those that a user has written."""
        return tuple(Rule._all_moments)

    @abstractmethod
    def update_(
        self,
        param: Tensor,
        grad: Tensor,
        *moments: Tensor,
        kind: Kind,
        optim: Optimizer,
        lr: Tensor,
        weight_decay: Knob,
        applied: Tensor,
        accepted: Tensor,
        compute: torch.dtype,
        orthogonal: Tensor | None,
        over: Callable[[Any], Any],
    ) -> None:
        """Update parameters and moments; nothing changes where `accepted` is false.

        Args:
            param: [size], or [matrices, rows, cols] if the kind has a `matrix`.
            grad: the mean gradient after clipping, of the same shape.
            moments: of the same shape, in the order of the rule's `moments`.
            kind: the parameters' kind.
            optim: the optimizer, for its numbers.
            lr: the learning rate of this kind; broadcasts against `param`.
            weight_decay: the decoupled decay; broadcasts against `param`.
            applied: the number of updates applied, including this one, int64; broadcasts.
            accepted: whether the update is made, bool; broadcasts.
            compute: the dtype of the rule's matrix products, if it has any.
            orthogonal: what `newton_schulz` makes of the direction, if it was computed before; then
                `param` is [size]. None otherwise.
            over: maps one of the optimizer's numbers, which may differ between the members of a
                stack, to a shape that broadcasts against `param`.
        """

    @abstractmethod
    def next_moments(
        self, grad: Tensor, moments: Sequence[Tensor], kind: Kind, optim: Optimizer
    ) -> Sequence[Tensor]:
        """Return the moments after an update by `grad`, without changing any.

        Ranks need them to agree on the largest number of each 8-bit block.
        """

    def direction(self, grad: Tensor, moments: Sequence[Tensor], kind: Kind) -> Tensor:
        """Return the matrices to orthogonalise, for a rule whose kinds have a `matrix`."""
        raise NotImplementedError(f"{type(self).__name__} updates element by element")


@dataclass(frozen=True)
class Group:
    """Parameters that have their own learning rate, weight decay or eps.

    Attributes:
        pattern: a pattern of names as in a shell, such as "lm_head.*" or "*.bias"; a star matches
            dots too. The first group that matches a name counts.
        lr: factor of the optimizer's learning rate.
        weight_decay: the decay of these parameters; None: the optimizer's decay for matrices, 0 for
            other parameters.
        eps: factor of the optimizer's eps; Muon's matrices have no eps.
    """

    pattern: str
    lr: float = 1.0
    weight_decay: float | None = None
    eps: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a pattern that is not a text, and numbers outside their range."""
        if not isinstance(self.pattern, str):
            raise UsageError(f"pattern = {self.pattern!r}: expected a text such as '*.bias'")
        NOT_NEGATIVE.require(f"lr of the group {self.pattern!r}", self.lr)
        ABOVE_0.require(f"eps of the group {self.pattern!r}", self.eps)
        if self.weight_decay is not None:
            NOT_NEGATIVE.require(f"weight_decay of the group {self.pattern!r}", self.weight_decay)


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base class of optimizers; the defaults are usual for pretraining small language models.

    To add an optimizer, write its `Rule` in `monograph.optim.rules`, its class in
    `OPTIMIZERS` of `monograph.optim.optimizers`, and name it in the key `optim.name`.

    Attributes:
        lr: peak learning rate; a schedule multiplies it. With 0 no weight changes.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of parameters with two dimensions or more.
        groups: parameters with their own rate, decay or eps.
        ema: decay of a moving average of the weights, which evaluation then uses; None: no average.
        state: the form in which moments are kept; the update always computes in the gradient's
            dtype. "fp32": exact, in the parameters' dtype, 8 bytes a parameter in fp32. "bf16":
            stochastically rounded to 8 bits, which are right on average, 4 bytes. "8bit": codes in
            blocks of 256, 2 bytes; errors are up to 1 % of a block's largest moment, and not
            random.
        master_weights: whether weights keep their dtype. False, which needs the state "bf16",
            rounds them stochastically to bf16: a weight changes by 2^-8 of itself or not at all.
        seed: the seed of stochastic rounding.

    Class attributes, for plans and defaults:
        moments_each: moments kept of a parameter, in the mean over a language model.
        moments_of_matrices: moments kept of a block's matrix, and so of adapters.
        updates_matrices: whether the matrices of blocks are updated as a whole.
        rate_factor: the usual learning rate, divided by AdamW's.
    """

    lr: float = 1e-3
    betas: tuple[Knob, Knob] = (0.9, 0.95)
    eps: Knob = 1e-8
    weight_decay: float = 0.1
    groups: Sequence[Group] = ()
    ema: float | None = None
    state: str = "fp32"
    master_weights: bool = True
    seed: int = 0

    moments_each: ClassVar[float]
    moments_of_matrices: ClassVar[int]
    updates_matrices: ClassVar[bool] = False
    rate_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        """Refuse values outside their range, each in one line."""
        _require_ranges(self)

    @abstractmethod
    def kinds(self, module: nn.Module) -> dict[str, Kind]:
        """Return how each trainable parameter is updated, by name.

        Raises:
            UsageError: a group matches no parameter, or the module lacks what the optimizer needs.
        """


def _require_ranges(optim: Optimizer) -> None:
    NOT_NEGATIVE.require("lr", optim.lr)
    NOT_NEGATIVE.require("weight_decay", optim.weight_decay)
    # Numbers that are tensors come from an ensemble, whose members' own optimizers were checked.
    is_pair = isinstance(optim.betas, tuple | list) and len(optim.betas) == 2
    if not is_pair or not all(
        isinstance(beta, Tensor) or DECAY.holds(beta) for beta in optim.betas
    ):
        raise UsageError(f"betas = {optim.betas!r}: expected two numbers, 0 or more and below 1")
    if not isinstance(optim.eps, Tensor):
        ABOVE_0.require("eps", optim.eps)
    if optim.ema is not None and not FRACTION.holds(optim.ema):
        raise UsageError(
            f"ema = {optim.ema!r}: expected a decay between 0 and 1, or None for no average"
        )
    if optim.state not in FORMATS:
        raise UsageError(f"state = {optim.state!r}: expected one of {', '.join(FORMATS)}")
    if not optim.master_weights and optim.state != "bf16":
        raise UsageError(
            f"master_weights = False keeps weights in bf16: its state is bf16, not {optim.state}"
        )
    require_list("groups", optim.groups, Group, "monograph.Group(...)")


def require_list(name: str, values: object, kind: type, words: str) -> None:
    """Refuse values that are not a list of `kind`.

    Args:
        name: what the values are called in the message.
        values: the values.
        kind: the class of each value.
        words: what the message calls this class.

    Raises:
        UsageError: `values` is not such a list.
    """
    if (
        isinstance(values, str)
        or not isinstance(values, Iterable)
        or not all(isinstance(value, kind) for value in values)
    ):
        raise UsageError(f"{name} = {values!r}: expected a list of {words}")
