"""The table of cards, cards.toml: find a card by its name, as people spell it or as its driver
gives it.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

from monograph.errors import UsageError


@dataclass(frozen=True)
class Rates:
    """Datasheet rates of a card: dense (no structured sparsity) FLOP/s with fp32 accumulation, and
    memory bytes/s.
    """

    flops: Mapping[str, float]
    bandwidth_bytes_per_s: float


class Card(NamedTuple):
    """A row of cards.toml.

    Attributes:
        group: what kind of card it is, such as "GeForce RTX".
        name: the name that its driver gives.
        memory_bytes: its memory.
        link_bytes_per_s: datasheet rate between card and host, one way.
        rates: its datasheet rates.
        pattern: a regular expression for the names that drivers give to cards with these rates.
    """

    group: str
    name: str
    memory_bytes: int
    link_bytes_per_s: float
    rates: Rates
    pattern: str


def _card(
    group: str,
    name: str,
    gibibytes: float,
    gb_per_s: float,
    link_gb_per_s: float,
    teraflops: Mapping[str, float],
    pattern: str | None = None,
) -> Card:
    """Return a row of cards.toml as a `Card`. The arguments are the row's columns, in the table's units."""
    rates = Rates({dtype: rate * 1e12 for dtype, rate in teraflops.items()}, gb_per_s * 1e9)
    exact = rf"\b{re.escape(name.removeprefix('NVIDIA '))}$"
    return Card(
        group=group,
        name=name,
        memory_bytes=int(gibibytes * 2**30),
        link_bytes_per_s=link_gb_per_s * 1e9,
        rates=rates,
        pattern=pattern or exact,
    )


# The rows of each group. A row is a list: the short name that users type, and the arguments of `_card`
# without the group.
_GROUPS = tomllib.loads(files(__package__).joinpath("cards.toml").read_text("utf-8"))["cards"]
# By the short names.
CARDS = {short: _card(group, *row) for group, rows in _GROUPS.items() for short, *row in rows}


def card_rates(name: str) -> Rates | None:
    """Return the datasheet rates of a card, given the name that its driver gives.

    The result is None for a card that is not in the table, and for a MIG slice, a part of a card.
    """
    if "MIG" in name:
        return None
    return next((card.rates for card in CARDS.values() if re.search(card.pattern, name)), None)


def card_named(name: str) -> Card:
    """Return a card by its name, in any usual spelling.

    Raises:
        UsageError: there is no such card.
    """
    short_names = {_bare_name(short): short for short in CARDS}
    bare = _bare_name(name)
    if bare in short_names:
        return CARDS[short_names[bare]]
    similar = [short for other, short in short_names.items() if bare and other.startswith(bare)]
    if not similar:
        closest = difflib.get_close_matches(bare, short_names, n=2, cutoff=0.5)
        similar = [short_names[other] for other in closest]
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    else:
        hint = "`monograph plan --help` lists those that are known"
    raise UsageError(f"--device {name}: no such card; {hint}")


def _bare_name(name: str) -> str:
    """Return a card's name without the parts that people leave out.

    For example, it is 4090 for RTX 4090, and a10040 for A100 40GB.
    """
    plain = re.sub(r"nvidia|geforce|tesla|rtx|generation|[\s_-]", "", name.lower())
    return re.sub(r"(?<=\d)g(i?b)?$", "", plain)  # g, gb or gib after a number


def card_lines() -> list[str]:
    """Return a line for each kind of card: "GeForce RTX: 5090, 5080, ..."."""
    return [f"{group}: {', '.join(row[0] for row in rows)}" for group, rows in _GROUPS.items()]
