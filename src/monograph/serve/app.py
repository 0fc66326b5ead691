"""The application: which address answers what, and what stands before it: who may ask, from where,
and in which form.

Nothing else is even read. A page that someone else wrote must not reach the model through the
user's browser. A rebound name shows in Host, a foreign page in Origin, and a request that needs no
leave of the browser in its Content-Type.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from monograph.errors import MonographError
from monograph.serve import shapes
from monograph.serve.answers import send_error, send_json
from monograph.serve.body import Closed, parsed, read_body
from monograph.serve.document import OPERATIONS, document
from monograph.serve.metrics import Counted
from monograph.serve.refused import Refused, error_of
from monograph.serve.requests import DetokenizeRequest, TokenizeRequest, read
from monograph.serve.service import Service
from monograph.serve.texts import Texts

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::[0-9]*)?")
_CHARSET = re.compile(r"(?:^|;)\s*charset\s*=\s*\"?([^\s;\"]+)", re.IGNORECASE)
LOCAL = ("localhost", "127.0.0.1", "::1")
OPEN = tuple(each.path for each in OPERATIONS if each.is_open)  # they need no key


class Guard:
    """An application that passes on only what is allowed.

    A request that it passes on has the name of its client in `scope["client_name"]`.
    """

    def __init__(self, app: ASGIApp, host: str, keys: Iterable[str], counted: Counted) -> None:
        """Guard an application that listens at a host and is for those who have one of the keys, or
        for all.
        """
        self._app, self._counted = app, counted
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        # Whoever listens everywhere has no one name, but then there is a key, which a rebound page
        # does not have.
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
        _require_one_length(scope, headers)
        host = headers.get("host", "")
        origin = headers.get("origin")
        name = _name(host)
        if (
            len(headers.getlist("host")) != 1
            or not name
            or (self._hosts is not None and name not in self._hosts)
        ):
            raise Refused(
                403, f"this server is not {host!r:.80}: ask it by the name that it was started with"
            )
        if origin is not None and origin.lower() != f"{scope['scheme']}://{host}".lower():
            raise Refused(403, f"pages of {origin!r:.80} may not use this server")
        name = self._client(headers.getlist("authorization")) if scope["path"] not in OPEN else ""
        kind, _, parameters = headers.get("content-type", "").partition(";")
        if scope["method"] == "POST" and kind.strip().lower() != "application/json":
            raise Refused(415, "expected a body with the header Content-Type: application/json")
        charset = _CHARSET.search(parameters)
        if charset is not None and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
            raise Refused(
                415, f"the body is in {charset[1]!r:.40}: JSON is sent in UTF-8 (RFC 8259)"
            )
        return name

    def _client(self, given: list[str]) -> str:
        if not self._keys:
            return ""
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()  # the bytes that came
        # All are compared, in the same time whether they fit or not.
        fits = [hmac.compare_digest(digest, own) for own in self._keys]
        if scheme.lower() != "bearer" or not any(fits):
            message = (
                "expected the header Authorization: Bearer KEY, with a key of the server's file"
            )
            raise Refused(401, message, code="invalid_api_key", WWW_Authenticate="Bearer")
        return str(fits.index(True))


def _require_one_length(scope: Scope, headers: Headers) -> None:
    """Refuse a body of two lengths, which is how a request hides in another from a proxy in front
    (RFC 9112, 6.1).

    HTTP/1.0 has no Transfer-Encoding. The connection is closed: whatever comes after such a body is
    not read.
    """
    if "transfer-encoding" not in headers:
        return
    if "content-length" in headers:
        both = "the request has both Transfer-Encoding and Content-Length: send one of them"
        raise Refused(400, both, Connection="close")
    if scope["http_version"] < "1.1":
        raise Refused(
            400, "Transfer-Encoding is not for HTTP/1.0: send Content-Length", Connection="close"
        )


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """Return the name in a Host header, in small letters and without the port; "" if it is anything
    else.
    """
    found = _HOST.fullmatch(host.lower())
    return found[1].strip("[]") if found else ""


PAGE = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def application(service: Service, host: str, keys: Sequence[str]) -> ASGIApp:
    """Return the application of a service that listens at a host, for those who have one of the
    keys, or for all.
    """
    about = _About(service)
    endpoints: dict[str, Any] = {
        "getPage": _page,
        "getDocument": _document,
        "getHealth": about.health,
        "getMetrics": about.metrics,
        "listModels": about.models,
        "getModel": about.model,
        "describeTokenizer": about.tokenizer,
        "tokenize": _Posted(about.tokenize),
        "detokenize": _Posted(about.detokenize),
        "complete": Texts(service, is_chat=False),
        "chat": Texts(service, is_chat=True),
    }
    answering = Starlette(
        routes=[
            # A model's name may have slashes.
            Route(
                each.path.replace("{name}", "{name:path}"),
                endpoints[each.name],
                methods=[each.method],
            )
            for each in OPERATIONS
        ],
        exception_handlers={
            404: _missing,
            405: _missing,
            Refused: _refused,
            Exception: _failed(service),
        },
    )
    # To an address that the client's Host would be a part of.
    answering.router.redirect_slashes = False
    return Guard(answering, host, keys, service.counted)


async def _page(request: Request) -> Response:
    return Response(
        files(__package__).joinpath("page.html").read_bytes(), media_type="text/html", headers=PAGE
    )


async def _document(request: Request) -> Response:
    return JSONResponse(await asyncio.to_thread(document))


class _About:
    """Handles the endpoints that write no text: state, names of the model, and its tokenizer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._service.newest.id})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        version = self._service.newest
        return JSONResponse(
            {"object": "list", "data": list(map(version.shown, self._service.names(version)))}
        )

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        async with self._service.version(name) as version:
            return JSONResponse(version.shown(name))

    async def tokenizer(self, request: Request) -> Response:
        tokenizer = self._service.newest.tokenizer
        names = {index: name for name, index in tokenizer.special.items()}
        ends = {
            f"{kind}_token": names.get(getattr(tokenizer, f"{kind}_id"))
            for kind in ("bos", "eos", "pad")
        }
        template = tokenizer.config.template
        return JSONResponse(ends | {"chat_template": template and template.source})

    def tokenize(self, body: dict[str, Any]) -> shapes.Tokens:
        request = read(TokenizeRequest, body)
        version = self._service.newest
        text = request.prompt
        try:
            ids = version.tokenizer.encode(text)
        except MonographError as error:
            raise Refused(400, f"prompt: {error}", "prompt") from None
        if request.add_special_tokens:
            ids = [version.tokenizer.bos_id, *ids]
        elif (
            text in version.tokenizer.special
        ):  # so a client finds the ids of the names in /tokenizer_info
            ids = [version.tokenizer.special[text]]
        return {"tokens": ids, "count": len(ids), "max_model_len": version.context}

    def detokenize(self, body: dict[str, Any]) -> shapes.Decoded:
        tokenizer = self._service.newest.tokenizer
        request = read(DetokenizeRequest, body, vocabulary=tokenizer.vocab_size)
        return {"prompt": tokenizer.decode(request.tokens)}


class _Posted:
    """An application that answers a JSON object with another."""

    def __init__(self, answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive)
            # Elsewhere, as a large body takes a while, and the loop has others to serve.
            answer = await asyncio.to_thread(lambda: self._answer(parsed(body)))
        except Refused as refused:
            return await send_error(send, refused)
        except Closed:
            return None
        return await send_json(send, answer)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error_of(error), error.status, error.headers)


async def _missing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "there is nothing at" if error.status_code == 404 else f"{request.method} is not for"
    refused = Refused(
        error.status_code,
        f"{what} {request.scope['path']!r:.80}: GET /openapi.json says what there is",
    )
    return JSONResponse(error_of(refused), error.status_code, error.headers)


def _failed(service: Service) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def failed(request: Request, error: Exception) -> Response:
        service.bug(error)
        return JSONResponse(error_of(Refused(500, "a bug: the server's terminal says more")), 500)

    return failed
