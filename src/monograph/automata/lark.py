"""Write a grammar in the form of Lark that llguidance reads.

llguidance cuts a text into lexemes before it parses them, and each lexeme is as long as it can be. If
`[a-z]* "a"` were written as two lexemes, it would accept nothing, because the first one would take the
last `a` too. So each character is a lexeme here, and the parser sees every character: a text is accepted
if and only if the rules accept it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from monograph.automata.expression import CodePoints, complement, intersection
from monograph.automata.rules import (
    AnyOf,
    InOrder,
    Json,
    Lexeme,
    OneCharacter,
    Repeated,
    RuleText,
    SpecialToken,
    Symbol,
)

_SURROGATES: CodePoints = ((0xD800, 0xDFFF),)
# Where only one text can follow, every token that begins this text is allowed, and not only the token with
# which the tokenizer would spell it.
_OPTIONS = '%llguidance {"no_forcing": true}'


def lark_text(rules: Mapping[str, Symbol], root: str) -> str:
    """Return rules as Lark, in which the rule with the name `root` accepts the whole text."""
    writer = _Writer({name: f"r{number}" for number, name in enumerate(rules)})
    lines = [f"{writer.names[name]}: {writer.write(symbol)}" for name, symbol in rules.items()]
    return "\n".join([_OPTIONS, f"start: {writer.names[root]}", *lines, *writer.lexemes, ""])


class _Writer:
    """Writes symbols.

    Attributes:
        names: each rule's name in the result.
        lexemes: the rules of lexemes that are not written in place.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.lexemes: list[str] = []

    def write(self, symbol: Symbol) -> str:
        """Return a symbol as Lark, which may stand anywhere in a rule."""
        match symbol:
            case OneCharacter(points):
                return f"/{_character_class(points)}/"
            case InOrder(parts):
                return "(" + " ".join(map(self.write, parts)) + ")" if parts else '""'
            case AnyOf(options):
                return "(" + " | ".join(map(self.write, options)) + ")"
            case Repeated(part, least, most):
                return self._counted(part, least, most)
            case RuleText(name):
                return self.names[name]
            case SpecialToken(ids):
                return "<[" + ",".join(map(str, ids)) + "]>"
            case Json(schema, separators):
                return f"%json {json.dumps(_with_separators(schema, separators))}"
            case Lexeme():
                return self._lexeme(symbol)

    def _counted(self, part: Symbol, least: int, most: int | None) -> str:
        if most == 0:
            return '""'
        written = self.write(part)
        bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        count = f"{{{least},{'' if most is None else most}}}"
        return f"({written}){bounds.get((least, most), count)}"

    def _lexeme(self, lexeme: Lexeme) -> str:
        """Add a rule for a lexeme, and return the rule's name.

        Only a terminal, whose name begins with a capital letter, may have `&` and `~`, and only a rule, whose
        name does not, an option such as `[lazy]`.
        """
        number = len(self.lexemes)
        text = f"/{lexeme.pattern}/"
        if lexeme.without is not None:
            self.lexemes.append(f"T{number}: {text} & ~/{lexeme.without}/")
            return f"T{number}"
        option = "[lazy]" if lexeme.is_lazy else ""
        self.lexemes.append(f"t{number}{option}: {text}")
        return f"t{number}"


def _character_class(points: CodePoints) -> str:
    """Return a set of code points as an expression in Rust's syntax, in which surrogates are errors."""
    ranges = intersection(points, complement(_SURROGATES))
    members = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)
    return f"[{members}]"


def _with_separators(schema: Any, separators: tuple[str, str]) -> Any:
    """Return a schema with llguidance's options, by which it writes these separators and no spaces."""
    # `true` allows every value, as a schema without keywords does.
    keywords = schema if isinstance(schema, dict) else {}
    item, key = separators
    options = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    return {**keywords, "x-guidance": options}
