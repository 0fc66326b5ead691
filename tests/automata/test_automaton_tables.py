"""Run: pytest tests/automata/test_automaton_tables.py"""

from __future__ import annotations

import random

import pytest
import torch

from daily import nightly
from monograph.automata import Automaton, constraint, stop_strings
from monograph.decode.automaton_tables import AutomatonTables, allowed_tokens, is_over, next_states
from monograph.errors import InputRefused
from monograph.text.tokenizer import Tokenizer

PIECES = Tokenizer.bytes().pieces
END, V = 1, len(PIECES)
CPU = torch.device("cpu")
AUTOMATA = [
    *(
        constraint("regex", pattern, PIECES, [END])
        for pattern in ("[a-c]{1,9}", "x|yz*", "(ab){2,5}")
    ),
    *(stop_strings([text], PIECES) for text in ("ab", "a long one", "\n\n")),
]


def follows(tables: AutomatonTables, automaton: Automaton, start: int) -> bool:
    """Whether a text's states say the same as in tables of the automaton alone."""
    alone = AutomatonTables.with_room_for([automaton], V, CPU)
    states = [
        torch.tensor([start], dtype=torch.int64),
        torch.tensor([alone.acquire(automaton)], dtype=torch.int64),
    ]
    for token in [*b"abab", *b"\n\n"]:
        ours, theirs = (
            (allowed_tokens(t, s), is_over(t, s))
            for t, s in zip((tables, alone), states, strict=True)
        )
        if not all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)):
            return False
        states = [
            next_states(t, s, torch.tensor([token]))
            for t, s in zip((tables, alone), states, strict=True)
        ]
    return True


@pytest.mark.parametrize("times", nightly([60, 300], {60}))
def test_whatever_came_and_went_an_automaton_is_followed_as_in_tables_of_its_own(
    times: int,
) -> None:
    tables, choice = AutomatonTables(V, CPU, cells=600, states=40, automata=4), random.Random(0)
    held: list[tuple[Automaton, int]] = []
    refused = 0
    for _ in range(times):
        if held and choice.random() < 0.5:
            tables.release(held.pop(choice.randrange(len(held)))[0])
            continue
        automaton = choice.choice(AUTOMATA)
        start = tables.acquire(automaton)
        if start is None:
            refused += 1
            continue
        held.append((automaton, start))
        assert all(follows(tables, *each) for each in held)
    assert times / 30 < refused < times / 2


def test_one_that_is_not_used_makes_room_and_one_that_is_does_not() -> None:
    tables = AutomatonTables(V, CPU, automata=1)
    first = tables.acquire(AUTOMATA[0])
    assert tables.acquire(AUTOMATA[0]) == first and tables.acquire(AUTOMATA[1]) is None
    tables.release(AUTOMATA[0])
    assert tables.acquire(AUTOMATA[1]) is None
    tables.release(AUTOMATA[0])
    assert tables.acquire(AUTOMATA[1]) is not None


def test_what_never_has_room_is_refused() -> None:
    tables = AutomatonTables(V, CPU, states=6)
    tables.require(AUTOMATA[3])
    with pytest.raises(
        InputRefused, match="[0-9]+ states and .* cells are more than there is room for"
    ):
        tables.require(AUTOMATA[0])
    with pytest.raises(
        InputRefused, match="tells [0-9]+ kinds of tokens apart, more than there is room for .1."
    ):
        AutomatonTables(V, CPU, classes=1).require(AUTOMATA[0])
    with pytest.raises(InputRefused, match="was made for 5 tokens"):
        tables.require(stop_strings(["a"], PIECES[:5]))


def test_two_that_have_room_but_not_together_are_refused() -> None:
    """A text with both would wait for ever, and all others behind it."""
    one, other = AUTOMATA[3], AUTOMATA[4]
    states, cells = (
        sum(map(count, (one, other))) + 2
        for count in (lambda a: len(a.next_SC), lambda a: a.next_SC.size)
    )
    AutomatonTables(V, CPU, states=states, cells=cells, automata=2).require(one, other)
    for less in ({"states": states - 1}, {"cells": cells - 1}, {"automata": 1}):
        tables = AutomatonTables(V, CPU, **{"states": states, "cells": cells, "automata": 2} | less)
        tables.require(one, None)
        tables.require(None, other)
        with pytest.raises(InputRefused, match="more than there is room for"):
            tables.require(one, other)
