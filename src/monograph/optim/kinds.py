"""Sort parameters into kinds, which say how they are updated. All optimizers use this file.

A kind is a rule, such as AdamW's formula, with hyperparameters (`monograph.optim.optimizer`).
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.ops.materialize import materialize
from monograph.optim.optimizer import Group, Knob, Optimizer, ParameterKind, Rule
from monograph.optim.planes import trainable


class Elementwise(Optimizer):
    """Base class of optimizers with one rule, which updates each element of all parameters separately."""

    def kinds(self, module: nn.Module) -> dict[str, ParameterKind]:
        """Return how each trainable parameter is updated, by name.

        Raises:
            UsageError: a group matches no parameter.
        """
        [rule] = self.rules
        return kinds_of(trainable(module), rule, self)

    @property
    def moments_per_parameter(self) -> float:
        """Return the number of moments for each parameter."""
        return self.moments_per_block_matrix

    @property
    def moments_per_block_matrix(self) -> int:
        """Return the number of moments of a matrix in a block, and of a matrix of an adapter."""
        [rule] = self.rules
        return len(rule.moments)


def kinds_of(
    parameters: Mapping[str, nn.Parameter], rule: Rule, optim: Optimizer
) -> dict[str, ParameterKind]:
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
    kinds: dict[str, ParameterKind] = {}
    for name, parameter in parameters.items():
        # The first match counts, so that a user can write an exception before a general pattern.
        group = next((group for group in groups if fnmatchcase(name, group.pattern)), Group("*"))
        unmatched.discard(group.pattern)
        # The number of dimensions alone does not tell which parameters are vectors: the biases of all experts
        # are one tensor with two dimensions.
        is_vector = parameter.ndim < 2 or name.endswith(".bias")
        if group.weight_decay is not None:
            decay = group.weight_decay
        else:
            # Gains and biases are not decayed. Pulling a gain towards zero would shrink activations
            # and regularise nothing.
            decay = 0.0 if is_vector else optim.weight_decay
        eps = optim.eps * group.eps
        kinds[name] = ParameterKind(rule, group.lr, decay, optim.betas, eps, is_vector=is_vector)
    if unmatched:
        raise UsageError(no_match_message("the optimizer's group", min(unmatched), parameters))
    return kinds


def no_match_message(what: str, pattern: str, parameters: Mapping[str, nn.Parameter]) -> str:
    """Return the error for a pattern that matches no parameter.

    Args:
        what: what the message calls the pattern, such as "muon's pattern".
        pattern: the pattern.
        parameters: the parameters by name, of which the message names one.
    """
    return (
        f"{what} {pattern!r} matches no trainable parameter that is not another's already; "
        f"names are such as {next(iter(parameters))!r}"
    )


def cast_like(knob: Knob, param: Tensor) -> Knob:
    """Return a hyperparameter, in the dtype of the parameters if it is a tensor.

    `materialize` keeps compiled code from computing it again for each element of a plane.
    """
    return materialize(knob.to(param.dtype)) if isinstance(knob, Tensor) else knob
