"""The type of an optimizer: its numbers, the kinds of parameters, and the rules that update them.

An optimizer sorts parameters into kinds, and each kind has a rule. All parameters of a kind are in one
flat buffer, their plane (`monograph.optim.planes`). It is [size], or [models, size] for an ensemble,
whose models are trained together as one graph. A rule's formula is a free function that changes such
tensors in place. It is the same function whether a model trains on one device, on several ranks (the
processes of distributed training), or is streamed from the host's memory. No function here reads a
tensor's value on the host, so that none waits for the device. `monograph.optim_table` lists the
optimizers and says how to add one.

Some fields below are only for ranks that share out the rows of parameters. Such a rank has only some
rows of a matrix, so it cannot orthogonalise the matrix alone. A format of the moments may pack
consecutive numbers in blocks with one scale (`monograph.optim.state_format`). If such a block is cut,
with numbers on two ranks, neither can compute the scale alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.optim.formats import FORMATS, format_names
from monograph.optim.state_format import Moment
from monograph.ranges import ABOVE_0, DECAY, FRACTION, NOT_NEGATIVE

# A hyperparameter: a number, or a tensor [N] in fp64 with one for each member of an ensemble.
Knob = float | Tensor


class Rule(NamedTuple):
    """A formula that updates parameters in place, and the moments that it keeps.

    Attributes:
        moments: the moments, three at most. Stochastic rounding has four random words for an element:
            one for its weight, and one for each moment.
        update_: gets (parameters, gradient, moments, hyperparameters) and changes parameters and
            moments in place. The gradient is the mean gradient after clipping. All tensors are
            [size], or [matrices, rows, cols] for a rule that updates matrices as a whole. Nothing
            changes where `Hyperparameters.accepted` is false.
        next_moments: gets (gradient, moments, hyperparameters) and returns the moments after an
            update, without changing any. It is for blocks of packed numbers that are cut between
            ranks: before the update, the ranks agree on the largest number that each of these
            blocks will have. A single call serves all parameters with the same rule and betas. Their
            other hyperparameters may differ, so the result must not depend on those.
        direction: only for a rule that updates matrices as a whole. It gets what `next_moments` gets
            and returns the matrices to orthogonalise.
        orthogonalise: only for such a rule. It gets whole matrices [..., rows, cols] and a dtype, and
            returns the matrices, orthogonalised in this dtype. Ranks that share out the rows of a
            matrix first bring its rows together.
    """

    moments: tuple[Moment, ...]
    update_: Callable[[Tensor, Tensor, Sequence[Tensor], Hyperparameters], None]
    next_moments: Callable[[Tensor, Sequence[Tensor], Hyperparameters], Sequence[Tensor]]
    direction: Callable[[Tensor, Sequence[Tensor], Hyperparameters], Tensor] | None = None
    orthogonalise: Callable[[Tensor, torch.dtype], Tensor] | None = None


class Hyperparameters(NamedTuple):
    """The numbers of one update of a plane. Tensors among them broadcast against the parameters.

    Attributes:
        lr: the learning rate.
        betas: the decay rates of the moments.
        eps: added to a denominator.
        weight_decay: the decoupled decay.
        applied: t, the number of updates applied, including this one, int64.
        accepted: whether the update is made, bool.
        compute: the dtype of matrix products.
        matrix_shape: the shape of a matrix that is updated as a whole, or of a stack of such matrices;
            None: each element is updated separately.
        orthogonal: this rank's rows of the orthogonalised matrices, flat, if ranks share out the rows.
            The ranks have computed them together, by the rule's `direction` and `orthogonalise`. The
            other tensors of the update are then also flat, because the rank has no whole matrices.
            None: the rule orthogonalises the matrices itself.
    """

    lr: Tensor
    betas: tuple[Knob, ...]
    eps: Knob
    weight_decay: Knob
    applied: Tensor
    accepted: Tensor
    compute: torch.dtype = torch.float32
    matrix_shape: tuple[int, ...] | None = None
    orthogonal: Tensor | None = None


class ParameterKind(NamedTuple):
    """A rule and the hyperparameters of some parameters. Parameters of one kind share a plane.

    Attributes:
        rule: the formula.
        lr: factor of the optimizer's learning rate.
        weight_decay: decoupled decay.
        betas: the decay rates of the rule's moments.
        eps: added to a denominator.
        matrix_shape: (rows, cols) of a matrix that is updated as a whole, or (matrices, rows, cols)
            of a stack; None: each element is updated separately.
        is_vector: whether the parameters are vectors, such as gains and biases.
        block_format: the format of `monograph.ops.weight_blocks` to which the weights of the model are
            rounded after each update; None: they are not rounded.
    """

    rule: Rule
    lr: Knob
    weight_decay: Knob
    betas: tuple[Knob, ...] = ()
    eps: Knob = 0.0
    matrix_shape: tuple[int, ...] | None = None
    is_vector: bool = False
    block_format: str | None = None

    def hyperparameters(
        self,
        *,
        lr: Tensor,
        applied: Tensor,
        accepted: Tensor,
        compute: torch.dtype,
        orthogonal: Tensor | None = None,
        broadcast: Callable[[Any], Any] = lambda knob: knob,
    ) -> Hyperparameters:
        """Return the numbers of an update of these parameters.

        Args:
            lr: the optimizer's learning rate.
            applied: see `Hyperparameters`.
            accepted: see `Hyperparameters`.
            compute: see `Hyperparameters`.
            orthogonal: see `Hyperparameters`.
            broadcast: a function that reshapes a number that differs between the members of an
                ensemble, [N], so that it broadcasts against the parameters.
        """
        return Hyperparameters(
            lr=broadcast(lr * self.lr),
            betas=tuple(broadcast(beta) for beta in self.betas),
            eps=broadcast(self.eps),
            weight_decay=broadcast(self.weight_decay),
            applied=broadcast(applied),
            accepted=broadcast(accepted),
            compute=compute,
            matrix_shape=self.matrix_shape,
            orthogonal=orthogonal,
        )


@dataclass(frozen=True)
class Group:
    """Parameters that have their own learning rate, weight decay or eps.

    Attributes:
        pattern: a pattern of names as in a shell, such as "lm_head.*" or "*.bias". A star also matches
            dots. A parameter belongs to the first group that matches its name.
        lr: factor of the optimizer's learning rate.
        weight_decay: the decay of these parameters; None: the optimizer's decay for matrices, 0 for
            other parameters.
        eps: factor of the optimizer's eps. It has no effect on Muon's matrices, which have no eps.
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
    """Base class of optimizers. The defaults are usual for pretraining small language models.

    Attributes:
        lr: peak learning rate, which a schedule multiplies. With 0 no weight changes.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of parameters with two dimensions or more.
        groups: groups of parameters with their own rate, decay or eps.
        ema: decay of a moving average of the weights, which evaluation then uses; None: no average.
        state: the form in which moments are kept. The update always computes in the gradient's dtype.
            "fp32": exact, in the parameters' dtype; 8 bytes a parameter in fp32. "bf16": rounded to
            8 significant bits, up or down at random, so that the mean is right; 4 bytes. "8bit":
            codes in blocks of 256; 2 bytes. Its errors are up to 1 % of a block's largest moment, and
            not random.
        master_weights: whether weights stay in the dtype that they have, such as fp32. False: the
            weights themselves are in bf16, and each update rounds them stochastically. Then a weight
            changes by about 2^-8 of itself or not at all. This needs the state "bf16".
        seed: the seed of stochastic rounding.

    Class attributes:
        rules: the rules of all its kinds.
        updates_matrices: whether the matrices in the model's blocks, such as transformer blocks, are
            updated as a whole.
        rate_factor: the ratio of this optimizer's usual learning rate to AdamW's.
        tuned: {name of a preset: {field: value}}, the values that were measured to be best for a new
            model of this preset.
        may_differ: the fields in which the members of an ensemble may differ. All other fields must
            be the same for all members, because they change the computation graph, of which there is
            only one.
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

    rules: ClassVar[tuple[Rule, ...]]
    updates_matrices: ClassVar[bool] = False
    rate_factor: ClassVar[float] = 1.0
    tuned: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    may_differ: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay")

    def __post_init__(self) -> None:
        """Refuse values outside their range, each in one line."""
        _require_ranges(self)

    @abstractmethod
    def kinds(self, module: nn.Module) -> dict[str, ParameterKind]:
        """Return how each trainable parameter is updated, by name.

        Raises:
            UsageError: a group matches no parameter, or the module lacks what the optimizer needs.
        """

    @property
    @abstractmethod
    def moments_per_parameter(self) -> float:
        """Return how many moments a parameter has, on average over a language model."""

    @property
    @abstractmethod
    def moments_per_block_matrix(self) -> int:
        """Return how many moments each element of a matrix in one of the model's blocks has.

        Each element of the matrices of LoRA adapters has as many moments.
        """

    @property
    def has_name_patterns(self) -> bool:
        """Return whether a field of this optimizer has patterns of parameters' names.

        Such patterns fit only modules that have parameters with these names.
        """
        return bool(self.groups)

    def width_factor(self, wide: Sequence[int], narrow: Sequence[int]) -> float:
        """Return the factor of the learning rate for a block's matrix that is made wider.

        With this factor, an update changes the outputs of the wide matrix as much as it changed those
        of the narrow one. The factor of this base class is for optimizers such as AdamW, in which the
        size of an element's update does not depend on the size of its gradient: it is 1 / m, where m
        is the number of columns of the wide matrix divided by that of the narrow one.

        Args:
            wide: (rows, cols) of the matrix.
            narrow: (rows, cols) of the same matrix in the model for which the rate is best.
        """
        column_ratio = wide[1] / narrow[1]
        return 1 / column_ratio


def _require_ranges(optim: Optimizer) -> None:
    NOT_NEGATIVE.require("lr", optim.lr)
    NOT_NEGATIVE.require("weight_decay", optim.weight_decay)
    is_pair = isinstance(optim.betas, tuple | list) and len(optim.betas) == 2
    if not is_pair or not all(DECAY.holds(beta) for beta in optim.betas):
        raise UsageError(f"betas = {optim.betas!r}: expected two numbers, 0 or more and below 1")
    ABOVE_0.require("eps", optim.eps)
    if optim.ema is not None and not FRACTION.holds(optim.ema):
        raise UsageError(
            f"ema = {optim.ema!r}: expected a decay between 0 and 1, or None for no average"
        )
    if optim.state not in FORMATS:
        raise UsageError(f"state = {optim.state!r}: expected one of {', '.join(FORMATS)}")
    if not optim.master_weights and not FORMATS[optim.state].stochastic:
        usable_states = " or ".join(format_names(stochastic=True))
        raise UsageError(
            f"master_weights = False keeps weights in bf16: its state is {usable_states}, not {optim.state}"
        )
    require_list("groups", optim.groups, Group, "monograph.Group(...)")


def require_list(name: str, values: object, item_class: type, description: str) -> None:
    """Refuse values that are not a list of objects of one class.

    Args:
        name: what the message calls the values.
        values: the values.
        item_class: the class of each value.
        description: what the message calls such objects.

    Raises:
        UsageError: `values` is not such a list.
    """
    # A text must be refused by its type: it is iterable, and each of its characters is a text, so that
    # it would pass as a list of `str`.
    if (
        isinstance(values, str)
        or not isinstance(values, Iterable)
        or not all(isinstance(value, item_class) for value in values)
    ):
        raise UsageError(f"{name} = {values!r}: expected a list of {description}")
