"""A server in a thread of this process, and the smallest client.

with Served(model, tokenizer) as served:
    served.post("/v1/completions", {"prompt": "a"})     # status, headers, JSON; the model's name is added
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, NamedTuple

import uvicorn

from batches import tiny_llama
from clocks import HANG_S
from monograph.decode.generator import OWN_HEAD, Draft
from monograph.graph.precision import Precision
from monograph.model.llama import Llama
from monograph.serve.command import server_config
from monograph.serve.service import Service
from monograph.serve.versions import LAST, AdapterRoom, ServedDraft, Source, Version
from monograph.text.tokenizer import Tokenizer

ROWS, CONTEXT = 4, 256
# The addresses whose requests name a model.
NAMING_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)


def small(tokenizer: Tokenizer, seed: int = 0, **sizes: Any) -> Llama:
    """A model of one layer with a sharp distribution, so that texts of different seeds have something
    in common.
    """
    model = tiny_llama(
        seed=seed,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=CONTEXT,
        num_hidden_layers=1,
        **sizes,
    )
    model.lm_head.weight.data *= 30
    return model


class Given(Source):
    """A source whose versions are models of this process: `give` another, and it is loaded at the
    next look.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        rows: int,
        adapters: AdapterRoom | None = None,
        draft: Draft | None = None,
    ) -> None:
        super().__init__("given", rows, print, adapters)
        if draft == OWN_HEAD:
            self.draft_name = OWN_HEAD
        elif draft is not None:
            self.draft_name = "small"
            self._draft = ServedDraft("small", draft.eval(), tokenizer, "digest")
        self.number, self._next = 0, (model, tokenizer)

    def give(self, model: Llama, tokenizer: Tokenizer) -> None:
        self._next = (model, tokenizer)
        self.number += 1

    def has_newer(self) -> bool:
        return self._seen != (self.number,)

    def _load_without_adapters(self) -> Version:
        self._seen = (self.number,)
        return Version(f"given@{self.number}", ("given", LAST), *self._next, Precision("fp32"))


class Answer(NamedTuple):
    """What came back; `body` is JSON where it can be."""

    status: int
    headers: dict[str, str]
    body: Any


class Served:
    """A server on a free port of this machine; `service` is its inside."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        rows: int = ROWS,
        keys: Sequence[str] = (),
        host: str = "127.0.0.1",
        adapters: AdapterRoom | None = None,
        draft: Draft | None = None,
        **names: Any,
    ) -> None:
        self._names = names
        self.source = Given(model, tokenizer, rows, adapters, draft)
        self._keys, self._host = list(keys), host
        self.model, self.tokenizer, self.said = model, tokenizer, list[str]()
        self.bugs: list[Exception] = []
        self._ready, self._failed = threading.Event(), list[BaseException]()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(HANG_S)
        if self._failed:
            raise self._failed[0]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(setattr, self.server, "should_exit", True)
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
        assert kind is not None or not self.bugs, self.bugs

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failed.append(error)
            self._ready.set()
            raise

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.service = Service(self.source, self.said.append, self.bugs.append, **self._names)
        self.server = _Quiet(server_config(self.service, self._host, self._keys))
        with socket.socket(proto=socket.IPPROTO_TCP) as listening:
            listening.bind(("127.0.0.1", 0))
            self.port = listening.getsockname()[1]
            serving = asyncio.create_task(self.server.serve([listening]))
            await self.service.begin(lambda: setattr(self.server, "should_exit", True))
            follow = asyncio.create_task(self.service.follow())
            self._ready.set()
            await serving
        follow.cancel()
        self.service.end()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            content, found = (
                answer.read(),
                {name.lower(): value for name, value in answer.getheaders()},
            )
        finally:
            connection.close()
        try:
            return Answer(answer.status, found, json.loads(content))
        except ValueError:
            return Answer(answer.status, found, content.decode())

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Answer:
        named = {"model": LAST, **body} if "model" not in body and path in NAMING_PATHS else body
        headers = {"Content-Type": "application/json"} | {
            k.replace("_", "-"): v for k, v in headers.items()
        }
        return self.ask("POST", path, json.dumps(named).encode(), headers)

    def texts(self, prompt: Any, **options: Any) -> list[str]:
        answer = self.post("/v1/completions", {"prompt": prompt, **options})
        assert answer.status == 200, answer.body
        return [choice["text"] for choice in answer.body["choices"]]

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        answer = self.post(path, body | {"stream": True})
        assert answer.status == 200, answer.body
        *events, last, rest = answer.body.split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return (
            json.loads(each.removeprefix("data: ")) for each in events if not each.startswith(":")
        )

    def idle(self) -> bool:
        """Whether nothing runs, waits or is kept for a request."""
        service = self.service
        decoders = service.owner._decoders.values()
        return (
            not any(decoder.generator.busy or decoder.texts for decoder in decoders)
            and service.gate.waiting == 0
        )


class _Quiet(uvicorn.Server):
    """A server that leaves the signals to the tests."""

    def capture_signals(self) -> Any:
        return nullcontext()
