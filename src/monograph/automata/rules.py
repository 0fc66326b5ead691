"""The symbols that make up the rules of a grammar.

A grammar is a dict from a rule's name to its symbol; the texts of the rule ROOT are accepted.
`monograph.automata.gbnf` reads rules that people write, and `monograph.automata.host_calls` makes the rules
of calls. Only the host (`monograph.automata.on_host`) can follow `SpecialToken`, `Json` and `Lexeme`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from monograph.automata.expression import CodePoints

ROOT = "root"


@dataclass(frozen=True)
class OneCharacter:
    """One character of a set."""

    points: CodePoints


@dataclass(frozen=True)
class InOrder:
    """The parts one after another; without parts the empty text."""

    parts: tuple[Symbol, ...]


@dataclass(frozen=True)
class AnyOf:
    """One of the options; without options no text."""

    options: tuple[Symbol, ...]


@dataclass(frozen=True)
class Repeated:
    """The part, `least` to `most` times; if `most` is None, there is no upper limit."""

    part: Symbol
    least: int
    most: int | None


@dataclass(frozen=True)
class RuleText:
    """A text of the rule with this name."""

    name: str


@dataclass(frozen=True)
class SpecialToken:
    """One of these special tokens, which have no characters."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Json:
    """JSON that follows a schema.

    Attributes:
        schema: the schema.
        separators: what is between two members or items, and between a name and its value.
    """

    schema: Any
    separators: tuple[str, str] = (",", ":")


@dataclass(frozen=True)
class Lexeme:
    """What a regular expression in Rust's syntax matches.

    Attributes:
        pattern: the expression.
        without: an expression that must not match the same text; None: any text may.
        is_lazy: whether a match ends at the first place where it can, instead of the last.
    """

    pattern: str
    without: str | None = None
    is_lazy: bool = False


Symbol: TypeAlias = (
    OneCharacter | InOrder | AnyOf | Repeated | RuleText | SpecialToken | Json | Lexeme
)
