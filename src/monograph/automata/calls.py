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
    fields                     None if arguments are written as JSON; otherwise how they are written
                               (`Fields.grammar` of `monograph.text.notation`)
    thoughts                   a dict, which may be missing: "begin" and "end" are what stands before and after
                               thoughts, and "place" is where an answer begins: "before" thoughts, which it may
                               then have, "inside" them, or "after" them

A *part* is a str, an int or a dict: a str is a text with one character for each byte, an int is the id of
a special token, and the dict {"hole": "name"}, {"hole": "arguments"} or {"hole": "id"} stands for what
differs from call to call.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from monograph.automata.expression import (
    Alternation,
    CodePoints,
    Expression,
    Repetition,
    byte_range,
    concatenation,
    literal,
    utf8,
)
from monograph.automata.schema import schema_expression
from monograph.automata.search import OTHER_SPECIAL, text_up_to, text_without
from monograph.automata.values import ByteNotation, ByteQuotes, json_notation
from monograph.errors import InputRefused

# The bytes that UTF-8 never has. They stand for special tokens.
_FREE_BYTES = (0xC0, 0xC1, *range(0xF5, 0x100))
# The last one stands for all special tokens that the frame does not have.
assert _FREE_BYTES[-1] == OTHER_SPECIAL
# The number of letters and digits of a call's id, in the templates that write one.
ID_LENGTH = 9
ID_CHARACTERS: CodePoints = ((0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A))
_SPACE = Alternation(tuple(byte_range(byte, byte) for byte in b" \t\r\n"))
SpellingPart = str | int | Mapping[str, str]


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
    # Ordinary tokens of a vocabulary may also have bytes that UTF-8 never has. These bytes are replaced, because
    # they would be taken for special tokens of the frame.
    replacement_of_byte = bytearray(range(256))
    for byte in _FREE_BYTES:
        replacement_of_byte[byte] = OTHER_SPECIAL
    other_special = bytes([OTHER_SPECIAL])
    new_pieces = []
    for piece in pieces:
        new_pieces.append(piece.translate(replacement_of_byte) if piece else other_special)
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
    # A model that decides by itself to call may write a call in any way that its family of models uses. If a
    # call is required, the template's way is the only one.
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
        expression = concatenation(builder.literal_of(frame["opening"]), *calls_and_closing)
        return builder.after_thoughts(expression, alphabet, may_end_inside=False)
    # After the trigger calls must follow, so an answer without calls has no trigger.
    trigger = builder.bytes_of(frame["trigger"])
    without_calls = text_without(trigger, alphabet, anywhere=frame["follows_text"])
    with_calls = concatenation(
        text_up_to(trigger, alphabet, anywhere=frame["follows_text"]),
        builder.literal_of(frame["after_trigger"]),
        *calls_and_closing,
    )
    any_answer = Alternation((without_calls, with_calls))
    return builder.after_thoughts(any_answer, alphabet, may_end_inside=True)


class _CallBuilder:
    """Builds the expressions of calls.

    Attributes:
        frame: what stands around calls.
        forms: the ways to write a call, each a list of parts.
        uses_counters: see `calls_expression`.
    """

    def __init__(
        self, frame: Mapping[str, Any], forms: Sequence[Sequence[SpellingPart]], uses_counters: bool
    ) -> None:
        self.frame = frame
        self.forms = forms
        self.uses_counters = uses_counters
        self._byte_of = _bytes_of_specials(frame)
        self._notation = self._notation_of_arguments()

    def _notation_of_arguments(self) -> ByteNotation:
        """Return how the object of all arguments is written: as JSON, or as fields."""
        fields = self.frame["fields"]
        if fields is None:
            item, key = self.frame["separators"]
            return json_notation(item.encode(), key.encode())
        # A field's value is written as `value`, and a value inside an array or object as `inner`. They differ in
        # how texts and the words for true, false and null are written.
        grammar = fields["inner"]
        inner = ByteNotation(
            text=self._quotes(grammar["text"]),
            words=self._texts(grammar["words"]),
            array=self._texts(grammar["array"]),
            name=self._quotes(grammar["name"]),
            member=self._texts(grammar["member"]),
            is_sorted=grammar["is_sorted"],
        )
        text = self._quotes(fields["text"])
        value = replace(inner, text=text, words=self._texts(fields["words"]), inside=inner)
        before, middle, after, separator = self._texts(
            [fields[key] for key in ("before", "middle", "after", "separator")]
        )
        return ByteNotation(
            name=ByteQuotes(before, b"", is_escaped=False),
            member=(b"", middle, separator, b""),
            after_value=after,
            is_sorted=fields["is_sorted"],
            inside=value,
            has_only_objects=True,
        )

    def _quotes(self, grammar: Mapping[str, Any]) -> ByteQuotes:
        opening, closing = self._texts([grammar["opening"], grammar["closing"]])
        return ByteQuotes(opening, closing, grammar["is_escaped"])

    def _texts(self, part_lists: Sequence[Sequence[SpellingPart]]) -> Any:
        """Return the bytes of each list of parts, as a tuple."""
        return tuple(self.bytes_of(parts) for parts in part_lists)

    def after_thoughts(
        self, answer: Expression, alphabet: Collection[int], *, may_end_inside: bool
    ) -> Expression:
        """Return an expression for an answer, with the thoughts that may be before it.

        Inside thoughts, the trigger does not begin a call.

        Args:
            answer: what stands after thoughts.
            alphabet: the bytes that thoughts may have.
            may_end_inside: whether the answer may end inside thoughts.
        """
        thoughts = self.frame.get("thoughts")
        if thoughts is None or thoughts["place"] == "after":
            return answer
        end = self.bytes_of(thoughts["end"])
        spaces = Repetition(_SPACE, 0, None)
        # The options for the rest of an answer whose beginning is inside thoughts.
        options = [
            concatenation(text_up_to(end, alphabet, anywhere=True), spaces, answer),
        ]
        if may_end_inside:
            options.append(concatenation(text_without(end, alphabet, anywhere=True)))
        inside = Alternation(tuple(options))
        if thoughts["place"] == "inside":
            return inside
        begin = self.literal_of(thoughts["begin"])
        return Alternation((answer, concatenation(spaces, begin, inside)))

    def call(self, name: str, schema: Any) -> Expression:
        """Return an expression for the calls of a function."""
        try:
            arguments = schema_expression(
                schema, self.uses_counters, self._notation, is_bounded=False
            )
        except InputRefused as error:
            raise InputRefused(f"the arguments of {name}: {error}") from None
        expression_of_hole = {
            "name": literal(name.encode()),
            "arguments": arguments,
            "id": Repetition(utf8(ID_CHARACTERS), ID_LENGTH, ID_LENGTH),
        }
        return Alternation(tuple(self._form(form, expression_of_hole) for form in self.forms))

    def _form(
        self, form: Sequence[SpellingPart], expression_of_hole: Mapping[str, Expression]
    ) -> Expression:
        """Return an expression for the parts of a form, with these expressions in its holes."""
        expressions: list[Expression] = []
        for part in form:
            if isinstance(part, Mapping):
                expressions.append(expression_of_hole[part["hole"]])
            else:
                expressions.append(self.literal_of([part]))
        return concatenation(*expressions)

    def literal_of(self, parts: Sequence[SpellingPart]) -> Expression:
        """Return an expression for parts without holes."""
        return literal(self.bytes_of(parts))

    def bytes_of(self, parts: Sequence[SpellingPart]) -> bytes:
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
    parts += _special_parts(frame["fields"]) + _special_parts(frame.get("thoughts"))
    # A dict keeps each token once, in the frame's order, so that equal frames get equal bytes.
    tokens = dict.fromkeys(part for part in parts if isinstance(part, int))
    free = [byte for byte in _FREE_BYTES if byte != OTHER_SPECIAL]
    if len(tokens) > len(free):
        raise InputRefused(
            f"the chat template writes {len(tokens)} special tokens around a call; at most {len(free)} are told apart"
        )
    return dict(zip(tokens, free, strict=False))  # some bytes may be left over


def _special_parts(value: Any) -> list[SpellingPart]:
    """Return the special tokens in a frame's "fields" or "thoughts", and in the values inside these."""
    if isinstance(value, Mapping):
        return [part for inner in value.values() for part in _special_parts(inner)]
    if isinstance(value, list):
        return [part for inner in value for part in _special_parts(inner)]
    is_token = isinstance(value, int) and not isinstance(value, bool)
    return [value] if is_token else []
