"""Run: pytest tests/automata/test_dfa.py (no text can begin that cannot be completed)"""

from __future__ import annotations

import random

import pytest

from monograph.automata.counting import (
    COUNTERS,
    MAX_COUNT,
    Ambiguous,
    CounterOperation,
    apply_effect,
)
from monograph.automata.dfa import STATE_MASK, Budget, ByteAutomaton, byte_automaton
from monograph.automata.expression import (
    Alternation,
    ByteSet,
    Concatenation,
    CounterMark,
    Expression,
    Intersection,
    Repetition,
    concatenation,
    literal,
)
from monograph.automata.schema import schema_expression

A, B = 1 << ord("a"), 1 << ord("b")
NOTHING = ByteSet(0)


def random_expression(draw: random.Random, depth: int, counter: int = 0) -> Expression:
    """An expression over a and b; many of its parts match no text. `counter` is the next free one."""
    kind = draw.choice(["bytes", "both", "either", "common", "repeated", "counted"])
    if depth == 0 or kind == "bytes":
        return ByteSet(draw.choice([A, B, A | B, 0]))
    if kind == "repeated":
        part = random_expression(draw, depth - 1, counter)
        return Repetition(part, draw.choice([0, 1]), draw.choice([None, 2]))
    if kind == "counted" and counter < COUNTERS:
        part = random_expression(draw, depth - 1, counter + 1)
        counted = concatenation(CounterMark(CounterOperation("count", counter)), part)
        most = draw.randrange(4)
        if draw.random() < 0.5:  # as in an array
            least = draw.randrange(most + 1)
            repeated = Repetition(counted, min(least, 1), None)
            left_over = most - least
        else:  # as in a string with a pattern, which may need several repetitions
            repeated = Repetition(counted, draw.randrange(3), draw.choice([None, 3]))
            left_over = MAX_COUNT
        begin = CounterMark(CounterOperation("begin", counter, most))
        end = CounterMark(CounterOperation("end", counter, left_over))
        return concatenation(literal(b"["), begin, repeated, end, literal(b"]"))
    if kind == "common":  # whose sides have no counters
        counter = COUNTERS
    left = random_expression(draw, depth - 1, counter)
    right = random_expression(draw, depth - 1, counter)
    if kind == "common":
        return Intersection(left, right)
    if kind == "either":
        return Alternation((left, right))
    return Concatenation((left, right))


def hopeless(automaton: ByteAutomaton) -> set[int]:
    """The packed states that a text reaches and from which no text reaches the end."""
    successors: dict[int, set[int]] = {}
    queue = [0]
    for packed in queue:
        if packed in successors:
            continue
        state = packed & STATE_MASK
        successors[packed] = set()
        for byte_class, target in enumerate(automaton.next_SK[state].tolist()):
            effect = automaton.effects[automaton.effect_SK[state, byte_class]]
            if target >= 0 and (after := apply_effect(effect, packed, target)) >= 0:
                successors[packed].add(after)
                queue.append(after)
    hopeful = {packed for packed in successors if automaton.accepting_S[packed & STATE_MASK]}
    while more := {p for p in successors if p not in hopeful and successors[p] & hopeful}:
        hopeful |= more
    return successors.keys() - hopeful


def test_every_text_that_can_begin_can_be_completed() -> None:
    draw = random.Random(0)
    built, counted = 0, 0
    for _ in range(3000):
        expression = random_expression(draw, 4)
        try:
            automaton = byte_automaton(expression, Budget("it"))
        except Ambiguous:
            continue
        if automaton is not None:
            assert not hopeless(automaton), expression
            built += 1
            counted += automaton.has_counters
    assert built > 1000 and counted > 100


@pytest.mark.parametrize("least", [0, 1])
def test_a_loop_before_what_matches_nothing_matches_nothing(least: int) -> None:
    loop = Repetition(ByteSet(A), least, None)
    assert byte_automaton(concatenation(loop, NOTHING), Budget("it")) is None
    either = Alternation((concatenation(loop, NOTHING), ByteSet(B)))
    automaton = byte_automaton(either, Budget("it"))
    assert automaton is not None and automaton.accepts(b"b") and not hopeless(automaton)
    assert len(automaton.accepting_S) == 2


@pytest.mark.parametrize("uses_counters", [True, False])
def test_an_array_that_needs_an_impossible_item_matches_nothing(uses_counters: bool) -> None:
    impossible = {"type": "string", "pattern": "^y$", "minLength": 3}
    array = {"type": "array", "prefixItems": [{"const": 1}], "items": impossible, "maxItems": 5}
    needed = schema_expression({**array, "minItems": 3}, uses_counters)
    assert byte_automaton(needed, Budget("it")) is None
    automaton = byte_automaton(schema_expression(array, uses_counters), Budget("it"))
    assert automaton is not None and automaton.accepts(b"[1]") and not hopeless(automaton)
