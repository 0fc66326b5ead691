"""The command line, whose graphs are traced as ever but run without generated code."""

from __future__ import annotations

from functools import partialmethod

from monograph.cli import main as command_line
from monograph.resident import Resident


def main() -> None:
    """Stand for `monograph.cli:main` in a fork (`CommandServer.start(call=...)`)."""
    Resident.capture = partialmethod(Resident.capture, backend="eager")  # type: ignore[method-assign, assignment]
    command_line()
