"""Say how each parameter is updated, for optimizers with one rule or several."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.ops.materialize import materialize
from monograph.optim.optimizer import Group, Knob, Optimizer, ParameterKind, Rule
from monograph.optim.planes import trainable


class Elementwise(Optimizer):
    """An optimizer that updates all parameters by its only rule, element by element."""

    def kinds(self, module: nn.Module) -> dict[str, ParameterKind]:
        """Return how each trainable parameter is updated, by name.

        Raises:
            UsageError: a group matches no parameter.
        """
        [rule] = self.rules
        return kinds_of(trainable(module), rule, self)

    @property
    def moments_each(self) -> float:
        """Return how many moments a parameter has."""
        return self.moments_of_matrices

    @property
    def moments_of_matrices(self) -> int:
        """Return how many moments a block's matrix has, and so an adapter."""
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
        kinds[name] = ParameterKind(rule, group.lr, decay, optim.betas, eps, vector=is_vector)
    if unmatched:
        raise UsageError(no_match_message("the optimizer's group", min(unmatched), parameters))
    return kinds


def no_match_message(what: str, pattern: str, parameters: Mapping[str, nn.Parameter]) -> str:
    """Return the error of a pattern, which `what` calls by its kind, that matches no parameter."""
    return (
        f"{what} {pattern!r} matches no trainable parameter that is not another's already; "
        f"names are such as {next(iter(parameters))!r}"
    )


def cast_like(knob: Knob, param: Tensor) -> Knob:
    """Return a knob; if it is a tensor, in the dtype of the parameters."""
    return materialize(knob.to(param.dtype)) if isinstance(knob, Tensor) else knob
