"""Compile constraints and stop strings to automata over tokens.

`constraint` and `stop_strings` return an `Automaton`, which the decode step runs on the device. A
constraint goes through four files: `pattern`, `schema` or `gbnf` parses it to an `expression` over bytes, `dfa`
compiles the expression to an automaton over bytes, and `tokens` turns that into an automaton over tokens.

`constraint` refuses what no automaton can follow, such as a recursive grammar. The host can follow it,
with the optional package llguidance (`on_host`).

Nothing in this package imports torch, so that a process that only compiles constraints starts quickly.
"""

from collections.abc import Collection, Iterable, Sequence

from monograph.automata.argument_types import argument_types, types_of_tools
from monograph.automata.calls import Calls, calls_expression, pieces_of_calls
from monograph.automata.counting import Ambiguous
from monograph.automata.dfa import ByteAutomaton, compile_expression
from monograph.automata.expression import Alternation, Expression, concatenation, literal
from monograph.automata.gbnf import expression_of, parse_grammar
from monograph.automata.pattern import fullmatch_expression
from monograph.automata.schema import parse_schema, schema_expression
from monograph.automata.tokens import Automaton, constraint_automaton, has_each_byte, stop_automaton
from monograph.errors import InputRefused, UsageError

__all__ = [
    "KINDS",
    "Automaton",
    "ByteAutomaton",
    "Calls",
    "acceptor",
    "argument_types",
    "call_constraint",
    "constraint",
    "stop_strings",
    "types_of_tools",
]
KINDS = ("choices", "regex", "json_schema", "grammar")


def constraint(
    kind: str, value: object, pieces: Sequence[bytes], end_ids: Collection[int], lead: bytes = b""
) -> Automaton:
    """Return an automaton that allows a token only if the text can still become an accepted text.

    Args:
        kind: what is accepted. "choices": one of several texts; "regex": texts that a regular
            expression matches as a whole; "json_schema": compact JSON that a bounded schema
            validates; "grammar": texts of a grammar in GBNF that is not recursive. docs/constraints.md
            lists the supported syntax and keywords.
        value: the texts, the regular expression, the grammar, or the schema as JSON text or as an object.
        pieces: the bytes of each token, empty for special tokens (`Tokenizer.pieces`).
        end_ids: the tokens that end a text.
        lead: bytes that come before the text and are not part of it (`Tokenizer.inserted_space`).

    Raises:
        UsageError: the kind is unknown.
        InputRefused: the value is outside the subset, unbounded or too large; the message names the
            place.
    """
    automaton, where = _compile(kind, value, lead)
    if automaton.has_counters and not has_each_byte(automaton, pieces, end_ids):
        # Counters need a token for each byte that may follow (`has_each_byte`). If one is missing, the
        # automaton is compiled without counters, with a state for each length.
        automaton, where = _compile(kind, value, lead, uses_counters=False)
    return constraint_automaton(automaton, pieces, end_ids, where)


def call_constraint(calls: Calls, pieces: Sequence[bytes], end_ids: Collection[int]) -> Automaton:
    """Return an automaton that allows a token only if the answer can still become an accepted one.

    Args:
        calls: which calls an answer may or must have.
        pieces: the bytes of each token, empty for special tokens (`Tokenizer.pieces`).
        end_ids: the tokens that end an answer.

    Raises:
        InputRefused: the schema of a function is refused as in `constraint`.
    """
    where = "the calls of the tools"
    # In these pieces special tokens have bytes, too.
    pieces = pieces_of_calls(calls.frame, pieces)
    ends = set(end_ids)
    # The bytes of all tokens that do not end an answer: the text before calls may have them.
    alphabet = set(b"".join([piece for token, piece in enumerate(pieces) if token not in ends]))
    try:
        automaton = _compile_calls(calls, alphabet, where)
        if automaton.has_counters and not has_each_byte(automaton, pieces, end_ids):
            # A token for some byte is missing, so lengths are not counted, as in `constraint`.
            automaton = _compile_calls(calls, alphabet, where, uses_counters=False)
    except RecursionError:
        raise InputRefused(f"{where} are nested too deep: make them flatter") from None
    return constraint_automaton(automaton, pieces, end_ids, where)


def _compile_calls(
    calls: Calls, alphabet: Collection[int], where: str, uses_counters: bool = True
) -> ByteAutomaton:
    """Return the automaton over bytes for answers with calls.

    It has no counters if they would be ambiguous: if two functions have similar schemas, the next byte may not
    decide which function's counter is used.
    """
    if uses_counters:
        try:
            return compile_expression(calls_expression(calls, alphabet), where)
        except Ambiguous:
            pass
    return compile_expression(calls_expression(calls, alphabet, uses_counters=False), where)


def acceptor(kind: str, value: object) -> ByteAutomaton:
    """Return an automaton over bytes, which reads whole texts and needs no tokenizer.

    Args:
        kind: see `constraint`.
        value: see `constraint`.

    Raises:
        UsageError: the kind is unknown.
        InputRefused: the value is outside the subset, unbounded or too large; the message names the
            place.
    """
    automaton, _ = _compile(kind, value, b"")
    return automaton


def stop_strings(strings: Sequence[str], pieces: Sequence[bytes]) -> Automaton:
    """Return an automaton that stops at the token that completes a stop string.

    A stop string may be part of one token, or be spread over several.

    Args:
        strings: at least one, none of them empty.
        pieces: the bytes of each token, empty for special tokens (`Tokenizer.pieces`).

    Raises:
        InputRefused: there is no string, one is empty, or they have too many bytes in all.
    """
    return stop_automaton([_utf8(string, "a stop string") for string in strings], pieces)


def _compile(
    kind: str, value: object, lead: bytes, uses_counters: bool = True
) -> tuple[ByteAutomaton, str]:
    """Return a constraint's automaton over bytes, and the constraint's name in an error.

    Each text that the automaton accepts is `lead` and then a text that the constraint accepts.
    """
    try:
        expression, where = _parse(kind, value, uses_counters)
        if lead:
            expression = concatenation(literal(lead), expression)
        return compile_expression(expression, where), where
    except RecursionError:
        raise InputRefused(f"the {kind} constraint is nested too deep: make it flatter") from None


def _parse(kind: str, value: object, uses_counters: bool) -> tuple[Expression, str]:
    """Return an expression for the accepted texts, and the constraint's name in an error."""
    if kind == "choices":
        if isinstance(value, str) or not isinstance(value, Iterable) or not value:
            raise InputRefused("choices: expected a list of at least one text")
        return Alternation(tuple(literal(_utf8(text, "a choice")) for text in value)), "the choices"
    if kind == "regex":
        if not isinstance(value, str):
            raise InputRefused(f"regex: expected a text, not {value!r:.60}")
        short = value if len(value) <= 60 else value[:60] + "..."
        where = f"the regular expression {short!r}"
        return fullmatch_expression(value, where), where
    if kind == "json_schema":
        schema = parse_schema(value) if isinstance(value, str) else value
        return schema_expression(schema, uses_counters), "the JSON schema"
    if kind == "grammar":
        if not isinstance(value, str):
            raise InputRefused(f"grammar: expected a text, not {value!r:.60}")
        grammar = parse_grammar(value)
        if grammar.is_recursive:
            raise InputRefused("the grammar is recursive, and an automaton has no stack")
        return expression_of(grammar), grammar.where
    raise UsageError(f"constraint {kind!r}: expected {', '.join(KINDS)}")


def _utf8(text: str, name: str) -> bytes:
    """Return a text's bytes; `name` is what the text is called in an error."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InputRefused(
            f"{name} has half of a surrogate pair, which UTF-8 cannot write: {text!r:.60}"
        ) from None
