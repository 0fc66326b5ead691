"""`monograph generate`: continue text, or answer, with a trained model."""

import itertools
import json as jsonlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from monograph.automata import Automaton, constraint
from monograph.data.messages import message_of
from monograph.data.records import Unusable
from monograph.decode import Completion, Generation, Sampling
from monograph.decode import generate as decode
from monograph.device import clock, default_device
from monograph.errors import InputRefused, UsageError, did_you_mean
from monograph.model.llama import Llama
from monograph.report.quantities import counted
from monograph.run.models import load_with_tokenizer
from monograph.run.progress import Progress
from monograph.run.run_index import parsed
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import json_fault, open_input, parse_json, readable
from monograph.terminal import warn
from monograph.text.chat import chat_ids, stop_ids
from monograph.text.tokenizer import Tokenizer

Message = dict[str, Any]
Prompt = str | list[Message]
_FLAGS = ("stop", "max_tokens", "n", "chat", "choice", "regex", "json_schema", "prompts", "json")
_PIECE_BYTES = 1 << 20
_EXPECTED = {int: "a whole number", float: "a number", str: "a text"}
_KINDS = {
    name: type(value) if value is not None else int for name, value in vars(Sampling()).items()
}
LARGEST_SCHEMA_BYTES, LARGEST_PROMPTS_BYTES = 1 << 20, 1 << 28
_PIPES = Path("/dev/fd")  # the folder of the pipes that a shell makes for <(command)


def sampling_of(numbers: dict[str, Any], pairs: Sequence[str]) -> Sampling:
    """Return the `Sampling` that flags and --sampler KEY=VALUE give; a value that is no number or
    text is JSON.

    Raises:
        UsageError: a key is unknown, given twice or has its own flag, or a value is impossible.
    """
    values = dict(numbers)
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if key in numbers or key in _FLAGS:
            raise UsageError(
                f"--sampler {pair}: it has a flag of its own, --{key.replace('_', '-')}"
            )
        if not equals and (colon := re.match(r"(\w+):(.+)", pair)):
            raise UsageError(
                f"--sampler {pair}: = stands between an option and its value: {colon[1]}={colon[2]}"
            )
        if key not in _KINDS:
            raise UsageError(
                f"--sampler {pair}: there is no option {_unknown(key, set(_KINDS) - set(numbers))}"
            )
        if not equals:
            raise UsageError(f"--sampler {pair}: expected a value, {key}=VALUE")
        if key in values:
            raise UsageError(f"--sampler {pair}: {key} is given twice")
        try:
            values[key] = _KINDS[key](text) if _KINDS[key] in _EXPECTED else parse_json(text)
        except (ValueError, RecursionError) as error:
            what = f'JSON: {{"ID": BIAS, ...}} or ["TEXT", ...] ({json_fault(error)})'
            raise UsageError(
                f"--sampler {pair}: expected {_EXPECTED.get(_KINDS[key], what)}"
            ) from None
    return _sampling(Sampling(), values)


class Asked(NamedTuple):
    """A prompt with its options; `where` is its file and line, or "" for one from the command line."""

    prompt: Prompt
    sampling: Sampling
    where: str = ""


def prompts_of(path: Path, chat: bool, sampling: Sampling, vocabulary: int) -> Iterator[Asked]:
    """Yield each prompt of a file with its options: a line, or a JSON line's key `prompt` or, in a
    chat, `messages`.

    A file holds JSON lines if its name ends with .jsonl, or if it begins with an object that has
    one of these keys. The object's other keys are options of `Sampling` that replace those of the
    command line, except `order`, which all texts share.

    Raises:
        InputRefused: the file cannot be read, or a line has no prompt, an unknown key or an
            impossible value.
    """
    # `splitlines` would also split at other line separators, which JSON may hold unescaped.
    lines = _text_of(path, "--prompts", LARGEST_PROMPTS_BYTES).replace("\r\n", "\n").split("\n")
    messages_too = ', or "messages", a list of objects with "role" and "content", texts'
    expected = 'expected an object with "prompt", a text' + (messages_too if chat else "")
    first = parsed(next(filter(str.strip, lines), ""))
    records = path.suffix == ".jsonl" or not first.keys().isdisjoint(("prompt", "messages"))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not records:
            yield Asked(line, sampling, f"{path}:{number}")
            continue
        try:
            record = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise InputRefused(
                f"{path}:{number}: no JSON: {json_fault(error)}; {expected}"
            ) from None
        options = dict(record) if isinstance(record, dict) else {}
        prompt = options.pop("prompt", None)
        messages = options.pop("messages", None) if chat else None
        if prompt is not None and messages is not None:
            raise InputRefused(f"{path}:{number}: has prompt and messages: give one of them")
        given: Prompt = (
            _messages(messages, f"{path}:{number}") if isinstance(messages, list) else ""
        )
        if isinstance(prompt, str):
            given = prompt
        elif not given:
            raise InputRefused(f"{path}:{number}: {expected}")
        known = {"prompt", *(["messages"] if chat else []), *_KINDS} - {"order"}
        if unknown := options.keys() - known:
            raise InputRefused(f"{path}:{number}: there is no key {_unknown(min(unknown), known)}")
        try:
            own = _sampling(sampling, options)
            own.check_vocabulary(vocabulary)
        except UsageError as error:
            raise InputRefused(f"{path}:{number}: {error}") from None
        yield Asked(given, own, f"{path}:{number}")


def _sampling(first: Sampling, values: dict[str, Any]) -> Sampling:
    """Return the options with values replaced; the keys of `logit_bias` are strings here, as in
    JSON.
    """
    bias = values.get("logit_bias")
    if isinstance(bias, dict):
        ids = {
            int(key) if re.fullmatch("0|[1-9][0-9]{0,17}", key) else key: value
            for key, value in bias.items()
        }
        values = {**values, "logit_bias": ids}
    return replace(first, **values)


def _unknown(key: str, known: Iterable[str]) -> str:
    return key + (did_you_mean(key, known) or f"; expected one of {', '.join(sorted(known))}")


def _messages(value: list[Any], where: str) -> list[Message]:
    """Return the messages of a record; raise InputRefused for a bad one."""
    try:
        return [
            message_of(each, f"messages[{number}]", roles=None) for number, each in enumerate(value)
        ]
    except Unusable as unusable:
        raise InputRefused(f"{where}: {unusable}") from None


def _text_of(path: Path, flag: str, most_bytes: int) -> str:
    """Return the text of a file, or of standard input for "-".

    Raises:
        InputRefused: the text cannot be read, is larger than `most_bytes`, or is not UTF-8.
    """
    try:
        if path == Path("-"):
            content = _at_most(sys.stdin.buffer, most_bytes + 1)
        else:
            with (
                readable(path),
                path.open("rb") if path.parent == _PIPES else open_input(path) as file,
            ):
                content = _at_most(file, most_bytes + 1)
    except OSError as error:
        raise InputRefused(f"{flag} {path}: cannot be read: {error.strerror}") from None
    if len(content) > most_bytes:
        raise InputRefused(f"{flag} {path}: is larger than {most_bytes / 2**20:,.0f} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputRefused(
            f"{flag} {path}: byte {error.start} (line {line}) is not UTF-8; convert it"
        ) from None


def _at_most(file: BinaryIO, most_bytes: int) -> bytes:
    """Read about `most_bytes`, rounded up to whole pieces. A single `read` would allocate the whole
    limit.
    """
    pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
    return b"".join(itertools.islice(pieces, -(-most_bytes // _PIECE_BYTES)))


class Options(NamedTuple):
    """The command line's options, without the model and the prompts.

    Attributes:
        numbers: the options of `Sampling` that have a flag.
        pairs: KEY=VALUE for its other options.
        n: number of continuations of each prompt.
        max_tokens: largest number of tokens of a continuation.
        stop: strings that end a text.
        constraints: limits on the text, by kind; at most one of them is not None.
        chat: whether prompts are messages to answer.
        json: whether to print one JSON object.
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
    """A model with its tokenizer and the options for writing."""

    model: Llama
    tokenizer: Tokenizer
    sampling: Sampling
    stop: list[str | int]
    constraint: Automaton | None
    options: Options

    def write(
        self, prompts: Sequence[str | Sequence[int]], samplings: Sequence[Sampling] | None = None
    ) -> Generation:
        """Begin to continue the prompts, each with its own sampling if `samplings` are given."""
        return decode(
            self.model,
            self.tokenizer,
            prompts,
            samplings or self.sampling,
            max_tokens=self.options.max_tokens,
            stop=self.stop,
            n=self.options.n,
            constraint=self.constraint,
        )

    def question(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a chat up to where the model's answer begins."""
        return chat_ids(self.tokenizer, messages, add_generation_prompt=True)


def open_model(run: str, options: Options) -> Model:
    """Load a model with its tokenizer, to write with these options, as yet without a constraint.

    Raises:
        UsageError: an option is wrong.
        InputRefused: the model cannot be loaded.
    """
    # Before torch._dynamo is imported, which sets its own cache path in the environment.
    keep_compiled()
    sampling = sampling_of(options.numbers, options.pairs)
    if sum(value is not None for value in options.constraints.values()) > 1:
        raise UsageError("--choice, --regex and --json-schema: one of them at a time")
    network, tokenizer = load_with_tokenizer(run, warn)
    ends = list(stop_ids(tokenizer, network.config.ends)) if options.chat else [tokenizer.eos_id]
    network.to(default_device())
    return Model(network, tokenizer, sampling, [*options.stop, *ends], None, options)


def constrained(model: Model, given: Sequence[Asked]) -> Model:
    """Return the model with the constraint that its options ask for, if any, on texts that follow
    the prompts.

    Raises:
        InputRefused: the constraint cannot be used.
    """
    for kind, value in model.options.constraints.items():
        if value is None:
            continue
        wanted = (
            _text_of(value, "--json-schema", LARGEST_SCHEMA_BYTES)
            if isinstance(value, Path)
            else value
        )
        for lost in map(model.tokenizer.loss, wanted if kind == "choices" else ()):
            if lost:  # leaving this choice out would ask a different question
                raise InputRefused(f"--choice: {lost}")
        ends = [end for end in model.stop if not isinstance(end, str)]
        automaton = constraint(kind, wanted, model.tokenizer.pieces, ends, _lead(model, given))
        model = model._replace(constraint=automaton)
    return model


def run(run: str, prompts: list[str], *, file: Path | None, options: Options) -> None:
    """Print each prompt with its continuation as it is written; see the command line's help."""
    model = open_model(run, options)
    sampling = model.sampling
    records = prompts_of(file, options.chat, sampling, model.tokenizer.vocab_size) if file else ()
    given = [*(Asked(prompt, sampling) for prompt in prompts), *records]
    if file is not None and not given:
        raise InputRefused(f"--prompts {file}: holds no prompt; give one a line")
    given = given or [Asked("", sampling)]
    model = constrained(model, given)
    written = model.write(
        [_ids(model, asked) for asked in given], [asked.sampling for asked in given]
    )
    if written.generator.compiled:
        print(
            "compiling the step first: with so much to write that is the faster way",
            file=sys.stderr,
        )
    if options.json:
        return _print_json(written)
    began = clock()
    limited = model.constraint is not None
    _print_text(
        written,
        lambda number: "" if options.chat else str(given[number // options.n].prompt),
        limited,
    )
    speed = f"{counted(written.tokens, 'token')}, {written.tokens / max(clock() - began, 1e-9):.0f} tok/s"
    print(
        f"{speed}, sampled in the graph; same seed, same text (--seed {sampling.seed})",
        file=sys.stderr,
    )


def _lead(model: Model, given: Sequence[Asked]) -> bytes:
    """Return the bytes that the tokenizer puts before a text that follows the prompts."""
    asked = [_ids(model, each) for each in given] if model.tokenizer.strips else []
    encode, lead = model.tokenizer.encode, model.tokenizer.lead
    leads = {lead(encode(prompt) if isinstance(prompt, str) else prompt) for prompt in asked}
    if len(leads) > 1:
        raise UsageError(
            "under a constraint, give an empty prompt alone: the tokenizer puts a space before its text"
        )
    return leads.pop() if leads else b""


def _ids(model: Model, asked: Asked) -> str | list[int]:
    """Return a prompt's text, or the ids of its chat; raise InputRefused, which names its file and
    line.
    """
    if not model.options.chat:
        return str(asked.prompt)
    messages = (
        [{"role": "user", "content": asked.prompt}]
        if isinstance(asked.prompt, str)
        else asked.prompt
    )
    try:
        return model.question(messages)
    except InputRefused as refused:
        raise InputRefused(f"{asked.where}: {refused}" if asked.where else str(refused)) from None


def _print_text(written: Generation, head: Callable[[int], str], limited: bool) -> None:
    """Print each completion after its prompt while it is written, with empty lines between.

    Args:
        written: the texts that are being written.
        head: returns the text printed before a completion, by the completion's number.
        limited: whether a constraint limits the texts; a warning then says that a text was cut
            before it satisfied it.
    """
    shown = -1
    for piece in written.stream():
        if piece.number != shown:
            _write(("\n" if shown >= 0 else "") + head(piece.number))
            shown = piece.number
        _write(piece.text)
        if piece.completion is not None:
            _write("\n")
            if piece.completion.finish_reason not in ("stop", "length"):
                warn(f"ended with {piece.completion.finish_reason}")
            elif limited and piece.completion.finish_reason == "length":
                warn("cut before it was whole: give more --max-tokens")


def _print_json(written: Generation) -> None:
    began = clock()
    done = list[Completion]()
    with Progress().stage("generate", counted(written.count, "completion")) as stage:
        for piece in written.stream():
            stage.report("token", written.tokens)
            if piece.completion is not None:
                done.append(piece.completion)
    seconds = clock() - began
    tokens = max(1, written.tokens)
    generator = written.generator
    result = {
        "schema": "monograph.generate/1",
        "completions": [_shown(completion) for completion in done],
        "tokens_per_s": written.tokens / max(seconds, 1e-9),
        "prefill_s": generator.prefill_s,
        "graphs": generator.replays.variants,
        "host_syncs_per_token": generator.blocks_read / tokens,
        "device_to_host_bytes_per_token": generator.outbox.bytes_out / tokens,
    }
    print(jsonlib.dumps(result))


def _shown(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON values, with log-probabilities only where they were asked for."""
    shown = {key: getattr(completion, key) for key in ("text", "token_ids", "finish_reason")}
    if completion.logprobs is not None:
        shown["logprobs"] = [logprob._asdict() for logprob in completion.logprobs]
    return shown


def _write(text: str) -> None:
    print(text, end="", flush=True)
