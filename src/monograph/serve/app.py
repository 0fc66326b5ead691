"""The application: which address answers what, and the guard in front of it.

The guard decides who may send requests, from where, and in which form. It refuses any other request
before its body is read.

A foreign web page that the user opens must not reach the model through the user's browser. The guard
recognises the requests of such a page by one of their headers:

- Origin names the foreign page.
- Host has a name that is not this server's. The page's owner may have made that name lead to this
  server's address (DNS rebinding).
- Content-Type is one with which browsers send requests to other servers without asking these first
  (a simple request of CORS).
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
from monograph.serve.body import ClientGone, parse_body, read_body
from monograph.serve.document import OPERATIONS, document
from monograph.serve.fields import read
from monograph.serve.messages_answer import CountedTokens
from monograph.serve.messages_request import read_count_request
from monograph.serve.metrics import RequestCounts
from monograph.serve.prompts import encode_prompts, find_call_frame
from monograph.serve.protocol import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from monograph.serve.refused import Refused, error_body
from monograph.serve.requests import (
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from monograph.serve.service import Service
from monograph.serve.texts import TextEndpoint

# The value of a Host header: an IPv6 address in brackets, or a name or another address; and perhaps a
# port.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::[0-9]*)?")
_CHARSET = re.compile(r"(?:^|;)\s*charset\s*=\s*\"?([^\s;\"]+)", re.IGNORECASE)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
# The paths that need no key.
OPEN_PATHS = tuple(operation.path for operation in OPERATIONS if operation.is_open)


class Guard:
    """An application that passes allowed requests on to another one.

    A request that is passed on has the name of its client in `scope["client_name"]`.
    """

    def __init__(
        self, app: ASGIApp, host: str, keys: Iterable[str], request_counts: RequestCounts
    ) -> None:
        """Guard an application.

        Args:
            app: the application.
            host: the name or address at which the server listens.
            keys: a client must send one of these; if there are none, no key is needed.
            request_counts: counts the requests.
        """
        self._app = app
        self._request_counts = request_counts
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        # The names that Host may have; None: any name. A server that listens at all addresses can be
        # reached by any name. It always has keys, which a foreign page does not know.
        listens_everywhere = host in ("0.0.0.0", "::", "")
        self._hosts = None if listens_everywhere else {*LOCAL_HOSTS, host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        send = self._request_counts.counting_send(scope, send)
        try:
            scope["client_name"] = self._require_allowed(scope)
        except Refused as refused:
            return await send_error(scope, send, refused)
        return await self._app(scope, receive, send)

    def _require_allowed(self, scope: Scope) -> str:
        """Return the client's name: the number of its key, or "" if it needs no key.

        Raises:
            Refused: the request is not allowed.
        """
        headers = Headers(scope=scope)
        _require_one_length(scope, headers)
        self._require_host(headers)
        origin = headers.get("origin")
        own_origin = f"{scope['scheme']}://{headers['host']}"
        if origin is not None and origin.lower() != own_origin.lower():
            raise Refused(403, f"pages of {origin!r:.80} may not use this server")
        client_name = ""
        if self._key_digests and scope["path"] not in OPEN_PATHS:
            client_name = self._require_key(headers)
        media_type, _, parameters = headers.get("content-type", "").partition(";")
        if scope["method"] == "POST" and media_type.strip().lower() != "application/json":
            raise Refused(415, "expected a body with the header Content-Type: application/json")
        charset = _CHARSET.search(parameters)
        if charset is not None and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
            message = f"the body is in {charset[1]!r:.40}: JSON is sent in UTF-8 (RFC 8259)"
            raise Refused(415, message)
        return client_name

    def _require_host(self, headers: Headers) -> None:
        """Refuse a request whose header Host is not a name of this server."""
        host = headers.get("host", "")
        name = _host_name(host)
        is_known = self._hosts is None or name in self._hosts
        if len(headers.getlist("host")) != 1 or not name or not is_known:
            advice = "ask it by the name that it was started with"
            raise Refused(403, f"this server is not {host!r:.80}: {advice}")

    def _require_key(self, headers: Headers) -> str:
        """Return the number of the client's key; refuse a request without a valid key."""
        authorizations = headers.getlist("authorization")
        # Anthropic's clients send the key in a header of its own.
        api_keys = headers.getlist("x-api-key")
        scheme = key = ""
        if len(authorizations) == 1:
            scheme, _, key = authorizations[0].partition(" ")
        elif not authorizations and len(api_keys) == 1:
            scheme, key = "bearer", api_keys[0]
        # Starlette has decoded the header's bytes as Latin-1.
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # All keys are compared, each in constant time, so that the time tells nothing about a key.
        are_equal = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if scheme.lower() != "bearer" or not any(are_equal):
            message = "expected the header Authorization: Bearer KEY or x-api-key: KEY, with a key of the server's file"
            raise Refused(401, message, code="invalid_api_key", WWW_Authenticate="Bearer")
        return str(are_equal.index(True))


def _require_one_length(scope: Scope, headers: Headers) -> None:
    """Refuse a request whose body has two lengths, or a Transfer-Encoding in HTTP/1.0.

    A proxy in front of the server may read such a body with another length than the server, so a second
    request could be hidden in it (request smuggling, RFC 9112, 6.1). The connection is closed, and what
    comes after the body is not read.
    """
    if "transfer-encoding" not in headers:
        return
    if "content-length" in headers:
        message = "the request has both Transfer-Encoding and Content-Length: send one of them"
        raise Refused(400, message, Connection="close")
    if scope["http_version"] < "1.1":
        message = "Transfer-Encoding is not for HTTP/1.0: send Content-Length"
        raise Refused(400, message, Connection="close")


def is_local(host: str) -> bool:
    """Return whether only this machine can reach a host's address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(header: str) -> str:
    """Return the name in a Host header, in lower case and without the port; "" if it is invalid."""
    match = _HOST.fullmatch(header.lower())
    return match[1].strip("[]") if match else ""


_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def application(service: Service, host: str, keys: Sequence[str]) -> ASGIApp:
    """Return the application of a service, behind a `Guard` with this host and these keys."""
    information = _Information(service)
    adapters = _Adapters(service, has_keys=bool(keys))
    endpoints: dict[str, Any] = {
        "getPage": _page,
        "getDocument": _document,
        "getHealth": information.health,
        "getMetrics": information.metrics,
        "listModels": information.models,
        "getModel": information.model,
        "describeTokenizer": information.tokenizer,
        "tokenize": _JsonEndpoint(_in_worker_thread(information.tokenize)),
        "detokenize": _JsonEndpoint(_in_worker_thread(information.detokenize)),
        "complete": TextEndpoint(service, COMPLETIONS),
        "chat": TextEndpoint(service, CHAT),
        "respond": TextEndpoint(service, RESPONSES),
        "message": TextEndpoint(service, MESSAGES),
        "countTokens": _JsonEndpoint(information.count_tokens),
        "loadAdapter": _JsonEndpoint(adapters.load),
        "unloadAdapter": _JsonEndpoint(adapters.unload),
    }
    routes = []
    for operation in OPERATIONS:
        # A model's name may have slashes.
        path = operation.path.replace("{name}", "{name:path}")
        routes.append(Route(path, endpoints[operation.name], methods=[operation.method]))
    app = Starlette(
        routes=routes,
        exception_handlers={
            404: _answer_missing,
            405: _answer_missing,
            Refused: _answer_refused,
            Exception: _bug_handler(service),
        },
    )
    # No redirects: Starlette would make their addresses from the client's Host header.
    app.router.redirect_slashes = False
    return Guard(app, host, keys, service.request_counts)


async def _page(request: Request) -> Response:
    page = files(__package__).joinpath("page.html").read_bytes()
    return Response(page, media_type="text/html", headers=_PAGE_HEADERS)


async def _document(request: Request) -> Response:
    return JSONResponse(await asyncio.to_thread(document))


class _Information:
    """The endpoints about the server's state, the model's names and its tokenizer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._service.newest.id})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics_text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        models = self._service.served_models()
        entries = [model.entry(name) for name, model in models.items()]
        return JSONResponse({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        async with self._service.use_model(name) as model:
            return JSONResponse(model.entry(name))

    async def tokenizer(self, request: Request) -> Response:
        tokenizer = self._service.newest.tokenizer
        names = {index: name for name, index in tokenizer.special.items()}
        template = tokenizer.config.template
        return JSONResponse(
            {
                "bos_token": names.get(tokenizer.bos_id),
                "eos_token": names.get(tokenizer.eos_id),
                "pad_token": names.get(tokenizer.pad_id),
                "chat_template": None if template is None else template.source,
            }
        )

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
        elif text in version.tokenizer.special:
            # `encode` reads the name of a special token as text. To look up the token's id, a client sends
            # the name, which it has from /tokenizer_info, as the whole prompt.
            ids = [version.tokenizer.special[text]]
        return {"tokens": ids, "count": len(ids), "max_model_len": version.context}

    async def count_tokens(self, body: dict[str, Any]) -> CountedTokens:
        request = read_count_request(body)
        async with self._service.use_model(request.model) as model:
            # In a worker thread, because templates and the tokenizer may take a while.
            await asyncio.to_thread(find_call_frame, request, model.version)
            [ids] = await asyncio.to_thread(encode_prompts, request, model.version)
        return {"input_tokens": len(ids)}

    def detokenize(self, body: dict[str, Any]) -> shapes.Decoded:
        tokenizer = self._service.newest.tokenizer
        request = read(DetokenizeRequest, body, vocabulary=tokenizer.vocab_size)
        return {"prompt": tokenizer.decode(request.tokens)}


class _Adapters:
    """The endpoints that add and remove adapters."""

    def __init__(self, service: Service, has_keys: bool) -> None:
        self._service = service
        self._has_keys = has_keys

    def _require_keys(self) -> None:
        """Refuse the request if the server has no keys: anyone who reaches it could change its adapters."""
        if not self._has_keys:
            message = (
                "adapters come and go only on a server with keys: start it with --api-key-file"
            )
            raise Refused(403, message)

    async def load(self, body: dict[str, Any]) -> shapes.Model:
        self._require_keys()
        request = read(LoadAdapterRequest, body)
        model = await self._service.add_adapter(request.lora_name, request.lora_path)
        return model.entry(request.lora_name)

    async def unload(self, body: dict[str, Any]) -> shapes.Deleted:
        self._require_keys()
        name = read(UnloadAdapterRequest, body).lora_name
        await self._service.remove_adapter(name)
        return {"id": name, "object": "model", "deleted": True}


def _in_worker_thread(
    answer: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]:
    """Return a function that answers in a worker thread, because a large body takes time."""

    async def answer_in_thread(body: dict[str, Any]) -> Mapping[str, Any]:
        return await asyncio.to_thread(answer, body)

    return answer_in_thread


class _JsonEndpoint:
    """An application that answers a JSON object with another JSON object."""

    def __init__(self, answer: Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive)
            # In a worker thread, because a large body takes time.
            answer = await self._answer(await asyncio.to_thread(parse_body, body))
        except Refused as refused:
            return await send_error(scope, send, refused)
        except ClientGone:
            return None
        return await send_json(send, answer)


# Starlette calls these functions with the errors that `exception_handlers` lists for them.


async def _answer_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error_body(error, request.scope["path"]), error.status, error.headers)


async def _answer_missing(request: Request, error: Exception) -> Response:
    """Answer a request for an address that does not exist (404), or that has other methods (405)."""
    assert isinstance(error, HTTPException)
    fault = "there is nothing at"
    if error.status_code == 405:
        fault = f"{request.method} is not for"
    path = request.scope["path"]
    message = f"{fault} {path!r:.80}: GET /openapi.json lists the addresses"
    body = error_body(Refused(error.status_code, message), path)
    return JSONResponse(body, error.status_code, error.headers)


def _bug_handler(service: Service) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return a handler that reports an unexpected error to the service, and answers with status 500."""

    async def report_and_answer(request: Request, error: Exception) -> Response:
        service.report_bug(error)
        refused = Refused(500, "a bug: the server's terminal says more")
        return JSONResponse(error_body(refused, request.scope["path"]), 500)

    return report_and_answer
