"""The forms in which an optimizer keeps its moments, which `monograph.optim_table` lists."""

from monograph import optim_table
from monograph.optim.state_format import StateFormat

# By their names in the key `optim.state`.
FORMATS: dict[str, StateFormat] = {name: row.load() for name, row in optim_table.FORMATS.items()}


def narrower(state: str) -> list[str]:
    """Return the forms that take fewer bytes than this one, the largest first."""
    limit = FORMATS[state].bytes_each
    smaller = [name for name, form in FORMATS.items() if form.bytes_each < limit]
    return sorted(smaller, key=lambda name: -FORMATS[name].bytes_each)


def rounding(*, stochastic: bool) -> list[str]:
    """Return the forms that round stochastically, or those that do not."""
    return [name for name, form in FORMATS.items() if form.stochastic == stochastic]
