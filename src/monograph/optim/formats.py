"""The formats in which optimizers keep their moments. `monograph.optim_table` lists them."""

from monograph import optim_table
from monograph.optim.state_format import StateFormat

# By their names in the key `optim.state`.
FORMATS: dict[str, StateFormat] = {name: row.load() for name, row in optim_table.FORMATS.items()}


def narrower(state: str) -> list[str]:
    """Return the names of the formats that take fewer bytes than this one, the largest first."""
    bytes_each = FORMATS[state].bytes_each
    smaller = [name for name, form in FORMATS.items() if form.bytes_each < bytes_each]
    return sorted(smaller, key=lambda name: -FORMATS[name].bytes_each)


def format_names(*, stochastic: bool) -> list[str]:
    """Return the names of the formats that round stochastically, or of those that do not."""
    return [name for name, form in FORMATS.items() if form.stochastic == stochastic]
