"""Prompts in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from monograph.data.tokenizer import Tokenizer
from monograph.decode.automata import Automaton, stop_strings
from monograph.decode.cache import KVCache
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.noise import continuation_seed
from monograph.decode.request import Finish, LogProbability, Request
from monograph.decode.sampling import Sampling
from monograph.decode.text import Transcript
from monograph.device import describe
from monograph.errors import InputRefused, UsageError
from monograph.model.llama import Llama

# Steps that take longer than compiling them (docs/log.md; on a GPU an estimate, not measured yet).
WORTH_COMPILING = {"cuda": 4_000, "cpu": 20_000}
MOST_ROWS = {"cuda": 64, "cpu": 8}


@dataclass(frozen=True)
class Completion:
    """What the model wrote after a prompt.

    Attributes:
        text: without the prompt and without the stop string.
        token_ids: the drawn ids, a stop id included.
        finish_reason: "stop" at a stop id or a stop string, "length" at max_tokens or the context's end, "not_finite"
            where the model's logits were not, "nothing_allowed" where bias and constraint left no token.
        logprobs: one of each id; None unless `Sampling.logprobs` asks for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: Finish
    logprobs: list[LogProbability] | None = None

    def __str__(self) -> str:
        """The text."""
        return self.text


class Piece(NamedTuple):
    """New text of a completion, which is whole if it is given; completions are numbered prompt by prompt."""

    number: int
    text: str
    completion: Completion | None


class Generation:
    """Completions that are being written; going through it, or through `stream`, writes them.

    Attributes:
        generator: what writes them, and counts what that took.
    """

    def __init__(self, generator: Generator, requests: Sequence[Request], tokenizer: Tokenizer, stop: Sequence[str]):
        """Of requests that the generator has not been given yet."""
        self.generator = generator
        self._indices = {generator.submit(request): index for index, request in enumerate(requests)}
        self._transcripts = [Transcript(tokenizer, stop) for _ in requests]
        self._logprobs = [None if request.sampling.logprobs is None else list[LogProbability]() for request in requests]

    @property
    def tokens(self) -> int:
        """Drawn so far."""
        return sum(len(transcript.token_ids) for transcript in self._transcripts)

    def __iter__(self) -> Iterator[Completion]:
        """Prompt by prompt, its n completions."""
        return (piece.completion for piece in self.stream() if piece.completion is not None)

    def stream(self) -> Iterator[Piece]:
        """All text as it comes: that of the first completion, then of the next, whatever is written at once."""
        finishes: list[Finish | None] = [None] * len(self._indices)
        unsaid = [""] * len(self._indices)
        current = 0
        for event in self.generator.run():
            index = self._indices[event.number]
            transcript = self._transcripts[index]
            unsaid[index] += transcript.add(event.token_ids)
            if (logprobs := self._logprobs[index]) is not None:
                logprobs += event.logprobs
            if event.finish is not None:
                unsaid[index] += transcript.finish()
                finishes[index] = event.finish
            while current < len(finishes):
                text, unsaid[current], finish = unsaid[current], "", finishes[current]
                if finish is None:
                    if text:
                        yield Piece(current, text, None)
                    break
                done = self._transcripts[current]
                yield Piece(current, text, Completion(done.text, done.token_ids, finish, self._logprobs[current]))
                current += 1


def generate(
    model: Llama,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    sampling: Sampling | None = None,
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
        sampling: how tokens are chosen.
        max_tokens: most tokens to write after a prompt.
        stop: strings before which, and ids at which, a text ends; the id that ends a document always does.
        n: continuations per prompt; the first has the draws of `sampling.seed`, the others of seeds made from it.
        constraint: what may be written (`monograph.decode.automata`); None: anything.

    Returns:
        An iterable of completions, prompt by prompt; each is written when it is asked for.

    Raises:
        InputRefused: a prompt that leaves no room in the model's context.
        UsageError: no prompt, max_tokens or n below 1, an empty stop string, or what `Sampling` refuses.
    """
    for name, value in (("max_tokens", max_tokens), ("n", n)):
        if value < 1:
            raise UsageError(f"{name} = {value}: expected 1 or more")
    if not prompts:
        raise UsageError("prompts: expected at least one; an empty text begins a document")
    if "" in stop:
        raise UsageError("stop: an empty string would stop every text at once; give the text to stop at")
    sampling = sampling or Sampling()
    sampling.check_vocabulary(tokenizer.vocab_size)
    strings = [each for each in stop if isinstance(each, str)]
    stop_ids = tuple(dict.fromkeys([tokenizer.eos_id, *(each for each in stop if isinstance(each, int))]))
    looked_for = stop_strings(strings, tokenizer.pieces) if strings else None
    requests = [
        Request(
            tuple(prompt_ids(model, tokenizer, prompt)),
            replace(sampling, seed=continuation_seed(sampling.seed, index)),
            max_tokens,
            stop_ids,
            constraint,
            looked_for,
        )
        for prompt in prompts
        for index in range(n)
    ]
    return Generation(generator_for(model, requests, tokenizer.vocab_size), requests, tokenizer, strings)


def generator_for(model: Llama, requests: Sequence[Request], vocabulary: int) -> Generator:
    """A generator with room for these requests, and no more rows than pay or than half of the free memory holds."""
    config, weight = model.config, model.lm_head.weight
    device = weight.device.type
    longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
    slots = min(longest, config.max_position_embeddings)
    fit = describe().free_memory_bytes // 2 // KVCache.bytes_per_row(config, slots, weight.dtype)
    rows = min(len(requests), MOST_ROWS[device], max(1, fit))
    steps = sum(request.max_tokens for request in requests) // rows
    automata = {id(each): each for request in requests for each in (request.constraint, request.stop) if each}
    return Generator(
        model,
        chain_of([request.sampling for request in requests], max(len(request.stop_ids) for request in requests)),
        rows=rows,
        slots=slots,
        vocabulary=vocabulary,
        automata=list(automata.values()),
        compiled=steps >= WORTH_COMPILING[device],
    )


def prompt_ids(model: Llama, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """A text's ids after the one that begins a document; ids as they are.

    Raises:
        InputRefused: they leave no room in the model's context.
    """
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)] if isinstance(prompt, str) else list(prompt)
    context = model.config.max_position_embeddings
    if not 0 < len(ids) < context:
        raise InputRefused(
            f"the prompt has {len(ids)} tokens, but the model's context is {context}: shorten it to below {context}"
            if ids
            else "the prompt has no tokens: give at least one id, or a text"
        )
    return ids
