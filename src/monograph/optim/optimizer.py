"""What an optimizer is: its numbers, the kinds into which it sorts parameters, and the rule that
updates each kind.
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

Knob = float | Tensor  # a number, or one for each member of a stack: [N], fp64


class Kind(NamedTuple):
    """A way to update parameters; those of one kind share a plane.

    Attributes:
        rule: the formula.
        lr: factor of the optimizer's learning rate.
        weight_decay: decoupled decay.
        matrix: (rows, cols) of a matrix that is updated as a whole, or (matrices, rows, cols) of a
            stack; None: each element is updated for itself.
        momentum: Muon's.
        eps: factor of the optimizer's eps.
        vector: whether it has one dimension or none, as gains and biases have.
    """

    rule: Rule
    lr: Knob
    weight_decay: Knob
    matrix: tuple[int, ...] | None = None
    momentum: Knob = 0.0
    eps: Knob = 1.0
    vector: bool = False


class Rule(ABC):
    """A formula that updates parameters in place, and the moments that it keeps of them.

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
            grad: the mean gradient after clipping, same shape.
            moments: same shape, in the order of the rule's `moments`.
            kind: the parameters' kind.
            optim: the optimizer, for its numbers.
            lr: the learning rate of this kind; it broadcasts against `param`, as the next four do.
            weight_decay: the decoupled decay.
            applied: the number of updates applied, this one included, int64.
            accepted: whether the update is made, bool.
            compute: the dtype of matrix products, if the rule has any.
            orthogonal: what `newton_schulz` gives of the direction, where it is known; then `param`
                is [size].
            over: gives one of the optimizer's numbers, which may differ between the members of a
                stack, in a shape that broadcasts against `param`.
        """

    @abstractmethod
    def next_moments(
        self, grad: Tensor, moments: Sequence[Tensor], kind: Kind, optim: Optimizer
    ) -> Sequence[Tensor]:
        """Return the moments after an update by `grad`, of which ranks agree on the largest numbers
        of 8-bit blocks.
        """

    def direction(self, grad: Tensor, moments: Sequence[Tensor], kind: Kind) -> Tensor:
        """Return what is orthogonalised, for a rule whose kinds have a `matrix`."""
        raise NotImplementedError(f"{type(self).__name__} updates element by element")


@dataclass(frozen=True)
class Group:
    """Parameters, by a pattern of their names, that have a learning rate, weight decay or eps of
    their own.

    Attributes:
        pattern: a pattern as in a shell: "lm_head.*", "*.bias"; a star matches dots, too. The first
            group that matches a name counts.
        lr: factor of the optimizer's learning rate.
        weight_decay: the decay of these parameters; None: the optimizer's for matrices, none for
            other parameters.
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
class Optimizer(ABC):
    """What every optimizer has. The defaults are the usual ones for pretraining small language
    models.

    To add an optimizer, write its `Rule` in `monograph.optim.rules`, its class in
    `OPTIMIZERS` of `monograph.optim.optimizers`, and name it in the key `optim.name`.

    Attributes:
        lr: peak learning rate; a schedule multiplies it. With 0 no weight changes.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of parameters with two dimensions or more.
        groups: parameters with a rate or a decay of their own.
        ema: decay of a moving average of the weights, which evaluation then uses; None for no
            average.
        state: the form in which moments are kept; the update computes in the gradient's dtype in
            any case. "fp32": exact, 8 bytes a parameter (in the parameters' dtype, to be precise).
            "bf16": stochastically rounded, 4 bytes; 8 bits of a moment are left, which are right on
            average. "8bit": codes in blocks of 256, 2 bytes; errors up to 1 % of a block's largest
            moment, not random.
        master_weights: whether weights keep their dtype. False, which goes with the state "bf16"
            alone, rounds them stochastically to bf16: a weight moves by 2^-8 of itself or not at
                all.
        seed: the seed of stochastic rounding.

    Of a class, for plans and defaults:
        moments_each: how many moments it keeps of a parameter, in the mean over a language model.
        moments_of_matrices: how many it keeps of a matrix of a block, and so of adapters.
        updates_matrices: whether it updates the matrices of blocks as a whole.
        rate_factor: its usual learning rate over AdamW's.
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
            UsageError: a group matches no parameter, or the module has nothing that the optimizer
                needs.
        """


def _require_ranges(optim: Optimizer) -> None:
    NOT_NEGATIVE.require("lr", optim.lr)
    NOT_NEGATIVE.require("weight_decay", optim.weight_decay)
    # Tensors come from an ensemble, whose members' own optimizers were checked.
    two = isinstance(optim.betas, tuple | list) and len(optim.betas) == 2
    if not two or not all(isinstance(beta, Tensor) or DECAY.holds(beta) for beta in optim.betas):
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
    """Refuse what is no list of `kind`, in words."""
    if (
        isinstance(values, str)
        or not isinstance(values, Iterable)
        or not all(isinstance(v, kind) for v in values)
    ):
        raise UsageError(f"{name} = {values!r}: expected a list of {words}")
