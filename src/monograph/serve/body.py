"""Reads a request's body and its JSON, within limits."""

import asyncio
import json
import math
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from monograph.serve.refused import Refused
from monograph.storage.reading import json_fault, parse_json

BODY_TIMEOUT_S = 30.0
MAX_BODY_BYTES = 1 << 20
MAX_DEPTH = 64  # the maximum depth of nested lists and objects


class ClientGone(Exception):
    """The client has closed the connection."""


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Return a request's body.

    Raises:
        Refused: the body is too large, or arrives too slowly.
        ClientGone: the client has closed the connection.
    """
    too_large = Refused(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
    declared_size = Headers(scope=scope).get("content-length", "0")
    # The first 19 digits are enough to exceed the limit. Python would refuse to convert thousands of digits.
    if declared_size.isdecimal() and int(declared_size[:19]) > MAX_BODY_BYTES:
        raise too_large
    chunks = list[bytes]()
    size = 0
    has_more = True
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                chunks.append(chunk)
                size += len(chunk)
                has_more = message.get("more_body", False)
                if size > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    return b"".join(chunks)


async def wait_until_gone(receive: Receive) -> None:
    """Wait until the client closes the connection. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def parse_body(body: bytes) -> dict[str, Any]:
    """Return a body's JSON object, in which every text is valid Unicode and every number finite.

    Raises:
        Refused: the body is not such an object, or is nested too deep.
    """
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        raise Refused(400, f"the body is in {encoding.upper()}: JSON is sent in UTF-8 (RFC 8259)")
    try:
        value = parse_json(body)
    except (ValueError, RecursionError) as error:
        fault = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else json_fault(error)
        raise Refused(400, f"the body is not JSON: {fault}") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body is not a JSON object")
    _require_valid(value)
    return value


def _require_valid(value: object) -> None:
    """Refuse texts that are not valid Unicode, numbers that are not finite, and deep nesting."""
    # All values at one depth, from the outermost inwards.
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        next_level = list[object]()
        for item in level:
            if isinstance(item, str):
                _require_unicode(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise Refused(400, "a number is not finite")
            elif isinstance(item, list):
                next_level.extend(item)
            elif isinstance(item, dict):
                for key in item:
                    _require_unicode(key)
                next_level.extend(item.values())
        if not next_level:
            return
        level = next_level
    raise Refused(400, f"the body's lists and objects are nested more than {MAX_DEPTH} deep")


def _require_unicode(text: str) -> None:
    # JSON may write half of a surrogate pair as an escape, which Python accepts.
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise Refused(400, "a text has half of a surrogate pair, which is not Unicode")
