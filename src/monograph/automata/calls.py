"""Automata of answers that call functions: each call names one of them, and its arguments follow the
function's schema.

The automaton reads bytes, but what stands around a call has special tokens, too, which have none. So
each of them gets a byte that occurs in no text in UTF-8, and all other special tokens share another
such byte. `pieces_of_calls` returns a vocabulary in which tokens are spelled so.

A *part* is a piece of what stands around a call: a text with a character for each byte, the id of a
special token, or {"hole": "name"}, {"hole": "arguments"} or {"hole": "id"}, in whose place each call
has something else. What `calls_expression` reads is JSON:

    frame      what the chat template writes, see `monograph.text.calls.CallFrame.grammar`
    functions  the functions, each [name, schema of its arguments]
    must_call  whether the answer has only calls; otherwise it is any text, and calls may end it
    parallel   whether there may be several calls
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from monograph.automata.expression import (
    Alternation,
    Expression,
    Repetition,
    StateMachine,
    byte_range,
    concatenation,
    literal,
)
from monograph.automata.schema import schema_expression
from monograph.automata.values import Separators
from monograph.errors import InputRefused

# The bytes that UTF-8 never has, which stand for special tokens; the last one for those that no call has.
_FREE_BYTES = (0xC0, 0xC1, *range(0xF5, 0x100))
_OTHER_SPECIAL = _FREE_BYTES[-1]
# What may stand before calls that begin an answer: white space and special tokens.
_BLANK = frozenset((*b" \t\n\r\v\f", _OTHER_SPECIAL))
# As many letters and digits as a template that writes a call's id wants.
_ID_LENGTH = 9
_ID_CHARACTER = Alternation(
    (byte_range(0x30, 0x39), byte_range(0x41, 0x5A), byte_range(0x61, 0x7A))
)
Part = str | int | Mapping[str, str]


class Calls(NamedTuple):
    """What `calls_expression` reads, see the module's docstring."""

    frame: Mapping[str, Any]
    functions: Sequence[tuple[str, Any]]
    must_call: bool
    parallel: bool


def pieces_of_calls(frame: Mapping[str, Any], pieces: Sequence[bytes]) -> list[bytes]:
    """Return the bytes of each token, with one byte for a special token.

    Args:
        frame: what stands around calls.
        pieces: the bytes of each token, empty for special tokens.

    Raises:
        InputRefused: the frame has more special tokens than there are bytes for them.
    """
    byte_of = _bytes_of_specials(frame)
    # A token of bytes that no text has must not be taken for a special token of the frame.
    table = bytes(_OTHER_SPECIAL if byte in _FREE_BYTES else byte for byte in range(256))
    other = bytes([_OTHER_SPECIAL])
    spelled = [piece.translate(table) if piece else other for piece in pieces]
    for token, byte in byte_of.items():
        spelled[token] = bytes([byte])
    return spelled


def calls_expression(
    calls: Calls, alphabet: Collection[int], uses_counters: bool = True
) -> Expression:
    """Return an expression for the answers, over the bytes of `pieces_of_calls`.

    Args:
        calls: what may be called, and how.
        alphabet: the bytes that any text before calls may have: all that tokens have.
        uses_counters: whether counters count lengths within arguments.

    Raises:
        InputRefused: a schema is refused (`schema_expression`); the message has the function's name.
    """
    frame = calls.frame
    # What the model has written before a call decides which form it has. Nothing does if it must call.
    forms = [frame["call"]] if calls.must_call else [frame["call"], *frame["variants"]]
    builder = _CallBuilder(frame, forms, uses_counters)
    one = Alternation(tuple(builder.call(name, schema) for name, schema in calls.functions))
    all_calls: list[Expression] = [one]
    if calls.parallel and frame["between"] is not None:
        another = concatenation(builder.parts(frame["between"]), one)
        all_calls.append(Repetition(another, 0, None))
    all_calls.append(builder.parts(frame["closing"]))
    if calls.must_call:
        return concatenation(builder.parts(frame["opening"]), *all_calls)
    trigger = builder.bytes_of(frame["trigger"])
    text = text_without(trigger, alphabet, anywhere=frame["follows_text"])
    text_before = text_up_to(trigger, alphabet, anywhere=frame["follows_text"])
    return Alternation(
        (text, concatenation(text_before, builder.parts(frame["after_trigger"]), *all_calls))
    )


class _CallBuilder:
    """Builds the expressions of calls.

    Attributes:
        frame: what stands around calls.
        forms: the forms of a call.
        uses_counters: whether counters count lengths within arguments.
    """

    def __init__(
        self, frame: Mapping[str, Any], forms: Sequence[Sequence[Part]], uses_counters: bool
    ) -> None:
        self.frame = frame
        self.forms = forms
        self.uses_counters = uses_counters
        self._byte_of = _bytes_of_specials(frame)

    def call(self, name: str, schema: Any) -> Expression:
        """Return an expression for the calls of a function."""
        item, key = self.frame["separators"]
        try:
            arguments = schema_expression(
                schema,
                self.uses_counters,
                Separators(item.encode(), key.encode()),
                is_bounded=False,
            )
        except InputRefused as error:
            raise InputRefused(f"the arguments of {name}: {error}") from None
        holes = {
            "name": literal(name.encode()),
            "arguments": arguments,
            "id": Repetition(_ID_CHARACTER, _ID_LENGTH, _ID_LENGTH),
        }
        return Alternation(tuple(self._form(form, holes) for form in self.forms))

    def _form(self, form: Sequence[Part], holes: Mapping[str, Expression]) -> Expression:
        """Return an expression for the calls of one form, with these texts in the place of its holes."""
        return concatenation(
            *(
                holes[part["hole"]] if isinstance(part, Mapping) else literal(self.bytes_of([part]))
                for part in form
            )
        )

    def parts(self, parts: Sequence[Part]) -> Expression:
        """Return an expression for parts without holes."""
        return literal(self.bytes_of(parts))

    def bytes_of(self, parts: Sequence[Part]) -> bytes:
        """Return the bytes of parts without holes."""
        texts = []
        for part in parts:
            if isinstance(part, str):
                texts.append(part.encode("latin-1"))
            else:
                assert isinstance(part, int)
                texts.append(bytes([self._byte_of[part]]))
        return b"".join(texts)


def _bytes_of_specials(frame: Mapping[str, Any]) -> dict[int, int]:
    """Return the byte that stands for each special token of a frame."""
    keys = ("trigger", "after_trigger", "opening", "call", "between", "closing")
    groups = [frame[key] or () for key in keys] + list(frame["variants"])
    parts = [part for group in groups for part in group]
    tokens = dict.fromkeys(part for part in parts if isinstance(part, int))
    free = [byte for byte in _FREE_BYTES if byte != _OTHER_SPECIAL]
    if len(tokens) > len(free):
        raise InputRefused(
            f"the chat template writes {len(tokens)} special tokens around a call; at most {len(free)} are told apart"
        )
    return dict(zip(tokens, free, strict=False))


# ── texts with and without another one ────────────────────────────────────────────────────────────


def text_without(needle: bytes, alphabet: Collection[int], *, anywhere: bool) -> StateMachine:
    """Return an expression for any bytes of an alphabet in which the needle does not occur.

    If not `anywhere`, for any bytes in which the needle is not at the beginning, apart from white space and
    special tokens that no call has.
    """
    rows, symbols_of = _search(needle, alphabet, anywhere=anywhere)
    end = len(needle)
    without_end = [{symbol: state for symbol, state in row.items() if state != end} for row in rows]
    accepting = [state != end for state in range(len(rows))]
    return StateMachine(tuple(without_end), tuple(accepting), symbols_of)


def text_up_to(needle: bytes, alphabet: Collection[int], *, anywhere: bool) -> StateMachine:
    """Return an expression for any bytes of an alphabet that end with the first occurrence of the needle.

    If not `anywhere`, only white space and special tokens that no call has may stand before it.
    """
    rows, symbols_of = _search(needle, alphabet, anywhere=anywhere)
    accepting = [state == len(needle) for state in range(len(rows))]
    return StateMachine(tuple(rows), tuple(accepting), symbols_of)


def _search(
    needle: bytes, alphabet: Collection[int], *, anywhere: bool
) -> tuple[list[dict[int, int]], dict[int, int]]:
    """Return the transitions of a search, and a bit mask of the bytes of each class.

    State s: the text ends with the first s bytes of the needle, which has not occurred, and with no
    more of them. No transition leaves the state in which it has occurred. If the search is not
    `anywhere`, but at the beginning, a last state is that of a text that begins otherwise.
    """
    distinct = sorted(set(needle))
    symbols_of = {symbol: 1 << byte for symbol, byte in enumerate(distinct)}
    # The classes of all other bytes: those that may stand before the beginning, and the rest.
    blank = len(distinct)
    rest = blank + 1
    others = set(alphabet) - set(distinct)
    symbols_of[blank] = sum(1 << byte for byte in others & _BLANK)
    symbols_of[rest] = sum(1 << byte for byte in others - _BLANK)
    size = len(needle)
    otherwise = size + 1
    rows = []
    for state in range(size):
        other = 0 if anywhere else otherwise
        row = {rest: other, blank: other if state else 0}
        for symbol, byte in enumerate(distinct):
            text = needle[:state] + bytes([byte])
            if anywhere:
                row[symbol] = _longest_end(text, needle)
            elif needle.startswith(text):
                row[symbol] = state + 1
            else:
                row[symbol] = 0 if state == 0 and byte in _BLANK else otherwise
        rows.append(row)
    rows.append({})
    if not anywhere:
        rows.append(dict.fromkeys(symbols_of, otherwise))
    return rows, symbols_of


def _longest_end(text: bytes, needle: bytes) -> int:
    """Return how many bytes of the needle's beginning a text ends with, at most."""
    return next(size for size in range(len(text), -1, -1) if text.endswith(needle[:size]))
