"""Continue prompts with text.

Text is shown while ids come: whole characters only, nothing that a stop string may still take back.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, overload

from torch import Tensor

from monograph.decode.automata import Automaton, stop_strings
from monograph.decode.cache import KVCache
from monograph.decode.generator import Finish, Generator, LogProbability, Request
from monograph.decode.knobs import chain_of
from monograph.decode.penalties import breakers
from monograph.decode.reproducible import continuation_seed
from monograph.decode.sampling import Sampling
from monograph.device import describe
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.graph.inspect import unwrapped
from monograph.model.llama import Llama
from monograph.ranges import COUNT, Range
from monograph.text.tokenizer import Tokenizer


class Transcript:
    """The text of one completion.

    Attributes:
        token_ids: all ids so far.
        text: their text as far as it is certain: without a character whose bytes are not all there, without the
            beginning of a stop string, and after `finish` without the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """Begin an empty text after the ids `before`; it will end before the first of `stop` that appears."""
        self._lead = tokenizer.lead(before)  # a space that begins the bytes and is not of the text
        self._tokenizer, self._stop = tokenizer, [text.encode() for text in stop]
        # A character's bytes may come in several tokens.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""
        self.token_ids: list[int] = []
        self.text = ""

    def add(self, ids: Iterable[int]) -> str:
        """Take more ids; return the text that is certain now and was not before."""
        ids = list(ids)
        self.token_ids += ids
        self._held += b"".join([self._tokenizer.pieces[index] for index in ids])
        return self._say(len(self._held) - self._begun())

    def finish(self) -> str:
        """Return the rest of the text, up to a stop string: nothing more comes."""
        places = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return self._say(min(places, default=len(self._held)), final=True)

    def _begun(self) -> int:
        """Return how many bytes at the end may begin a stop string, or come from a whole one on."""
        # A stop string may have begun in the last bytes: they are shown once it is clear that it did not.
        held = self._held
        for at in range(len(held) if self._stop else 0):
            if any(stop.startswith(held[at:]) or held.startswith(stop, at) for stop in self._stop):
                return len(held) - at
        return 0

    def _say(self, size: int, *, final: bool = False) -> str:
        said = self._held[:size]
        if said:
            said, self._lead = said.removeprefix(self._lead), b""
        new = self._decoder.decode(said, final)
        self._held = self._held[size:]
        self.text += new
        return new


# Steps that take longer than compiling them (docs/log.md; on a GPU an estimate, not measured yet).
WORTH_COMPILING = {"cuda": 4_000, "cpu": 20_000}
MOST_ROWS = {"cuda": 64, "cpu": 8}


@dataclass(frozen=True)
class Completion:
    """A text that the model wrote after a prompt.

    Attributes:
        text: without the prompt and without the stop string.
        token_ids: the drawn ids, a stop id included.
        finish_reason: "stop" at a stop id or a stop string, "length" at max_tokens or the context's end, "not_finite"
            where the model's logits were not, "nothing_allowed" where bias and constraint left no token.
        logprobs: one for each id; None unless `Sampling.logprobs` asks for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: Finish
    logprobs: list[LogProbability] | None = None

    def __str__(self) -> str:
        """Return the text."""
        return self.text


class Piece(NamedTuple):
    """New text of a completion, and the completion once it is whole; completions are numbered prompt by prompt."""

    number: int
    text: str
    completion: Completion | None


@dataclass
class _Writing:
    """A completion that has begun and is not all shown."""

    transcript: Transcript
    logprobs: list[LogProbability] | None
    unsaid: str = ""
    finish: Finish | None = None


class Generation:
    """Completions that are being written; iterating over it, or over `stream`, writes them.

    Attributes:
        generator: writes them, and counts what that took.
        count: completions in all.
        tokens: drawn so far.
    """

    def __init__(self, generator: Generator, requests: Sequence[Request], tokenizer: Tokenizer, stop: Sequence[str]):
        """Take any number of requests; the generator gets them as it needs them."""
        self.generator, self.count, self.tokens = generator, len(requests), 0
        self._requests, self._tokenizer, self._stop = requests, tokenizer, stop

    def __iter__(self) -> Iterator[Completion]:
        """Yield the n completions of each prompt, prompt by prompt."""
        return (piece.completion for piece in self.stream() if piece.completion is not None)

    def stream(self) -> Iterator[Piece]:
        """Yield all text as it comes: that of the first completion, then of the next, whatever is written at once."""
        indices: dict[int, int] = {}
        begun: dict[int, _Writing] = {}
        coming = iter(enumerate(self._requests))

        def begin(most: int) -> None:
            for index, request in itertools.islice(coming, most):
                logprobs = None if request.sampling.logprobs is None else list[LogProbability]()
                begun[index] = _Writing(Transcript(self._tokenizer, self._stop, request.prompt_ids), logprobs)
                indices[self.generator.submit(request)] = index

        # As many wait as run, so that a row that ends finds its next request in the queue.
        begin(2 * self.generator.rows)
        current = 0
        for event in self.generator.run():
            writing = begun[indices[event.number]]
            writing.unsaid += writing.transcript.add(event.token_ids)
            self.tokens += len(event.token_ids)
            if writing.logprobs is not None:
                writing.logprobs += event.logprobs
            if event.finish is not None:
                writing.unsaid += writing.transcript.finish()
                writing.finish = event.finish
                del indices[event.number]
                begin(1)
            # A later completion's text waits here until its turn.
            while (first := begun.get(current)) is not None:
                text, first.unsaid = first.unsaid, ""
                if first.finish is None:
                    if text:
                        yield Piece(current, text, None)
                    break
                whole = Completion(first.transcript.text, first.transcript.token_ids, first.finish, first.logprobs)
                yield Piece(current, text, whole)
                del begun[current]
                current += 1


class _Requests(Sequence[Request]):
    """`n` continuations of each request, which differ in their seed."""

    # Made when they are asked for, as n may be large.
    def __init__(self, requests: list[Request], n: int) -> None:
        self.requests, self.n = requests, n

    def __len__(self) -> int:
        return len(self.requests) * self.n

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        prompt, continuation = divmod(range(len(self))[index], self.n)
        first = self.requests[prompt]
        seed = continuation_seed(first.sampling.seed, continuation)
        return replace(first, sampling=replace(first.sampling, seed=seed))


def generate(
    model: Llama,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int] | Tensor],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    max_tokens: int = 128,
    stop: Sequence[str | int] = (),
    n: int = 1,
    constraint: Automaton | None = None,
) -> Generation:
    """Continue each prompt `n` times.

    Args:
        model: the language model; it is put into evaluation mode.
        tokenizer: its tokenizer.
        prompts: texts to go on from, after the token that begins a document, or ids as they are.
        sampling: how tokens are chosen; or one for each prompt, all of one order. A prompt's tokens do not depend on
            the options of the others.
        max_tokens: most tokens to write after a prompt.
        stop: strings before which, and ids at which, a text ends; the id that ends a document always does.
        n: continuations per prompt; the first has the draws of `sampling.seed`, the others of seeds made from it.
        constraint: what may be written (`monograph.decode.automata`); None: anything.

    Returns:
        An iterable of completions, prompt by prompt; each is written when it is asked for.

    Raises:
        InputRefused: a prompt leaves no room in the model's context.
        OutOfDeviceMemory: the keys and values of one row do not fit.
        UsageError: there is no prompt, max_tokens or n is below 1, a stop string is empty, a text is given for a list,
            there are not as many samplings as prompts, or `Sampling` refuses.
    """
    max_tokens, n = COUNT.integer("max_tokens", max_tokens), COUNT.integer("n", n)
    prompts, stop = _listed("prompts", prompts), _listed("stop", stop)
    if odd := [given for given in prompts if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable)]:
        raise UsageError(f"prompts: expected texts, or sequences of ids, not {odd[0]!r}")
    if not prompts:
        raise UsageError("prompts: expected at least one; an empty text begins a document")
    if "" in stop:
        raise UsageError("stop: an empty string would stop every text at once; give the text to stop at")
    # An id beyond the vocabulary would be an index error on the device, far from its cause.
    require_ids("stop", [item for item in stop if not isinstance(item, str)], tokenizer)
    samplings = Sampling.of_each(sampling, len(prompts), tokenizer.vocab_size)
    strings = [item for item in stop if isinstance(item, str)]
    stop_ids = tuple(dict.fromkeys([tokenizer.eos_id, *(item for item in stop if isinstance(item, int))]))
    looked_for = stop_strings(strings, tokenizer.pieces) if strings else None
    breaking = cache(lambda texts: breakers(texts, tokenizer.pieces))  # one look at the vocabulary serves many prompts
    bare = unwrapped(model)
    requests = [
        Request(
            tuple(prompt_ids(bare, tokenizer, prompt)), own, max_tokens, stop_ids, constraint, looked_for,
            breaking(tuple(own.dry_sequence_breakers)) if own.dry_multiplier else None,
        )
        for prompt, own in zip(prompts, samplings, strict=True)
    ]  # fmt: skip
    _require_beginnings(strings, requests, tokenizer)
    model.eval()  # the copy that `unwrapped` may make would leave it in training mode
    generator = generator_for(bare, requests, n, tokenizer.vocab_size)
    return Generation(generator, _Requests(requests, n), tokenizer, strings)


def _listed(name: str, given: Iterable[Any]) -> list[Any]:
    if isinstance(given, str):
        raise UsageError(f"{name} is one text, whose letters would be taken one by one: give a list, [{given!r}]")
    return list(given)


def _require_beginnings(strings: Sequence[str], requests: Sequence[Request], tokenizer: Tokenizer) -> None:
    for text in strings:
        if text.startswith(" ") and any(tokenizer.lead(request.prompt_ids) for request in requests):
            raise UsageError(f"stop: {text!r} begins with a space, as the tokenizer has every text begin: leave it out")


def generator_for(model: Llama, requests: Sequence[Request], n: int, vocabulary: int) -> Generator:
    """Return a generator for `n` times these requests, with no more rows than pay or than fit the memory.

    Keys and values may take half of the free memory.

    Raises:
        OutOfDeviceMemory: not even one row fits.
    """
    config, weight = model.config, model.lm_head.weight
    device, count = weight.device.type, n * len(requests)
    longest = max(requests, key=lambda request: len(request.prompt_ids))
    slots = min(len(longest.prompt_ids) + longest.max_tokens, config.max_position_embeddings)
    # Half, because logits, the sampler and the caller need memory, too.
    row_bytes, half_bytes = KVCache.bytes_per_row(config, slots, weight.dtype), describe().free_memory_bytes // 2
    if row_bytes > half_bytes:
        raise OutOfDeviceMemory(
            f"keys and values of {slots:,} positions take {row_bytes / 2**30:.3g} GiB, more than half of the free "
            f"memory ({half_bytes / 2**30:.3g} GiB): ask for fewer tokens"
        )
    rows = min(count, MOST_ROWS[device], half_bytes // row_bytes)
    steps = -(-count // rows) * min(longest.max_tokens, slots - 1)
    # One request speaks for all: `generate` gives them the same constraint and stop strings.
    automata = [automaton for automaton in (longest.constraint, longest.stop) if automaton]
    return Generator(
        model,
        chain_of([request.sampling for request in requests], len(longest.stop_ids)),
        rows=rows,
        slots=slots,
        vocabulary=vocabulary,
        automata=automata,
        compiled=steps >= WORTH_COMPILING[device],
    )


def require_ids(what: str, ids: Sequence[object], tokenizer: Tokenizer) -> None:
    """Refuse ids that a tokenizer does not have, which would stand for other ones or be an index error."""
    last = tokenizer.vocab_size - 1
    known = Range(f"an id of the tokenizer, from 0 to {last}", 0, last, whole=True)
    for token in ids:
        known.require(what, token)


def prompt_ids(model: Llama, tokenizer: Tokenizer, prompt: str | Sequence[int] | Tensor) -> list[int]:
    """Return a text's ids after the one that begins a document; ids are returned as they are.

    Raises:
        InputRefused: they leave no room in the model's context.
        UsageError: an id is not the tokenizer's.
    """
    if isinstance(prompt, str):
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    else:
        ids = list(prompt.tolist() if isinstance(prompt, Tensor) else prompt)
    require_ids("a prompt", ids, tokenizer)
    context = model.config.max_position_embeddings
    if not 0 < len(ids) < context:
        raise InputRefused(
            f"the prompt has {len(ids)} tokens, but the model's context is {context}: shorten it to below {context}"
            if ids
            else "the prompt has no tokens: give at least one id, or a text"
        )
    return ids
