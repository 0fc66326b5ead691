"""Say which value was perhaps meant by a text that is none of its key."""

import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal

from monograph.config.elsewhere import VALUES
from monograph.errors import did_you_mean
from monograph.terminal import shell_words

_MINUTES = {"h": Decimal(60), "m": Decimal(1), "s": Decimal(1) / 60}


def meant_value(key: str, text: str, words: Sequence[str], accepts: Callable[[str], bool]) -> str:
    """Return the end of a message about a wrong value: what was perhaps meant; "" if nothing is
    alike.

    Args:
        key: the key.
        text: the value.
        words: the words that the key takes.
        accepts: whether a text is a value of the key.
    """
    if said := VALUES.get(key, {}).get(text.lower()):
        return f"; did you mean {said}?" if accepts(said) else f"; {said}"
    for candidate in _candidates(key, text):
        if accepts(candidate):
            return f"; did you mean {candidate}?"
    parts = [part for part in re.split(r"[,;\s]+", text) if part]
    if re.match("(log|lin):", text) or (len(parts) > 1 and all(map(accepts, parts))):
        axis = shell_words(f"{key}={','.join(parts)}")
        return f"; a run has one value: start one for each, or say `sweep` in place of `train`, with {axis}"
    return did_you_mean(text, words)


def _candidates(key: str, text: str) -> Iterator[str]:
    """Yield texts that a slip may have made into this one."""
    plain = text.strip("\"' ,;").lower()
    yield plain
    if re.fullmatch(r"[0-9]{1,3}([,_' ][0-9]{3})+", plain):
        yield re.sub(r"\D", "", plain)
    if re.fullmatch(r"[0-9]+,[0-9]+(e[-+]?[0-9]+)?", plain):
        yield plain.replace(",", ".")
    if share := re.fullmatch(r"([0-9.]+)\s*%", plain):
        yield _decimal(share[1], Decimal(1) / 100)
    if (time := re.fullmatch(r"([0-9.]+)\s*([hms])[a-z]*", plain)) and key.endswith("minutes"):
        yield _decimal(time[1], _MINUTES[time[2]])


def _decimal(number: str, factor: Decimal) -> str:
    """Return a number times a factor, without zeros at its end."""
    try:
        return f"{float(Decimal(number) * factor):g}"
    except ArithmeticError:
        return number
