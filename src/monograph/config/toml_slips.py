"""Say what is wrong with a file that is not TOML: the line, the slip, and the line as it should be.

A correction is proposed only if it is TOML.
"""

import re
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from monograph.config.keys import KEYS, described
from monograph.config.settings import check, toml_of
from monograph.errors import UsageError

_KEY = r"\s*[\w.\"'-]+\s*"
_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‘": "'", "’": "'"})
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200d\u202f\u205f\u2060\u3000\ufeff]")
_WORDS = {
    "True": "true",
    "False": "false",
    "TRUE": "true",
    "FALSE": "false",
    "yes": "true",
    "no": "false",
}
_NOTHING = {"", "None", "none", "null", "nil", "~"}
_LONGEST = 120  # characters of a line that are shown
# Of one that is corrected: no person types a longer one, and patterns take time.
_LONGEST_READ = 500
_NEAREST = 20  # lines before the one that the parser means
_HEADER = re.compile(r"\s*\[\s*([\w.\"'-]+)\s*\]")


def explained(path: Path, text: str, said: str) -> str:
    """Return what is wrong with a file: its name, the line, the slip and the remedy.

    Args:
        path: the file.
        text: its text, which is not TOML.
        said: the message of the parser.
    """
    if re.search("\r(?!\n)", text):
        return f"{path}: not TOML: its lines end as those of an old Mac do: save it with the line ends of Linux"
    if text.lstrip()[:1] == "{":
        return f"{path}: not TOML, but JSON: `monograph train --print-config` writes a file to edit"
    lines = re.split("\r\n|\n", text)
    at = _line(said, lines)
    what = re.sub(r" \(at .*\)$", "", said)
    if again := _again(lines, at, what):
        return f"{path}:{at}: not TOML: {again}"
    opened = [*islice(_open_before(lines, at), _NEAREST)]
    for number in (*opened, at) if what.startswith("Unclosed") else (at, *opened):
        if found := _corrected(lines[number - 1], _section(lines[:number])):
            return f"{path}:{number}: not TOML: {found}"
    line = lines[at - 1].strip()[:_LONGEST]
    return f"{path}:{at}: not TOML: {what} in `{line}`: a line is `key = value`, `[section]` or `# a comment`"


def _line(said: str, lines: list[str]) -> int:
    """Return the number of the line that the parser means: that which has text, if it stopped after
    it.
    """
    found = re.search(r"at line (\d+)", said)
    at = min(int(found[1]), len(lines)) if found else len(lines)
    while at > 1 and not lines[at - 1].strip():
        at -= 1
    return at


def _open_before(lines: list[str], at: int) -> Iterator[int]:
    """Yield the lines before one that open a bracket, a brace or a text that they do not close, the
    nearest first.
    """
    for number in range(at - 1, 0, -1):
        line = lines[number - 1]
        if (
            line.count("[") > line.count("]")
            or line.count("{") > line.count("}")
            or line.count('"""') == 1
        ):
            yield number


def _again(lines: list[str], at: int, what: str) -> str:
    """Return what is there twice; "" if nothing is."""
    section = ""
    headers = dict[str, int]()
    keys = dict[tuple[str, str], int]()
    for number, line in enumerate(lines[:at], start=1):
        if header := _HEADER.match(line):
            section = header[1]
            if section in headers and number == at:
                twice = f"lines {headers[section]} and {at}"
                return f"[{section}] is there twice, in {twice}: keep one, with all of its keys"
            headers[section] = number
        elif entry := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            place = (section, entry[1])
            if place in keys and number == at:
                return (
                    f"{place[1]} is there twice, in lines {keys[place]} and {at}: keep one of them"
                )
            keys[place] = number
    if re.match("Cannot (declare|overwrite|mutate|redefine)", what):
        name = section or lines[at - 1].partition("=")[0].strip()
        return f"{name} is there twice, as a section and as a key with a dot: write all of its keys under one [{name}]"
    return ""


def _section(lines: list[str]) -> str:
    """Return the section that lines end in; "" if none has begun."""
    headers = [header[1] for line in lines if (header := _HEADER.match(line))]
    return headers[-1] if headers else ""


def _corrected(line: str, section: str) -> str:
    """Return the slip of a line and the line as it should be; "" if none is found that is TOML."""
    if len(line) > _LONGEST_READ:
        return ""
    refused = ""
    for slip, correction in _corrections(line):
        if correction == line or not _is_toml(correction):
            continue
        refused = refused or _refused(correction, section)
        if not _refused(correction, section):
            return f"{slip}: write {' and '.join(correction.strip().splitlines())[:_LONGEST]}"
    return refused


def _refused(line: str, section: str) -> str:
    """Return what a line's key takes, if it does not take the line's value; "" if it does or is not
    known.
    """
    for name, value in tomllib.loads(line).items():
        key = f"{section}.{name}"
        if key not in KEYS:
            continue
        try:
            check(key, value, "", from_text=False)
        except UsageError:
            text = line.partition("=")[2].strip(" \"'")
            return f"{name} = {text[:_LONGEST]}: expected {described(key).expected}"
    return ""


def _is_toml(line: str) -> bool:
    try:
        tomllib.loads(line)
    except (tomllib.TOMLDecodeError, RecursionError):
        return False
    return True


def _corrections(line: str) -> Iterator[tuple[str, str]]:
    """Yield slips that a line may have, each with the line without it; the likeliest first."""
    if odd := _SPACES.search(line):
        line = _SPACES.sub(" ", line)
        yield f"it has a space that is none in TOML (U+{ord(odd[0]):04X})", line
    if (straight := line.translate(_QUOTES)) != line:
        line = straight
        yield "quotes are straight in TOML", line
    yield from _of_two(line)
    yield "a comment begins with #", re.sub(r"\s*(?://|;|--)\s*(.*)", r"  # \1", line, count=1)
    yield from _of_header(line)
    yield from _of_sign(line)
    if entry := re.match(rf"({_KEY})(?:==|=>|:=|=|:)\s*(.*?)\s*(#.*)?$", line):
        key, value, comment = entry.groups()
        for slip, correction in (*_of_number(value), *_of_list(value), *_of_text(value)):
            yield slip, f"{key.strip()} = {correction}  {comment or ''}"
        if value in _NOTHING:
            yield "a key without a value is left out", f"# {key.strip()} ="


def _of_two(line: str) -> Iterator[tuple[str, str]]:
    if two := re.fullmatch(rf"\s*(\[[^\[\]]*\])\s*({_KEY}=.*)", line):
        yield "a section has a line of its own", f"{two[1]}\n{two[2]}"
    if two := re.fullmatch(rf"({_KEY}=.*?)[,;\s]+([\w.\"'-]+\s*=.*)", line):
        yield "a line has one key", f"{two[1].strip()}\n{two[2].strip()}"


def _of_header(line: str) -> Iterator[tuple[str, str]]:
    word = re.fullmatch(r"\s*\[*\s*([\w.-]+)\s*\]*\s*:?\s*(#.*)?", line)
    if word and ("[" in line or "]" in line or ":" in line):
        yield "a section is a name in brackets", f"[{word[1]}]"
    elif word:
        yield "a key without a value is left out", f"# {word[1]} ="


def _of_sign(line: str) -> Iterator[tuple[str, str]]:
    joined = "= stands between a key and its value"
    if entry := re.match(rf"({_KEY})(:=|==|=>|:)\s*(.*)", line):
        yield joined, f"{entry[1].strip()} = {entry[3]}"
    if apart := re.fullmatch(r"\s*([\w.-]+)\s+([^=\s].*)", line):
        yield joined, f"{apart[1]} = {apart[2]}"


def _of_number(value: str) -> Iterator[tuple[str, str]]:
    """Yield corrections of a value that is a number, numbers or a truth value."""
    word = value.rstrip(",;")
    if (bare := value.strip("\"'")) != value and re.fullmatch(r"[-+0-9.e]+", bare):
        yield "a number is not in quotes", bare
    if word in _WORDS:
        yield "true and false are in small letters", _WORDS[word]
    if word != value:
        yield "nothing stands after a value", word
    if number := re.fullmatch(
        r"([-+]?)0*([0-9_]*)(\.?)([0-9_]*)((?:e[-+]?[0-9]+)?)", value, re.IGNORECASE
    ):
        sign, whole, point, part, power = number.groups()
        digits = f"{sign}{whole or 0}" + (f".{part or 0}" if point else "") + power
        yield "a number begins and ends with a digit, and not with a 0 before others", digits
    if re.fullmatch(r"[0-9.,eE+\s-]+", value):
        yield "several numbers are a list", f"[{value}]"


def _of_list(value: str) -> Iterator[tuple[str, str]]:
    for bracket, closing in ("[]", "{}"):
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


def _of_text(value: str) -> Iterator[tuple[str, str]]:
    inside = value.strip("\"'")
    if "\\" in value:
        yield "a backslash is itself only in single quotes", f"'{inside}'"
    if value[:1] in "\"'" or value[-1:] in "\"'":
        yield "a text begins and ends with the same quote", toml_of(inside)
    elif value not in _NOTHING - {"none"} and not re.search(r"[=,\[\]{}]", value):
        yield "a text is in quotes", toml_of(value)
