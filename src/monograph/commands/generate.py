"""`monograph generate`: continue text, or answer, with a trained model."""

from __future__ import annotations

import difflib
import json as jsonlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monograph.data.chat import chat_ids, stop_ids
from monograph.data.tokenizer import Tokenizer
from monograph.decode import Completion, Generation, Sampling
from monograph.decode import generate as decode
from monograph.decode.automata import Automaton, constraint
from monograph.device import clock
from monograph.errors import InputRefused, UsageError
from monograph.measure.quantities import counted
from monograph.model.llama import Llama
from monograph.run.models import load

Message = dict[str, Any]


class Asked(NamedTuple):
    """What the command line says beside the model and the prompts.

    Attributes:
        numbers: options of `Sampling`.
        pairs: KEY=VALUE for the rest of them.
        n: continuations of each prompt.
        max_tokens: longest continuation.
        stop: strings that end a text.
        constraints: by kind, what limits what may be written; None but for one at most.
        chat: prompts are messages to answer.
        json: print one JSON object.
    """

    numbers: dict[str, Any]
    pairs: Sequence[str]
    n: int
    max_tokens: int
    stop: list[str]
    constraints: dict[str, Any]
    chat: bool
    json: bool


class Model(NamedTuple):
    """The model, its tokenizer, and how it is to write."""

    model: Llama
    tokenizer: Tokenizer
    sampling: Sampling
    stop: list[str | int]
    constraint: Automaton | None
    asked: Asked

    def write(self, prompts: Sequence[str | Sequence[int]]) -> Generation:
        """Begin to continue prompts."""
        return decode(
            self.model,
            self.tokenizer,
            prompts,
            self.sampling,
            max_tokens=self.asked.max_tokens,
            stop=self.stop,
            n=self.asked.n,
            constraint=self.constraint,
        )

    def question(self, messages: Sequence[Message]) -> list[int]:
        """A chat's ids up to where the answer begins."""
        return chat_ids(self.tokenizer, messages, add_generation_prompt=True)


def run(run: str, prompts: list[str], *, file: Path | None, **asked_for: Any) -> int:
    """Print each prompt with its continuation as it is written; see the command line's help and `Asked`."""
    asked = Asked(**asked_for)
    sampling = _sampling(asked.numbers, asked.pairs)
    limits = {kind: value for kind, value in asked.constraints.items() if value is not None}
    if len(limits) > 1:
        raise UsageError("--choice, --regex and --json-schema: one of them at a time")
    network, tokenizer = load(run, lambda line: print(f"warning: {line}", file=sys.stderr))
    ends = list(stop_ids(tokenizer)) if asked.chat else [tokenizer.eos_id]
    limit = None
    for kind, value in limits.items():
        wanted = _text_of(value, "--json-schema") if isinstance(value, Path) else value
        limit = constraint(kind, wanted, tokenizer.pieces, ends)
    model = Model(network, tokenizer, sampling, [*asked.stop, *ends], limit, asked)
    given: list[str | list[Message]] = [*prompts, *(_from_file(file, asked.chat) if file else ())]
    if file is not None and not given:
        raise InputRefused(f"--prompts {file}: holds no prompt; give one a line")
    if asked.chat and not given:
        return _converse(model)
    written = model.write([_ids(model, prompt) for prompt in given or [""]])
    if asked.json:
        return _print_json(written)
    began = clock()
    heads = ["" if asked.chat else str(prompt) for prompt in given or [""] for _ in range(asked.n)]
    _print_text(written, heads)
    _print_speed(written.tokens, clock() - began, sampling.seed)
    return 0


def _ids(model: Model, prompt: str | list[Message]) -> str | list[int]:
    if not model.asked.chat:
        return str(prompt)
    return model.question([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def _print_text(written: Generation, heads: Sequence[str]) -> list[Completion]:
    """Each completion after its prompt, as it comes; an empty line between two."""
    done: list[Completion] = []
    shown = -1
    for piece in written.stream():
        if piece.number != shown:
            _write(("\n" if shown >= 0 else "") + heads[piece.number])
            shown = piece.number
        _write(piece.text)
        if piece.completion is not None:
            done.append(piece.completion)
            _write("\n")
            if piece.completion.finish_reason not in ("stop", "length"):
                print(f"warning: ended with {piece.completion.finish_reason}", file=sys.stderr)
    return done


def _print_speed(tokens: int, seconds: float, seed: int) -> None:
    speed = f"{counted(tokens, 'token')}, {tokens / max(seconds, 1e-9):.0f} tok/s"
    print(f"{speed}, sampled in the graph; same seed, same text (--seed {seed})", file=sys.stderr)


def _print_json(written: Generation) -> int:
    began, done = clock(), list(written)
    seconds, tokens = clock() - began, max(1, written.tokens)
    generator = written.generator
    print(
        jsonlib.dumps(
            {
                "schema": "monograph.generate/1",
                "completions": [_shown(completion) for completion in done],
                "tokens_per_s": written.tokens / max(seconds, 1e-9),
                "prefill_s": generator.prefill_s,
                "graphs": generator.replays.variants,
                "host_syncs_per_token": generator.blocks_read / tokens,
                "device_to_host_bytes_per_token": generator.outbox.bytes_out / tokens,
            }
        )
    )
    return 0


def _shown(completion: Completion) -> dict[str, Any]:
    """A completion as JSON; log-probabilities only where they were asked for."""
    found = {key: getattr(completion, key) for key in ("text", "token_ids", "finish_reason")}
    if completion.logprobs is not None:
        found["logprobs"] = [each._asdict() for each in completion.logprobs]
    return found


def _converse(model: Model) -> int:
    """Every line of standard input is a message, the chat so far comes with it."""
    if model.asked.json or model.asked.n > 1:
        raise UsageError("--chat without a prompt is a conversation: it takes neither --json nor --n")
    live, messages = sys.stdin.isatty(), list[Message]()
    while (line := _line(live)) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        [answer] = _print_text(model.write([model.question(messages)]), [""])
        messages.append({"role": "assistant", "content": answer.text})
    return 0


def _line(live: bool) -> str | None:
    if live:
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _sampling(numbers: dict[str, Any], pairs: Sequence[str]) -> Sampling:
    """`Sampling` of the flags and of --sampler KEY=VALUE.

    Raises:
        UsageError: an unknown key, or a value that is not what it needs.
    """
    defaults = {name: value for name, value in vars(Sampling()).items() if name != "logit_bias"}
    kinds: dict[str, type] = {name: type(value) if value is not None else int for name, value in defaults.items()}
    values = dict(numbers)
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if key not in kinds or not equals:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected KEY=VALUE with one of {', '.join(kinds)}"
            raise UsageError(f"--sampler {pair}: {hint}")
        try:
            values[key] = kinds[key](text)
        except ValueError:
            raise UsageError(f"--sampler {pair}: expected a number") from None
    return Sampling(**values)


def _from_file(path: Path, chat: bool) -> Iterator[str | list[Message]]:
    """Prompts of a file: one a line, or of JSON lines the key `prompt`, or in a chat `messages`.

    Raises:
        InputRefused: it cannot be read, or a line has no prompt.
    """
    lines = _text_of(path, "--prompts").splitlines()
    expected = 'expected an object with "prompt", a text' + (', or "messages", a list' if chat else "")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield line
            continue
        try:
            record = jsonlib.loads(line)
        except (ValueError, RecursionError):
            raise InputRefused(f"{path}:{number}: no JSON; {expected}") from None
        record = record if isinstance(record, dict) else {}
        prompt, messages = record.get("prompt"), record.get("messages")
        if chat and isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
            yield messages
        elif isinstance(prompt, str):
            yield prompt
        else:
            raise InputRefused(f"{path}:{number}: {expected}")


def _text_of(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(f"{flag} {path}: cannot be read as text: {error}") from None


def _write(text: str) -> None:
    print(text, end="", flush=True)
