# Run: pytest tests/automata/test_lift.py
"""Over tokens an automaton does what it does over bytes, and it allows exactly what can still be
finished.
"""

from __future__ import annotations

import itertools
import random

import pytest

from automata_vocabularies import END, PAD, allowed_ids, random_text, state_after, vocabulary
from monograph.automata import constraint, stop_strings
from monograph.automata.dfa import compile_expression
from monograph.automata.pattern import fullmatch_expression
from monograph.errors import InputRefused, UsageError

PATTERNS = [
    "a*",
    "(ab)*",
    "a{2,5}|b",
    "(?:a|é)*b{2}",
    ".{0,4}",
    "[^a]*(ba)?",
    "(aab|aba|b)+",
    "aé{3}",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tokens_walk_as_their_bytes(pattern: str) -> None:
    """Any sequence of tokens is at an accepting state if and only if its bytes are accepted."""
    pieces, draw = vocabulary("abé\n"), random.Random(1)
    tokens, byte_by_byte = (
        constraint("regex", pattern, pieces, [END]),
        compile_expression(fullmatch_expression(pattern, "it"), "it"),
    )
    accepted = 0
    for _ in range(600):
        ids: list[int] = []
        for _ in range(draw.randrange(6)):
            inside = (
                sorted(allowed_ids(tokens, state_after(tokens, ids)) - {END})
                if draw.random() < 0.9
                else []
            )
            ids.append(draw.choice(inside or range(2, len(pieces))))
        state = state_after(tokens, ids)
        accepts = byte_by_byte.accepts(b"".join(pieces[i] for i in ids))
        assert (state >= 0 and END in allowed_ids(tokens, state)) == accepts, [
            pieces[i] for i in ids
        ]
        accepted += accepts
    assert accepted


def brute_force(texts: set[bytes], pieces: list[bytes], prefix: bytes) -> set[int]:
    """Which tokens may follow: those with which some sequence of tokens still makes one of the
    texts.
    """

    def can_finish(text: bytes) -> bool:
        return text in texts or any(
            can_finish(text + piece)
            for piece in pieces
            if piece and any(other.startswith(text + piece) for other in texts)
        )

    ids = {i for i, piece in enumerate(pieces) if piece and can_finish(prefix + piece)}
    return ids | ({END} if prefix in texts else set())


@pytest.mark.parametrize("seed", range(6))
def test_masks_are_brute_force(seed: int) -> None:
    """Also after a lead, and where the vocabulary lacks bytes, so that some texts cannot be
    written, nor begun.
    """
    draw, lead = random.Random(seed), b"ab"[: seed % 3]
    texts = {"".join(draw.choices("abc", k=draw.randrange(0, 6))).encode() for _ in range(5)}
    pieces = [
        b"",
        b"",
        *{"".join(draw.choices("abc", k=draw.randrange(1, 4))).encode() for _ in range(9)},
    ]
    written, given = (
        {lead + text for text in texts},
        ("choices", [text.decode() for text in texts], pieces, [END], lead),
    )
    if not brute_force(written, pieces, b""):
        with pytest.raises(InputRefused, match="no sequence of the tokenizer's tokens"):
            constraint(*given)
        return
    automaton = constraint(*given)
    waiting = [(0, b"")]
    while waiting:
        state, text = waiting.pop()
        assert allowed_ids(automaton, state) == brute_force(written, pieces, text), text
        assert automaton.stops_S[state] == (allowed_ids(automaton, state) == {END})
        waiting += [
            (state_after(automaton, [i], state), text + pieces[i])
            for i in allowed_ids(automaton, state) - {END}
        ]


def test_a_token_that_changes_nothing_is_not_one_without_bytes() -> None:
    pieces = [b"", b"", b"a", b"b"]
    automaton = constraint("regex", "a*", pieces, [END])
    assert allowed_ids(automaton, 0) == {END, 2}
    assert state_after(automaton, [PAD]) == state_after(automaton, [3]) == -1


def test_after_the_end_only_the_end() -> None:
    automaton = constraint("regex", "a*", vocabulary("a"), [END])
    done = state_after(automaton, [END])
    assert allowed_ids(automaton, done) == {END} and state_after(automaton, [END], done) == done
    assert automaton.stops_S[done] and not automaton.stops_S[0]


def test_states_that_no_token_reaches_are_left_out() -> None:
    automaton = constraint("regex", "abb", [b"", b"", b"ab", b"b"], [END])
    # Before, after "ab", after "abb", after the end; never after "a".
    assert len(automaton.next_SC) == 4


def test_an_end_token_ends_whatever_its_bytes() -> None:
    pieces = [b"a", b"a", b"<end>"]
    automaton = constraint("regex", "aa", pieces, [0, 2])
    assert allowed_ids(automaton, 0) == {1}
    assert allowed_ids(automaton, state_after(automaton, [1, 1])) == {0, 2}


def test_one_of_the_choices() -> None:
    pieces, draw = vocabulary("yesno", longer=60), random.Random(0)
    automaton = constraint("choices", ["yes", "no", "none"], pieces, [END])
    assert {random_text(automaton, pieces, draw) for _ in range(300)} == {b"yes", b"no", b"none"}


@pytest.mark.parametrize(
    "strings", [["ab"], ["a", "ba"], ["abab", "baa", "b\n"], ["aab", "a\nab", "bbbb"], ["é", "aé"]]
)
def test_stop_strings_are_found_as_by_search(strings: list[str]) -> None:
    """The row stops at the very token that completes a string, inside it or across tokens, and
    stays stopped.
    """
    pieces, draw, hits = vocabulary("abé\n"), random.Random(2), 0
    automaton = stop_strings(strings, pieces)
    for _ in range(300):
        ids = draw.choices(range(len(pieces)), k=8)
        for count in range(len(ids) + 1):
            text = b"".join(pieces[i] for i in ids[:count])
            found = any(string.encode() in text for string in strings)
            state = state_after(automaton, ids[:count])
            assert state >= 0 and automaton.stops_S[state] == found, (text, strings)
            hits += found
    assert hits


def test_a_stop_automaton_forbids_nothing() -> None:
    pieces = vocabulary("ab")
    automaton = stop_strings(["ab"], pieces)
    assert (automaton.next_SC >= 0).all()
    assert state_after(automaton, [END, PAD]) == 0 and len(automaton.next_SC) == 3


def test_equal_tokens_are_one_class() -> None:
    pieces = [b"", *(bytes(pair) for pair in itertools.product(b"abcdefgh", repeat=2))]
    automaton = constraint("regex", "a[b-h]", pieces, [0])
    assert automaton.next_SC.shape[1] == 3  # the end, what fits, what does not


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("choices", [], "at least one text"),
        ("choices", "yes", "expected a list"),
        ("choices", ["\ud800"], "half of a surrogate pair"),
        ("regex", "[", "is not closed"),
        ("regex", None, "regex: expected a text, not None"),
        ("json_schema", [], "at #: '\\[\\]' is no schema"),
        ("regex", "c", "no sequence of the tokenizer's tokens makes such a text"),
    ],
)
def test_values_are_refused(kind: str, value: object, words: str) -> None:
    with pytest.raises(InputRefused, match=words):
        constraint(kind, value, vocabulary("ab"), [END])


def test_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="expected choices, regex, json_schema"):
        constraint("yaml", "", vocabulary("ab"), [END])


def test_a_text_must_be_able_to_end() -> None:
    with pytest.raises(InputRefused, match="needs a token that ends a text"):
        constraint("regex", "a", vocabulary("ab"), [])


@pytest.mark.parametrize("strings", [[], [""], ["a", ""], ["a" * 5000], ["\udc00"]])
def test_stop_strings_are_refused(strings: list[str]) -> None:
    with pytest.raises(InputRefused, match="stop string"):
        stop_strings(strings, vocabulary("ab"))
