"""Continue prompts with text.

Text is returned while ids are sampled. It has only whole characters. Its end is held back as long as
it may be the beginning of a stop string.
"""

import codecs
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.automata import Automaton, stop_strings
from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.chain import breakers
from monograph.decode.generator import Generator, Mode
from monograph.decode.knobs import chain_of
from monograph.decode.reproducible import continuation_seed
from monograph.decode.request import Finish, LogProbability, Request
from monograph.decode.sampling import Sampling
from monograph.device import describe
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.graph.inspect import unwrapped
from monograph.model.llama import Llama
from monograph.ranges import COUNT, Range, whole
from monograph.text.tokenizer import Tokenizer


class Transcript:
    """The text of one completion, which grows with its ids.

    Attributes:
        token_ids: all ids so far.
        text: the part of the ids' text that is certain. It does not end with an incomplete character
            or the beginning of a stop string. After `finish` it ends before the first stop string.
        size: the number of bytes of `text` and of an incomplete character after it, before errors
            are replaced.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        """Begin an empty text.

        Args:
            tokenizer: the tokenizer of the ids.
            stop: the text ends before the first of these strings.
            before: the ids before the text.
        """
        # The space that the tokenizer adds before a text, or nothing. It is removed from the text.
        self._lead = tokenizer.inserted_space(before)
        self._tokenizer = tokenizer
        self._stop = [text.encode() for text in stop]
        # The decoder is incremental, because several tokens may share the bytes of one character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""
        self.token_ids: list[int] = []
        self.text = ""
        self.size = 0

    def add(self, ids: Iterable[int]) -> str:
        """Add ids, and return the text that has become certain."""
        ids = list(ids)
        self.token_ids += ids
        self._held += b"".join([self._tokenizer.pieces[index] for index in ids])
        return self._append(len(self._held) - self._uncertain())

    def finish(self) -> str:
        """End the text, and return its rest up to a stop string."""
        places = [self._held.find(stop) for stop in self._stop]
        found = [place for place in places if place >= 0]
        return self._append(min(found, default=len(self._held)), final=True)

    def _uncertain(self) -> int:
        """Return how many of the held bytes must wait, because a stop string may begin with them.

        They begin at the first place where a stop string stands, or where the rest of the held bytes
        is the beginning of a stop string.
        """
        if not self._stop:
            return 0
        held = self._held
        for place in range(len(held)):
            for stop in self._stop:
                if held.startswith(stop, place) or stop.startswith(held[place:]):
                    return len(held) - place
        return 0

    def _append(self, size: int, *, final: bool = False) -> str:
        """Move the first `size` held bytes to the text, and return the new text."""
        certain = self._held[:size]
        self._held = self._held[size:]
        self.size += size
        if certain:
            certain = certain.removeprefix(self._lead)
            self._lead = b""
        new = self._decoder.decode(certain, final)
        self.text += new
        return new


# The smallest number of steps for which compiling saves time (dev/log.md). The number for a GPU is an
# estimate.
WORTH_COMPILING = {"cuda": 4_000, "cpu": 20_000}
# The allowed numbers of texts of each prompt. len() fails for a sequence of 2^63 texts.
MOST_TEXTS = whole(1, 10**15)
# The maximum number of requests that run at the same time.
MOST_ROWS = {"cuda": 64, "cpu": 8}


@dataclass(frozen=True)
class Completion:
    """A text that the model wrote after a prompt.

    Attributes:
        text: the text, without the prompt and the stop string.
        token_ids: the sampled ids, including the stop id.
        finish_reason: "stop" at a stop id or a stop string, "length" at max_tokens or the end of the
            context, "not_finite" if the model's logits were not finite, "nothing_allowed" if bias
            and constraint forbid all tokens.
        logprobs: one for each id; None unless `Sampling.logprobs` asks for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: Finish
    logprobs: list[LogProbability] | None = None

    def __str__(self) -> str:
        """Return the text."""
        return self.text


class CompletionDelta(NamedTuple):
    """New text of a completion.

    Attributes:
        number: the completion's number; completions are numbered prompt by prompt.
        text: the new text.
        completion: the completion, once it has ended; else None.
    """

    number: int
    text: str
    completion: Completion | None


@dataclass
class _Writing:
    """A completion that has begun, and whose end has not been yielded.

    Attributes:
        transcript: its text.
        logprobs: one for each id; None if they are not asked for.
        pending: the text that has not been yielded.
        finish: how it ended; None while it runs.
    """

    transcript: Transcript
    logprobs: list[LogProbability] | None
    pending: str = ""
    finish: Finish | None = None


class Generation:
    """Completions that are written while one iterates over this object or over `stream`.

    Attributes:
        generator: the decoder of the requests.
        count: the number of completions.
        tokens: the number of tokens that have been sampled.
    """

    def __init__(
        self,
        generator: Generator,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        stop: Sequence[str],
        n: int = 0,
    ):
        """Take the requests, which are submitted as rows become free.

        Args:
            generator: the decoder.
            requests: any number of requests.
            tokenizer: the model's tokenizer.
            stop: the strings before which a text ends.
            n: the number of texts for each request, each with its own seed; 0: one text, with the
                request's seed.
        """
        self.generator = generator
        self.count = len(requests) * (n or 1)
        self.tokens = 0
        self._requests = requests
        self._tokenizer = tokenizer
        self._stop = stop
        self._n = n

    def __iter__(self) -> Iterator[Completion]:
        """Yield the n completions of each prompt, prompt by prompt."""
        return (piece.completion for piece in self.stream() if piece.completion is not None)

    def stream(self) -> Iterator[CompletionDelta]:
        """Yield new text, completion by completion, although several are written at the same time."""
        # The index of the completion of each submitted request.
        indices: dict[int, int] = {}
        writings: dict[int, _Writing] = {}
        # This is a generator expression and not a list, because n may be large.
        continued = (
            request._replace(seed=continuation_seed(request.sampling.seed, index))
            for request in self._requests
            for index in range(self._n)
        )
        waiting = iter(enumerate(continued if self._n else self._requests))

        def submit(count: int) -> None:
            for index, request in itertools.islice(waiting, count):
                logprobs = None if request.sampling.logprobs is None else list[LogProbability]()
                writings[index] = _Writing(
                    Transcript(self._tokenizer, self._stop, request.prompt_ids), logprobs
                )
                indices[self.generator.submit(request)] = index

        # One request runs and one waits for each row, so that a row that becomes free finds a request.
        submit(2 * self.generator.rows)
        current = 0
        for event in self.generator.run():
            writing = writings[indices[event.number]]
            writing.pending += writing.transcript.add(event.token_ids)
            self.tokens += len(event.token_ids)
            if writing.logprobs is not None:
                writing.logprobs += event.logprobs
            if event.finish is not None:
                writing.pending += writing.transcript.finish()
                writing.finish = event.finish
                del indices[event.number]
                submit(1)
            # The text of later completions is pending until all earlier ones have ended.
            while current in writings:
                writing = writings[current]
                text = writing.pending
                writing.pending = ""
                if writing.finish is None:
                    if text:
                        yield CompletionDelta(current, text, None)
                    break
                transcript = writing.transcript
                completion = Completion(
                    transcript.text, transcript.token_ids, writing.finish, writing.logprobs
                )
                yield CompletionDelta(current, text, completion)
                del writings[current]
                current += 1


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
        tokenizer: the model's tokenizer.
        prompts: texts, before which the token that begins a document is put, or sequences of ids,
            which are not changed.
        sampling: how tokens are sampled, for all prompts; or a list with one for each prompt, all
            with the same order; None: `Sampling()`. A prompt's tokens do not depend on the options
            of others.
        max_tokens: the maximum number of tokens to write after a prompt.
        stop: strings before which a text ends, and ids with which it ends. The id that ends a
            document always ends a text.
        n: the number of continuations of each prompt. The first one has `sampling.seed`, and the
            others have seeds that are made from it.
        constraint: an automaton of the allowed texts (`monograph.automata`); None: any text.

    Returns:
        An iterable of completions, prompt by prompt, which are written while one iterates over it.

    Raises:
        InputRefused: a prompt fills the model's context.
        OutOfDeviceMemory: the keys and values of one row do not fit.
        UsageError: there is no prompt, max_tokens or n is below 1, a stop string is empty, a text
            is given instead of a list, the number of samplings is not that of the prompts, or
            `Sampling` refuses an option.
    """
    max_tokens = COUNT.integer("max_tokens", max_tokens)
    n = MOST_TEXTS.integer("n", n)
    prompts = _listed("prompts", prompts)
    stop = _listed("stop", stop)
    for prompt in prompts:
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
            raise UsageError(f"prompts: expected texts, or sequences of ids, not {prompt!r}")
    if not prompts:
        raise UsageError("prompts: expected at least one; an empty text begins a document")
    if "" in stop:
        raise UsageError(
            "stop: an empty string would stop every text at once; give the text to stop at"
        )
    given_stop_ids = [item for item in stop if not isinstance(item, str)]
    require_ids("stop", given_stop_ids, tokenizer)
    samplings = Sampling.of_each(sampling, len(prompts), tokenizer.vocab_size)
    strings = [item for item in stop if isinstance(item, str)]
    stop_ids = tuple(dict.fromkeys([tokenizer.eos_id, *map(int, given_stop_ids)]))
    stop_automaton = stop_strings(strings, tokenizer.pieces) if strings else None
    # Prompts with the same sequence breakers share one search of the vocabulary.
    breakers_of = cache(lambda texts: breakers(texts, tokenizer.pieces))
    bare = unwrapped(model)
    requests = [
        Request(
            prompt_ids=tuple(prompt_ids(bare, tokenizer, prompt)),
            sampling=options,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            constraint=constraint,
            stop=stop_automaton,
            breaker_V=(
                breakers_of(tuple(options.dry_sequence_breakers))
                if options.dry_multiplier
                else None
            ),
        )
        for prompt, options in zip(prompts, samplings, strict=True)
    ]
    _refuse_leading_spaces(strings, requests, tokenizer)
    # The generator puts `bare` into evaluation mode, which may be a copy of the model.
    model.eval()
    generator = generator_for(bare, requests, n, tokenizer.vocab_size)
    return Generation(generator, requests, tokenizer, strings, n)


def _listed(name: str, given: Iterable[Any]) -> list[Any]:
    if isinstance(given, str):
        raise UsageError(
            f"{name} is one text, whose letters would be taken one by one: give a list, [{given!r}]"
        )
    return list(given)


def _refuse_leading_spaces(
    strings: Sequence[str], requests: Sequence[Request], tokenizer: Tokenizer
) -> None:
    """Refuse stop strings that begin with a space if the tokenizer adds a space before texts."""
    for text in strings:
        if text.startswith(" ") and any(
            tokenizer.inserted_space(request.prompt_ids) for request in requests
        ):
            raise UsageError(
                f"stop: {text!r} begins with a space, as the tokenizer has every text begin: leave it out"
            )


def generator_for(model: Llama, requests: Sequence[Request], n: int, vocabulary: int) -> Generator:
    """Return a generator for `n` texts of each request, with at most MOST_ROWS rows.

    Keys and values take at most half of the free memory.

    Raises:
        OutOfDeviceMemory: one row takes more than half of the free memory.
    """
    config = model.config
    weight = model.lm_head.weight
    device = weight.device.type
    count = n * len(requests)
    longest = max(requests, key=lambda request: len(request.prompt_ids))
    slots = min(len(longest.prompt_ids) + longest.max_tokens, config.max_position_embeddings)
    rows = rows_that_fit(
        model, CacheSizes(slots), min(count, MOST_ROWS[device]), "ask for fewer tokens"
    )
    steps = math.ceil(count / rows) * min(longest.max_tokens, slots - 1)
    # `generate` gives all requests the same constraint and stop strings, so the automata of one request
    # are those of all.
    return Generator(
        model,
        chain_of([request.sampling for request in requests], len(longest.stop_ids)),
        rows=rows,
        slots=slots,
        vocabulary=vocabulary,
        automata=[automaton for automaton in (longest.constraint, longest.stop) if automaton],
        mode=mode_for(steps, device, torch.is_autocast_enabled(device)),
    )


def mode_for(steps: int, device: str, casts: bool) -> Mode:
    """Return the mode of a decoder.

    Args:
        steps: the number of steps that it will run.
        device: the type of device.
        casts: whether it runs under autocast.
    """
    if steps >= WORTH_COMPILING[device]:
        return "compiled"
    # Autocast caches rounded weights, which a captured step would read forever.
    return "eager" if casts else "captured"


def rows_that_fit(model: Llama, form: CacheSizes, most: int, advice: str) -> int:
    """Return the number of rows of a cache that fit into half of the free memory, at most `most`.

    Raises:
        OutOfDeviceMemory: one row does not fit; the message ends with the advice.
    """
    # The other half is for logits, the sampler and the caller.
    half_bytes = describe().free_memory_bytes // 2
    row_bytes = KVCache.bytes_per_row(
        model.config, form.most, model.lm_head.weight.dtype, form.block
    )
    if row_bytes > half_bytes:
        raise OutOfDeviceMemory(
            f"keys and values of {form.most:,} positions take {row_bytes / 2**30:.3g} GiB, more than half of the free "
            f"memory ({half_bytes / 2**30:.3g} GiB): {advice}"
        )
    return min(most, half_bytes // row_bytes)


def require_ids(what: str, ids: Sequence[object], tokenizer: Tokenizer) -> None:
    """Refuse ids that a tokenizer does not have.

    Otherwise they would be read as other ids, or raise an IndexError.

    Raises:
        UsageError: an id is unknown; the message begins with `what`.
    """
    last = tokenizer.vocab_size - 1
    known = Range(f"an id of the tokenizer, from 0 to {last}", 0, last, whole=True)
    for token in ids:
        known.require(what, token)


def prompt_ids(
    model: Llama, tokenizer: Tokenizer, prompt: str | Sequence[int] | Tensor
) -> list[int]:
    """Return the ids of a prompt.

    Args:
        model: the language model.
        tokenizer: its tokenizer.
        prompt: a text, before which the id that begins a document is put; or ids, which are not
            changed.

    Raises:
        InputRefused: the ids fill the model's context, or there are none.
        UsageError: the tokenizer does not have an id.
    """
    if isinstance(prompt, str):
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    else:
        ids = list(prompt.tolist() if isinstance(prompt, Tensor) else prompt)
    require_ids("a prompt", ids, tokenizer)
    if not ids:
        raise InputRefused("the prompt has no tokens: give at least one id, or a text")
    context = model.config.max_position_embeddings
    if len(ids) >= context:
        raise InputRefused(
            f"the prompt has {len(ids)} tokens, but the model's context is {context}: shorten it to below {context}"
        )
    return ids
