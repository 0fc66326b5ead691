"""The parts of a page that a script of docs/ makes: what lies between the script's marker and `END`."""

from __future__ import annotations

from collections.abc import Sequence

END = "<!-- end -->"


def made_parts(page: str, begin: str) -> list[str]:
    """Return the parts of a page's text that follow the markers `begin`, in their order."""
    return [rest.split(END, 1)[0].strip() for rest in page.split(begin)[1:]]


def with_made_parts(page: str, begin: str, parts: Sequence[str]) -> str:
    """Return a page's text with new parts after the markers `begin`, in their order.

    Raises:
        ValueError: there are more or fewer parts than markers.
    """
    before, *rests = page.split(begin)
    filled = (
        f"{begin}\n{part}\n{END}{rest.split(END, 1)[1]}"
        for part, rest in zip(parts, rests, strict=True)
    )
    return before + "".join(filled)
