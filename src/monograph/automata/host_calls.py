"""The grammar of all answers that call functions, for the host to follow.

It accepts what the automaton of `monograph.automata.calls` accepts, and the schemas of arguments may also
need a stack. Two kinds of answers are refused here, which only the automaton can follow: answers in which a
template writes arguments one by one, and answers that may begin with thoughts and need not call a function.

What a template writes around calls is a *frame*, made of *parts*: `monograph.automata.calls` describes both.
"""

from collections.abc import Mapping, Sequence

from monograph.automata.calls import ID_CHARACTERS, ID_LENGTH, Calls, SpellingPart
from monograph.automata.expression import single
from monograph.automata.rules import (
    ROOT,
    AnyOf,
    InOrder,
    Json,
    Lexeme,
    OneCharacter,
    Repeated,
    SpecialToken,
    Symbol,
)
from monograph.errors import InputRefused

_SPACES = Repeated(AnyOf(tuple(OneCharacter(single(byte)) for byte in b" \t\r\n")), 0, None)
_ANY_TEXT = "(?s:.*)"


def calls_rules(calls: Calls, special_ids: Sequence[int]) -> dict[str, Symbol]:
    """Return a grammar whose rule ROOT accepts the answers.

    Args:
        calls: the calls that an answer may or must have.
        special_ids: the ids of all special tokens.

    Raises:
        InputRefused: only an automaton can follow such answers.
    """
    frame = calls.frame
    if frame["fields"] is not None:
        raise InputRefused("llguidance cannot follow arguments that a template writes one by one")
    thoughts = frame.get("thoughts")
    place = "after" if thoughts is None else thoughts["place"]
    if place == "before" and not calls.must_call:
        raise InputRefused(
            "llguidance cannot follow an answer that may think and need not call: require a call"
        )
    all_special_ids = tuple(special_ids)
    answer = _answer(calls, all_special_ids)
    if thoughts is None or place == "after":
        return {ROOT: answer}
    # The rest of an answer whose beginning is inside thoughts.
    end = thoughts["end"]
    inside = InOrder((_text_up_to(end, all_special_ids, anywhere=True), _SPACES, answer))
    if not calls.must_call:
        # Such an answer may also be over before its thoughts end.
        return {ROOT: AnyOf((inside, _text_without(end, all_special_ids)))}
    if place == "inside":
        return {ROOT: inside}
    with_thoughts = InOrder((_SPACES, _text(thoughts["begin"]), inside))
    return {ROOT: AnyOf((answer, with_thoughts))}


def _answer(calls: Calls, special_ids: tuple[int, ...]) -> Symbol:
    """Return the answers without thoughts; see `calls_rules`."""
    frame = calls.frame
    forms = [frame["call"]]
    # If a call is required, the template's way to write it is the only one.
    if not calls.must_call:
        forms += frame["variants"]
    separators = tuple(frame["separators"])
    call_options = []
    for form in forms:
        for name, schema in calls.functions:
            call_options.append(_form(form, name, schema, separators))
    any_call = AnyOf(tuple(call_options))
    calls_and_closing: list[Symbol] = [any_call]
    if calls.parallel and frame["between"] is not None:
        further_call = InOrder((_text(frame["between"]), any_call))
        calls_and_closing.append(Repeated(further_call, 0, None))
    calls_and_closing.append(_text(frame["closing"]))
    if calls.must_call:
        return InOrder((_text(frame["opening"]), *calls_and_closing))
    trigger = frame["trigger"]
    text_and_trigger = _text_up_to(trigger, special_ids, frame["follows_text"])
    with_calls = InOrder((text_and_trigger, _text(frame["after_trigger"]), *calls_and_closing))
    return AnyOf((_text_without(trigger, special_ids), with_calls))


def _form(
    form: Sequence[SpellingPart], name: str, schema: object, separators: tuple[str, str]
) -> Symbol:
    """Return the calls of one function that are written in one form.

    Args:
        form: the parts of a call, with holes for what differs from call to call.
        name: the function's name.
        schema: the schema of its arguments.
        separators: what is between two members of the arguments, and between a name and its value.
    """
    symbol_of_hole: dict[str, Symbol] = {
        "name": _text([name]),
        "arguments": Json(schema, separators),
        "id": Repeated(OneCharacter(ID_CHARACTERS), ID_LENGTH, ID_LENGTH),
    }
    symbols = []
    for part in form:
        if isinstance(part, Mapping):
            symbols.append(symbol_of_hole[part["hole"]])
        else:
            symbols.append(_text([part]))
    return InOrder(tuple(symbols))


def _text(parts: Sequence[SpellingPart]) -> Symbol:
    """Return these parts, one after another, and nothing else."""
    symbols: list[Symbol] = []
    for part in parts:
        if isinstance(part, int):
            symbols.append(SpecialToken((part,)))
        else:
            assert isinstance(part, str)
            letters = part.encode("latin-1").decode()  # a part has a character for each byte
            symbols += [OneCharacter(single(ord(letter))) for letter in letters]
    return InOrder(tuple(symbols))


def _text_up_to(
    needle: Sequence[SpellingPart], special_ids: tuple[int, ...], anywhere: bool
) -> Symbol:
    """Return the texts that end with the first occurrence of a needle.

    Args:
        needle: what is searched for.
        special_ids: the ids of all special tokens.
        anywhere: True: any text may come before the needle. False: only white space may.
    """
    if not anywhere:
        return InOrder((_SPACES, _text(needle)))
    if isinstance(needle[0], int):
        others = tuple(token for token in special_ids if token != needle[0])
        return InOrder((_any_text(others), _text(needle)))
    return Lexeme(_ANY_TEXT + _escaped(needle), is_lazy=True)


def _text_without(needle: Sequence[SpellingPart], special_ids: tuple[int, ...]) -> Symbol:
    """Return the texts that do not contain a needle."""
    if isinstance(needle[0], int):
        return _any_text(tuple(token for token in special_ids if token != needle[0]))
    return Lexeme(_ANY_TEXT, without=_ANY_TEXT + _escaped(needle) + _ANY_TEXT)


def _any_text(special_ids: tuple[int, ...]) -> Symbol:
    """Return any text, which may have any of these special tokens in it."""
    options: list[Symbol] = [Lexeme("(?s:.+)")]
    if special_ids:
        options.append(SpecialToken(special_ids))
    return Repeated(AnyOf(tuple(options)), 0, None)


def _escaped(needle: Sequence[SpellingPart]) -> str:
    """Return a regular expression that matches exactly the text of a needle.

    Raises:
        InputRefused: the needle has special tokens.
    """
    if not all(isinstance(part, str) for part in needle):
        raise InputRefused(
            "llguidance cannot follow calls that begin with text and a special token"
        )
    text = "".join(map(str, needle)).encode("latin-1").decode()
    return "".join(rf"\x{{{ord(letter):x}}}" for letter in text)
