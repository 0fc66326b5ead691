"""How much of a sample is Python, line by line, as Python's own tokenizer sees it."""

from __future__ import annotations

import io
import tokenize

# What `tokenize` says of a line that is fine but goes on: an open bracket, an open triple-quoted string.
_GOES_ON = ("EOF in multi-line statement", "unexpected EOF in multi-line statement", "EOF in multi-line string")


def accepted_share(text: str) -> tuple[int, int]:
    """(lines that `tokenize` accepts, lines), of the non-empty lines of `text`.

    Its first and last line are cut by chance and left out. Each line is looked at alone, without indentation; one
    that opens a bracket or a triple-quoted string is accepted.
    """
    lines = [line.strip() for line in text.split("\n")[1:-1]]
    lines = [line for line in lines if line]
    return sum(_accepted(line) for line in lines), len(lines)


def _accepted(line: str) -> bool:
    try:
        return all(t.type != tokenize.ERRORTOKEN for t in tokenize.generate_tokens(io.StringIO(line + "\n").readline))
    except tokenize.TokenError as error:
        return str(error.args[0]).startswith(_GOES_ON)
    except SyntaxError:
        return False
