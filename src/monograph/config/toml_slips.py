"""Explain why a file is not TOML: name the line, the slip, and the line as it should be.

A slip is a small error of a person, such as a missing quote. A correction is shown only if it is
valid TOML and its key takes the value.
"""

import re
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from monograph.config.keys import KEYS, key_declaration
from monograph.config.settings import checked_value, toml_of
from monograph.errors import UsageError

_KEY = r"\s*[\w.\"'-]+\s*"
_HEADER = re.compile(r"\s*\[\s*([\w.\"'-]+)\s*\]")
# Typographic quotes, and the straight quotes of TOML.
_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‘": "'", "’": "'"})
# Characters that look like a space, or are invisible.
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200d\u202f\u205f\u2060\u3000\ufeff]")
# Other spellings of TOML's booleans.
_BOOLEANS = {
    "True": "true",
    "False": "false",
    "TRUE": "true",
    "FALSE": "false",
    "yes": "true",
    "no": "false",
}
# What people write for a key without a value.
_NO_VALUE = {"", "None", "none", "null", "nil", "~"}
_MAX_SHOWN = 120  # the characters of a line that a message shows
# A longer line is not corrected: no person types one, and the patterns take time.
_MAX_CORRECTED = 500
# The number of earlier lines with an open bracket for which corrections are tried.
_MAX_OPEN_LINES = 20


def toml_error_message(path: Path, text: str, parser_message: str) -> str:
    """Return the message for a file that is not TOML, with the line, the slip and the correction.

    Args:
        path: the file.
        text: its text.
        parser_message: the message of tomllib.
    """
    if re.search("\r(?!\n)", text):
        return f"{path}: not TOML: its lines end as those of an old Mac do: save it with the line ends of Linux"
    if text.lstrip()[:1] == "{":
        return f"{path}: not TOML, but JSON: `monograph train --print-config` writes a file to edit"
    lines = re.split("\r\n|\n", text)
    number = _line_number(parser_message, lines)
    # The place is left out of the parser's message, because this message begins with it.
    reason = re.sub(r" \(at .*\)$", "", parser_message)
    repetition = _repetition(lines, number, reason)
    if repetition:
        return f"{path}:{number}: not TOML: {repetition}"
    # The slip may be in an earlier line that opens a bracket: the parser notices it later.
    open_lines = [*islice(_open_lines_before(number, lines), _MAX_OPEN_LINES)]
    if reason.startswith("Unclosed"):
        numbers_to_try = [*open_lines, number]
    else:
        numbers_to_try = [number, *open_lines]
    for tried_number in numbers_to_try:
        section = _last_section(lines[:tried_number])
        correction = _correction(lines[tried_number - 1], section)
        if correction:
            return f"{path}:{tried_number}: not TOML: {correction}"
    line = lines[number - 1].strip()[:_MAX_SHOWN]
    return f"{path}:{number}: not TOML: {reason} in `{line}`: a line is `key = value`, `[section]` or `# a comment`"


def _line_number(parser_message: str, lines: list[str]) -> int:
    """Return the number of the line that the parser's message is about, from 1.

    The parser may stop at empty lines after the line with the slip.
    """
    place = re.search(r"at line (\d+)", parser_message)
    number = min(int(place[1]), len(lines)) if place else len(lines)
    while number > 1 and not lines[number - 1].strip():
        number -= 1
    return number


def _open_lines_before(number: int, lines: list[str]) -> Iterator[int]:
    """Yield the numbers of lines that leave a bracket, brace or text open, the last first."""
    for earlier_number in range(number - 1, 0, -1):
        line = lines[earlier_number - 1]
        has_open_bracket = line.count("[") > line.count("]")
        has_open_brace = line.count("{") > line.count("}")
        has_open_text = line.count('"""') == 1
        if has_open_bracket or has_open_brace or has_open_text:
            yield earlier_number


def _repetition(lines: list[str], number: int, reason: str) -> str:
    """Return the message for a section or key that line `number` repeats; "" if it repeats none."""
    section = ""
    section_lines = dict[str, int]()  # {section: number of its line}
    key_lines = dict[tuple[str, str], int]()  # {(section, name): number of the key's line}
    for current, line in enumerate(lines[:number], start=1):
        header = _HEADER.match(line)
        entry = re.match(r"\s*([\w.\"'-]+)\s*=", line)
        if header:
            section = header[1]
            if section in section_lines and current == number:
                numbers = f"lines {section_lines[section]} and {number}"
                return f"[{section}] is there twice, in {numbers}: keep one, with all of its keys"
            section_lines[section] = current
        elif entry:
            name = entry[1]
            if (section, name) in key_lines and current == number:
                numbers = f"lines {key_lines[section, name]} and {number}"
                return f"{name} is there twice, in {numbers}: keep one of them"
            key_lines[section, name] = current
    if re.match("Cannot (declare|overwrite|mutate|redefine)", reason):
        # The name is the section of the line, or, before the first section, the line's key.
        name = section or lines[number - 1].partition("=")[0].strip()
        return f"{name} is there twice, as a section and as a key with a dot: write all of its keys under one [{name}]"
    return ""


def _last_section(lines: list[str]) -> str:
    """Return the section at the end of the lines; "" if no section has begun."""
    for line in reversed(lines):
        header = _HEADER.match(line)
        if header:
            return header[1]
    return ""


def _correction(line: str, section: str) -> str:
    """Return a message with a line's slip and the line as it should be.

    If each correction has a value that its key does not take, the message says what the key takes.
    The result is "" if no correction is valid TOML.
    """
    if len(line) > _MAX_CORRECTED:
        return ""
    first_wrong_value = ""
    for slip, correction in _corrections(line):
        if correction == line or not _is_toml(correction):
            continue
        wrong_value = _wrong_value_message(correction, section)
        if not wrong_value:
            new_lines = " and ".join(correction.strip().splitlines())
            return f"{slip}: write {new_lines[:_MAX_SHOWN]}"
        if not first_wrong_value:
            first_wrong_value = wrong_value
    return first_wrong_value


def _wrong_value_message(line: str, section: str) -> str:
    """Return a message if the line gives a key a value that the key does not take, else ""."""
    for name, value in tomllib.loads(line).items():
        key = f"{section}.{name}"
        if key not in KEYS:
            continue
        try:
            checked_value(key, value, "", from_text=False)
        except UsageError:
            text = line.partition("=")[2].strip(" \"'")
            return f"{name} = {text[:_MAX_SHOWN]}: expected {key_declaration(key).expected}"
    return ""


def _is_toml(line: str) -> bool:
    try:
        tomllib.loads(line)
    except (tomllib.TOMLDecodeError, RecursionError):
        return False
    return True


def _corrections(line: str) -> Iterator[tuple[str, str]]:
    """Yield (slip, corrected line) for each slip that the line may have, the likeliest first."""
    wrong_space = _SPACES.search(line)
    if wrong_space:
        line = _SPACES.sub(" ", line)
        yield f"it has a space that TOML does not take as one (U+{ord(wrong_space[0]):04X})", line
    straight = line.translate(_QUOTES)
    if straight != line:
        line = straight
        yield "quotes are straight in TOML", line
    yield from _split_lines(line)
    yield "a comment begins with #", re.sub(r"\s*(?://|;|--)\s*(.*)", r"  # \1", line, count=1)
    yield from _corrected_headers(line)
    yield from _corrected_signs(line)
    # KEY = VALUE # COMMENT, where the sign may be another one and the comment may be missing
    entry = re.match(rf"({_KEY})(?:==|=>|:=|=|:)\s*(.*?)\s*(#.*)?$", line)
    if entry:
        key, value, comment = entry.groups()
        corrected_values = (
            *_corrected_numbers(value),
            *_corrected_lists(value),
            *_corrected_texts(value),
        )
        for slip, corrected_value in corrected_values:
            yield slip, f"{key.strip()} = {corrected_value}  {comment or ''}"
        if value in _NO_VALUE:
            yield "a key without a value is left out", f"# {key.strip()} ="


def _split_lines(line: str) -> Iterator[tuple[str, str]]:
    """Yield the corrections of a line that should be two lines."""
    # [optim] lr = 1
    section_and_key = re.fullmatch(rf"\s*(\[[^\[\]]*\])\s*({_KEY}=.*)", line)
    if section_and_key:
        section, entry = section_and_key.groups()
        yield "a section has a line of its own", f"{section}\n{entry}"
    # lr = 1, eps = 2
    two_keys = re.fullmatch(rf"({_KEY}=.*?)[,;\s]+([\w.\"'-]+\s*=.*)", line)
    if two_keys:
        first, second = two_keys.groups()
        yield "a line has one key", f"{first.strip()}\n{second.strip()}"


def _corrected_headers(line: str) -> Iterator[tuple[str, str]]:
    """Yield the corrections of a line with a single word, such as `[optim` or `optim:`."""
    word = re.fullmatch(r"\s*\[*\s*([\w.-]+)\s*\]*\s*:?\s*(#.*)?", line)
    if word and ("[" in line or "]" in line or ":" in line):
        yield "a section is a name in brackets", f"[{word[1]}]"
    elif word:
        yield "a key without a value is left out", f"# {word[1]} ="


def _corrected_signs(line: str) -> Iterator[tuple[str, str]]:
    """Yield the corrections of a line with another sign than `=`, or with none."""
    slip = "= stands between a key and its value"
    other_sign = re.match(rf"({_KEY})(:=|==|=>|:)\s*(.*)", line)
    if other_sign:
        yield slip, f"{other_sign[1].strip()} = {other_sign[3]}"
    no_sign = re.fullmatch(r"\s*([\w.-]+)\s+([^=\s].*)", line)
    if no_sign:
        yield slip, f"{no_sign[1]} = {no_sign[2]}"


def _corrected_numbers(value: str) -> Iterator[tuple[str, str]]:
    """Yield (slip, corrected value) for a value that is meant as a number, a list or a bool."""
    word = value.rstrip(",;")
    unquoted = value.strip("\"'")
    if unquoted != value and re.fullmatch(r"[-+0-9.e]+", unquoted):
        yield "a number is not in quotes", unquoted
    if word in _BOOLEANS:
        yield "true and false are in small letters", _BOOLEANS[word]
    if word != value:
        yield "nothing stands after a value", word
    # .5, 5. or 007
    number = re.fullmatch(
        r"([-+]?)0*([0-9_]*)(\.?)([0-9_]*)((?:e[-+]?[0-9]+)?)", value, re.IGNORECASE
    )
    if number:
        sign, integer, point, fraction, exponent = number.groups()
        digits = f"{sign}{integer or 0}"
        if point:
            digits += f".{fraction or 0}"
        slip = "a number begins and ends with a digit, and not with a 0 before others"
        yield slip, digits + exponent
    if re.fullmatch(r"[0-9.,eE+\s-]+", value):
        yield "several numbers are a list", f"[{value}]"


def _corrected_lists(value: str) -> Iterator[tuple[str, str]]:
    """Yield (slip, corrected value) for a value that is meant as a list or a table."""
    for bracket, closing in (("[", "]"), ("{", "}")):
        if value.startswith(bracket):
            yield f"the {closing} is missing", f"{value.rstrip(',')}{closing}"
    if value.startswith("("):
        yield "a list is in square brackets", f"[{value.strip('(),')}]"
    if value.startswith("["):
        yield (
            "a comma stands between the values of a list",
            re.sub(r"([\"'])\s+([\"'])", r"\1, \2", value),
        )
        parts = [part.strip(" \"'") for part in value.strip("[]").split(",")]
        yield "a text is in quotes", f"[{', '.join(map(toml_of, parts))}]"


def _corrected_texts(value: str) -> Iterator[tuple[str, str]]:
    """Yield (slip, corrected value) for a value that is meant as a text."""
    unquoted = value.strip("\"'")
    if "\\" in value:
        yield "a backslash is itself only in single quotes", f"'{unquoted}'"
    if value[:1] in "\"'" or value[-1:] in "\"'":
        yield "a text begins and ends with the same quote", toml_of(unquoted)
    elif value not in _NO_VALUE - {"none"} and not re.search(r"[=,\[\]{}]", value):
        yield "a text is in quotes", toml_of(value)
