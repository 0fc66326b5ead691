"""Reads the JSON of a request's body within bounds."""

import json
import math
from typing import Any

from monograph.serve.refused import Refused
from monograph.storage.reading import json_fault, parse_json

MOST_BODY = 1 << 20  # bytes
MOST_DEPTH = 64  # of lists and objects inside each other


def parsed(body: bytes) -> dict[str, Any]:
    """Return a body's JSON object, in which every text is UTF-8 and every number finite.

    Raises:
        Refused: it is none, or nested too deep.
    """
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        raise Refused(400, f"the body is in {encoding.upper()}: JSON is sent in UTF-8 (RFC 8259)")
    try:
        value = parse_json(body)
    except (ValueError, RecursionError) as error:
        fault = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else json_fault(error)
        raise Refused(400, f"the body is no JSON: {fault}") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body is not a JSON object")
    _require_sound(value)
    return value


def _require_sound(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        texts = [each for each in level if isinstance(each, str)]
        texts += [key for each in level if isinstance(each, dict) for key in each]
        if any("\ud800" <= letter <= "\udfff" for text in texts if not text.isascii() for letter in text):
            raise Refused(400, "a text has half of a surrogate pair, which is no Unicode")
        if not all(math.isfinite(each) for each in level if isinstance(each, float)):
            raise Refused(400, "a number is not finite")
        level = [inner for each in level if isinstance(each, dict | list) for inner in _inner(each)]
        if not level:
            return
    raise Refused(400, f"the body has lists and objects inside each other more than {MOST_DEPTH} deep")


def _inner(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value
