"""Continues prompts with text.

Text is given out while ids come, in whole characters, and without an end that may still turn out to
be a stop string.
"""

import codecs
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.automata import Automaton, stop_strings
from monograph.decode.cache import KVCache, Slots
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
    """The text of one completion, made from ids as they come.

    Attributes:
        token_ids: all ids so far.
        text: the part of their text that is certain: it has no incomplete character and no
            beginning of a stop string, and after `finish` it ends before the first stop string.
        size: the bytes of all ids that `text` is made of, with an incomplete character.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        """Begin an empty text after the ids `before`; it will end before the first occurrence of a
        string in `stop`.
        """
        self._lead = tokenizer.lead(before)  # a space that the tokenizer puts before the text
        self._tokenizer = tokenizer
        self._stop = [text.encode() for text in stop]
        # The bytes of one character may be spread over several tokens.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""
        self.token_ids: list[int] = []
        self.text, self.size = "", 0

    def add(self, ids: Iterable[int]) -> str:
        """Take more ids; return the text that became certain by them."""
        ids = list(ids)
        self.token_ids += ids
        self._held += b"".join([self._tokenizer.pieces[index] for index in ids])
        return self._append(len(self._held) - self._uncertain())

    def finish(self) -> str:
        """Return the rest of the text, up to a stop string, once no more ids come."""
        places = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return self._append(min(places, default=len(self._held)), final=True)

    def _uncertain(self) -> int:
        """Return how many of the held bytes come after the first place where a stop string stands
        or may begin.
        """
        held = self._held
        for at in range(len(held) if self._stop else 0):
            if any(stop.startswith(held[at:]) or held.startswith(stop, at) for stop in self._stop):
                return len(held) - at
        return 0

    def _append(self, size: int, *, final: bool = False) -> str:
        """Move the first `size` held bytes to the text; return the text that is new."""
        certain, self._held = self._held[:size], self._held[size:]
        self.size += size
        if certain:
            certain = certain.removeprefix(self._lead)
            self._lead = b""
        new = self._decoder.decode(certain, final)
        self.text += new
        return new


# The number of steps from which on compiling saves time (dev/log.md; on a GPU an estimate, not
# measured yet).
WORTH_COMPILING = {"cuda": 4_000, "cpu": 20_000}
MOST_TEXTS = whole(1, 10**15)  # of each prompt: a sequence of 2^63 has no len()
MOST_ROWS = {"cuda": 64, "cpu": 8}  # requests that run at once


@dataclass(frozen=True)
class Completion:
    """A text that the model wrote after a prompt.

    Attributes:
        text: the text without the prompt and the stop string.
        token_ids: the drawn ids, with the stop id.
        finish_reason: "stop" at a stop id or a stop string, "length" at max_tokens or the context's
            end, "not_finite" if the model's logits were not finite, "nothing_allowed" if bias and
            constraint left no token.
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
    """New text of a completion.

    Attributes:
        number: the completion's number; completions are numbered prompt by prompt.
        text: the text that is new.
        completion: the completion once it is whole, else None.
    """

    number: int
    text: str
    completion: Completion | None


@dataclass
class _Writing:
    """A completion that has begun and was not given out as a whole yet; `pending` is text that
    waits for its turn.
    """

    transcript: Transcript
    logprobs: list[LogProbability] | None
    pending: str = ""
    finish: Finish | None = None


class Generation:
    """Completions that are being written; iterating over it, or over `stream`, writes them.

    Attributes:
        generator: the decoder of the requests, which counts what that took.
        count: completions in all.
        tokens: tokens drawn so far.
    """

    def __init__(
        self,
        generator: Generator,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        stop: Sequence[str],
        n: int = 0,
    ):
        """Take any number of requests; the generator gets each when it is about to have a free row.

        With `n` there are so many texts for each, which differ in their seeds.
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

    def stream(self) -> Iterator[Piece]:
        """Yield text as it comes, completion by completion, even where several are written at once."""
        indices: dict[int, int] = {}
        writings: dict[int, _Writing] = {}
        # Made when they are asked for, as n may be large.
        continued = (
            request._replace(seed=continuation_seed(request.sampling.seed, index))
            for request in self._requests
            for index in range(self._n)
        )
        waiting = iter(enumerate(continued if self._n else self._requests))

        def submit(most: int) -> None:
            for index, request in itertools.islice(waiting, most):
                logprobs = None if request.sampling.logprobs is None else list[LogProbability]()
                writings[index] = _Writing(
                    Transcript(self._tokenizer, self._stop, request.prompt_ids), logprobs
                )
                indices[self.generator.submit(request)] = index

        # As many requests wait as run, so that a row whose request ends finds the next one in the
        # queue.
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
            # A later completion's text waits here until its turn.
            while (first := writings.get(current)) is not None:
                text = first.pending
                first.pending = ""
                if first.finish is None:
                    if text:
                        yield Piece(current, text, None)
                    break
                whole = Completion(
                    first.transcript.text, first.transcript.token_ids, first.finish, first.logprobs
                )
                yield Piece(current, text, whole)
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
        prompts: texts, which get the token that begins a document before them, or ids, which are
            taken as they are.
        sampling: how tokens are chosen, for all prompts, or a list with one for each prompt and one
            order in all. A prompt's tokens do not depend on the options of the others.
        max_tokens: most tokens to write after a prompt.
        stop: strings before which a text ends, and ids with which it ends; the id that ends a
            document is always one.
        n: continuations per prompt; the first has the draws of `sampling.seed`, the others those of
            seeds made from it.
        constraint: an automaton of the allowed texts (`monograph.automata`); None: any text.

    Returns:
        An iterable of completions, prompt by prompt, which are written while one iterates over it.

    Raises:
        InputRefused: a prompt leaves no room in the model's context.
        OutOfDeviceMemory: the keys and values of one row do not fit.
        UsageError: there is no prompt, max_tokens or n is below 1, a stop string is empty, a text
            is given for a list, there are not as many samplings as prompts, or `Sampling` refuses.
    """
    max_tokens = COUNT.integer("max_tokens", max_tokens)
    n = MOST_TEXTS.integer("n", n)
    prompts = _listed("prompts", prompts)
    stop = _listed("stop", stop)
    if wrong := [
        given
        for given in prompts
        if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable)
    ]:
        raise UsageError(f"prompts: expected texts, or sequences of ids, not {wrong[0]!r}")
    if not prompts:
        raise UsageError("prompts: expected at least one; an empty text begins a document")
    if "" in stop:
        raise UsageError(
            "stop: an empty string would stop every text at once; give the text to stop at"
        )
    require_ids("stop", ids := [item for item in stop if not isinstance(item, str)], tokenizer)
    samplings = Sampling.of_each(sampling, len(prompts), tokenizer.vocab_size)
    strings = [item for item in stop if isinstance(item, str)]
    stop_ids = tuple(dict.fromkeys([tokenizer.eos_id, *map(int, ids)]))
    stop_automaton = stop_strings(strings, tokenizer.pieces) if strings else None
    # Prompts with the same sequence breakers share one search of the vocabulary.
    breakers_of = cache(lambda texts: breakers(texts, tokenizer.pieces))
    bare = unwrapped(model)
    requests = [
        Request(
            tuple(prompt_ids(bare, tokenizer, prompt)),
            options,
            max_tokens,
            stop_ids,
            constraint,
            stop_automaton,
            breakers_of(tuple(options.dry_sequence_breakers)) if options.dry_multiplier else None,
        )
        for prompt, options in zip(prompts, samplings, strict=True)
    ]
    _require_beginnings(strings, requests, tokenizer)
    model.eval()  # the copy that `unwrapped` may make would leave it in training mode
    return Generation(
        generator_for(bare, requests, n, tokenizer.vocab_size), requests, tokenizer, strings, n
    )


def _listed(name: str, given: Iterable[Any]) -> list[Any]:
    if isinstance(given, str):
        raise UsageError(
            f"{name} is one text, whose letters would be taken one by one: give a list, [{given!r}]"
        )
    return list(given)


def _require_beginnings(
    strings: Sequence[str], requests: Sequence[Request], tokenizer: Tokenizer
) -> None:
    for text in strings:
        if text.startswith(" ") and any(tokenizer.lead(request.prompt_ids) for request in requests):
            raise UsageError(
                f"stop: {text!r} begins with a space, as the tokenizer has every text begin: leave it out"
            )


def generator_for(model: Llama, requests: Sequence[Request], n: int, vocabulary: int) -> Generator:
    """Return a generator for `n` times these requests, with at most MOST_ROWS rows.

    Keys and values take at most half of the free memory.

    Raises:
        OutOfDeviceMemory: one row takes more than that.
    """
    config, weight = model.config, model.lm_head.weight
    device = weight.device.type
    count = n * len(requests)
    longest = max(requests, key=lambda request: len(request.prompt_ids))
    slots = min(len(longest.prompt_ids) + longest.max_tokens, config.max_position_embeddings)
    rows = rows_that_fit(model, Slots(slots), min(count, MOST_ROWS[device]), "ask for fewer tokens")
    steps = -(-count // rows) * min(longest.max_tokens, slots - 1)
    # One request stands for all, as `generate` gives them the same constraint and stop strings.
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
    """Return how to run so many steps on a type of device, under autocast if it `casts`."""
    if steps >= WORTH_COMPILING[device]:
        return "compiled"
    # Autocast keeps the weights that it has rounded, and a captured step would read these for ever.
    return "eager" if casts else "captured"


def rows_that_fit(model: Llama, form: Slots, most: int, advice: str) -> int:
    """Return as many rows of a cache as half of the free memory holds, at most `most`.

    Raises:
        OutOfDeviceMemory: it does not hold one; the message ends with the advice.
    """
    # Half, because logits, the sampler and the caller need memory, too.
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
    """Refuse ids that a tokenizer does not have; unchecked they would stand for other ids or be an
    index error.
    """
    last = tokenizer.vocab_size - 1
    known = Range(f"an id of the tokenizer, from 0 to {last}", 0, last, whole=True)
    for token in ids:
        known.require(what, token)


def prompt_ids(
    model: Llama, tokenizer: Tokenizer, prompt: str | Sequence[int] | Tensor
) -> list[int]:
    """Return the ids of a prompt: a text's after the id that begins a document, given ids as they
    are.

    Raises:
        InputRefused: the ids leave no room in the model's context, or there are none.
        UsageError: the tokenizer does not have an id.
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
