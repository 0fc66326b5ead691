"""Continue prompts with text.

Text is returned while ids are sampled (`monograph.decode.transcript`).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.automata import Automaton, stop_strings
from monograph.automata.on_host import HostConstraint
from monograph.decode.adapter_bank import BASE, BASE_SLOT, bank_of
from monograph.decode.cache import CacheSizes, KVCache
from monograph.decode.chain import breakers
from monograph.decode.generator import OWN_HEAD, Draft, Generator, Mode
from monograph.decode.knobs import chain_of
from monograph.decode.reproducible import continuation_seed
from monograph.decode.request import Finish, LogProbability, Request
from monograph.decode.sampling import Sampling
from monograph.decode.transcript import Transcript
from monograph.device import describe
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.graph.inspect import unwrapped
from monograph.model.llama import Llama
from monograph.ranges import COUNT, Range, whole
from monograph.text.tokenizer import Tokenizer

# The smallest number of steps for which compiling saves time (dev/log.md). The number for a GPU is an
# estimate.
WORTH_COMPILING = {"cuda": 4_000, "cpu": 20_000}
# The allowed numbers of completions of a prompt. (Python's len() fails for a sequence of 2^63 items.)
COMPLETIONS_PER_PROMPT = whole(1, 10**15)
# The maximum number of requests that run at the same time.
MAX_ROWS = {"cuda": 64, "cpu": 8}


@dataclass(frozen=True)
class Completion:
    """A text that the model wrote after a prompt.

    Attributes:
        text: the text, without the prompt and the stop string.
        token_ids: the sampled ids, including a stop id.
        finish_reason: "stop" at a stop id or a stop string, "length" at max_tokens or the end of the
            context, "not_finite" if the model's logits had a NaN or +inf, "nothing_allowed" if bias
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
        number: the completion's number, from 0; completions are numbered prompt by prompt.
        text: the new text.
        completion: the completion, once it has ended; else None.
    """

    number: int
    text: str
    completion: Completion | None


@dataclass
class _UnfinishedCompletion:
    """A completion that was submitted, and whose end has not been yielded.

    Attributes:
        transcript: its text.
        logprobs: one for each id; None if they are not asked for.
        pending: the text that is certain (`Transcript.text`) but has not been yielded.
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
        # The number of the completion, by the decoder's number of its request.
        completion_numbers: dict[int, int] = {}
        unfinished: dict[int, _UnfinishedCompletion] = {}
        requests: Iterable[Request] = self._requests
        if self._n:
            # This is a generator expression and not a list, because n may be large.
            requests = (
                request._replace(seed=continuation_seed(request.sampling.seed, index))
                for request in self._requests
                for index in range(self._n)
            )
        waiting = iter(enumerate(requests))

        def submit(count: int) -> None:
            for number, request in itertools.islice(waiting, count):
                logprobs: list[LogProbability] | None = None
                if request.sampling.logprobs is not None:
                    logprobs = []
                transcript = Transcript(self._tokenizer, self._stop, request.prompt_ids)
                unfinished[number] = _UnfinishedCompletion(transcript, logprobs)
                completion_numbers[self.generator.submit(request)] = number

        # One request runs and one waits for each row, so that a row that becomes free finds a request.
        submit(2 * self.generator.rows)
        current = 0
        for event in self.generator.run():
            completion = unfinished[completion_numbers[event.number]]
            completion.pending += completion.transcript.add(event.token_ids)
            self.tokens += len(event.token_ids)
            if completion.logprobs is not None:
                completion.logprobs += event.logprobs
            if event.finish is not None:
                completion.pending += completion.transcript.finish()
                completion.finish = event.finish
                del completion_numbers[event.number]
                submit(1)
            # The text of later completions is pending until all earlier ones have ended.
            while current in unfinished:
                completion = unfinished[current]
                text = completion.pending
                completion.pending = ""
                if completion.finish is None:
                    # It still runs. The event may have brought it no text.
                    if text:
                        yield CompletionDelta(current, text, None)
                    break
                transcript = completion.transcript
                finished = Completion(
                    transcript.text, transcript.token_ids, completion.finish, completion.logprobs
                )
                yield CompletionDelta(current, text, finished)
                del unfinished[current]
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
    constraint: Automaton | HostConstraint | None = None,
    adapters: str | Sequence[str] = BASE,
    draft: Draft | None = None,
    draft_tokens: int | None = None,
) -> Generation:
    """Continue each prompt `n` times.

    Args:
        model: the language model; it is put into evaluation mode.
        tokenizer: the model's tokenizer.
        prompts: texts, each of which is preceded by the token that begins a document, or sequences
            of ids, which are used as they are.
        sampling: how tokens are sampled, for all prompts; or a list with one for each prompt, all
            with the same order; None: `Sampling()`. A prompt's tokens do not depend on the options
            of others.
        max_tokens: the maximum number of tokens to write after a prompt.
        stop: strings before which a text ends, and ids that end a text. The id that ends a document
            always ends a text.
        n: the number of continuations of each prompt. The first one has `sampling.seed`, and the
            others have seeds that are made from it.
        constraint: an automaton of the allowed texts (`monograph.automata`), or what the host follows
            instead (`monograph.automata.on_host`); None: any text.
        adapters: the name of the adapter that writes, if the model has a bank of them
            (`monograph.decode.adapter_bank.install`), for all prompts; or a list with one for each
            prompt. "base" is the model without an adapter.
        draft: a small model with the same vocabulary, which proposes tokens that the model checks
            together (`monograph.decode.draft`); or "mtp": the model's own head for multi-token
            prediction proposes them (`monograph.decode.draft_head`). The texts are those without it,
            except that a pass over several tokens may round differently from single steps. None: each
            step samples one token.
        draft_tokens: the number of tokens that it proposes at a time; None: 4, or 1 of the model's own
            head.

    Returns:
        An iterable of completions, prompt by prompt, which are written while one iterates over it.

    Raises:
        InputRefused: a prompt fills the model's context.
        OutOfDeviceMemory: the keys and values of one row do not fit.
        UsageError: there is no prompt, max_tokens or n is below 1, a stop string is empty, a text
            is given instead of a list, the number of samplings or adapters is not that of the
            prompts, there is no adapter with a name, or `Sampling` refuses an option for this vocabulary;
            or the draft model has recurrent layers, another vocabulary or too few positions, is
            another text than "mtp", or the model has no head that proposes tokens.
    """
    max_tokens = COUNT.integer("max_tokens", max_tokens)
    n = COMPLETIONS_PER_PROMPT.integer("n", n)
    prompts = _as_list("prompts", prompts)
    stop = _as_list("stop", stop)
    for prompt in prompts:
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
            raise UsageError(f"prompts: expected texts, or sequences of ids, not {prompt!r}")
    if not prompts:
        raise UsageError("prompts: expected at least one; an empty text begins a document")
    if "" in stop:
        raise UsageError(
            "stop: an empty string would stop every text at once; give the text to stop at"
        )
    strings = [item for item in stop if isinstance(item, str)]
    ids = [item for item in stop if not isinstance(item, str)]
    require_ids("stop", ids, tokenizer)
    samplings = Sampling.of_each(sampling, len(prompts), tokenizer.vocab_size)
    # A dict removes duplicates and keeps the order.
    stop_ids = tuple(dict.fromkeys([tokenizer.eos_id, *map(int, ids)]))
    stop_automaton = stop_strings(strings, tokenizer.pieces) if strings else None
    # Prompts with the same sequence breakers (`Sampling`) share one search of the vocabulary for them.
    breakers_of = cache(lambda texts: breakers(texts, tokenizer.pieces))
    unwrapped_model = unwrapped(model)
    adapter_slots = _adapter_slots(unwrapped_model, adapters, len(prompts))
    automaton = constraint if isinstance(constraint, Automaton) else None
    host_constraint = constraint if isinstance(constraint, HostConstraint) else None
    requests: list[Request] = []
    for prompt, options, slot in zip(prompts, samplings, adapter_slots, strict=True):
        encoded_prompt = tuple(prompt_ids(unwrapped_model, tokenizer, prompt))
        breaker_V = None
        if options.dry_multiplier:
            breaker_V = breakers_of(tuple(options.dry_sequence_breakers))
        request = Request(
            prompt_ids=encoded_prompt,
            sampling=options,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            constraint=automaton,
            host_constraint=host_constraint,
            stop_automaton=stop_automaton,
            breaker_V=breaker_V,
            adapter=slot,
        )
        requests.append(request)
    _refuse_leading_spaces(strings, requests, tokenizer)
    # The generator puts only `unwrapped_model` into evaluation mode, which may be a copy of `model`.
    model.eval()
    if isinstance(draft, str) and draft != OWN_HEAD:
        raise UsageError(
            f"draft = {draft!r}: expected a model, as monograph.load returns it, or {OWN_HEAD!r}"
        )
    if isinstance(draft, Llama):
        draft = unwrapped(draft.eval())
    generator = generator_for(
        unwrapped_model, requests, n, tokenizer.vocab_size, draft, draft_tokens
    )
    return Generation(generator, requests, tokenizer, strings, n)


def _adapter_slots(model: Llama, names: str | Sequence[str], prompts: int) -> list[int]:
    """Return the slot of each prompt's adapter.

    Raises:
        UsageError: there is no adapter with a name, or not one for each prompt.
    """
    if isinstance(names, str):
        names = [names] * prompts
    if len(names) != prompts:
        raise UsageError(f"adapters: {len(names)} names for {prompts} prompts")
    bank = bank_of(model)
    if bank is not None:
        return [bank.slot_of(name) for name in names]
    unknown = [name for name in names if name != BASE]
    if unknown:
        raise UsageError(f"there is no adapter {unknown[0]!r:.80}: the model has none")
    return [BASE_SLOT] * prompts


def _as_list(name: str, given: Iterable[Any]) -> list[Any]:
    """Return what was given as a list; refuse a text, since its letters would become the items."""
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
        if not text.startswith(" "):
            continue
        if any(tokenizer.inserted_space(request.prompt_ids) for request in requests):
            raise UsageError(
                f"stop: {text!r} begins with a space, as the tokenizer has every text begin: leave it out"
            )


def generator_for(
    model: Llama,
    requests: Sequence[Request],
    n: int,
    vocabulary: int,
    draft: Draft | None = None,
    draft_tokens: int | None = None,
) -> Generator:
    """Return a generator for `n` texts of each request of `generate`, with at most MAX_ROWS rows.

    Keys and values, those of the draft model included, take at most half of the free memory.

    Raises:
        OutOfDeviceMemory: one row takes more than half of the free memory.
        UsageError: see `Generator`.
    """
    config = model.config
    weight = model.lm_head.weight
    device = weight.device.type
    count = n * len(requests)
    # All requests have the same `max_tokens`, constraint and stop strings, so the longest prompt decides
    # the number of positions, and the automata of one request are those of all.
    longest = max(requests, key=lambda request: len(request.prompt_ids))
    slots = min(len(longest.prompt_ids) + longest.max_tokens, config.max_position_embeddings)
    rows = rows_that_fit(
        model, CacheSizes(slots), min(count, MAX_ROWS[device]), "ask for fewer tokens", draft
    )
    # All rows take a step at a time, so the number of steps depends on how often each row is filled.
    steps = math.ceil(count / rows) * min(longest.max_tokens, slots - 1)
    automata: list[Automaton] = []
    if longest.host_constraint is not None:
        # Each text that the host follows has an automaton of its own.
        automata += [longest.host_constraint.begin()] * rows
    automata += [each for each in (longest.constraint, longest.stop_automaton) if each is not None]
    return Generator(
        model,
        chain_of([request.sampling for request in requests], len(longest.stop_ids)),
        rows=rows,
        slots=slots,
        vocabulary=vocabulary,
        automata=automata,
        mode=mode_for(steps, device, torch.is_autocast_enabled(device)),
        draft=draft,
        draft_tokens=draft_tokens,
    )


def mode_for(steps: int, device: str, is_autocast: bool) -> Mode:
    """Return the mode of a decoder that is likely to be the fastest.

    Args:
        steps: the number of steps that it will run.
        device: the type of device.
        is_autocast: whether it runs under autocast.
    """
    if steps >= WORTH_COMPILING[device]:
        return "compiled"
    # Autocast caches weights rounded to its dtype. A captured step would go on to read those that were
    # cached when it was captured.
    return "eager" if is_autocast else "captured"


def bytes_of_row(model: Llama, sizes: CacheSizes, draft: Draft | None = None) -> int:
    """Return the bytes of the keys and values of one row, in the model and in what proposes tokens."""
    dtype = model.lm_head.weight.dtype
    caches = [(model.config, dtype)]
    if isinstance(draft, Llama):
        caches.append((draft.config, draft.lm_head.weight.dtype))
    elif draft is not None and model.mtp is not None:
        caches.append((model.mtp.config, dtype))
    return sum(
        KVCache.bytes_per_row(config, sizes.per_row, dtype, sizes.block) for config, dtype in caches
    )


def rows_that_fit(
    model: Llama, sizes: CacheSizes, max_rows: int, advice: str, draft: Draft | None = None
) -> int:
    """Return the number of rows of a cache that fit into half of the free memory.

    Args:
        model: the language model.
        sizes: the sizes of the cache.
        max_rows: the maximum number that is returned.
        advice: what the user can do if no row fits, for the error.
        draft: what proposes tokens, which has as many rows; None: nothing.

    Raises:
        OutOfDeviceMemory: one row does not fit.
    """
    # The other half is for logits, the sampler and the caller.
    half_bytes = describe().free_memory_bytes // 2
    row_bytes = bytes_of_row(model, sizes, draft)
    if row_bytes > half_bytes:
        raise OutOfDeviceMemory(
            f"keys and values of {sizes.per_row:,} positions take {row_bytes / 2**30:.3g} GiB, more than half of the "
            f"free memory ({half_bytes / 2**30:.3g} GiB): {advice}"
        )
    return min(max_rows, half_bytes // row_bytes)


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
        prompt: a text, which is preceded by the id that begins a document; or ids, which are used as
            they are.

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
