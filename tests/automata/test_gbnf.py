"""Run: pytest tests/automata/test_gbnf.py"""

from __future__ import annotations

import itertools

import pytest

from grammars import ALPHABET, RECURSIVE, REGULAR, language
from monograph.automata import acceptor
from monograph.automata.gbnf import MAX_GRAMMAR_LENGTH, parse_grammar
from monograph.errors import InputRefused

LLAMA_CPP_JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize("grammar", REGULAR)
def test_a_grammar_without_recursion_is_an_automaton_of_its_texts(grammar: str) -> None:
    longest = 6
    automaton = acceptor("grammar", grammar)
    texts = language(grammar, longest)
    for size in range(longest + 1):
        for letters in itertools.product(ALPHABET, repeat=size):
            text = "".join(letters)
            assert automaton.accepts(text.encode()) == (text in texts), text


@pytest.mark.parametrize("grammar", [*RECURSIVE, LLAMA_CPP_JSON])
def test_a_recursive_grammar_is_no_automaton(grammar: str) -> None:
    assert parse_grammar(grammar).is_recursive
    with pytest.raises(InputRefused, match="recursive"):
        acceptor("grammar", grammar)


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ("", "expected a rule root"),
        ('a ::= "b"', "expected a rule root"),
        ('root := "a"', "line 1, column 6: expected ::= after the name root"),
        ('root ::= "a', 'line 1, column 10: expected " before the end of the line'),
        ('root ::= "b"\na ::= [a\n', "line 2, column 7: expected ] before the end of the line"),
        ("root ::= a", "line 1, column 10: there is no rule a"),
        ('root ::= ("a" |\n "b"', "line 2, column 5: expected ), not the end of the grammar"),
        ("root ::= root", "root never comes to an end"),
        ('root ::= "a"{3,1}', "the second count, 1, is less than the first, 3"),
        ('root ::= "a"{x}', "line 1, column 13: expected {m}, {m,} or {m,n}"),
        ('root ::= "a"**', "a count after a count"),
        ('root ::= "a"{2001}', "a count is at most 2,000"),
        ('root ::= "a" )', "line 1, column 14: expected the end of the rule"),
        ("root ::= <think>", "tokens such as <think> are not supported"),
        ('root ::= "\\q"', "expected n, r, t, x, u, U"),
        ('root ::= "\\u12"', "expected 4 hexadecimal digits"),
        ('root ::= "\\uD800"', "there is no character"),
        ("root ::= [z-a]", "the range ends before it begins"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root is there twice"),
        ("root ::= " + "(" * 60, "parentheses may be nested at most 50 deep"),
        ("#" * (MAX_GRAMMAR_LENGTH + 1), "characters; at most"),
    ],
)
def test_what_is_no_grammar_is_refused_by_its_place(grammar: str, fault: str) -> None:
    with pytest.raises(InputRefused) as refused:
        parse_grammar(grammar, "g.gbnf")
    assert str(refused.value).startswith("g.gbnf: ") and fault in str(refused.value)
