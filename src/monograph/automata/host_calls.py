"""The grammar of all answers that call functions, for the host to follow.

It accepts what the automaton of `monograph.automata.calls` accepts, also for arguments whose schema needs
a stack. Two kinds of answers are left to the automaton: those in which a template writes arguments one by
one, and those that may begin with thoughts and need not call a function.

Frames and their parts are described in `monograph.automata.calls`.
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
    forms = [frame["call"], *([] if calls.must_call else frame["variants"])]
    any_call = AnyOf(
        tuple(
            _form(form, name, schema, tuple(frame["separators"]))
            for form in forms
            for name, schema in calls.functions
        )
    )
    parts: list[Symbol] = [any_call]
    if calls.parallel and frame["between"] is not None:
        parts.append(Repeated(InOrder((_text(frame["between"]), any_call)), 0, None))
    parts.append(_text(frame["closing"]))
    other_ids = tuple(special_ids)
    if calls.must_call:
        answer: Symbol = InOrder((_text(frame["opening"]), *parts))
    else:
        trigger = frame["trigger"]
        with_calls = InOrder(
            (
                _text_up_to(trigger, other_ids, frame["follows_text"]),
                _text(frame["after_trigger"]),
                *parts,
            )
        )
        answer = AnyOf((_text_without(trigger, other_ids), with_calls))
    if thoughts is not None and place != "after":
        end = thoughts["end"]
        inside = InOrder((_text_up_to(end, other_ids, anywhere=True), _SPACES, answer))
        if not calls.must_call:
            return {ROOT: AnyOf((inside, _text_without(end, other_ids)))}
        if place == "inside":
            return {ROOT: inside}
        return {ROOT: AnyOf((answer, InOrder((_SPACES, _text(thoughts["begin"]), inside))))}
    return {ROOT: answer}


def _form(
    form: Sequence[SpellingPart], name: str, schema: object, separators: tuple[str, str]
) -> Symbol:
    """Return a call of a function."""
    in_hole: dict[str, Symbol] = {
        "name": _text([name]),
        "arguments": Json(schema, separators),
        "id": Repeated(OneCharacter(ID_CHARACTERS), ID_LENGTH, ID_LENGTH),
    }
    parts = []
    for part in form:
        parts.append(in_hole[part["hole"]] if isinstance(part, Mapping) else _text([part]))
    return InOrder(tuple(parts))


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
        anywhere: whether any text may come before the needle, or only white space.
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
    """Return any text with any of these special tokens."""
    options: list[Symbol] = [Lexeme("(?s:.+)")]
    if special_ids:
        options.append(SpecialToken(special_ids))
    return Repeated(AnyOf(tuple(options)), 0, None)


def _escaped(needle: Sequence[SpellingPart]) -> str:
    """Return a needle without special tokens as a regular expression.

    Raises:
        InputRefused: there are special tokens in it.
    """
    if not all(isinstance(part, str) for part in needle):
        raise InputRefused(
            "llguidance cannot follow calls that begin with text and a special token"
        )
    text = "".join(map(str, needle)).encode("latin-1").decode()
    return "".join(rf"\x{{{ord(letter):x}}}" for letter in text)
