"""What somebody may have meant by a word that is none of the choices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean X?` for the choice closest to `word`, comparing last parts too; empty if none is close."""
    full = list(choices)
    last = {choice.rpartition(".")[2]: choice for choice in full}
    near = difflib.get_close_matches(word, full, n=1, cutoff=0.75)
    near = near or [last[part] for part in difflib.get_close_matches(word.rpartition(".")[2], last, n=1, cutoff=0.7)]
    return f"; did you mean {near[0]}?" if near else ""
