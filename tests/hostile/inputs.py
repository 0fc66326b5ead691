"""Kinds of hostile input: each a function that makes one from random draws, in a folder, and lets
it be read.

What is read is a sound file with something replaced, doubled or taken out, or made of parts that
attack: sizes that no machine has, paths that lead elsewhere, programs where data belongs, nesting
without end. Raises what reading raises.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import signal
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from adapted import SMALL, adapted_llama
from batches import tiny_llama
from chats import speaking
from damage import damaged
from data import bombs
from data.damaged_files import damaged_line
from faults.examples import two_saves
from monograph import checkpointing
from monograph.automata.dfa import compile_expression
from monograph.automata.pattern import fullmatch_expression
from monograph.automata.schema import parse_schema, schema_expression
from monograph.checkpointing.folder import FileEntry, Manifest
from monograph.commands.generate import (
    LARGEST_SCHEMA_BYTES,
    _read_text,
    parse_sampling,
    prompts_in_file,
)
from monograph.commands.plan import memory_size
from monograph.config import load
from monograph.config.axes import axes_of, points
from monograph.config.keys import KEYS
from monograph.config.sources import classify, path_and_weight
from monograph.data import shards
from monograph.data.conversations import Conversation, conversation_text
from monograph.data.documents import Documents, ReadingPlan
from monograph.data.reading import decompressed_blocks
from monograph.data.records import Fault
from monograph.data.sources import find_sources
from monograph.data.tables import table_texts
from monograph.decode import Sampling
from monograph.errors import InputRefused
from monograph.evaluation.choices import read_questions
from monograph.graph.mmap_weights import materialize_
from monograph.model import torch_file
from monograph.model.adapter import (
    install_adapters,
    load_adapter_weights,
    pack_adapters,
    read_adapter,
    save_adapter,
)
from monograph.model.hub import mapped_model, save_model
from monograph.predict.roofline import Calibration
from monograph.run.folder import Run
from monograph.run.recipe import ModelRecipe
from monograph.run.run_index import lock_record, serial_number
from monograph.run.source import ModelSource, checked_recipe
from monograph.run.writing import recorded_parent
from monograph.session.objectives.teachers import recorded_teachers
from monograph.session.record import write_config
from monograph.session.recorded import parent_named
from monograph.sweeps.folder import Sweep
from monograph.text.tokenizer import Tokenizer

DEEP = "[" * 3000 + "]" * 3000
CANARY = "canary"
INSTEAD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "x" * 70_000,
    "../../../etc/passwd", "/dev/zero", "/proc/self/mem", "\ud800", "\0", "{{ 'x' * 10**10 }}", "(a+)+$", "\n", "١٢",
    f"__import__('os').system('touch {CANARY}')", "nan", "1e999", "-", "%s%n", [], {}, [[]], [None], [-1], ["x"] * 99,
    [2**62, 2**62], {"x": {"x": 1}}, {"content": 5}, {"__class__": "os.system"}, DEEP,
]  # fmt: skip
Kind = Callable[[random.Random, Path], None]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON value can be changed; of long lists and tables the first few."""
    yield path
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in list(inner)[:40]:
        yield from places(each, (*path, key))


def instead(draws: random.Random) -> Any:
    return copy.deepcopy(draws.choice(INSTEAD))


def mutated(content: Any, draws: random.Random) -> Any:
    """The JSON value with one to three parts replaced, taken out, or put in the place of another."""
    content = copy.deepcopy(content)
    for _ in range(draws.choice([1, 1, 1, 2, 3])):
        path = draws.choice(list(places(content)))
        if not path:
            return instead(draws)
        part = content
        for key in path[:-1]:
            part = part[key]
        if draws.random() < 0.15:
            del part[path[-1]]
        elif isinstance(part, dict) and draws.random() < 0.15:
            part[draws.choice(["", "x", "__class__", "../x", "\0", *part])] = instead(draws)
        else:
            part[path[-1]] = instead(draws)
    return content


def as_json(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"))
    return text.replace(json.dumps(DEEP), DEEP)


def hostile_json(content: Any, draws: random.Random) -> bytes:
    text = as_json(mutated(content, draws)).encode("utf-8", "surrogatepass")
    return damaged(text, draws) if draws.random() < 0.1 else text


def replaced(path: Path, content: bytes, use: Callable[[], object]) -> None:
    """Let a file be read with another content; the sound one is put back."""
    sound = path.read_bytes()
    path.write_bytes(content)
    try:
        use()
    finally:
        path.write_bytes(sound)


# ---- settings ------------------------------------------------------------------------------------


def toml_value(value: Any) -> str:
    try:
        return json.dumps(value) if not isinstance(value, dict) else "{}"
    except ValueError:
        return "nan"


def settings(draws: random.Random, folder: Path) -> None:
    keys = draws.sample(sorted(KEYS), draws.randrange(1, 5))
    usual = [None, "auto", 1, 2, 64, 0.1, True, "adamw", "text"]
    values = [draws.choice(INSTEAD[:27] if draws.random() < 0.3 else usual) for _ in keys]
    lines = [
        f"{key} = {toml_value(value)}"
        for key, value in zip(keys, values, strict=True)
        if value is not None
    ]
    lines += draws.choice(
        [[], [], [], [], ["[model"], ["x = 1"], ["[[data]]"], ["[model]", "a.b.c = 1"], ['"" = 1']]
    )
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    (folder / "some.toml").write_bytes(
        damaged(text, draws) if text and draws.random() < 0.3 else text
    )
    load(folder / "some.toml", {}, {})


def command_line(draws: random.Random, folder: Path) -> None:
    pieces = [*"=..:,0-@x[]~*é ٣8", "lr", "1e-3", "log:", "..", "nan", "GiB", "1e999"]
    key = draws.choice([*sorted(KEYS), "no.such", "optim.lr", "train.seed"])
    texts = ["".join(draws.choices(pieces, k=draws.randrange(8))) for _ in range(2)]
    if draws.random() < 0.5:
        fixed, axes = axes_of(classify([f"{key}={texts[0]}"]).overrides)
        load(None, fixed | {axis.key: axis.first for axis in axes}, {})
        points(axes, draws.choice([None, 3]))
    elif draws.random() < 0.5:
        path_and_weight(texts[0])
        toml, overrides, faults = classify(texts)
        load(toml, overrides, {}, faults=faults)
    elif draws.random() < 0.5:
        draws.choice([partial(memory_size, "--device-memory"), parent_named])(
            draws.choice(["8", "", "-1"]) + texts[0]
        )
    else:
        parse_sampling(
            {"temperature": 1.0},
            [f"{draws.choice(['seed', 'min_p', 'x', 'logit_bias'])}={texts[0]}"],
        )


# ---- model folders -------------------------------------------------------------------------------


@cache
def model(folder: Path) -> Path:
    if not (folder / "model").exists():
        tokenizer = speaking(folder / "words", "chatml", stops=[1])
        llama = tiny_llama(vocab_size=tokenizer.vocab_size, hidden_size=16, num_hidden_layers=1)
        save_model(llama, folder / "model", tokenizer)
        save_model(llama, folder / "sharded", tokenizer, max_shard_bytes=3000)
        save_adapter(pack_adapters(adapted_llama(), SMALL, "model"), folder / "adapter")
    return folder / "model"


def config(draws: random.Random, folder: Path) -> None:
    path = model(folder) / "config.json"
    replaced(
        path,
        hostile_json(json.loads(path.read_bytes()), draws),
        lambda: materialize_(mapped_model(path.parent)),
    )


def read_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(folder)
    assert tokenizer.decode(tokenizer.encode("The cat sat, " * 20)).startswith("The")


def tokenizer(draws: random.Random, folder: Path) -> None:
    path = model(folder) / "tokenizer.json"
    content = json.loads(path.read_bytes())
    steps = {
        "normalizer": [
            {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b" * 10**6},
            {"type": "NFC"},
        ],
        "padding": [
            {"strategy": {"Fixed": 4 * 10**9}, "direction": "Right", "pad_id": 0, "pad_token": "x"}
        ],
        "truncation": [
            {"max_length": -1, "strategy": "LongestFirst", "stride": 9, "direction": "Right"}
        ],
        "pre_tokenizer": [
            {
                "type": "Split",
                "pattern": {"Regex": "(x+x+)+y"},
                "behavior": "Isolated",
                "invert": False,
            }
        ],
        "post_processor": [
            {"type": "TemplateProcessing", "single": [[]], "pair": [], "special_tokens": {}}
        ],
    }
    for key in draws.sample(sorted(steps), draws.randrange(3)):
        content[key] = draws.choice([*steps[key], draws.choice(INSTEAD)])
    replaced(path, hostile_json(content, draws), lambda: read_tokenizer(path.parent))


def companion(draws: random.Random, folder: Path) -> None:
    path = model(folder) / draws.choice(["tokenizer_config.json", "generation_config.json"])
    replaced(
        path,
        hostile_json(json.loads(path.read_bytes()), draws),
        lambda: read_tokenizer(path.parent),
    )


def safetensors(draws: random.Random, folder: Path) -> None:
    path = model(folder) / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = hostile_json(json.loads(data[8 : 8 + length]), draws)
    told = draws.choice([len(header)] * 6 + [0, 2**63, 2**64 - 1, length, 10**8])
    content = struct.pack("<Q", told) + header + data[8 + length :]
    use = draws.choice(
        [lambda: materialize_(mapped_model(path.parent)), lambda: mapped_model(path.parent)]
    )
    replaced(path, damaged(data, draws) if draws.random() < 0.2 else content, use)


def index(draws: random.Random, folder: Path) -> None:
    path = model(folder).parent / "sharded" / "model.safetensors.index.json"
    content = json.loads(path.read_bytes())
    for name in draws.sample(sorted(content["weight_map"]), 2):
        content["weight_map"][name] = draws.choice(
            [
                "../model/model.safetensors",
                "/etc/passwd",
                "/dev/zero",
                ".",
                "..",
                "config.json",
                "",
                "\0",
                "a/b",
            ]
        )
    replaced(path, hostile_json(content, draws), lambda: materialize_(mapped_model(path.parent)))


def adapter(draws: random.Random, folder: Path) -> None:
    path = model(folder).parent / "adapter" / "adapter_config.json"

    def use() -> None:
        found, base = read_adapter(path.parent), tiny_llama()
        install_adapters(base, found.lora)
        load_adapter_weights(found, base)

    replaced(path, hostile_json(json.loads(path.read_bytes()), draws), use)


class Payload:
    """Unpickled, it runs a program."""

    def __init__(self, how: int) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        command = f"touch {CANARY}"
        return [
            (os.system, (command,)), (eval, (f"open({CANARY!r}, 'w')",)), (exec, (f"open({CANARY!r}, 'w')",)),
            (os.unlink, (CANARY,)), (torch.load, ("/dev/zero",)), (bytearray, (1 << 40,)),
        ][self.how]  # fmt: skip


def weight_file(draws: random.Random, folder: Path) -> None:
    path = folder / "weights.pt"
    state: Any = {"embed_tokens.weight": torch.zeros(4, 4), "evil": Payload(draws.randrange(6))}
    if draws.random() < 0.4:
        path.write_bytes(pickle.dumps(state, protocol=draws.choice([0, 2, 4])))
    else:
        content = io.BytesIO()
        torch.save(state if draws.random() < 0.6 else {"model": tiny_llama().state_dict()}, content)
        data = content.getvalue()
        path.write_bytes(damaged(data, draws) if draws.random() < 0.5 else data)
    torch_file.read(path, {})


# ---- what is written here ------------------------------------------------------------------------


@cache
def saved(folder: Path) -> Path:
    if not (folder / "checkpoints").exists():
        two_saves(folder / "checkpoints")
    return folder / "checkpoints" / "step-00000002"


def manifest(draws: random.Random, folder: Path) -> None:
    """Forged so that its own digest is right, where that can be."""
    path = saved(folder) / "MANIFEST.json"
    content = mutated(json.loads(path.read_bytes()), draws)
    try:
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        data = Manifest(content["run"], content["update"], files).encode()
    except Exception:
        data = as_json(content).encode("utf-8", "surrogatepass")
    replaced(path, data, lambda: checkpointing.load(path.parent))


def shard(draws: random.Random, folder: Path) -> None:
    """Items with checksums that are right, wrong, missing or too many, and a seal of them that is
    right.
    """
    items, path = draws.randbytes(draws.choice([0, 1, 6, 12])), folder / "some.tokens"
    checksum = struct.pack("<I", zlib.crc32(items))
    path.write_bytes(
        items + draws.choice([checksum, b"", draws.randbytes(draws.randrange(9)), 2 * checksum])
    )
    shards.open_shard(
        path, draws.choice([shards.INDEX_DTYPE, shards.token_dtype(9)]), shards.seal(path)
    )


def run_files(draws: random.Random, folder: Path) -> None:
    run = Run(folder / "run")
    if not run.folder.exists():
        run = Sweep.create(
            folder / "run", load(None, {"train.updates": 5}, {}), [{"optim.lr": 1e-3}], None
        ).run
        write_config(run, load(None, {"train.updates": 5}, {}))
        run.log({"update": 1, "train_loss": 0.5}, {"update": 2, "eval_loss": 0.5})
        run.parent_file.write_text(json.dumps({"run": "elsewhere", "update": 3}))
        teacher = {"member": "members/000", "update": 5, "sha256": "0" * 64}
        (run.folder / "teachers.json").write_text(
            json.dumps({"share": 0.5, "teachers": [teacher, teacher]})
        )
        (run.folder / "calibration.json").write_text(
            json.dumps(
                {
                    "schema": "monograph.calibration/1",
                    "seen": {"cpu": [1.0]},
                    "beyond": {"cpu": [[1, 2]]},
                }
            )
        )
    names: dict[str, Callable[[], object]] = {
        "metrics.jsonl": run.rows, "run.lock": lambda: Run.locate(run.folder),
        "from.json": lambda: recorded_parent(run),
        "teachers.json": lambda: recorded_teachers(run, (run.folder / "teachers.json").read_bytes()),
        "sweep.json": lambda: Sweep.open(run.folder), "config.toml": lambda: load(run.config, {}, {}),
        "calibration.json": lambda: Calibration(run.folder / "calibration.json"),
    }  # fmt: skip
    path = run.folder / draws.choice(sorted(names))
    data = path.read_bytes()
    if path.suffix in (".json", ".lock", ".jsonl") and draws.random() < 0.7:
        first, newline, rest = (
            data.partition(b"\n") if path.suffix == ".jsonl" else (data, b"", b"")
        )
        data = hostile_json(json.loads(first), draws) + newline + rest
    else:
        data = damaged(data, draws)
    replaced(path, data, names[path.name])


# ---- texts ---------------------------------------------------------------------------------------


def records(draws: random.Random, folder: Path) -> None:
    path = folder / "records.jsonl"
    lines = [damaged_line(draws) for _ in range(3)] + [
        as_json(draws.choice(INSTEAD)).encode("utf-8", "surrogatepass")
    ]
    path.write_bytes(b"\n".join(lines))
    documents = Documents(
        find_sources(path, folder).files, ReadingPlan("text", draws.random() < 0.7), 0.0
    )
    for each in documents:
        list(each.parts)


CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {
            "role": "assistant",
            "content": "a",
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
}


def conversation(draws: random.Random, folder: Path) -> None:
    shapes = [CHAT, {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
              {"prompt": "q", "completion": "a"}]  # fmt: skip
    found = mutated(draws.choice(shapes), draws)
    said = conversation_text(found) if isinstance(found, dict) else Fault("no object", "")
    if isinstance(said, Fault):
        raise InputRefused(said.detail)
    Conversation.of_text(said)


def questions(draws: random.Random, folder: Path) -> None:
    path = folder / "asked.jsonl"
    line = {"question": "q", "choices": ["a", "b"], "answer": 1}
    path.write_bytes(hostile_json(line, draws).replace(b"\n", b" ") + b"\n")
    if draws.random() < 0.5:
        read_questions([str(path)])
    else:
        list(prompts_in_file(path, draws.random() < 0.5, Sampling(), 300))


# ---- what is no regular file, and what is larger than it looks -----------------------------------


def given(path: Path) -> dict[str, Callable[[], object]]:
    """Everywhere that a person or a configuration names a file: by how the file is called."""
    sources = [".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.zst", ".parquet", ".arrow"]
    return {
        ".toml": lambda: load(classify([str(path)]).toml, {}, {}), ".pth": lambda: torch_file.read(path, {}),
        ".py": lambda: checked_recipe(ModelRecipe(None, "nano", {}, 0), ModelSource.open(f"{path}:build")),
        ".json": lambda: Tokenizer.from_file(path),
        ".prompts": lambda: list(prompts_in_file(path, False, Sampling(), 300)),
        ".ndjson": lambda: read_questions([str(path)]),
        ".schema": lambda: _read_text(path, "", LARGEST_SCHEMA_BYTES),
        ".raw.parquet": lambda: list(table_texts(path, "text")),
        ".raw.arrow": lambda: list(table_texts(path, "text")), ".raw.gz": lambda: list(decompressed_blocks(path)),
        **{kind: lambda: find_sources(path, path.parent) for kind in sources},
    }  # fmt: skip


def within(folder: Path) -> list[tuple[Path, Callable[[], object]]]:
    """Files of folders that somebody made, each with what reads it."""
    base, run = model(folder), Run(folder / "special")
    if not run.folder.exists():
        Sweep.create(run.folder, load(None, {"train.updates": 5}, {}), [{"optim.lr": 1e-3}], None)
        run.log({"update": 1})
        run.parent_file.write_text("{}")
    names = (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    )
    return [
        *((base / name, lambda: (materialize_(mapped_model(base)), read_tokenizer(base))) for name in names),
        *((path, lambda: mapped_model(folder / "sharded")) for path in sorted((folder / "sharded").glob("model*"))),
        (folder / "adapter" / "adapter_config.json", lambda: read_adapter(folder / "adapter")),
        (saved(folder) / "MANIFEST.json", lambda: checkpointing.load(saved(folder))),
        (saved(folder) / "model.safetensors", lambda: checkpointing.load(saved(folder))),
        (run.lock_file, lambda: (lock_record(run.folder), serial_number(run.folder), Run.locate(run.folder))),
        (run.metrics, run.rows), (run.config, lambda: load(run.config, {}, {})),
        (run.parent_file, lambda: recorded_parent(run)), (run.folder / "sweep.json", lambda: Sweep.open(run.folder)),
    ]  # fmt: skip


def special(path: Path, draws: random.Random, folder: Path) -> None:
    """Put something at `path` that no reading may wait for."""
    how = draws.choice(
        ["fifo", "/dev/zero", "/dev/tty", "socket", "folder", "/proc/self/mem", "to a fifo"]
    )
    if how == "folder":
        path.mkdir()
    elif how == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    elif how == "fifo":
        os.mkfifo(path)
    else:
        pipe = folder / "pipe"
        if how == "to a fifo" and not pipe.exists():
            os.mkfifo(pipe)
        path.symlink_to(pipe if how == "to a fifo" else how)


def not_a_file(draws: random.Random, folder: Path) -> None:
    if draws.random() < 0.5:
        suffix = draws.choice(sorted(given(folder)))
        path = folder / f"named{suffix}"
        use = given(path)[suffix]
    else:
        path, use = draws.choice(within(folder))
    aside = path.with_name("aside")
    with suppress(FileNotFoundError):
        path.rename(aside)
    # To wait costs no time of the processor: what hangs is ended by the signal, and that is seen.
    signal.alarm(5)
    try:
        special(path, draws, folder)
        use()
    finally:
        signal.alarm(0)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            aside.rename(path)


def bomb(draws: random.Random, folder: Path) -> None:
    kind = draws.choice(bombs.KINDS)
    path = bombs.made(kind, draws.choice([1, 300]), folder)
    for _ in decompressed_blocks(path) if kind.startswith("txt") else table_texts(path, "text"):
        pass


# ---- languages -----------------------------------------------------------------------------------

SCHEMA = {
    "type": "object", "required": ["a"], "additionalProperties": False,
    "properties": {
        "a": {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^a+$"},
        "b": {"type": "integer", "minimum": 0, "maximum": 99}, "c": {"$ref": "#/$defs/d"},
        "e": {"type": "array", "items": {"enum": [1, "x", None]}, "minItems": 0, "maxItems": 3},
    },
    "$defs": {"d": {"anyOf": [{"type": "null"}, {"type": "number"}]}},
}  # fmt: skip


def wide(draws: random.Random) -> Any:
    """Of a thousand or more parts each of which has its price."""
    part = draws.choice(
        [{"type": kind} for kind in ("null", "integer", "number", "string")] + [{"const": "x" * 99}]
    )
    count = draws.choice([1000, 3000, 12_000])
    numbers = [list(range(start, start + count)) for start in (0, count)]
    return draws.choice([
        {"type": "object", "properties": {f"p{i}": part for i in range(count)}},
        {"type": "object", "properties": {f"p{i}": part for i in range(count)}, "required": ["p0"] * count},
        {"oneOf": [{"enum": each} for each in numbers]}, {"enum": numbers[0], "const": numbers},
        {"anyOf": [{"anyOf": [part] * 64}] * 64}, {"type": ["null"] * count},
    ])  # fmt: skip


def schema(draws: random.Random, folder: Path) -> None:
    content = wide(draws) if draws.random() < 0.1 else mutated(SCHEMA, draws)
    if draws.random() < 0.2:
        content = {
            "$ref": draws.choice(
                ["#", "#/$defs/x", "http://x", "file:///etc/passwd", "#/properties/../a"]
            )
        }
    compile_expression(schema_expression(parse_schema(as_json(content))), "the JSON schema")


def pattern(draws: random.Random, folder: Path) -> None:
    pieces = list("ab.*+?|()[]{}^$\\-,09dwsxé\n") + [
        "{1,9999}",
        "{9}{9}{9}",
        "(?:",
        "(?=",
        "\\1",
        "[^",
        "\\p{L}",
        "(a*)*",
    ]
    compile_expression(
        fullmatch_expression("".join(draws.choices(pieces, k=draws.randrange(1, 14))), "--regex"),
        "--regex",
    )


TEMPLATES = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' * 10**10 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "{% include '/etc/passwd' %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ self.__init__ }}",
    "{{ messages | map(attribute='__class__') | list }}", "{{ lipsum.__globals__['os'].popen('touch canary') }}",
    "{{ (1).__class__.__base__ }}", "{{ namespace(__class__=1) }}", "{% set x = messages.__class__ %}{{ x }}",
    "{{ '%s' % messages }}", "{{ messages[0]['content'] | replace('h', 'x' * 10**7) }}",
    "{{ strftime_now('%Y' * 99) }}",
    "{{ raise_exception('no') }}", "{% generation %}x", "{{ ''.format_map({}) }}", "{{ '{0.__class__}'.format(1) }}",
]  # fmt: skip


def template(draws: random.Random, folder: Path) -> None:
    from monograph.text.template import ChatTemplate

    source = draws.choice(TEMPLATES)
    if draws.random() < 0.4:
        source = damaged(source.encode(), draws).decode("utf-8", "replace")
    ChatTemplate(source, "chat_template.jinja").render([{"role": "user", "content": "h"}])


KINDS: dict[str, Kind] = {
    "settings": settings, "command line": command_line, "config.json": config, "tokenizer.json": tokenizer,
    "beside a tokenizer": companion, "safetensors": safetensors, "index of shards": index, "adapter": adapter,
    "torch.save file": weight_file, "manifest": manifest, "shard of tokens": shard, "files of a run": run_files,
    "records": records, "conversations": conversation, "questions": questions, "JSON schema": schema,
    "regular expression": pattern, "chat template": template, "no regular file": not_a_file,
    "compression bomb": bomb,
}  # fmt: skip
