"""Stands before every request: who may ask, from where, and in which form; nothing else is even read.

A page that someone else wrote must not reach the model through the user's browser. A rebound name shows in Host, a
foreign page in Origin, and a request that needs no leave of the browser in its Content-Type.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from monograph.serve.fields import Refused
from monograph.serve.sending import Counted, send_error

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::[0-9]*)?")
LOCAL = ("localhost", "127.0.0.1", "::1")
OPEN = ("/", "/health", "/openapi.json")  # they need no key


class Guard:
    """An application that passes on only what is allowed.

    A request that it passes on has the name of its client in `scope["client_name"]`.
    """

    def __init__(self, app: ASGIApp, host: str, keys: Iterable[str], counted: Counted) -> None:
        """Guard an application that listens at a host and is for those who have one of the keys, or for all."""
        self._app, self._counted = app, counted
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        # Whoever listens everywhere has no one name, but then there is a key, which a rebound page does not have.
        self._hosts = None if host in ("0.0.0.0", "::", "") else {*LOCAL, host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        send = self._counted.watched(scope, send)
        try:
            scope["client_name"] = self._require(scope)
        except Refused as refused:
            return await send_error(send, refused)
        return await self._app(scope, receive, send)

    def _require(self, scope: Scope) -> str:
        """Return the name of the client that may ask.

        Raises:
            Refused: it may not.
        """
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name(host)
        if len(headers.getlist("host")) != 1 or not name or (self._hosts is not None and name not in self._hosts):
            raise Refused(403, f"this server is not {host!r:.80}: ask it by the name that it was started with")
        if origin is not None and origin.lower() != f"{scope['scheme']}://{host}".lower():
            raise Refused(403, f"pages of {origin!r:.80} may not use this server")
        name = self._client(headers.getlist("authorization")) if scope["path"] not in OPEN else ""
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise Refused(415, "expected a body with the header Content-Type: application/json")
        return name

    def _client(self, given: list[str]) -> str:
        if not self._keys:
            return ""
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()  # the bytes that came
        # All are compared, in the same time whether they fit or not.
        fits = [hmac.compare_digest(digest, own) for own in self._keys]
        if scheme.lower() != "bearer" or not any(fits):
            message = "expected the header Authorization: Bearer KEY, with a key of the server's file"
            raise Refused(401, message, code="invalid_api_key", WWW_Authenticate="Bearer")
        return str(fits.index(True))


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """Return the name in a Host header, in small letters and without the port; "" if it is anything else."""
    found = _HOST.fullmatch(host.lower())
    return found[1].strip("[]") if found else ""
