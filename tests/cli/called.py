"""The command line with the commands taken out: what it would have called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import monograph
from monograph import cli

# Streams as most people have them: without PYTHONUNBUFFERED.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
ENVIRONMENT["PYTHONPATH"] = str(Path(monograph.__file__).parents[1])
COMMANDS = (
    "train", "sweep", "plan", "recipes", "keys", "runs", "profile", "generate", "chat", "serve", "evaluate", "compare",
    "export", "follow", "data", "check",
)  # fmt: skip


class Calls(list[tuple[tuple[Any, ...], dict[str, Any]]]):
    """Stands in for the commands: records what they are called with, and raises or returns what the
    test says.
    """

    outcome: BaseException | int = 0

    def __call__(self, *arguments: Any, **options: Any) -> int:
        self.append((arguments, options))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def monograph_(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    return int(str(exit_.value.code or 0))
