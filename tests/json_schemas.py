"""Random JSON schemas of the bounded subset, values that follow them, and a small validator."""

from __future__ import annotations

import json
import random
import re
from typing import Any

TEXTS = ["", "a", "b", "é", '"', "\\", "\n", "𝔘", "ab", "0", "\x1f\x7f"]


def random_schema(draw: random.Random, depth: int = 0) -> Any:
    """A schema that the subset understands, small enough to be compiled in milliseconds."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "types"]
    kind = draw.choice(kinds + ["object", "array", "tuple", "anyOf"] * (depth < 2))
    if kind == "object":
        names = draw.sample(["a", "b", "é", 'q"', "long name"], draw.randrange(4))
        properties = {name: random_schema(draw, depth + 1) for name in names}
        required = [name for name in names if draw.random() < 0.5]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array":
        least = draw.randrange(3)
        most = least + draw.randrange(3)
        return {
            "type": "array",
            "items": random_schema(draw, depth + 1),
            "minItems": least,
            "maxItems": most,
        }
    if kind == "tuple":
        first = [random_schema(draw, depth + 1) for _ in range(draw.randrange(1, 3))]
        rest = (
            {"items": random_schema(draw, depth + 1), "maxItems": 3}
            if draw.random() < 0.5
            else {"items": False}
        )
        return {"type": "array", "prefixItems": first, "minItems": draw.randrange(2)} | rest
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
    return random_scalar(draw, kind)


def random_scalar(draw: random.Random, kind: str) -> dict[str, Any]:
    """The same without objects and arrays."""
    if kind == "string":
        return {"type": "string", "minLength": draw.randrange(2), "maxLength": draw.randrange(1, 4)}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": draw.choice(["^a*$", "b", "^[^a]", r"\d$", "^é?\n"]),
            "maxLength": 4,
        }
    if kind in ("integer", "number"):
        least = draw.randrange(-130, 130)
        return {"type": kind} | draw.choice(
            [{}, {"minimum": least}, {"minimum": least, "maximum": least + 45}]
        )
    if kind == "enum":
        return {"enum": draw.sample([1, "a", "é\n", None, True, [1, "x"], {"k": 0.5}], 3)}
    if kind == "const":
        return {"const": draw.choice([0, "b", False, {"a": [None]}])}
    return {"type": ["boolean", "null"] if kind == "types" else kind}


def random_value(draw: random.Random, schema: Any) -> Any:
    """A value of the schema, its members in the schema's order; None or a wrong value where none
    was found.
    """
    if "anyOf" in schema:
        return random_value(draw, draw.choice(schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return draw.choice(schema.get("enum", [schema.get("const")]))
    kind = schema["type"] if isinstance(schema["type"], str) else draw.choice(schema["type"])
    if kind == "object":
        chosen = [
            name
            for name in schema["properties"]
            if name in schema["required"] or draw.random() < 0.5
        ]
        return {name: random_value(draw, schema["properties"][name]) for name in chosen}
    if kind == "array":
        first = schema.get("prefixItems", [])
        most = len(first) if schema["items"] is False else schema["maxItems"]
        items = [*first, *[schema["items"]] * 5]
        return [
            random_value(draw, item)
            for item in items[: draw.randrange(schema["minItems"], most + 1)]
        ]
    return random_plain(draw, kind, schema)


def random_plain(draw: random.Random, kind: str, schema: dict[str, Any]) -> Any:
    """A string, number, boolean or null."""
    if kind == "string":
        return "".join(draw.choices(TEXTS, k=draw.randrange(4)))
    if kind in ("integer", "number"):
        least, most = schema.get("minimum", -(10**15) + 1), schema.get("maximum", 10**15 - 1)
        whole = draw.randint(least, most)
        return (
            whole if kind == "integer" or draw.random() < 0.5 else min(whole + draw.random(), most)
        )
    return draw.choice([True, False]) if kind == "boolean" else None


def follows(value: Any, schema: Any) -> bool:
    """Whether a value follows a schema of this subset; objects have no other members than the
    schema's.
    """
    if "anyOf" in schema:
        return any(follows(value, option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        texts = [
            json.dumps(each, sort_keys=True) for each in schema.get("enum", [schema.get("const")])
        ]
        return json.dumps(value, sort_keys=True) in texts
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return any(_has_type(value, kind) and _within(value, schema) for kind in kinds)


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    python = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": int | float,
        "null": type(None),
    }
    return kind in python and isinstance(value, python[kind])  # type: ignore[arg-type]


def _within(value: Any, schema: dict[str, Any]) -> bool:
    if isinstance(value, dict):
        known = schema["properties"]
        return set(schema["required"]) <= value.keys() <= known.keys() and all(
            follows(value[name], known[name]) for name in value
        )
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        most = len(first) if schema["items"] is False else schema["maxItems"]
        items = [*first, *[schema["items"]] * len(value)]
        return schema["minItems"] <= len(value) <= most and all(map(follows, value, items))
    if isinstance(value, str):
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 64)
        return (
            fits
            and re.search(schema.get("pattern", "").replace("$", r"\Z"), value, re.ASCII)
            is not None
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return True
