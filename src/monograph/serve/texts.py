"""Answers requests for texts: reads the request, lets the decoder write its texts, and sends them.

This runs in the event loop. The decoder runs in the owner's thread (`monograph.serve.owner`), and puts
its events into a queue, the request's inbox. A request uses one *version* of the model: its weights at one
time, with their tokenizer. If the client closes the connection, its texts are cancelled.
"""

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send
from torch import Tensor

from monograph.automata import Automaton, Calls
from monograph.automata.on_host import HostConstraint
from monograph.decode.reproducible import continuation_seed
from monograph.decode.request import Event
from monograph.decode.request import Request as DecoderRequest
from monograph.decode.sampling import Sampling
from monograph.device import clock
from monograph.errors import MonographError
from monograph.serve import shapes
from monograph.serve.answers import (
    AnswerBuilder,
    EventStream,
    TextBuilder,
    TextPiece,
    prompt_entries,
    send_body,
    send_error,
    token_usage,
)
from monograph.serve.body import ClientGone, parse_body, read_body, wait_until_gone
from monograph.serve.compiling import Busy, NotCompiled
from monograph.serve.gate import MAX_REQUEST_LOGPROBS
from monograph.serve.owner import Inbox, OwnerEnded, ServedText
from monograph.serve.prompts import PromptIds, find_call_frame, prompt_ids
from monograph.serve.protocol import AskedTexts, TextProtocol
from monograph.serve.refused import Refused, field_names
from monograph.serve.requests import AnyTextRequest, ChatRequest, CompletionRequest, ToolUse
from monograph.serve.service import Service
from monograph.serve.versions import ServedModel, Version
from monograph.text.call_reader import CallReader
from monograph.text.calls import CallFrame
from monograph.text.thoughts import AnswerPlace, AnswerReader, Thoughts
from monograph.text.tokenizer import Tokenizer

EventBatch = list[tuple[ServedText, Event]]  # events that came at the same time, each with its text
REQUEST_TIMEOUT_S = 600.0  # from the arrival of the request's body to the end of its answer
# Whether the answer begins inside thoughts is found out from this number of last tokens of the prompt.
_PROMPT_END = 256
PING_INTERVAL_S = 15.0  # a stream without new text sends a comment this often
# The HTTP status and the message of the error, for each finish of a text that is an error.
_FAILED_FINISHES = {
    "not_finite": (500, "the model's logits are not finite"),
    "nothing_allowed": (400, "bias, min_tokens and constraint together left no token to write"),
}


class _Constraint(NamedTuple):
    """A request's constraint: an automaton, or what the host follows instead; neither if it has none."""

    automaton: Automaton | None = None
    host: HostConstraint | None = None


class TextEndpoint:
    """An ASGI application that answers requests for texts, in the form of one protocol."""

    def __init__(self, service: Service, protocol: TextProtocol) -> None:
        self._service = service
        self._protocol = protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; cancel its texts as soon as the client has gone."""
        try:
            body = await read_body(scope, receive)
        except Refused as refused:
            return await send_error(scope, send, refused)
        except ClientGone:
            return None
        reply = _Reply(scope, send)
        response = asyncio.create_task(self._respond(body, scope, reply))
        client_gone = asyncio.create_task(wait_until_gone(receive))
        owner_crashed = asyncio.create_task(self._service.crashed.wait())
        tasks = (response, client_gone, owner_crashed)
        # The error that the client gets if the response must be cancelled; None: the client has gone.
        interruption = None
        try:
            await asyncio.wait(tasks, timeout=REQUEST_TIMEOUT_S, return_when=FIRST_COMPLETED)
            if owner_crashed.done():
                interruption = self._service.end_refusal
            elif not client_gone.done():
                # Either the time is up, or the response is complete, and then this is not sent.
                message = f"the text was not done after {REQUEST_TIMEOUT_S:.0f} s"
                interruption = Refused(408, message, code="timeout")
        except asyncio.CancelledError:  # the server is ending
            interruption = self._service.end_refusal
        for task in tasks:
            task.cancel()  # does nothing to a task that is done
            with suppress(asyncio.CancelledError):
                await task
        if response.cancelled() and interruption is not None:
            await reply.fail(interruption)

    async def _respond(self, body: bytes, scope: Scope, reply: "_Reply") -> None:
        """Answer a request whose body has been read, with an error if it is refused or fails."""
        try:
            # This is done in a worker thread, because a large body takes a while.
            asked = await asyncio.to_thread(self._read, body)
            async with self._service.use_model(asked.request.model) as model:
                # The guard (`monograph.serve.app`) has put the client's name there.
                with field_names(self._protocol.field_names):
                    await self._answer(asked, model, scope["client_name"], reply)
        except Refused as refused:
            await reply.fail(refused)
        except OwnerEnded:
            await reply.fail(self._service.end_refusal)
        except Exception as error:
            self._service.report_bug(error)
            await reply.fail(Refused(500, "a bug: the server's terminal says more"))

    async def _answer(
        self, asked: AskedTexts, model: ServedModel, client: str, reply: "_Reply"
    ) -> None:
        """Answer a valid request: score its prompts, or let the decoder write its texts.

        Args:
            asked: the request, and how its answer is written.
            model: the model that answers it.
            client: the client's name, by which the decoder lets clients take turns.
            reply: sends the answer.
        """
        began_s = clock()
        request = asked.request
        version = model.version
        scores_only = request.token_limit == 0
        # A chat cannot ask for too many texts: it has one prompt, and n is at most the number of rows.
        if isinstance(request, CompletionRequest) and not scores_only:
            self._require_few_texts(request)
        # In a worker thread, because templates and the tokenizer may take a while.
        call_frame = await asyncio.to_thread(find_call_frame, request, version)
        prompts = await asyncio.to_thread(prompt_ids, request, version)
        logprob_count = 0
        if request.likeliest_count is not None:
            logprob_count = _count_logprobs(request, version, prompts)
        if isinstance(request, CompletionRequest) and scores_only:
            with self._service.gate.reserve_logprobs(logprob_count):
                return await self._send_scored(request, asked.answer(model), model, prompts, reply)
        inbox: Inbox = asyncio.Queue()
        decoder_requests = await self._decoder_requests(request, model, prompts, call_frame, client)
        texts = [
            ServedText(decoder_request, version, index, inbox, request.stream)
            for index, decoder_request in enumerate(decoder_requests)
        ]
        answer = asked.answer(model)
        async with self._write(texts, began_s) as batches:
            if request.stream:
                await self._send_stream(request, texts, call_frame, answer, batches, prompts, reply)
            else:
                await self._send_whole(
                    request, model, texts, call_frame, answer, batches, prompts, reply
                )
        return None

    def _require_few_texts(self, request: CompletionRequest) -> None:
        """Refuse a request for more texts than may run and wait."""
        count = len(request.prompt) * request.n
        limit = self._service.gate.max_texts
        if count > limit:
            product = f"{request.n} for each of {len(request.prompt):,} are {count:,} texts"
            message = f"prompt: {product}; a request may ask for {limit:,} in all"
            raise Refused(400, message, "prompt")

    def _read(self, body: bytes) -> AskedTexts:
        """Return a body as a request to this endpoint.

        Raises:
            Refused: the body is not JSON, or not a valid request.
        """
        return self._protocol.read(parse_body(body), self._service.rows)

    # ── from a client's request to those of the decoder ───────────────────────────────────────

    async def _decoder_requests(
        self,
        request: AnyTextRequest,
        model: ServedModel,
        prompts: PromptIds,
        call_frame: CallFrame | None,
        client: str,
    ) -> list[DecoderRequest]:
        """Return the decoder's requests: n for the first prompt, then n for the next one, and so on.

        Text i of a prompt has the seed that `monograph generate` gives to its text i.
        """
        version = model.version
        tokenizer = version.tokenizer
        sampling = request.sampling
        if request.likeliest_count is not None:
            logprobs = min(request.likeliest_count, tokenizer.vocab_size)
            sampling = replace(sampling, logprobs=logprobs)
        lead = _lead(request, tokenizer, prompts)
        try:
            sampling.check_vocabulary(tokenizer.vocab_size)
        except MonographError as error:  # a bias is for a token that the model does not have
            raise Refused(400, str(error), "logit_bias") from None
        breaker_V = await self._breaker_V(sampling, version)
        stop_ids: Sequence[int] = (tokenizer.eos_id,)
        if isinstance(request, ChatRequest) and version.has_template:
            stop_ids = version.chat_stop_ids
        constraints, stop_automaton = await self._constraints(
            request, version, prompts, call_frame, stop_ids, lead
        )
        max_tokens = version.context if request.token_limit is None else request.token_limit
        seeds = [continuation_seed(sampling.seed, index) for index in range(request.n)]
        return [
            DecoderRequest(
                prompt_ids=tuple(ids),
                sampling=sampling,
                max_tokens=max_tokens,
                stop_ids=tuple(stop_ids),
                constraint=constraints.automaton,
                host_constraint=constraints.host,
                stop_automaton=stop_automaton,
                breaker_V=breaker_V,
                seed=seed,
                owner=client,  # the owner of the request, which is not the thread `Owner`
                adapter=model.slot,
            )
            for ids in prompts
            for seed in seeds
        ]

    @staticmethod
    async def _breaker_V(sampling: Sampling, version: Version) -> Tensor | None:
        """Return which tokens of the vocabulary V contain a sequence breaker of the DRY penalty.

        Returns:
            bool [V]; None: the request has no DRY penalty, or no breakers.

        Raises:
            Refused: a breaker is in no token.
        """
        breakers = tuple(sampling.dry_sequence_breakers)
        if not breakers or not sampling.dry_multiplier:
            return None
        try:
            # In a worker thread, because each breaker is searched for in every token.
            return await asyncio.to_thread(version.breakers, breakers)
        except MonographError as error:
            raise Refused(400, str(error), "dry_sequence_breakers") from None

    async def _constraints(
        self,
        request: AnyTextRequest,
        version: Version,
        prompts: PromptIds,
        call_frame: CallFrame | None,
        stop_ids: Sequence[int],
        lead: bytes,
    ) -> tuple[_Constraint, Automaton | None]:
        """Return the constraint, and the automaton of the stop strings, which is None if there are none.

        Strict tools are a constraint, too. If the compiler of automata does not compile a constraint, the
        host may follow it instead.

        Raises:
            Refused: a constraint cannot be followed, or too many wait to be compiled.
        """
        compiler = self._service.compiler_for(version, stop_ids)
        host = self._service.host_constraints_for(version, stop_ids)
        field = "stop"  # the field that is being compiled, which an error names
        constraint = _Constraint()
        stop_automaton = None
        try:
            if request.stop_texts:
                stop_automaton = await compiler.stop_strings(request.stop_texts)
            if request.constraint is not None:
                field = request.constraint.field
                kind, value = request.constraint.kind, request.constraint.value
                try:
                    constraint = _Constraint(await compiler.constraint(kind, value, lead))
                except NotCompiled as refusal:
                    followed = await host.constraint(refusal, kind, value, lead)
                    constraint = _Constraint(host=followed)
            tool_use = request.tool_use if isinstance(request, ChatRequest) else None
            if call_frame is not None and tool_use is not None and tool_use.is_strict:
                field = "tools"
                thoughts = _thoughts(request, version)
                calls = _calls(tool_use, call_frame, thoughts, prompts[0], version)
                try:
                    constraint = _Constraint(await compiler.calls(calls))
                except NotCompiled as refusal:
                    constraint = _Constraint(host=await host.calls(refusal, calls))
        except MonographError as error:
            raise Refused(400, f"{field}: {error}", field) from None
        except Busy:
            message = f"{field}: too many constraints wait to be compiled: try again later"
            raise Refused(429, message, field, "rate_limit_exceeded", Retry_After="10") from None
        return constraint, stop_automaton

    # ── from the decoder's events to the answer ───────────────────────────────────────────────

    @asynccontextmanager
    async def _write(
        self, texts: Sequence[ServedText], began_s: float
    ) -> AsyncIterator[AsyncIterator[EventBatch]]:
        """Let the decoder write texts; yield an iterator over batches of their events.

        The iterator ends when all texts have ended. At the end of the `async with` block, texts that
        have not ended are cancelled.

        Args:
            texts: the texts of a request.
            began_s: when the request came, by `clock`.

        Raises:
            Refused: too many texts wait (at the beginning of the block), or a text has failed (in the
                iterator).
        """
        gate = self._service.gate
        running = set(texts)

        async def batches() -> AsyncIterator[EventBatch]:
            is_first = True
            while running:
                batch = await _next_batch(texts[0].inbox)  # all texts have the same inbox
                if batch and is_first:
                    self._service.first_token_s.add(clock() - began_s)
                    is_first = False
                for text, event in batch:
                    if event.finish is not None:
                        running.discard(text)
                        gate.leave(text)
                    if event.finish in _FAILED_FINISHES:
                        status, message = _FAILED_FINISHES[event.finish]
                        raise Refused(status, message)
                yield batch

        gate.enter(texts)  # hands the texts to the decoder, or refuses them
        try:
            yield batches()
        finally:
            for text in running:
                gate.leave(text, cancelled=True)
            self._service.request_s.add(clock() - began_s)

    async def _send_stream(
        self,
        request: AnyTextRequest,
        texts: Sequence[ServedText],
        call_frame: CallFrame | None,
        answer: AnswerBuilder,
        batches: AsyncIterator[EventBatch],
        prompts: PromptIds,
        reply: "_Reply",
    ) -> None:
        """Send an answer event by event, as the texts are written."""
        builders = {text: self._builder(text, request, call_frame) for text in texts}
        prompt_tokens = _count_tokens(prompts)
        stream = None
        async for batch in batches:
            events: list[bytes] = []
            if stream is None:
                # A stream begins with status 200. It does not begin before there is a token or a ping is
                # due, so that most errors can still be sent with their own status.
                stream = await reply.begin_stream(answer)
                events = answer.first_events(len(texts), prompt_tokens)
            for text, event in batch:
                events += answer.piece_events(builders[text].add(event))
            if events:
                await stream.send(events)
            elif not batch:  # no event came within PING_INTERVAL_S
                await stream.ping()
        assert stream is not None  # there is at least one batch
        sampled_tokens = sum(builder.token_count for builder in builders.values())
        await stream.end(answer.last_events(token_usage(prompt_tokens, sampled_tokens)))

    async def _send_whole(
        self,
        request: AnyTextRequest,
        model: ServedModel,
        texts: Sequence[ServedText],
        call_frame: CallFrame | None,
        answer: AnswerBuilder,
        batches: AsyncIterator[EventBatch],
        prompts: PromptIds,
        reply: "_Reply",
    ) -> None:
        """Send an answer when all of its texts have ended."""
        # For each prompt, the beginning of its texts: the prompt itself if it is echoed, or nothing.
        echoes = [TextPiece(0, [], [], None)] * len(prompts)
        if isinstance(request, CompletionRequest) and request.echo:
            echoes = await self._echoes(request, model, prompts)
        builders = []
        pieces_of_texts: list[list[TextPiece]] = []
        for text in texts:
            echo = echoes[text.index // request.n]  # each prompt has n texts, one after another
            builders.append(self._builder(text, request, call_frame, echo.text))
            pieces_of_texts.append([echo])
        async for batch in batches:
            for text, event in batch:
                pieces_of_texts[text.index].append(builders[text.index].add(event))
        sampled_tokens = sum(builder.token_count for builder in builders)
        usage = token_usage(_count_tokens(prompts), sampled_tokens)
        await _send_answer(answer, pieces_of_texts, usage, reply)

    def _builder(
        self,
        text: ServedText,
        request: AnyTextRequest,
        call_frame: CallFrame | None,
        echo: str = "",
    ) -> TextBuilder:
        """Return the builder of a text, which comes after `echo` in the answer."""
        version = text.version
        prompt_ids = text.request.prompt_ids
        thoughts = _thoughts(request, version)
        reader = None
        if call_frame is not None or thoughts is not None:
            lead = version.tokenizer.inserted_space(prompt_ids)
            call_reader = None
            if call_frame is not None and isinstance(request, ChatRequest):
                types = {} if request.tool_use is None else request.tool_use.argument_types
                call_reader = CallReader(call_frame, version.spelling_V, types=types)
            place = AnswerPlace.AFTER if thoughts is None else _place(thoughts, prompt_ids, version)
            reader = AnswerReader(version.spelling_V, lead, thoughts, place, call_reader)
        # lm-evaluation-harness expects an entry for each token of a completion, including the token that
        # ends the text. In a chat, the protocol has no entry for that token.
        return TextBuilder(
            text,
            request.stop_texts,
            request.likeliest_count,
            reports_end=isinstance(request, CompletionRequest),
            echo=echo,
            reader=reader,
        )

    async def _send_scored(
        self,
        request: CompletionRequest,
        answer: AnswerBuilder,
        model: ServedModel,
        prompts: PromptIds,
        reply: "_Reply",
    ) -> None:
        """Answer with each prompt and its scores n times, without new text."""
        echoes = await self._echoes(request, model, prompts)
        repeated = [echo for echo in echoes for _ in range(request.n)]
        pieces_of_texts = [
            [echo._replace(text_index=index, finish="length")]
            for index, echo in enumerate(repeated)
        ]
        usage = token_usage(_count_tokens(prompts), sampled_tokens=0)
        await _send_answer(answer, pieces_of_texts, usage, reply)

    async def _echoes(
        self, request: CompletionRequest, model: ServedModel, prompts: PromptIds
    ) -> list[TextPiece]:
        """Return each prompt as the first piece of a text.

        If the request asks for log-probabilities, the piece has those of the prompt's tokens.
        """
        version = model.version
        echoes = []
        for prompt, ids in zip(request.prompt, prompts, strict=True):
            text = prompt if isinstance(prompt, str) else version.tokenizer.decode(ids)
            entries = []
            if request.likeliest_count is not None:
                scores = []
                if len(ids) > 1:  # the first token has no score
                    count = min(request.likeliest_count, version.tokenizer.vocab_size)
                    scores = await self._service.owner.score(model, ids, count)
                entries = prompt_entries(version.tokenizer, ids, scores)
            echoes.append(TextPiece(0, [text], entries, None))
        return echoes


def _lead(request: AnyTextRequest, tokenizer: Tokenizer, prompts: PromptIds) -> bytes:
    """Return the lead: what the tokenizer inserts between a prompt and its text, a space or nothing.

    Raises:
        Refused: a stop text or the constraint cannot be used with the lead.
    """
    leads = {bytes(tokenizer.inserted_space(ids)) for ids in prompts}
    inserts_space = any(leads)
    if inserts_space and any(text.startswith(" ") for text in request.stop_texts):
        message = "stop: the tokenizer begins every text with a space: leave out the stop's own"
        raise Refused(400, message, "stop")
    # The automaton of a constraint is compiled for one lead. Only an empty prompt may have another lead
    # than the other prompts.
    if request.constraint is not None and len(leads) > 1:
        raise Refused(400, "prompt: under a constraint, give an empty prompt alone", "prompt")
    return (
        leads.pop()
    )  # several leads occur only without a constraint, and then the lead is not used


def _thoughts(request: AnyTextRequest, version: Version) -> Thoughts | None:
    """Return how the answer's thoughts are written; None: thoughts are treated like other text.

    They are so with a constraint or stop texts, which apply to the whole text.
    """
    if not isinstance(request, ChatRequest) or request.constraint is not None:
        return None
    if request.stop_texts:
        return None
    return version.thoughts


def _place(thoughts: Thoughts, prompt_ids: Sequence[int], version: Version) -> AnswerPlace:
    """Return whether the answer begins before, inside or after its thoughts, given the prompt."""
    last_ids = prompt_ids[-_PROMPT_END:]
    return thoughts.place_after("".join(version.spelling_V[token_id] for token_id in last_ids))


def _calls(
    tools: ToolUse,
    call_frame: CallFrame,
    thoughts: Thoughts | None,
    prompt_ids: Sequence[int],
    version: Version,
) -> Calls:
    """Return which calls an answer may have, in the form that the compiler of automata takes."""
    frame = call_frame.grammar()
    if thoughts is not None:
        frame["thoughts"] = thoughts.grammar(_place(thoughts, prompt_ids, version))
    no_arguments: dict[str, Any] = {"type": "object", "properties": {}}
    functions = []
    for function in tools.functions:
        schema = no_arguments if function.parameters is None else function.parameters
        functions.append((function.name, schema))
    return Calls(frame, functions, tools.must_call, tools.parallel)


class _Reply:
    """Sends the answer to one request, or an error instead of it or at its end."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        # A stream that has begun, and what makes its events.
        self._stream: EventStream | None = None
        self._answer: AnswerBuilder | None = None

    async def send_whole(self, body: bytes) -> None:
        """Send a whole answer."""
        await send_body(self._send, body)

    async def begin_stream(self, answer: AnswerBuilder) -> EventStream:
        """Begin the stream of an answer, and return it."""
        self._answer = answer
        self._stream = EventStream(self._send)
        await self._stream.begin()
        return self._stream

    async def fail(self, refused: Refused) -> None:
        """Send an error. If the answer is a stream that has begun, the error is its last event."""
        has_begun = self._scope["answered"]  # from `RequestCounts.counting_send`
        if not has_begun:
            return await send_error(self._scope, self._send, refused)
        # An error cannot be added to a whole answer that is being sent. The answer stays incomplete.
        if self._stream is None or self._answer is None:
            return None
        return await self._stream.end([self._answer.error_event(refused)])


async def _send_answer(
    answer: AnswerBuilder,
    texts: Sequence[Sequence[TextPiece]],
    usage: shapes.Usage,
    reply: _Reply,
) -> None:
    """Send a whole answer, given all pieces of each text."""
    has_logprobs = any(piece.entries for pieces in texts for piece in pieces)
    if has_logprobs:
        # This is done in a worker thread, because thousands of numbers are serialised.
        body = await asyncio.to_thread(answer.whole_json, texts, usage)
    else:
        body = answer.whole_json(texts, usage)
    await reply.send_whole(body)


def _count_tokens(prompts: PromptIds) -> int:
    return sum(len(ids) for ids in prompts)


def _count_logprobs(request: AnyTextRequest, version: Version, prompts: PromptIds) -> int:
    """Return the maximum number of log-probabilities in the answer to a request.

    Raises:
        Refused: there may be more than MAX_REQUEST_LOGPROBS, which would take too much memory.
    """
    max_new_tokens = version.context if request.token_limit is None else request.token_limit
    tokens = 0
    for ids in prompts:
        new_tokens = min(max_new_tokens, version.context - len(ids))
        echoed_tokens = len(ids) if request.echo else 0
        tokens += request.n * (new_tokens + echoed_tokens)
    logprobs_per_token = 1 + (request.likeliest_count or 0)
    count = tokens * logprobs_per_token
    if count > MAX_REQUEST_LOGPROBS:
        message = (
            f"logprobs: {count:,} of up to {tokens:,} tokens; a request may ask for "
            f"{MAX_REQUEST_LOGPROBS:,}: ask for fewer, or for fewer tokens or texts"
        )
        raise Refused(400, message, "logprobs")
    return count


async def _next_batch(inbox: Inbox) -> EventBatch:
    """Wait for events; return all that have come, or an empty list after PING_INTERVAL_S.

    Raises:
        Refused: the decoder has refused a text.
    """
    try:
        async with asyncio.timeout(PING_INTERVAL_S):
            items = [await inbox.get()]
    except TimeoutError:
        return []
    while not inbox.empty():
        items.append(inbox.get_nowait())
    batch = []
    for text, event in items:
        if isinstance(event, MonographError):
            raise Refused(400, str(event)) from event
        batch.append((text, event))
    return batch
