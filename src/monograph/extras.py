"""Say how the libraries of an extra are installed beside this installation, however it was made.

The command names the libraries, never this package: its name on a package index may be a
stranger's.
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
    """Return the command that installs what an extra needs; `library` if its metadata does not say."""
    return install_command(_required(extra) or [library])


def install_command(requirements: Sequence[str]) -> str:
    """Return the command that installs libraries for the Python that runs this."""
    python = sys.executable or "python3"
    if Path(python).is_relative_to(Path.cwd()):
        python = os.path.relpath(python)
    # An environment of uv has no pip of its own. The folders are asked, not all finders: that of
    # setuptools stops standing in for distutils as soon as pip is looked for, and Inductor's next
    # import of setuptools then warns.
    has_pip = PathFinder.find_spec("pip") is not None
    tool = (
        [python, "-m", "pip", "install"]
        if has_pip
        else ["uv", "pip", "install", "--python", python]
    )
    return shell_words(*tool, *requirements)


def _required(extra: str) -> list[str]:
    """Return the requirements of an extra, by the metadata of the installed package."""
    try:
        found = importlib.metadata.requires("monograph") or []
    except (
        importlib.metadata.PackageNotFoundError
    ):  # it is run from its source, which was not installed
        return []
    named = re.compile(rf"extra == [\"']{re.escape(extra)}[\"']")
    return [each.partition(";")[0].strip() for each in found if named.search(each)]
