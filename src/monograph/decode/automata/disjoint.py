"""Whether schemas have no valid value in common, by what can be seen: types, constants, one telling member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monograph.decode.automata import values


def overlap(
    options: Sequence[dict[str, Any]], target: Callable[[str], Any], spend: Callable[[int], None]
) -> tuple[int, int] | None:
    """Two options that one value may follow, or None if every value follows at most one.

    Args:
        options: schemas that have been read, so that they are well formed and not recursive.
        target: the schema that a reference names.
        spend: counts so many comparisons of values, and raises where they are too many.
    """
    apart = _Apart(target, spend)
    for later in range(len(options)):
        for index in range(later):
            if not apart.disjoint(options[index], options[later]):
                return index, later
    return None


class _Apart:
    def __init__(self, target: Callable[[str], Any], spend: Callable[[int], None]) -> None:
        self.target, self.spend = target, spend
        self.known: dict[tuple[int, int], bool] = {}

    def disjoint(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """True only if no value follows both."""
        pair = id(one), id(other)
        if pair not in self.known:
            left, right = self.alternatives(one), self.alternatives(other)
            self.known[pair] = all(self.plainly_disjoint(a, b) for a in left for b in right)
        return self.known[pair]

    def alternatives(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """The schemas without references and choices that it stands for: a value follows it if it follows any."""
        found, waiting, seen = [], [schema], set()
        for each in waiting:
            if id(each) in seen:
                continue
            seen.add(id(each))
            choices = [each[key] for key in ("anyOf", "oneOf") if key in each]
            if "$ref" in each:
                waiting.append(self.target(each["$ref"]))
            elif choices:
                waiting.extend(choices[0])
            else:
                found.append(each)
        return found

    def plainly_disjoint(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """The same of two schemas without references and choices."""
        left, right = _constants(one), _constants(other)
        if left is not None and right is not None:
            self.spend(len(left) * len(right))
            return not any(values.equal(a, b) for a in left for b in right)
        shared = _kinds(one, left) & _kinds(other, right)
        if shared != {"object"} or left is not None or right is not None:
            return not shared
        names = set(one.get("required", [])) & set(other.get("required", []))
        return any(self.disjoint(one["properties"][name], other["properties"][name]) for name in names)


def _constants(schema: dict[str, Any]) -> list[Any] | None:
    return schema.get("enum", [schema.get("const")]) if {"enum", "const"} & schema.keys() else None


def _kinds(schema: dict[str, Any], constants: list[Any] | None) -> set[str]:
    if constants is not None:
        return set().union(*map(values.type_names, constants)) - {"integer"}
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if name == "integer" else name for name in types}
