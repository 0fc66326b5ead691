"""`monograph generate`: continue text, or answer, with a trained model."""

import itertools
import json as jsonlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from monograph.automata import Automaton, constraint
from monograph.automata.gbnf import parse_grammar
from monograph.automata.on_host import (
    HOST_KINDS,
    HostConstraint,
    HostVocabulary,
    lark_of,
    require_llguidance,
)
from monograph.automata.schema import parse_schema
from monograph.commands.generate_tools import AUTO, AnswerTools, answer_tools
from monograph.data.messages import message_of
from monograph.data.records import Unusable
from monograph.decode import Completion, Generation, Sampling
from monograph.decode import generate as decode
from monograph.decode.adapter_bank import BASE, bank_of, install
from monograph.decode.generator import OWN_HEAD, Draft
from monograph.device import clock, default_device
from monograph.errors import InputRefused, UsageError, did_you_mean
from monograph.model.llama import Llama
from monograph.report.quantities import counted
from monograph.run.adapters import AdapterBase, named_folders
from monograph.run.drafts import naming_draft, require_same_tokens
from monograph.run.models import load_with_tokenizer
from monograph.run.progress import Progress
from monograph.run.run_index import json_object
from monograph.storage.cache_dir import keep_compiled
from monograph.storage.reading import json_fault, open_input, parse_json, readable
from monograph.terminal import warn
from monograph.text.chat import chat_ids, stop_ids
from monograph.text.template import Message
from monograph.text.tokenizer import Tokenizer

PromptContent = str | list[Message]
# Flags of the command that are not options of `Sampling`. --sampler refuses them with a hint.
_FLAGS = {
    "adapter",
    "chat",
    "choice",
    "draft",
    "grammar",
    "json",
    "json_schema",
    "max_tokens",
    "n",
    "prompts",
    "regex",
    "stop",
    "tool_choice",
    "tools",
    "use",
}
_PIECE_BYTES = 1 << 20  # bytes of a file that are read at once
# The types whose values a user writes as they are, with the words for them in messages. Values of all
# other types are written as JSON.
_TYPE_WORDS = {int: "a whole number", float: "a number", str: "a text"}
# The type of each option of `Sampling`: that of its default, or int if its default is None.
_OPTION_TYPES = {
    name: type(value) if value is not None else int for name, value in vars(Sampling()).items()
}
LARGEST_SCHEMA_BYTES = 1 << 20
LARGEST_GRAMMAR_BYTES = 1 << 18
LARGEST_PROMPTS_BYTES = 1 << 28
LARGEST_TOOLS_BYTES = 1 << 20
_PIPES = Path("/dev/fd")  # the folder of the pipes that a shell makes for <(command)


def parse_sampling(flag_values: dict[str, Any], pairs: Sequence[str]) -> Sampling:
    """Return the options of sampling from the command line.

    Args:
        flag_values: the values of the options that have a flag of their own, by the options' names.
        pairs: the texts KEY=VALUE that were given with --sampler. KEY is an option without a flag.
            Whether VALUE is a number, a text or JSON depends on KEY.

    Raises:
        UsageError: a key is unknown, given twice or has a flag of its own, or a value is
            impossible.
    """
    values = dict(flag_values)
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if key in flag_values or key in _FLAGS:
            raise UsageError(
                f"--sampler {pair}: it has a flag of its own, --{key.replace('_', '-')}"
            )
        with_colon = re.match(r"(\w+):(.+)", pair)  # KEY:VALUE, a common slip
        if with_colon and not equals:
            raise UsageError(
                f"--sampler {pair}: write = between option and value: {with_colon[1]}={with_colon[2]}"
            )
        if key not in _OPTION_TYPES:
            hint = _unknown_key_hint(key, _OPTION_TYPES.keys() - flag_values.keys())
            raise UsageError(f"--sampler {pair}: there is no option {hint}")
        if not equals:
            raise UsageError(f"--sampler {pair}: expected a value, {key}=VALUE")
        if key in values:
            raise UsageError(f"--sampler {pair}: {key} is given twice")
        option_type = _OPTION_TYPES[key]
        try:
            values[key] = option_type(text) if option_type in _TYPE_WORDS else parse_json(text)
        except (ValueError, RecursionError) as error:
            form = f'JSON: {{"ID": BIAS, ...}} or ["TEXT", ...] ({json_fault(error)})'
            raise UsageError(
                f"--sampler {pair}: expected {_TYPE_WORDS.get(option_type, form)}"
            ) from None
    return _replace_options(Sampling(), values)


class PromptRequest(NamedTuple):
    """A prompt to continue or answer.

    Attributes:
        prompt: a text, or the messages of a chat.
        sampling: the options of sampling for this prompt.
        where: the prompt's file and line, for messages; "" for a prompt from the command line.
        adapter: the name of its adapter; None: that of the command line.
    """

    prompt: PromptContent
    sampling: Sampling
    where: str = ""
    adapter: str | None = None


def prompts_in_file(
    path: Path, chat: bool, sampling: Sampling, vocabulary: int, adapters: Sequence[str] = ()
) -> Iterator[PromptRequest]:
    """Yield each prompt of a file.

    In a file of JSON lines, each line is an object with the key `prompt` or, in a chat, `messages`.
    If there are adapters, `adapter` is the name of one. The object's other keys are options of
    `Sampling` for this prompt. `order`, the order of filters, is not allowed, because all texts that are
    written together have the same order. In a file of any other kind each line is a prompt. Empty lines
    are skipped.

    A file has JSON lines if its name ends with .jsonl, or if its first line that is not empty is an
    object with `prompt` or `messages`.

    Args:
        path: the file; "-" for standard input.
        chat: whether prompts are messages to answer.
        sampling: the command line's options, which a JSON line may replace.
        vocabulary: number of tokens of the model, which limits the ids in options.
        adapters: the names that `adapter` may have.

    Raises:
        InputRefused: the file cannot be read, or a line has no prompt, an unknown key or an
            impossible value.
    """
    # `splitlines` is not used, because it also splits at other line separators, such as U+2028, which
    # JSON may contain unescaped.
    lines = _read_text(path, "--prompts", LARGEST_PROMPTS_BYTES).replace("\r\n", "\n").split("\n")
    first_line = next((line for line in lines if line.strip()), "")
    first_record = json_object(first_line)  # {} if it is no JSON object
    begins_with_record = "prompt" in first_record or "messages" in first_record
    has_records = path.suffix == ".jsonl" or begins_with_record
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        if has_records:
            yield _prompt_in_record(line, where, chat, sampling, vocabulary, adapters)
        else:
            yield PromptRequest(line, sampling, where)


def _prompt_in_record(
    line: str,
    where: str,
    chat: bool,
    sampling: Sampling,
    vocabulary: int,
    adapters: Sequence[str],
) -> PromptRequest:
    """Return the prompt in a line of JSON, with its own options.

    `chat` and the arguments after it, and the errors, are those of `prompts_in_file`. `where` is the
    line's file and number, for messages.
    """
    expected = 'expected an object with "prompt", a text'
    known_keys = {"prompt", *_OPTION_TYPES} - {"order"}
    if adapters:
        known_keys.add("adapter")
    if chat:
        expected += ', or "messages", a list of objects with "role" and "content", texts'
        known_keys.add("messages")
    try:
        record = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise InputRefused(f"{where}: not JSON: {json_fault(error)}; {expected}") from None
    # "prompt", "adapter" and, in a chat, "messages" are taken out of `options` below. The keys that are left
    # are options of `Sampling`, or unknown.
    options = dict(record) if isinstance(record, dict) else {}
    text = options.pop("prompt", None)
    messages = options.pop("messages", None) if chat else None
    if text is not None and messages is not None:
        raise InputRefused(f"{where}: has prompt and messages: give one of them")
    prompt: PromptContent
    if isinstance(text, str):
        prompt = text
    elif isinstance(messages, list) and messages:
        prompt = _messages(messages, where)
    else:
        raise InputRefused(f"{where}: {expected}")
    unknown_keys = options.keys() - known_keys
    if unknown_keys:
        hint = _unknown_key_hint(min(unknown_keys), known_keys)
        raise InputRefused(f"{where}: there is no key {hint}")
    adapter = options.pop("adapter", None)
    if adapter is not None and adapter not in adapters:
        raise InputRefused(f"{where}: adapter = {adapter!r:.80}: expected {', '.join(adapters)}")
    try:
        own_sampling = _replace_options(sampling, options)
        own_sampling.check_vocabulary(vocabulary)
    except UsageError as error:
        raise InputRefused(f"{where}: {error}") from None
    return PromptRequest(prompt, own_sampling, where, adapter)


def _replace_options(sampling: Sampling, values: dict[str, Any]) -> Sampling:
    """Return the options with some of them replaced.

    Args:
        sampling: the options.
        values: the new values by name. The keys of `logit_bias`, which are ids, may be strings, as
            in JSON.

    Raises:
        UsageError: a value is impossible.
    """
    biases = values.get("logit_bias")
    if isinstance(biases, dict):
        bias_by_id = {}
        for key, bias in biases.items():
            # A key that is not an id stays a string, which `Sampling` refuses.
            is_id = re.fullmatch("0|[1-9][0-9]{0,17}", key)
            bias_by_id[int(key) if is_id else key] = bias
        values = {**values, "logit_bias": bias_by_id}
    return replace(sampling, **values)


def _unknown_key_hint(key: str, known: Iterable[str]) -> str:
    """Return words for a message: the unknown key, and the known key that was probably meant. If no
    known key is similar, all known keys are listed instead.
    """
    return key + (did_you_mean(key, known) or f"; expected one of {', '.join(sorted(known))}")


def _messages(value: list[Any], where: str) -> list[Message]:
    """Return the messages in a record's list.

    Raises:
        InputRefused: one of them is not a message.
    """
    try:
        return [
            message_of(message, f"messages[{index}]", roles=None)
            for index, message in enumerate(value)
        ]
    except Unusable as unusable:
        raise InputRefused(f"{where}: {unusable}") from None


def _read_text(path: Path, flag: str, max_bytes: int) -> str:
    """Read the text of a file.

    Args:
        path: the file; "-" for standard input.
        flag: the flag that names the file, for messages.
        max_bytes: the largest size.

    Raises:
        InputRefused: the text cannot be read, is larger than `max_bytes`, or is not UTF-8.
    """
    try:
        # One more byte than allowed shows that a file is too large.
        if path == Path("-"):
            content = _read_at_least(sys.stdin.buffer, max_bytes + 1)
        else:
            with readable(path), _open_file_or_pipe(path) as file:
                content = _read_at_least(file, max_bytes + 1)
    except OSError as error:
        raise InputRefused(f"{flag} {path}: cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise InputRefused(f"{flag} {path}: is larger than {max_bytes / 2**20:,.0f} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputRefused(
            f"{flag} {path}: byte {error.start} (line {line}) is not UTF-8; convert it"
        ) from None


def _open_file_or_pipe(path: Path) -> BinaryIO:
    """Open a file, or a pipe that the user's shell has made, which `open_input` would refuse."""
    return path.open("rb") if path.parent == _PIPES else open_input(path)


def _read_at_least(file: BinaryIO, min_bytes: int) -> bytes:
    """Return at least the first `min_bytes` bytes of a file; all bytes if it has fewer.

    The file is read in pieces, because a single `read` would allocate memory for all `min_bytes`. So the
    result may be up to one piece longer.
    """
    max_pieces = math.ceil(min_bytes / _PIECE_BYTES)
    pieces = iter(lambda: file.read(_PIECE_BYTES), b"")  # until the end of the file
    return b"".join(itertools.islice(pieces, max_pieces))


class GenerateOptions(NamedTuple):
    """The command line's options, without the model and the prompts.

    Attributes:
        flag_values: the values of the options of `Sampling` that have a flag of their own, by name.
        pairs: KEY=VALUE for other options of `Sampling`.
        n: number of completions of each prompt.
        max_tokens: largest number of tokens of a completion.
        stop: strings that end a completion.
        constraints: for each kind of constraint on completions, such as "choices", its value from the
            command line; None if it was not given. At most one may be given.
        chat: whether prompts are messages to answer.
        json: whether to print one JSON object.
        adapters: NAME=FOLDER for each adapter.
        use: the name of the adapter that writes; None: the first one, if there are any.
        tools: a file with the tools that an answer may call; None: there are none.
        tool_choice: which tools an answer calls; see `answer_tools`. None: "auto".
        draft: a small model that proposes tokens, or "mtp" if the model's own head does; None: neither.
    """

    flag_values: dict[str, Any]
    pairs: Sequence[str]
    n: int
    max_tokens: int
    stop: list[str]
    constraints: dict[str, Any]
    chat: bool
    json: bool
    adapters: Sequence[str] = ()
    use: str | None = None
    tools: Path | None = None
    tool_choice: str | None = None
    draft: str | None = None


class ReadyModel(NamedTuple):
    """A model that is ready to write completions.

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
        sampling: the command line's options of sampling.
        stop: strings and ids of tokens that end a completion.
        constraint: an automaton that accepts exactly the allowed completions, or what the host follows
            instead; None if all are allowed.
        options: the command line's options.
        adapter: the name of the adapter that writes, unless a prompt names another one.
        tools: the tools that an answer may call; None: there are none.
        draft: what proposes tokens; None: nothing.
    """

    model: Llama
    tokenizer: Tokenizer
    sampling: Sampling
    stop: list[str | int]
    constraint: Automaton | HostConstraint | None
    options: GenerateOptions
    adapter: str = BASE
    tools: AnswerTools | None = None
    draft: Draft | None = None

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        samplings: Sequence[Sampling] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> Generation:
        """Start to write completions.

        Args:
            prompts: for each prompt, its text or its ids.
            samplings: for each prompt, its options; None for those of the command line.
            adapters: for each prompt, the name of its adapter; None for that of the command line.
        """
        return decode(
            self.model,
            self.tokenizer,
            prompts,
            samplings or self.sampling,
            max_tokens=self.options.max_tokens,
            stop=self.stop,
            n=self.options.n,
            constraint=self.constraint,
            adapters=self.adapter if adapters is None else adapters,
            draft=self.draft,
        )

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a chat's messages, up to where the model's answer begins."""
        if self.tools is not None:
            return self.tools.prompt_ids(messages)
        return chat_ids(self.tokenizer, messages, add_generation_prompt=True)


def open_model(run: str, options: GenerateOptions) -> ReadyModel:
    """Load a model with its tokenizer.

    The constraint that the options ask for is not set yet. `with_constraint` sets it, because a
    constraint depends on the prompts.

    Raises:
        UsageError: an option is wrong.
        InputRefused: the model cannot be loaded.
    """
    # This must come before the import of torch._dynamo, which sets its own cache path in the environment.
    keep_compiled()
    sampling = parse_sampling(options.flag_values, options.pairs)
    if sum(value is not None for value in options.constraints.values()) > 1:
        raise UsageError("--choice, --regex, --json-schema and --grammar: one of them at a time")
    _check_tool_flags(options)
    folders = named_folders("--adapter", options.adapters)
    if options.use is not None and options.use not in [*folders, BASE]:
        raise UsageError(
            f"--use {options.use}: expected {', '.join([*folders, BASE])}, a name that --adapter gives"
        )
    drafts_itself = options.draft == OWN_HEAD
    model, tokenizer = load_with_tokenizer(run, warn, mtp=drafts_itself)
    draft: Draft | None = None
    if drafts_itself:
        draft = OWN_HEAD
    elif options.draft is not None:
        with naming_draft(options.draft, f"{OWN_HEAD} is the model's own head"):
            draft_model, draft_tokenizer = load_with_tokenizer(options.draft, warn)
        require_same_tokens(options.draft, draft_tokenizer, tokenizer)
        draft = draft_model.to(default_device())
    base = AdapterBase(model, tokenizer)
    stored_adapters = {name: base.read(folder, warn) for name, folder in folders.items()}
    end_ids = [tokenizer.eos_id]
    if options.chat:
        end_ids = list(stop_ids(tokenizer, model.config.eos_token_ids))
    model.to(default_device())
    if stored_adapters:
        install(model, stored_adapters)
    first_adapter = next(iter(stored_adapters), BASE)
    adapter = options.use or first_adapter
    stop: list[str | int] = [*options.stop, *end_ids]
    tools = None
    if options.tools is not None:
        text = _read_text(options.tools, "--tools", LARGEST_TOOLS_BYTES)
        choice = options.tool_choice or AUTO
        tools = answer_tools(text, options.tools, choice, tokenizer, end_ids)
    return ReadyModel(model, tokenizer, sampling, stop, None, options, adapter, tools, draft)


def _check_tool_flags(options: GenerateOptions) -> None:
    """Refuse --tools and --tool-choice where they cannot be used.

    Raises:
        UsageError: there is no chat, another constraint, or no tools to choose from.
    """
    if options.tools is None:
        if options.tool_choice is not None:
            raise UsageError("--tool-choice: there are no tools: give --tools, too")
        return
    if not options.chat:
        raise UsageError("--tools: only answers in a chat call tools: give --chat, too")
    if any(value is not None for value in options.constraints.values()):
        raise UsageError(
            "--tools and --choice, --regex, --json-schema or --grammar: one of them at a time"
        )


def with_constraint(model: ReadyModel, prompts: Sequence[PromptRequest]) -> ReadyModel:
    """Return the model with the constraint that its options ask for, if there is one.

    Args:
        model: the model.
        prompts: the prompts. The constraint is on the texts that follow them, and a tokenizer may
            begin such a text with a space or not, depending on the prompt.

    Raises:
        InputRefused: the constraint cannot be used.
        UsageError: the constraint would differ from prompt to prompt.
    """
    if model.tools is not None:
        prompts_ids = (_chat_ids(model, request) for request in prompts)
        return model._replace(constraint=model.tools.constraint(prompts_ids))
    for kind, value in model.options.constraints.items():
        if value is None:  # at most one is not None
            continue
        if kind == "json_schema":
            value = parse_schema(_read_text(value, "--json-schema", LARGEST_SCHEMA_BYTES))
        if kind == "grammar":
            path = value
            value = _read_text(path, "--grammar", LARGEST_GRAMMAR_BYTES)
            # Called for its errors, which name the file and the line.
            parse_grammar(value, f"--grammar {path}")
        if kind == "choices":
            for choice in value:
                change = model.tokenizer.describe_change(choice)
                if change:
                    # The tokenizer changes this text, so the model cannot write it. The choice is not just
                    # left out, since the model would then be asked another question.
                    raise InputRefused(f"--choice: {change}")
        end_ids = [end for end in model.stop if not isinstance(end, str)]
        lead = _lead_bytes(model, prompts)
        model = model._replace(
            constraint=_constraint(kind, value, model.tokenizer.pieces, end_ids, lead)
        )
    return model


def _constraint(
    kind: str, value: Any, pieces: Sequence[bytes], end_ids: Sequence[int], lead: bytes
) -> Automaton | HostConstraint:
    """Return a constraint: an automaton, or what the host follows if no automaton can.

    The arguments and errors are those of `monograph.automata.constraint`.
    """
    try:
        return constraint(kind, value, pieces, end_ids, lead)
    except InputRefused as refusal:
        if kind not in HOST_KINDS:
            raise
        require_llguidance(refusal)
        lark = lark_of(kind, value, lead)
        followed = HostConstraint(lark, HostVocabulary(pieces, end_ids), refusal)
        warn(f"{refusal}; so llguidance follows it on the host, token by token")
        return followed


def run(run: str, prompts: list[str], *, file: Path | None, options: GenerateOptions) -> None:
    """Print each prompt with its completions while they are written; see the command line's help."""
    model = open_model(run, options)
    sampling = model.sampling
    requests = [PromptRequest(prompt, sampling) for prompt in prompts]
    if file is not None:
        bank = bank_of(model.model)
        adapters = [*bank.slots, BASE] if bank else []
        vocabulary = model.tokenizer.vocab_size
        requests += prompts_in_file(file, options.chat, sampling, vocabulary, adapters)
        if not requests:
            raise InputRefused(f"--prompts {file}: holds no prompt; give one a line")
    if not requests:
        requests = [PromptRequest("", sampling)]  # the model begins a text by itself
    model = with_constraint(model, requests)
    texts_or_ids = [_text_or_ids(model, request) for request in requests]
    generation = model.generate(
        texts_or_ids,
        [request.sampling for request in requests],
        [request.adapter or model.adapter for request in requests],
    )
    if generation.generator.compiled:
        print(
            "compiling the step first: with so much to write that is the faster way",
            file=sys.stderr,
        )
    if options.json:
        _print_json(generation, model.tools)
        return

    def text_before(number: int) -> str:
        """Return the prompt to print before a completion; "" in a chat, where only answers are printed.

        The completions are numbered prompt by prompt, `options.n` for each.
        """
        return "" if options.chat else str(requests[number // options.n].prompt)

    began = clock()
    _print_text(generation, text_before, model.constraint is not None)
    tokens_per_s = generation.tokens / max(clock() - began, 1e-9)
    speed = f"{counted(generation.tokens, 'token')}, {tokens_per_s:.0f} tok/s"
    generator = generation.generator
    if generator.masks:
        mask_us = generator.masks_s / generator.masks * 1e6
        speed += f", masks of llguidance {mask_us:.0f} µs each"
    if generator.drafted_passes:
        per_pass = generator.drafted_tokens / generator.drafted_passes
        speed += f", {per_pass:.1f} tokens per drafted pass"
    print(
        f"{speed}, sampled in the graph; same seed, same text (--seed {sampling.seed})",
        file=sys.stderr,
    )


def _lead_bytes(model: ReadyModel, prompts: Sequence[PromptRequest]) -> bytes:
    """Return the bytes that the tokenizer puts before a completion, which are no part of it.

    They are a space or nothing. Some tokenizers put a space before the first text of a document, and
    before a text that follows certain special tokens. Decoding removes it again (`strips_space`).

    Raises:
        UsageError: the bytes differ from prompt to prompt.
    """
    if not model.tokenizer.strips_space:
        return b""
    leads = set[bytes]()
    for request in prompts:
        text_or_ids = _text_or_ids(model, request)
        if isinstance(text_or_ids, str):
            text_or_ids = model.tokenizer.encode(text_or_ids)
        leads.add(model.tokenizer.inserted_space(text_or_ids))
    if len(leads) > 1:
        raise UsageError(
            "under a constraint, give an empty prompt alone: the tokenizer puts a space before its text"
        )
    return leads.pop() if leads else b""


def _text_or_ids(model: ReadyModel, request: PromptRequest) -> str | list[int]:
    """Return a prompt's text or, in a chat, the ids of its messages.

    Raises:
        InputRefused: the messages cannot be encoded; the message names the prompt's file and line.
    """
    if not model.options.chat:
        return str(request.prompt)
    return _chat_ids(model, request)


def _chat_ids(model: ReadyModel, request: PromptRequest) -> list[int]:
    """Return the ids of a chat's messages, or of a prompt that a user says.

    Raises:
        InputRefused: the messages cannot be encoded; the message names the prompt's file and line.
    """
    messages = request.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    try:
        return model.prompt_ids(messages)
    except InputRefused as refused:
        if not request.where:
            raise
        raise InputRefused(f"{request.where}: {refused}") from None


def _print_text(
    generation: Generation, text_before: Callable[[int], str], is_constrained: bool
) -> None:
    """Print each completion while it is written, after its prompt, with an empty line in between two.

    Args:
        generation: the completions that are being written.
        text_before: returns the text to print before a completion, by the completion's number.
        is_constrained: whether there is a constraint. If so, a completion that reached max_tokens
            was cut before it satisfied the constraint, and a warning says so.
    """
    last_number = -1  # of the completion that the last piece belonged to
    for piece in generation.stream():
        if piece.number != last_number:
            separator = "\n" if last_number >= 0 else ""
            _write(separator + text_before(piece.number))
            last_number = piece.number
        _write(piece.text)
        if piece.completion is not None:
            _write("\n")
            if piece.completion.finish_reason not in ("stop", "length"):
                warn(f"ended with {piece.completion.finish_reason}")
            elif is_constrained and piece.completion.finish_reason == "length":
                warn("cut before it was whole: give more --max-tokens")


def _print_json(generation: Generation, tools: AnswerTools | None) -> None:
    """Write all completions, and print them with measurements as one JSON object.

    Args:
        generation: the completions that are being written.
        tools: the tools whose calls are read; None: there are none.
    """
    began = clock()
    completions = list[Completion]()
    with Progress().stage("generate", counted(generation.count, "completion")) as stage:
        for piece in generation.stream():
            stage.report("token", generation.tokens)
            if piece.completion is not None:
                completions.append(piece.completion)
    seconds = clock() - began
    tokens = max(1, generation.tokens)
    generator = generation.generator
    result = {
        "schema": "monograph.generate/1",
        "completions": [_completion_values(completion, tools) for completion in completions],
        "tokens_per_s": generation.tokens / max(seconds, 1e-9),
        "prefill_s": generator.prefill_s,
        "masks": generator.masks,
        "masks_s": generator.masks_s,
        "drafted_passes": generator.drafted_passes,
        "drafted_tokens": generator.drafted_tokens,
        "graphs": generator.variant_count,
        "host_syncs_per_token": generator.blocks_read / tokens,
        "device_to_host_bytes_per_token": generator.outbox.bytes_out / tokens,
    }
    print(jsonlib.dumps(result))


def _completion_values(completion: Completion, tools: AnswerTools | None) -> dict[str, Any]:
    """Return a completion as JSON values, with log-probabilities if they were asked for, and with its
    calls if there are tools.
    """
    values = {key: getattr(completion, key) for key in ("text", "token_ids", "finish_reason")}
    if completion.logprobs is not None:
        values["logprobs"] = [logprob._asdict() for logprob in completion.logprobs]
    if tools is not None:
        values["tool_calls"] = tools.calls_in(completion.token_ids)
    return values


def _write(text: str) -> None:
    """Print a text without a line end, and do not wait for one."""
    print(text, end="", flush=True)
