"""Build the expression of all answers that call functions as a chat template writes calls.

Each call has the name of a function, and arguments that the function's schema validates.

A chat template writes special tokens around calls, such as <tool_call>. The automaton reads bytes, and
special tokens have none. So each special token that the template writes around calls gets one of the 13
bytes that never occur in UTF-8, and all other special tokens share the last of these bytes.
`pieces_of_calls` returns the vocabulary with these bytes.

What the template writes around calls is a *frame*, a dict that
`monograph.text.calls.CallFrame.grammar` makes. With two calls an answer ends with

    opening  call  between  call  closing

and the frame's keys are

    opening, between, closing  these texts, as lists of parts; "between" is None if an answer can have only
                               one call
    call                       a call, as a list of parts
    variants                   other ways in which models of the family write a call, each like "call"
    trigger, after_trigger     "opening" without white space at its beginning, in two pieces: the trigger is
                               the text by which a call is recognised
    follows_text               whether the answer may have text before its calls
    separators                 what is between two members of the arguments, and between name and value

A *part* is a str, an int or a dict: a str is a text with one character for each byte, an int is the id of
a special token, and the dict {"hole": "name"}, {"hole": "arguments"} or {"hole": "id"} stands for what
differs from call to call.
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

# The bytes that UTF-8 never has. They stand for special tokens.
_FREE_BYTES = (0xC0, 0xC1, *range(0xF5, 0x100))
_OTHER_SPECIAL = _FREE_BYTES[-1]  # stands for all special tokens that the frame does not have
# What may come before the calls if the answer may have no text there: white space and special tokens.
_BLANK = frozenset((*b" \t\n\r\v\f", _OTHER_SPECIAL))
# The number of letters and digits of a call's id, in the templates that write one.
_ID_LENGTH = 9
_ID_CHARACTER = Alternation(
    (byte_range(0x30, 0x39), byte_range(0x41, 0x5A), byte_range(0x61, 0x7A))
)
Part = str | int | Mapping[str, str]


class Calls(NamedTuple):
    """The calls that an answer may or must have.

    Attributes:
        frame: what stands around calls; see the module's docstring.
        functions: (name, JSON schema of the arguments) of each function that may be called.
        must_call: True: the answer has only calls. False: it is any text, which may end with calls.
        parallel: whether there may be several calls.
    """

    frame: Mapping[str, Any]
    functions: Sequence[tuple[str, Any]]
    must_call: bool
    parallel: bool


def pieces_of_calls(frame: Mapping[str, Any], pieces: Sequence[bytes]) -> list[bytes]:
    """Return the bytes of each token, where a special token has the byte that stands for it.

    Args:
        frame: what stands around calls.
        pieces: the bytes of each token, empty for special tokens.

    Raises:
        InputRefused: the frame has more special tokens than there are bytes for them.
    """
    # Vocabularies have ordinary tokens with bytes that UTF-8 never has. Their bytes are replaced, or they
    # would be taken for special tokens of the frame.
    without_free_bytes = bytes(
        _OTHER_SPECIAL if byte in _FREE_BYTES else byte for byte in range(256)
    )
    other_special = bytes([_OTHER_SPECIAL])
    new_pieces = [
        piece.translate(without_free_bytes) if piece else other_special for piece in pieces
    ]
    for token, byte in _bytes_of_specials(frame).items():
        new_pieces[token] = bytes([byte])
    return new_pieces


def calls_expression(
    calls: Calls, alphabet: Collection[int], uses_counters: bool = True
) -> Expression:
    """Return an expression for the answers, over the bytes of `pieces_of_calls`.

    Args:
        calls: the calls that an answer may or must have.
        alphabet: the bytes that the text before calls may have: all bytes of all tokens.
        uses_counters: whether counters count the lengths of strings and arrays in arguments; False: the
            automaton has a state for each length.

    Raises:
        InputRefused: a schema is refused (`schema_expression`); the message has the function's name.
    """
    frame = calls.frame
    forms = [frame["call"]]
    # A model that decides by itself to call may write a call in any way of its family. If it must call, the
    # template's way is the only one.
    if not calls.must_call:
        forms += frame["variants"]
    builder = _CallBuilder(frame, forms, uses_counters)
    any_call = Alternation(tuple(builder.call(name, schema) for name, schema in calls.functions))
    calls_and_closing: list[Expression] = [any_call]
    if calls.parallel and frame["between"] is not None:
        further_call = concatenation(builder.literal_of(frame["between"]), any_call)
        calls_and_closing.append(Repetition(further_call, 0, None))
    calls_and_closing.append(builder.literal_of(frame["closing"]))
    if calls.must_call:
        return concatenation(builder.literal_of(frame["opening"]), *calls_and_closing)
    # After the trigger calls must follow, so an answer without calls has no trigger.
    trigger = builder.bytes_of(frame["trigger"])
    without_calls = text_without(trigger, alphabet, anywhere=frame["follows_text"])
    with_calls = concatenation(
        text_up_to(trigger, alphabet, anywhere=frame["follows_text"]),
        builder.literal_of(frame["after_trigger"]),
        *calls_and_closing,
    )
    return Alternation((without_calls, with_calls))


class _CallBuilder:
    """Builds the expressions of calls.

    Attributes:
        frame: what stands around calls.
        forms: the ways to write a call, each a list of parts.
        uses_counters: see `calls_expression`.
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
        expression_of_hole = {
            "name": literal(name.encode()),
            "arguments": arguments,
            "id": Repetition(_ID_CHARACTER, _ID_LENGTH, _ID_LENGTH),
        }
        return Alternation(tuple(self._form(form, expression_of_hole) for form in self.forms))

    def _form(
        self, form: Sequence[Part], expression_of_hole: Mapping[str, Expression]
    ) -> Expression:
        """Return an expression for the parts of a form, with these expressions in its holes."""
        expressions: list[Expression] = []
        for part in form:
            if isinstance(part, Mapping):
                expressions.append(expression_of_hole[part["hole"]])
            else:
                expressions.append(self.literal_of([part]))
        return concatenation(*expressions)

    def literal_of(self, parts: Sequence[Part]) -> Expression:
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
    """Return the byte that stands for each special token of a frame, by the token's id."""
    keys = ("trigger", "after_trigger", "opening", "call", "between", "closing")
    part_lists = [frame[key] or () for key in keys] + list(frame["variants"])
    parts = [part for part_list in part_lists for part in part_list]
    # A dict keeps each token once, in the frame's order, so that equal frames get equal bytes.
    tokens = dict.fromkeys(part for part in parts if isinstance(part, int))
    free = [byte for byte in _FREE_BYTES if byte != _OTHER_SPECIAL]
    if len(tokens) > len(free):
        raise InputRefused(
            f"the chat template writes {len(tokens)} special tokens around a call; at most {len(free)} are told apart"
        )
    return dict(zip(tokens, free, strict=False))


# ── texts in which a needle, such as the trigger of calls, is searched for ────────────────────────


def text_without(needle: bytes, alphabet: Collection[int], *, anywhere: bool) -> StateMachine:
    """Return an expression for the texts over an alphabet that do not have the needle.

    Args:
        needle: the bytes to search for.
        alphabet: the bytes of the texts.
        anywhere: True: the needle is nowhere in the text. False: it is not at the text's beginning, where
            only bytes of _BLANK are before it; it may be later in the text.
    """
    rows, symbols_of = _search_automaton(needle, alphabet, anywhere=anywhere)
    found = len(needle)
    rows_without_found = [
        {symbol: state for symbol, state in row.items() if state != found} for row in rows
    ]
    accepting = [state != found for state in range(len(rows))]
    return StateMachine(tuple(rows_without_found), tuple(accepting), symbols_of)


def text_up_to(needle: bytes, alphabet: Collection[int], *, anywhere: bool) -> StateMachine:
    """Return an expression for the texts over an alphabet that end with the needle's first occurrence.

    Args:
        needle: the bytes to search for.
        alphabet: the bytes of the texts.
        anywhere: True: any text may be before the needle. False: only bytes of _BLANK may.
    """
    rows, symbols_of = _search_automaton(needle, alphabet, anywhere=anywhere)
    found = len(needle)
    accepting = [state == found for state in range(len(rows))]
    return StateMachine(tuple(rows), tuple(accepting), symbols_of)


def _search_automaton(
    needle: bytes, alphabet: Collection[int], *, anywhere: bool
) -> tuple[list[dict[int, int]], dict[int, int]]:
    """Return the transitions of a search for a needle, and a bit mask of the bytes of each class.

    In state s < len(needle) the needle has not occurred, and s is the largest number such that the text
    ends with the first s bytes of the needle. In state len(needle) it has occurred, and no transition
    leaves this state. If not `anywhere`, there is one more state: the text began with something else, so
    the needle cannot be at its beginning any more.
    """
    distinct = sorted(set(needle))
    # Each byte of the needle is a class of its own. All other bytes are in one of two classes.
    symbols_of = {symbol: 1 << byte for symbol, byte in enumerate(distinct)}
    blank_class = len(distinct)
    rest_class = blank_class + 1
    others = set(alphabet) - set(distinct)
    symbols_of[blank_class] = sum(1 << byte for byte in others & _BLANK)
    symbols_of[rest_class] = sum(1 << byte for byte in others - _BLANK)
    found = len(needle)
    failed = found + 1
    rows: list[dict[int, int]] = []
    for state in range(found):
        row: dict[int, int]
        if anywhere:
            row = {rest_class: 0, blank_class: 0}
            for symbol, byte in enumerate(distinct):
                row[symbol] = _longest_beginning(needle, needle[:state] + bytes([byte]))
        else:
            # Blank bytes may come before the needle, but not after it has begun.
            after_blank = 0 if state == 0 else failed
            row = {rest_class: failed, blank_class: after_blank}
            for symbol, byte in enumerate(distinct):
                if byte == needle[state]:
                    row[symbol] = state + 1
                else:
                    row[symbol] = after_blank if byte in _BLANK else failed
        rows.append(row)
    rows.append({})
    if not anywhere:
        rows.append(dict.fromkeys(symbols_of, failed))
    return rows, symbols_of


def _longest_beginning(needle: bytes, text: bytes) -> int:
    """Return the largest number of bytes from the needle's beginning with which the text ends."""
    return next(size for size in range(len(text), -1, -1) if text.endswith(needle[:size]))
