"""Reads a request's body and its JSON within bounds."""

import asyncio
import json
import math
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from monograph.serve.refused import Refused
from monograph.storage.reading import json_fault, parse_json

BODY_S = 30.0  # for a body to arrive
MOST_BODY = 1 << 20  # bytes
MOST_DEPTH = 64  # of lists and objects inside each other


class Closed(Exception):
    """The client has gone."""


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Return a request's body.

    Raises:
        Refused: it is too large, or too slow.
        Closed: the client has gone.
    """
    too_large = Refused(413, f"the body is larger than {MOST_BODY:,} bytes")
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdecimal() and int(declared[:19]) > MOST_BODY:
        raise too_large
    parts = list[bytes]()
    size = 0
    more = True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Closed
                parts.append(message.get("body", b""))
                size = size + len(parts[-1])
                more = message.get("more_body", False)
                if size > MOST_BODY:
                    raise too_large
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_S:.0f} s") from None
    return b"".join(parts)


async def closed(receive: Receive) -> None:
    """Wait until the client has gone, once its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


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


def _require_sound(value: object) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        texts = [each for each in level if isinstance(each, str)]
        texts += [key for each in level if isinstance(each, dict) for key in each]
        if any(
            "\ud800" <= letter <= "\udfff"
            for text in texts
            if not text.isascii()
            for letter in text
        ):
            raise Refused(400, "a text has half of a surrogate pair, which is no Unicode")
        if not all(math.isfinite(each) for each in level if isinstance(each, float)):
            raise Refused(400, "a number is not finite")
        level = [inner for each in level if isinstance(each, dict | list) for inner in _inner(each)]
        if not level:
            return
    raise Refused(
        400, f"the body has lists and objects inside each other more than {MOST_DEPTH} deep"
    )


def _inner(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value
