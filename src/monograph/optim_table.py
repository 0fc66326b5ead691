"""List the optimizers and the formats in which they keep their moments, by the values of the keys.

Settings are read without torch, so this file only names the objects, which are in `monograph.optim`.

To add an optimizer, write its formula and its class in a file such as `monograph/optim/adamw.py`,
and its row here. To add a format of the state, write its two functions and its `StateFormat` in a
file such as `monograph/optim/narrow.py`, and its row here. Other code asks the class or the format,
and has no list of its own.
"""

import importlib
from typing import Any, NamedTuple


class TableRow(NamedTuple):
    """An entry of a table.

    Attributes:
        about: the help for this value of the key.
        home: where the object is, "module:name".
    """

    about: str
    home: str

    def load(self) -> Any:
        """Import the object and return it."""
        module, _, name = self.home.partition(":")
        return getattr(importlib.import_module(module), name)


# By the values of the key `optim.name`.
OPTIMIZERS = {
    "adamw": TableRow(about="AdamW for all weights", home="monograph.optim.adamw:AdamW"),
    "muon": TableRow(
        about="Muon for the matrices of blocks, AdamW for the rest",
        home="monograph.optim.muon:Muon",
    ),
}
# By the values of the key `optim.state`. The exact format comes first.
FORMATS = {
    "fp32": TableRow(about="8 bytes a parameter", home="monograph.optim.state_format:EXACT"),
    "bf16": TableRow(
        about="4 bytes a parameter, stochastically rounded", home="monograph.optim.narrow:BF16"
    ),
    "8bit": TableRow(
        about="2 bytes a parameter, in blocks with a scale", home="monograph.optim.narrow:EIGHT_BIT"
    ),
}
