"""Answers requests for texts: reads what is asked, has it written and sends it, unless the client
goes before.
"""

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from starlette.types import Receive, Scope, Send

from monograph.automata import Automaton
from monograph.decode.reproducible import continuation_seed
from monograph.decode.request import Event, Request
from monograph.device import clock
from monograph.errors import MonographError
from monograph.serve import shapes
from monograph.serve.answers import (
    Answer,
    ChatAnswer,
    Events,
    Piece,
    Writing,
    as_json,
    scored,
    send_error,
    send_whole,
    usage_of,
)
from monograph.serve.body import Closed, closed, parsed, read_body
from monograph.serve.compiling import Busy
from monograph.serve.gate import MOST_NUMBERS
from monograph.serve.owner import Generation, Gone, Inbox
from monograph.serve.refused import Refused, error_of
from monograph.serve.requests import Asked, ChatRequest, CompletionRequest, read
from monograph.serve.service import Service
from monograph.serve.versions import Version
from monograph.text.chat import chat_ids

Prompts = Sequence[Sequence[int]]  # their ids
Batches = AsyncIterator[list[tuple[Generation, Event]]]  # the events of texts, as they come
LONGEST_S, PING_S = 600.0, 15.0  # of a request; between two signs of life
_FAILED = {
    "not_finite": (500, "the model's logits are not finite"),
    "nothing_allowed": (400, "bias, min_tokens and constraint together left no token to write"),
}


class Texts:
    """An application that answers requests for texts, of a chat or not."""

    def __init__(self, service: Service, is_chat: bool) -> None:
        self._service, self._is_chat = service, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; what it asked for is cancelled as soon as the client has gone."""
        try:
            body = await read_body(scope, receive)
        except Refused as refused:
            return await send_error(send, refused)
        except Closed:
            return None
        work = asyncio.create_task(self._answered(body, scope, send))
        gone = asyncio.create_task(closed(receive))
        ended = asyncio.create_task(self._service.ended.wait())
        broken = None
        try:
            await asyncio.wait({work, gone, ended}, timeout=LONGEST_S, return_when=FIRST_COMPLETED)
            if ended.done():
                broken = self._service.ending
            elif not gone.done():
                broken = Refused(
                    408, f"the text was not done after {LONGEST_S:.0f} s", code="timeout"
                )
        except asyncio.CancelledError:
            broken = self._service.ending
        for task in (work, gone, ended):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if work.cancelled() and broken is not None:
            await _fail(scope, send, broken)

    async def _answered(self, body: bytes, scope: Scope, send: Send) -> None:
        try:
            asked = await asyncio.to_thread(self._read, body)
            async with self._service.version(asked.model) as version:
                await self._answer(asked, version, scope["client_name"], send)
        except Refused as refused:
            await _fail(scope, send, refused)
        except Gone:
            await _fail(scope, send, self._service.ending)
        except Exception as error:
            self._service.bug(error)
            await _fail(scope, send, Refused(500, "a bug: the server's terminal says more"))

    async def _answer(self, asked: Asked, version: Version, client: str, send: Send) -> None:
        began = clock()
        if isinstance(asked, CompletionRequest) and asked.max_tokens != 0:
            self._require_room(asked)
        prompts = await asyncio.to_thread(self._prompts, asked, version)
        numbers = 0 if asked.likeliest is None else _numbers(asked, version, prompts)
        if isinstance(asked, CompletionRequest) and asked.max_tokens == 0:
            with self._service.gate.scoring(numbers):
                return await self._send_scored(asked, version, prompts, send)
        inbox: Inbox = asyncio.Queue()
        requests = await self._requests(asked, version, prompts, client)
        texts = [
            Generation(request, version, index, inbox, asked.stream)
            for index, request in enumerate(requests)
        ]
        answer = (ChatAnswer if self._is_chat else Answer)(
            version, asked.sampling.seed, asked.likeliest
        )
        used = sum(map(len, prompts))
        async with self._written(texts, began) as events:
            if asked.stream:
                await self._stream(asked, texts, answer, events, used, send)
            else:
                await self._whole(asked, texts, answer, events, prompts, send)
        return None

    def _require_room(self, asked: CompletionRequest) -> None:
        count = len(asked.prompt) * asked.n
        if count > (most := self._service.gate.most_at_once):
            asks = f"{asked.n} for each of {len(asked.prompt):,} are {count:,} texts"
            raise Refused(400, f"prompt: {asks}; a request may ask for {most:,} in all", "prompt")

    def _read(self, body: bytes) -> Asked:
        given = parsed(body)
        rows = self._service.rows
        return (
            read(ChatRequest, given, rows=rows)
            if self._is_chat
            else read(CompletionRequest, given, rows=rows)
        )

    # ── what is asked ─────────────────────────────────────────────────────────────────────────

    def _prompts(self, asked: Asked, version: Version) -> list[list[int]]:
        """Return the ids of each prompt, which have room in the model's context."""
        field = "messages" if self._is_chat else "prompt"
        # No longer text has room, however it is cut into tokens.
        limit = version.context * version.longest_piece
        given = asked.prompt if isinstance(asked, CompletionRequest) else []
        if any(isinstance(each, str) and len(each) > limit for each in given):
            raise _too_long(f"more than {version.context:,}", version, field)
        try:
            if isinstance(asked, CompletionRequest):
                prompts = [self._ids(version, prompt) for prompt in given]
            elif version.has_template:
                prompts = [
                    chat_ids(
                        version.tokenizer,
                        asked.messages,
                        add_generation_prompt=True,
                        **asked.variables,
                    )
                ]
            else:
                prompts = [self._ids(version, joined(asked))]
        except MonographError as error:
            raise Refused(400, f"{field}: {error}", field) from None
        for ids in prompts:
            if len(ids) >= version.context + (asked.most_tokens == 0):
                raise _too_long(f"{len(ids):,}", version, field)
        return prompts

    @staticmethod
    def _ids(version: Version, prompt: str | list[int]) -> list[int]:
        tokenizer = version.tokenizer
        if isinstance(prompt, str):
            return [tokenizer.bos_id, *tokenizer.encode(prompt)]
        if any(not 0 <= token < tokenizer.vocab_size for token in prompt):
            raise Refused(
                400, f"prompt: expected token ids from 0 to {tokenizer.vocab_size - 1}", "prompt"
            )
        return prompt

    async def _requests(
        self, asked: Asked, version: Version, prompts: Prompts, client: str
    ) -> list[Request]:
        """Return a request for each text, n for each prompt, whose seeds are those of
        `monograph generate`.
        """
        tokenizer, sampling = version.tokenizer, asked.sampling
        if asked.likeliest is not None:
            sampling = replace(sampling, logprobs=min(asked.likeliest, tokenizer.vocab_size))
        leads = {bytes(tokenizer.lead(ids)) for ids in prompts}
        if any(text.startswith(" ") for text in asked.stop) and any(leads):
            raise Refused(
                400, "stop: the tokenizer has every text begin with a space: leave it out", "stop"
            )
        if asked.limit is not None and len(leads) > 1:
            raise Refused(400, "prompt: under a constraint, give an empty prompt alone", "prompt")
        try:
            sampling.check_vocabulary(tokenizer.vocab_size)
            breakers = tuple(sampling.dry_sequence_breakers) if sampling.dry_multiplier else ()
            broken = await asyncio.to_thread(version.breakers, breakers) if breakers else None
        except MonographError as error:
            field = "logit_bias" if "logit_bias" in str(error) else "dry_sequence_breakers"
            raise Refused(400, str(error), field) from None
        ends = version.ends if self._is_chat and version.has_template else (tokenizer.eos_id,)
        constraint, stop = await self._automata(asked, version, ends, leads.pop())
        most = version.context if asked.most_tokens is None else asked.most_tokens
        seeds = [continuation_seed(sampling.seed, index) for index in range(asked.n)]
        return [
            Request(ids, sampling, most, ends, constraint, stop, broken, seed, client)
            for ids in map(tuple, prompts)
            for seed in seeds
        ]

    async def _automata(
        self, asked: Asked, version: Version, ends: Sequence[int], lead: bytes
    ) -> tuple[Automaton | None, Automaton | None]:
        compiler = self._service.compiler(version, ends)
        field = "stop"
        constraint = None
        stop = None
        try:
            if asked.stop:
                stop = await compiler.stop_strings(asked.stop)
            if asked.limit is not None:
                field = asked.limit.field
                constraint = await compiler.constraint(asked.limit.kind, asked.limit.value, lead)
        except MonographError as error:
            raise Refused(400, f"{field}: {error}", field) from None
        except Busy:
            busy = f"{field}: too many constraints wait to be compiled: try again later"
            raise Refused(429, busy, field, "rate_limit_exceeded", Retry_After="10") from None
        return constraint, stop

    # ── what is sent ──────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _written(self, texts: Sequence[Generation], began: float) -> AsyncIterator[Batches]:
        """Have texts written; yields an iterator of their events, and cancels those that have not
        ended at the end.
        """
        gate = self._service.gate
        running = set(texts)

        async def events() -> AsyncIterator[list[tuple[Generation, Event]]]:
            first = True
            while running:
                if (batch := await _batch(texts[0].inbox)) and first:
                    self._service.first_token.add(clock() - began)
                    first = False
                for text, event in batch:
                    if event.finish is not None:
                        running.discard(text)
                        gate.leave(text)
                    if failed := _FAILED.get(str(event.finish)):
                        raise Refused(*failed)
                yield batch

        gate.enter(texts)
        try:
            yield events()
        finally:
            for text in list(running):
                gate.leave(text, cancelled=True)
            self._service.whole.add(clock() - began)

    async def _stream(
        self,
        asked: Asked,
        texts: Sequence[Generation],
        answer: Answer,
        events: Batches,
        used: int,
        send: Send,
    ) -> None:
        writings = {text: self._writing(text, asked) for text in texts}
        stream = Events(send)
        begun = False
        async for batch in events:
            pieces = [writings[text].add(event) for text, event in batch]
            if not begun:  # what is refused before the first token has a status of its own
                begun = True
                await stream.begin()
                pieces = [piece for text in texts for piece in answer.begin(text.index)] + pieces
            if said := [answer.piece(piece, asked.usage) for piece in pieces]:
                await stream.send(*said)
            elif not batch:
                await stream.ping()
        if asked.usage:
            drawn = sum(writing.tokens for writing in writings.values())
            await stream.send(answer.piece(None, usage_of(used, drawn)))
        await stream.end()

    async def _whole(
        self,
        asked: Asked,
        texts: Sequence[Generation],
        answer: Answer,
        events: Batches,
        prompts: Prompts,
        send: Send,
    ) -> None:
        version = texts[0].version
        echoes = [Piece(0, "", [], None)] * len(prompts)
        if isinstance(asked, CompletionRequest) and asked.echo:
            echoes = await self._echoes(asked, version, prompts)
        of = [echoes[text.index // asked.n] for text in texts]
        writings = [
            self._writing(text, asked, echo.text) for text, echo in zip(texts, of, strict=True)
        ]
        pieces = [
            Piece(text.index, echo.text, [*echo.entries], None)
            for text, echo in zip(texts, of, strict=True)
        ]
        async for batch in events:
            for text, event in batch:
                new = writings[text.index].add(event)
                old = pieces[text.index]
                pieces[text.index] = Piece(
                    new.number, old.text + new.text, old.entries + new.entries, new.finish
                )
        usage = usage_of(sum(map(len, prompts)), sum(writing.tokens for writing in writings))
        await _send(answer, pieces, usage, send)

    def _writing(self, text: Generation, asked: Asked, before: str = "") -> Writing:
        # lm-evaluation-harness counts on an entry for each token; in a chat the protocol has none
        # for the end.
        return Writing(text, asked.stop, asked.likeliest, ends=not self._is_chat, before=before)

    async def _send_scored(
        self, asked: CompletionRequest, version: Version, prompts: Prompts, send: Send
    ) -> None:
        """Answer with the prompts alone, n times each."""
        echoes = await self._echoes(asked, version, prompts)
        repeated = [echo for echo in echoes for _ in range(asked.n)]
        pieces = [
            echo._replace(number=number, finish="length") for number, echo in enumerate(repeated)
        ]
        answer = Answer(version, asked.sampling.seed, asked.likeliest)
        await _send(answer, pieces, usage_of(sum(map(len, prompts)), 0), send)

    async def _echoes(
        self, asked: CompletionRequest, version: Version, prompts: Prompts
    ) -> list[Piece]:
        """Return each prompt as a piece, scored if log-probabilities are asked for."""
        echoes = []
        for prompt, ids in zip(asked.prompt, prompts, strict=True):
            text = prompt if isinstance(prompt, str) else version.tokenizer.decode(ids)
            entries = []
            if asked.likeliest is not None:
                most = min(asked.likeliest, version.tokenizer.vocab_size)
                scores = await self._service.owner.score(version, ids, most) if len(ids) > 1 else []
                entries = scored(version.tokenizer, ids, scores)
            echoes.append(Piece(0, text, entries, None))
        return echoes


async def _send(answer: Answer, pieces: Sequence[Piece], usage: shapes.Usage, send: Send) -> None:
    """Send a whole answer, serialised in a worker thread if it has log-probabilities: they are
    thousands of numbers.
    """
    has_numbers = any(piece.entries for piece in pieces)
    made = asyncio.to_thread(answer.whole, pieces, usage) if has_numbers else None
    await send_whole(send, await made if made else answer.whole(pieces, usage))


def joined(asked: ChatRequest) -> str:
    """Return the messages of a chat with a model that has no template: a text, which the model goes
    on with.

    Raises:
        Refused: a message is of nobody who speaks, or says more than its text.
    """
    further = {key for each in asked.messages for key in each} - {"role", "content", "name"}
    if further:
        said = f"messages: the model has no chat template, so nothing reads {min(further)}: leave it out"
        raise Refused(400, said, "messages")
    if strange := next(
        (each["role"] for each in asked.messages if each["role"] not in ("user", "assistant")), None
    ):
        raise Refused(
            400,
            f"messages: the model has no chat template, so nobody has the role {strange}",
            "messages",
        )
    return "".join(each["content"] for each in asked.messages)


def _numbers(asked: Asked, version: Version, prompts: Prompts) -> int:
    """Return how many log-probabilities a request may have.

    Raises:
        Refused: they might take gigabytes.
    """
    most = version.context if asked.most_tokens is None else asked.most_tokens
    tokens = asked.n * sum(
        min(most, version.context - len(ids)) + len(ids) * asked.echo for ids in prompts
    )
    if (numbers := tokens * (1 + (asked.likeliest or 0))) > MOST_NUMBERS:
        asks = f"{numbers:,} of up to {tokens:,} tokens; a request may ask for {MOST_NUMBERS:,}"
        raise Refused(
            400, f"logprobs: {asks}: ask for fewer, or for fewer tokens or texts", "logprobs"
        )
    return numbers


async def _batch(inbox: Inbox) -> list[tuple[Generation, Event]]:
    """Return the events that have come, or none if none comes for a while.

    Raises:
        Refused: the decoder has refused a text.
    """
    try:
        async with asyncio.timeout(PING_S):
            found = [await inbox.get()]
    except TimeoutError:
        return []
    while not inbox.empty():
        found.append(inbox.get_nowait())
    batch = []
    for text, event in found:
        if isinstance(event, MonographError):
            raise Refused(400, str(event)) from event
        batch.append((text, event))
    return batch


def _too_long(tokens: str, version: Version, field: str) -> Refused:
    message = f"{field}: it has {tokens} tokens, and the model's context is {version.context:,}: shorten it"
    return Refused(400, message, field, "context_length_exceeded")


async def _fail(scope: Scope, send: Send, refused: Refused) -> None:
    """Say an error, in the middle of a stream if one has begun."""
    if not scope["answered"]:
        return await send_error(send, refused)
    stream = Events(send)
    await stream.send(as_json(error_of(refused)))
    return await stream.end(done=False)
