"""Suggest the value that a person meant by a text that is not a value of its key."""

import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal

from monograph.config.elsewhere import VALUES
from monograph.errors import did_you_mean
from monograph.terminal import shell_words

_MINUTES_PER_UNIT = {"h": Decimal(60), "m": Decimal(1), "s": Decimal(1) / 60}


def meant_value(key: str, text: str, words: Sequence[str], accepts: Callable[[str], bool]) -> str:
    """Return the end of a message about a wrong value: the value that was perhaps meant.

    Args:
        key: the key.
        text: the wrong value.
        words: the words that the key takes.
        accepts: returns whether a text is a value of the key.

    Returns:
        The suggestion, which begins with "; ", or "" if no value is similar.
    """
    # The text may be a value in another program. Then this is the value that stands for it here, or a sentence
    # that says what to do.
    replacement = VALUES.get(key, {}).get(text.lower())
    if replacement:
        return f"; did you mean {replacement}?" if accepts(replacement) else f"; {replacement}"
    for candidate in _candidates(key, text):
        if accepts(candidate):
            return f"; did you mean {candidate}?"
    parts = [part for part in re.split(r"[,;\s]+", text) if part]
    are_several_values = len(parts) > 1 and all(map(accepts, parts))
    if re.match("(log|lin):", text) or are_several_values:
        axis = shell_words(f"{key}={','.join(parts)}")
        return f"; a run has one value: start one for each, or say `sweep` in place of `train`, with {axis}"
    return did_you_mean(text, words)


def _candidates(key: str, text: str) -> Iterator[str]:
    """Yield texts from which `text` differs by a common slip."""
    plain = text.strip("\"' ,;").lower()
    yield plain
    # 1,000,000 for 1000000
    if re.fullmatch(r"[0-9]{1,3}([,_' ][0-9]{3})+", plain):
        yield re.sub(r"\D", "", plain)
    # 0,5 for 0.5
    if re.fullmatch(r"[0-9]+,[0-9]+(e[-+]?[0-9]+)?", plain):
        yield plain.replace(",", ".")
    # 5 % for 0.05
    percentage = re.fullmatch(r"([0-9.]+)\s*%", plain)
    if percentage:
        yield _times(percentage[1], Decimal(1) / 100)
    # 2h for 120 minutes
    time = re.fullmatch(r"([0-9.]+)\s*([hms])[a-z]*", plain)
    if time and key.endswith("minutes"):
        yield _times(time[1], _MINUTES_PER_UNIT[time[2]])


def _times(number: str, factor: Decimal) -> str:
    """Return a number times a factor, without zeros at its end."""
    try:
        return f"{float(Decimal(number) * factor):g}"
    except ArithmeticError:
        # The text is not a number, such as "1.2.3", and no key accepts it.
        return number
