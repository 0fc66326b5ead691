# Run: pytest tests/decode/automata/test_pattern.py    (10,000 random patterns and more: -m slow)
"""A pattern accepts what `re.fullmatch` matches; what is not understood is refused by name and place."""

from __future__ import annotations

import random
import re

import pytest

from clocks import least_s
from monograph.decode.automata.dfa import ByteAutomaton, compiled
from monograph.decode.automata.expression import ANY, complement, intersection, union, utf8
from monograph.decode.automata.pattern import found_in, whole
from monograph.errors import InputRefused

ALPHABET = "ab0_ -\n\té￿𝔘"


def automaton(pattern: str) -> ByteAutomaton:
    return compiled(whole(pattern, "the pattern"), "the pattern")


def random_pattern(draw: random.Random, depth: int = 0) -> str:
    """An expression of the subset over the alphabet."""
    atoms = [
        "a",
        "b",
        "0",
        "é",
        "𝔘",
        ".",
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"\W",
        r"\S",
        r"\n",
        r"\x61",
        "[ab]",
        "[^a]",
        r"\-",
    ]
    atoms += ["[a-z]", "[^\\w]", r"[\d_-]", "[b-é]", r"[\u0080-\U0010ffff]", r"[^\s\d]", "\\u00e9"]
    kind = draw.random()
    if depth > 3 or kind < 0.4:
        return draw.choice(atoms)
    if kind < 0.6:
        return "".join(random_pattern(draw, depth + 1) for _ in range(draw.randrange(4)))
    inner = random_pattern(draw, depth + 1)
    if kind < 0.8:
        return draw.choice(["({})", "(?:{})"]).format(f"{inner}|{random_pattern(draw, depth + 1)}")
    return f"(?:{inner}){draw.choice(['*', '+', '?', '{2}', '{1,3}', '{,2}', '{2,}'])}"


def similar_text(draw: random.Random, pattern: str) -> str:
    """A text that has a chance to match: random, or made of the pattern's own characters."""
    source = ALPHABET if draw.random() < 0.5 else ([c for c in pattern if c in ALPHABET] or ALPHABET)
    return "".join(draw.choice(source) for _ in range(draw.randrange(7)))


def compare(patterns: int, seed: int) -> tuple[int, int]:
    """How many texts were compared, and how many of them matched."""
    draw, compared, matched = random.Random(seed), 0, 0
    for _ in range(patterns):
        pattern = random_pattern(draw)
        expected = re.compile(pattern, re.ASCII)
        ours = automaton(pattern)
        for _ in range(12):
            text = similar_text(draw, pattern)
            match = expected.fullmatch(text) is not None
            assert ours.accepts(text.encode()) == match, (pattern, text)
            compared, matched = compared + 1, matched + match
    return compared, matched


def test_equal_to_fullmatch() -> None:
    compared, matched = compare(400, seed=1)
    assert compared == 4800 and matched > 300


@pytest.mark.slow
def test_equal_to_fullmatch_on_many() -> None:
    assert compare(10_000, seed=2)[1] > 8000


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("^ab$", ["ab"], ["a", "abb", "^ab$"]),
        ("^a|b$", ["a", "b"], ["ab"]),
        ("", [""], ["a"]),
        (r"[\]\[^-]", ["]", "[", "^", "-"], ["\\"]),
        ("a}]", ["a}]"], ["a"]),
        (r"\x41\u00e9\U0001d518\0", ["Aé𝔘\0"], ["A"]),
        ("(a|ab)(c|bcd)", ["ac", "abc", "abcd", "abbcd"], ["ab", "abd"]),
        ("(?:a{2,3}){2}", ["aaaa", "aaaaaa"], ["aaa", "a" * 7]),
    ],
)
def test_examples(pattern: str, inside: list[str], outside: list[str]) -> None:
    ours = automaton(pattern)
    assert all(ours.accepts(text.encode()) for text in inside)
    assert not any(ours.accepts(text.encode()) for text in outside)


@pytest.mark.parametrize("pattern", ["^a", "a$", "^a|b$", "b", "^a.b$|é"])
def test_found_in_is_search(pattern: str) -> None:
    ours, draw = compiled(found_in(pattern, "the pattern"), "the pattern"), random.Random(3)
    for _ in range(200):
        text = "".join(draw.choice("abé") for _ in range(draw.randrange(5)))
        assert ours.accepts(text.encode()) == (re.search(pattern, text) is not None), text


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(a)\1", "a backreference or octal number .* at position 3"),
        ("a(?=b)", "lookahead at position 1"),
        ("(?<!b)", "lookbehind at position 0"),
        ("a*?", "a lazy quantifier at position 2"),
        ("a++", "a possessive quantifier at position 2"),
        ("(?>a)", "an atomic group"),
        ("(?P<n>a)", "a named group"),
        ("(?i)a", "a flag or unknown group"),
        ("(?(1)a|b)", "a conditional group"),
        (r"\bword", "a word boundary"),
        (r"\p{L}", "a property"),
        (r"a\Z", "an anchor other than"),
        ("a^b", "an anchor inside the pattern at position 1"),
        ("a$b", "an anchor inside the pattern at position 1"),
        ("(^a)", "an anchor inside"),
        ("(a$)", "an anchor inside"),
        ("(a", r"a '\(' that is not closed at position 0"),
        ("a)", "an unopened '\\)' at position 1"),
        ("[ab", r"a '\[' that is not closed at position 0"),
        ("[]a]", "a set that begins with ']'"),
        ("[[:alpha:]]", "a named set"),
        ("[b-a]", "a range whose end"),
        (r"[\d-z]", "a range at position 1"),
        ("*a", "nothing to repeat at position 0"),
        ("a**", "a quantifier of a quantifier at position 2"),
        ("a{1}{2}", "a quantifier of a quantifier"),
        ("a{x}", "a '{' that begins no count at position 1"),
        ("a{,}", "a '{' that begins no count"),
        ("a{3,2}", "a count whose upper bound"),
        ("a{1234567890}", "a count of more than nine digits"),
        (r"\q", "the escape"),
        (r"\x1", "2 hexadecimal digits must follow"),
        (r"\U00110000", "there is no such character"),
        ("a\\", "the escape"),
        ("(" * 40 + ")" * 40, "at most 30 lie inside each other"),
        ("a" * 30_000, "at most 20,000 are read"),
        (r"[^\s\S]", "matches no text at all"),
        (r"\ud800", "matches no text at all"),
    ],
)
def test_refused_by_name(pattern: str, words: str) -> None:
    with pytest.raises(InputRefused, match=words) as caught:
        automaton(pattern)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("the pattern")


@pytest.mark.parametrize(
    "pattern",
    [
        "((a|a)*){100000}",
        "(a?){100000}",
        "(a*){100000}",
        "((a{1000}){1000}){1000}",
        "(a|b)*a(a|b){40}",
        "(?:a{0,90}b{0,90}){0,90}",
        ".{0,100000}",
        "((.*a){9}(.*b){9}){9}c{999999999}",
        "[" + "".join(map(chr, range(0x100, 0x8000, 2))) + "]{1000}",
    ],
)
def test_hostile_patterns_are_refused_at_once(pattern: str) -> None:
    def refused() -> None:
        with pytest.raises(InputRefused, match="its automaton needs more than .* make it simpler or shorter"):
            automaton(pattern)

    assert least_s(refused, 2) < 2


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(a|a)*b", "((a*)*)*", "(){999999999}", "(?:a?){90}", "(|a)+"])
def test_what_backtracks_elsewhere_is_small_here(pattern: str) -> None:
    assert len(automaton(pattern).next_SK) <= 91


@pytest.mark.parametrize(
    ("pattern", "states"),
    [("a|b|c|ab|abc", 4), ("(a|b)*", 1), ("a{5}|a{3}", 6), ("[ab]c|[bd]c", 3), ("(aa)*|a(aa)*", 1)],
)
def test_minimal(pattern: str, states: int) -> None:
    assert len(automaton(pattern).next_SK) == states


def test_utf8_is_pythons() -> None:
    """Every character of a set, and no other, at the borders of ranges and of lengths."""
    borders = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF, 0xE9, 0x20AC, 0x1D518]
    points = union([(0x70, 0x85), (0x7FF, 0x900), (0xD000, 0xE100), (0xFFFF, 0x1D518)])
    ours = compiled(utf8(points), "a set")
    for border in borders:
        for point in {max(border - 1, 0), border, min(border + 1, 0x10FFFF)}:
            if not 0xD800 <= point <= 0xDFFF:
                inside = any(first <= point <= last for first, last in points)
                assert ours.accepts(chr(point).encode()) == inside, hex(point)
    assert not ours.accepts("\ud900".encode("utf-8", "surrogatepass"))
    assert not compiled(utf8(ANY), "any").accepts(b"\xc0\x80")  # longer than it has to be
    assert complement(complement(points)) == points and not intersection(points, complement(points))
