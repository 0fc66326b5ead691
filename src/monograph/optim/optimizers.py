"""The classes of optimizers. `monograph.optim_table` lists them."""

from monograph import optim_table
from monograph.errors import UsageError
from monograph.optim.optimizer import Optimizer

# By their names in the key `optim.name`.
OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: row.load() for name, row in optim_table.OPTIMIZERS.items()
}


def name_of(optim: Optimizer) -> str:
    """Return an optimizer's name in the key `optim.name`."""
    return next(name for name, kind in OPTIMIZERS.items() if type(optim) is kind)


def require_optimizer(optim: object) -> Optimizer:
    """Return the object if it is an optimizer, and refuse it otherwise.

    Raises:
        UsageError: it is another object.
    """
    if not isinstance(optim, Optimizer):
        known = " or ".join(f"monograph.{kind.__name__}(...)" for kind in OPTIMIZERS.values())
        raise UsageError(f"optim is a {type(optim).__name__}: expected {known}")
    return optim
