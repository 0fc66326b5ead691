"""Write a grammar in the form of Lark that llguidance reads.

llguidance cuts a text into lexemes before it parses them, and each lexeme is as long as it can be. If
`[a-z]* "a"` were written as two lexemes, it would accept nothing, because the first one would take the
last `a` too. So here each character is a lexeme, and the parser sees every character. Then a text is
accepted if and only if the rules accept it.
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
    """Return rules as Lark; the whole text must be one of the rule with the name `root`."""
    writer = _Writer({name: f"r{number}" for number, name in enumerate(rules)})
    lines = [f"{writer.names[name]}: {writer.write(symbol)}" for name, symbol in rules.items()]
    return "\n".join([_OPTIONS, f"start: {writer.names[root]}", *lines, *writer.lexemes, ""])


class _Writer:
    """Writes symbols.

    Attributes:
        names: each rule's name in the result.
        lexemes: the rules that were written for `Lexeme` symbols; other rules refer to them by name.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.lexemes: list[str] = []

    def write(self, symbol: Symbol) -> str:
        """Return a symbol as Lark that may be anywhere in a rule."""
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
        """Return a part that is repeated `least` to `most` times."""
        if most == 0:
            return '""'
        signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        upper_bound = "" if most is None else str(most)
        count = signs.get((least, most), f"{{{least},{upper_bound}}}")
        return f"({self.write(part)}){count}"

    def _lexeme(self, lexeme: Lexeme) -> str:
        """Add a rule for a lexeme, and return the rule's name.

        A name with a capital letter at its beginning is a terminal, and only terminals may have `&` and `~`. Other
        names are rules, and only rules may have an option such as `[lazy]`.
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
    """Return a set of code points as an expression in Rust's syntax.

    Surrogates are left out, because they are errors in it.
    """
    ranges = intersection(points, complement(_SURROGATES))
    members = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)
    return f"[{members}]"


def _with_separators(schema: Any, separators: tuple[str, str]) -> Any:
    """Return a schema with the options that make llguidance write these separators and no other spaces."""
    # `true` allows every value, as a schema without keywords does.
    keywords = schema if isinstance(schema, dict) else {}
    item, key = separators
    options = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    return {**keywords, "x-guidance": options}
