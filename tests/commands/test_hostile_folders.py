"""Run: pytest tests/commands/test_hostile_folders.py (model folders, damaged in every way: used, or
one clear line).
"""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chats import speaking
from monograph.commands import check, compare, evaluate, export
from monograph.errors import InputRefused, MonographError
from monograph.model.config import LlamaConfig
from monograph.model.files import read_header
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.run.models import load

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
DEEP = "[" * 3000 + "]" * 3000
INSTEAD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), "", "x", "x" * 70_000,
    "../../../etc/passwd", "/dev/zero", "\ud800", "\0", "{{ 'x' * 10**10 }}", "(a+)+$",
    [], {}, [[]], [None], [-1], ["x"] * 99, {"x": {"x": 1}}, {"content": 5}, DEEP,
]  # fmt: skip
FORMATS = ["hf"] + ["gguf"] * (importlib.util.find_spec("gguf") is not None)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    tokenizer = speaking(folder / "words", "chatml", stops=[1])
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=32,
    )
    save_model(Llama(config), folder / "model", tokenizer)
    (folder / "text.txt").write_text("the user said what the answer is, and " * 40)
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON value can be changed: keys and indices from its root; of long lists and tables
    the first few.
    """
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


def changed(content: Any, path: tuple[Any, ...], draws: random.Random) -> str:
    """The JSON text with one value replaced, doubled or taken out."""
    content = copy.deepcopy(content)
    if not path:
        return json.dumps(draws.choice(INSTEAD))
    part = content
    for key in path[:-1]:
        part = part[key]
    if draws.random() < 0.15:
        del part[path[-1]]
    else:
        part[path[-1]] = draws.choice(INSTEAD)
    return json.dumps(content).replace(json.dumps(DEEP), DEEP)


def damaged(folder: Path, draws: random.Random) -> str:
    """Damage one file, of text or of bytes; says which and how."""
    name = draws.choice([*FILES, *FILES, "chat_template.jinja", "model.safetensors"])
    path = folder / name
    if name in FILES and draws.random() < 0.8:
        content = json.loads(path.read_text())
        where = draws.choice(list(places(content)))
        text = changed(content, where, draws)
        path.write_text(text)
        return f"{name} {where}: {text[:300]}"
    data = bytearray(path.read_bytes())
    kind = draws.choice(["cut", "flip", "zero", "empty", "link"])
    if kind == "cut":
        del data[draws.randrange(len(data)) :]
    elif kind == "empty":
        data = bytearray()
    elif kind == "link":
        path.unlink()
        path.symlink_to(draws.choice(["/etc/passwd", "/dev/zero", "../words", path.name]))
        return f"{name} linked"
    else:
        for _ in range(3):
            data[draws.randrange(len(data))] = 0 if kind == "zero" else draws.randrange(256)
    path.write_bytes(data)
    return f"{name} {kind}"


def used(folder: Path, out: Path, text: Path, turn: int) -> int:
    """What people do with a folder; how many of these worked. Refused is as good, by an error of
    ours in one line.
    """
    worked = 0
    actions = [
        lambda: load(folder),
        lambda: export.run(str(folder), to=out / "hf", format="hf", dtype=None),
    ]
    if turn % 4 == 0:
        actions.append(lambda: evaluate.run(str(folder), data=[str(text)], chat=False, json=False))
    if turn % 6 == 0 and "gguf" in FORMATS:
        actions.append(lambda: export.run(str(folder), to=out / "gguf", format="gguf", dtype="f16"))
    for action in actions:
        try:
            action()
        except MonographError as error:
            assert error.exit_code == 3 and len(str(error)) < 2000, error
            assert "Traceback" not in str(error)
        else:
            worked += 1
    return worked


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_is_used_or_refused_in_a_line(sound: Path, tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    count, worked, refused = (1000 if seed else 20), 0, 0
    for turn in range(count):
        folder, out = tmp_path / "model", tmp_path / "out"
        shutil.copytree(sound / "model", folder)
        what, began = damaged(folder, draws), time.process_time()
        try:
            done = used(folder, out, sound / "text.txt", turn)
        except Exception as error:
            raise AssertionError(f"turn {turn}: {what}") from error
        assert time.process_time() - began < 60, what
        assert not out.exists() or not [
            path for path in out.iterdir() if path.name.startswith(".")
        ], what
        worked, refused = worked + (done > 0), refused + (done == 0)
        shutil.rmtree(folder)
        shutil.rmtree(out, ignore_errors=True)
    assert worked > count / 8 and refused > count / 4, "both happen, or this shows nothing"


def test_the_sound_folder_is_used(sound: Path, tmp_path: Path) -> None:
    assert used(sound / "model", tmp_path / "out", sound / "text.txt", 0) == 2 + 1 + (
        "gguf" in FORMATS
    )


def copied(sound: Path, folder: Path) -> Path:
    shutil.copytree(sound / "model", folder)
    return folder


@pytest.mark.parametrize("file", [*FILES, "model.safetensors.index.json"])
def test_a_key_that_is_there_twice_is_refused(file: str, sound: Path, tmp_path: Path) -> None:
    """Readers would take different ones of the two values."""
    folder = copied(sound, tmp_path / "model")
    if file == "model.safetensors.index.json":
        tensors = read_header(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / file).write_text(
            json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")})
        )
        load(folder)
    text = (folder / file).read_text()
    key = next(iter(json.loads(text)))
    (folder / file).write_text(text.replace("{", f'{{"{key}": 7, ', 1))
    with pytest.raises(InputRefused, match=f"{file}: .*has the key '{key}' twice in one object"):
        load(folder)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.bfloat16), (-float("inf"), torch.float16)],
    ids=str,
)
def test_weights_that_are_no_numbers_are_refused_by_name(
    value: float,
    dtype: torch.dtype,
    sound: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, bad = copied(sound, tmp_path / "model"), "model.layers.0.mlp.down_proj.weight"
    weights = {
        name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    weights[bad][-1, -1] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    said = f"{bad} holds NaN or infinity"
    for command in (
        lambda: evaluate.run(str(folder), data=[str(sound / "text.txt")], chat=False, json=True),
        lambda: compare.run(
            [str(sound / "model"), str(folder)],
            data=[str(sound / "text.txt")],
            chat=False,
            json=True,
            report=None,
        ),
        *(
            lambda kind=kind: export.run(str(folder), to=tmp_path / "out", format=kind, dtype=None)
            for kind in FORMATS
        ),
    ):
        with pytest.raises(InputRefused, match=said):
            command()
        assert not capsys.readouterr().out and [path.name for path in tmp_path.iterdir()] == [
            "model"
        ]
    with pytest.raises(InputRefused, match=said):
        check.run(str(folder), json=False)
