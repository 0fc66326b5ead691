"""Give the command that installs the libraries of an extra for the Python that runs this.

The command has the names of the libraries, and never this package's name with the extra: on a package
index, a stranger's package may have this name.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from monograph.terminal import shell_words


def command_for(extra: str, library: str) -> str:
    """Return the command that installs what an extra needs.

    Args:
        extra: the extra of this package.
        library: what is installed if the package's metadata does not say what the extra needs.
    """
    return install_command(_requirements(extra) or [library])


def install_command(requirements: Sequence[str]) -> str:
    """Return the command that installs libraries for the Python that runs this."""
    python = sys.executable or "python3"
    if Path(python).is_relative_to(Path.cwd()):
        python = os.path.relpath(python)
    # An environment that uv made has no pip. Only PathFinder is asked, which searches folders. A search
    # by all finders would also ask the one of setuptools, which would then no longer replace distutils,
    # and Inductor's next import of setuptools would warn.
    has_pip = PathFinder.find_spec("pip") is not None
    if has_pip:
        tool = [python, "-m", "pip", "install"]
    else:
        tool = ["uv", "pip", "install", "--python", python]
    return shell_words(*tool, *requirements)


def _requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, from the metadata of the installed package."""
    try:
        requirements = importlib.metadata.requires("monograph") or []
    except importlib.metadata.PackageNotFoundError:
        # The package is run from its source and is not installed.
        return []
    of_extra = re.compile(rf"extra == [\"']{re.escape(extra)}[\"']")
    return [line.partition(";")[0].strip() for line in requirements if of_extra.search(line)]
