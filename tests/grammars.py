"""Small grammars, and a slow and obvious recogniser of their texts."""

from __future__ import annotations

from collections.abc import Mapping

from monograph.automata.gbnf import parse_grammar
from monograph.automata.rules import AnyOf, InOrder, OneCharacter, Repeated, RuleText, Symbol

ALPHABET = "()abé"
REGULAR = (
    'root ::= [ab]* "a"',
    'root ::= "ab" | [ab] [ab] [ab]',
    'root ::= x{2,3} y?\nx ::= "a" | "ab"\ny ::= "b"+',
    'root ::= "a"{0} "b" | "a" z  # a text of z never ends\nz ::= z "c"',
    'root ::= . "a" | "\\u00e9" (\n  [^ab(] | ""\n)',
)
RECURSIVE = (
    'root ::= "(" root ")" | ""',
    'root ::= "a" root "a" | [ab]',
    'root ::= root "a" | "b"',
    'root ::= "é" root | [^ab(]',
    'root ::= x | y\nx ::= "a" x "b" | ""\ny ::= "a" y "a" | "b"',
    'root ::= (root root | "a" | "()")',
)


def language(grammar: str, longest: int) -> set[str]:
    """All texts over the alphabet of at most so many characters: rules are filled in until no text is new."""
    rules = parse_grammar(grammar).rules
    known: Mapping[str, set[str]] = {name: set() for name in rules}
    while True:
        found = {name: _texts(symbol, known, longest) for name, symbol in rules.items()}
        if found == known:
            return known["root"]
        known = found


def _texts(symbol: Symbol, known: Mapping[str, set[str]], longest: int) -> set[str]:
    def joined(left: set[str], right: set[str]) -> set[str]:
        return {a + b for a in left for b in right if len(a + b) <= longest}

    match symbol:
        case OneCharacter(points):
            return {each for each in ALPHABET if any(a <= ord(each) <= b for a, b in points)}
        case InOrder(parts):
            texts = {""}
            for part in parts:
                texts = joined(texts, _texts(part, known, longest))
            return texts
        case AnyOf(options):
            return {text for option in options for text in _texts(option, known, longest)}
        case Repeated(part, least, most):
            part_texts = _texts(part, known, longest)
            texts = {""}
            found = {""} if least == 0 else set[str]()
            # More of them have too many characters, or are there already.
            for count in range(
                1, min(longest + least, longest + least if most is None else most) + 1
            ):
                texts = joined(texts, part_texts)
                if count >= least:
                    found |= texts
            return found
        case RuleText(name):
            return known[name]
    raise TypeError(symbol)
