"""List the compared systems: how each trains, the packages that it needs, and how to install
missing ones.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import NamedTuple

from peer_litgpt import litgpt
from peers import Task, lightning, monograph, plain, trainer, trainer_module


class System(NamedTuple):
    """A system: how it trains, and what it needs.

    Attributes:
        fit: builds it.
        packages: those that it needs.
        clones: environment variables, each of which names the folder of a repository that is no
            package.
    """

    fit: Callable[[Task], None]
    packages: tuple[str, ...] = ()
    clones: tuple[str, ...] = ()

    @property
    def versions(self) -> dict[str, str]:
        """Return the versions of its packages."""
        return {name: importlib.metadata.version(name) for name in self.packages}

    @property
    def missing(self) -> list[str]:
        """Return its packages that are not installed, and its variables that name no folder."""
        packages = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return packages + [name for name in self.clones if not os.path.isdir(os.getenv(name, ""))]


SYSTEMS = {
    "monograph": System(monograph),
    "plain loop": System(plain),
    "trainer": System(trainer, ("transformers", "accelerate")),
    "trainer, own module": System(trainer_module, ("transformers", "accelerate")),
    "lightning": System(lightning, ("lightning",)),
    "litgpt": System(litgpt, ("litgpt", "lightning", "jsonargparse", "requests")),
}
HOW_TO_INSTALL = (
    "pip install -e '.[peers]' -c constraints.txt; and, because litgpt asks for older companions than it needs, "
    "pip install -c constraints.txt --no-deps litgpt jsonargparse docstring_parser typeshed_client importlib_resources"
)
