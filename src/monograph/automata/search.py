"""Expressions for texts in which a string is searched for, such as the one that begins a call.

As usual, the string is called the needle.
"""

from collections.abc import Collection

from monograph.automata.expression import StateMachine

# The byte that stands for all special tokens that are not told apart (`monograph.automata.calls`).
OTHER_SPECIAL = 0xFF
# What may come before a needle at the beginning of a text: white space and special tokens.
_BLANK = frozenset((*b" \t\n\r\v\f", OTHER_SPECIAL))


def text_without(needle: bytes, alphabet: Collection[int], *, anywhere: bool) -> StateMachine:
    """Return an expression for the texts over an alphabet that do not have the needle.

    Args:
        needle: the bytes to search for.
        alphabet: the bytes of the texts.
        anywhere: True: the needle is nowhere in the text. False: the text does not begin with the needle, nor
            with bytes of _BLANK and then the needle; later in the text it may occur.
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


def text_before(needle: bytes) -> StateMachine:
    """Return an expression for the texts that the needle can end.

    In such a text followed by the needle, the needle occurs first at the end, and not earlier. So a reader
    that searches for the needle finds the end of the text.
    """
    rows, symbols_of = _search_automaton(needle, range(256), anywhere=True)
    class_of = {mask: symbol for symbol, mask in symbols_of.items()}
    needle_classes = [class_of[1 << byte] for byte in needle]
    found = len(needle)
    accepting = []
    for state in range(found):
        # The needle is read after the text. If it occurs before all of its bytes are read, it began in the text.
        bytes_read = 0
        after = state
        while after != found:
            after = rows[after][needle_classes[bytes_read]]
            bytes_read += 1
        accepting.append(bytes_read == len(needle))
    rows_without_found = [
        {symbol: state for symbol, state in row.items() if state != found} for row in rows[:found]
    ]
    return StateMachine(tuple(rows_without_found), tuple(accepting), symbols_of)


def _search_automaton(
    needle: bytes, alphabet: Collection[int], *, anywhere: bool
) -> tuple[list[dict[int, int]], dict[int, int]]:
    """Return the transitions of a search for a needle, and a bit mask of the bytes of each class.

    In state s < len(needle) the needle has not occurred, and s is the largest number such that the text
    ends with the first s bytes of the needle. In state len(needle) it has occurred, and no transition
    leaves this state. If `anywhere` is False, there is one more state: the text began with something else, so
    the needle cannot be at its beginning any more.
    """
    distinct = sorted(set(needle))
    # Each byte of the needle is a class of its own. All other bytes are in one of two classes: blank or not.
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
    """Return the length of the needle's longest prefix that is a suffix of the text."""
    return next(size for size in range(len(text), -1, -1) if text.endswith(needle[:size]))
