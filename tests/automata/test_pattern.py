# Run: pytest tests/automata/test_pattern.py    (10,000 random patterns and more: -m slow)
"""A pattern accepts what ECMA-262 matches; what is not understood is refused by name and place."""

from __future__ import annotations

import json
import random
import re
import unicodedata

import pytest

from clocks import least_s
from daily import nightly
from monograph.automata.dfa import ByteAutomaton, compile_expression
from monograph.automata.expression import ANY, complement, intersection, union, utf8
from monograph.automata.pattern import fullmatch_expression, search_expression
from monograph.automata.schema import schema_expression
from monograph.errors import InputRefused

ALPHABET = "ab0_ -\n\té￿𝔘\r\u2028\u00a0\ufeff"
# Written out from ECMA-262 and Unicode, and not taken from the code.
LINE_ENDS = {"\n", "\r", "\u2028", "\u2029"}
SPACES = {"\t", "\v", "\f", "\ufeff"} | LINE_ENDS
SPACES |= {chr(point) for point in range(0x10000) if unicodedata.category(chr(point)) == "Zs"}
DIGITS = set("0123456789")
WORDS = DIGITS | set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")


def in_python(pattern: str) -> str:
    r"""A pattern of ECMA-262 for `re` with its flag ASCII: the dot and \s are written out."""
    listed, lines = (
        "".join(f"\\u{ord(sign):04x}" for sign in sorted(signs)) for signs in (SPACES, LINE_ENDS)
    )
    written, at, inside = "", 0, False
    while at < len(pattern):
        part = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(part)
        inside = part == "[" or (inside and part != "]")
        if part == "\\s":
            part = listed if inside else f"[{listed}]"
        elif part == "\\S":
            part = f"[^{listed}]"
        elif part == "." and not inside:
            part = f"[^{lines}]"
        written += part
    return written


def automaton(pattern: str) -> ByteAutomaton:
    return compile_expression(fullmatch_expression(pattern, "the pattern"), "the pattern")


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
    return f"(?:{inner}){draw.choice(['*', '+', '?', '{2}', '{1,3}', '{0,2}', '{2,}'])}"


def similar_text(draw: random.Random, pattern: str) -> str:
    """A text that has a chance to match: random, or made of the pattern's own characters."""
    source = (
        ALPHABET if draw.random() < 0.5 else ([c for c in pattern if c in ALPHABET] or ALPHABET)
    )
    return "".join(draw.choice(source) for _ in range(draw.randrange(7)))


def compare(patterns: int, seed: int) -> tuple[int, int]:
    """How many texts were compared, and how many of them matched."""
    draw, compared, matched, refused = random.Random(seed), 0, 0, 0
    for _ in range(patterns):
        pattern = random_pattern(draw)
        expected = re.compile(in_python(pattern), re.ASCII)
        try:
            ours = automaton(pattern)
        except InputRefused as error:
            assert "steps to build" in str(error)
            refused += 1
            continue
        for _ in range(12):
            text = similar_text(draw, pattern)
            match = expected.fullmatch(text) is not None
            assert ours.accepts(text.encode()) == match, (pattern, text)
            compared, matched = compared + 1, matched + match
    assert refused * 1000 <= patterns
    return compared, matched


@pytest.mark.parametrize(
    ("name", "members", "is_inside"),
    [
        (r"\d", DIGITS, True),
        (r"\w", WORDS, True),
        (r"\s", SPACES, True),
        (r"[\s\d]", SPACES | DIGITS, True),
        (r"[^\S]", SPACES, True),
        (".", LINE_ENDS, False),
        (r"\D", DIGITS, False),
        (r"\W", WORDS, False),
        (r"\S", SPACES, False),
        (r"[^\w]", WORDS, False),
        (r"[\S\n]", SPACES - {"\n"}, False),
    ],
)
@pytest.mark.parametrize("apart", nightly([16, 1], {16}))
def test_each_set_has_the_characters_of_ecma_262(
    name: str, members: set[str], is_inside: bool, apart: int
) -> None:
    """Characters of the basic plane and some beyond it: a set has these members, and not their
    neighbours.
    """
    ours = automaton(name)
    near = {ord(sign) + by for sign in members for by in (-1, 0, 1)}
    for point in (
        *near,
        *range(0, 0xD800, apart),
        *range(0xE000, 0x10100, apart),
        0x1D7D8,
        0x10FFFF,
    ):
        sign = chr(point)
        assert ours.accepts(sign.encode()) == ((sign in members) == is_inside), hex(point)


def test_a_schemas_pattern_lets_no_text_through_that_ecma_262_does_not_match() -> None:
    """The same sets inside a JSON string, where a character may be an escape."""
    texts = ["\u00a0", "\u2003", "\u2028", "\ufeff", "\r", "\u3000"]
    for pattern, misses in (
        (r"^\S$", texts),
        ("^.$", ["\u2028", "\u2029", "\r", "\n"]),
        (r"^\W$", ["_", "a", "0"]),
    ):
        ours = compile_expression(
            schema_expression({"type": "string", "pattern": pattern}), "the JSON schema"
        )
        for ascii_only in (True, False):
            taken = [
                sign
                for sign in misses
                if ours.accepts(json.dumps(sign, ensure_ascii=ascii_only).encode())
            ]
            assert taken == [], pattern
            assert ours.accepts(
                json.dumps(
                    "é" if pattern != r"^\W$" else "\u00a0", ensure_ascii=ascii_only
                ).encode()
            )


def test_equal_to_fullmatch() -> None:
    compared, matched = compare(150, seed=1)
    assert compared == 1800 and matched > 100


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
        (r"\u{1D518}\u{e9}\u{000041}[\u{61}-\u{63}]", ["𝔘éAb"], ["𝔘éAd"]),
        (r"\ud835\udd18|[\uD835\uDD18x]{2}", ["𝔘", "𝔘x", "xx"], ["x"]),
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
    ours, draw = (
        compile_expression(search_expression(pattern, "the pattern"), "the pattern"),
        random.Random(3),
    )
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
        ("a{,3}", r"a count without a lower bound at position 1: write \{0,3\}"),
        (r"\u{}", r"\\u\{ at position 0"),
        (r"\u{110000}", "there is no such character"),
        (r"\u{1F600", r"\\u\{ at position 0"),
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
        pytest.param("((a|a)*){100000}", marks=pytest.mark.slow),
        pytest.param("(a?){100000}", marks=pytest.mark.slow),
        "(a*){100000}",
        pytest.param("((a{1000}){1000}){1000}", marks=pytest.mark.slow),
        "(a|b)*a(a|b){40}",
        "(?:a{0,90}b{0,90}){0,90}",
        ".{0,100000}",
        "((.*a){9}(.*b){9}){9}c{999999999}",
        "[" + "".join(map(chr, range(0x100, 0x8000, 2))) + "]{1000}",
    ],
)
def test_hostile_patterns_are_refused_at_once(pattern: str) -> None:
    def refused() -> None:
        with pytest.raises(
            InputRefused, match="its automaton needs more than .* make it simpler or shorter"
        ):
            automaton(pattern)

    assert least_s(refused, 2) < 2


@pytest.mark.parametrize(
    "pattern", ["(x+x+)+y", "(a|a)*b", "((a*)*)*", "(){999999999}", "(?:a?){90}", "(|a)+"]
)
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
    borders = [
        0,
        0x7F,
        0x80,
        0x7FF,
        0x800,
        0xD7FF,
        0xE000,
        0xFFFF,
        0x10000,
        0x10FFFF,
        0xE9,
        0x20AC,
        0x1D518,
    ]
    points = union([(0x70, 0x85), (0x7FF, 0x900), (0xD000, 0xE100), (0xFFFF, 0x1D518)])
    ours = compile_expression(utf8(points), "a set")
    for border in borders:
        for point in {max(border - 1, 0), border, min(border + 1, 0x10FFFF)}:
            if not 0xD800 <= point <= 0xDFFF:
                inside = any(first <= point <= last for first, last in points)
                assert ours.accepts(chr(point).encode()) == inside, hex(point)
    assert not ours.accepts("\ud900".encode("utf-8", "surrogatepass"))
    assert not compile_expression(utf8(ANY), "any").accepts(b"\xc0\x80")  # longer than it has to be
    assert complement(complement(points)) == points and not intersection(points, complement(points))
