# Run: pytest tests/model/test_files.py
"""Files of a model folder: damaged ones are refused by name and at once, new ones are whole or
absent.
"""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from clocks import least_s
from memory import resident_bytes
from monograph.errors import DiskFull, InputRefused
from monograph.model import files
from monograph.model.config import LlamaConfig
from monograph.model.hub import load_model, save_model
from monograph.model.llama import Llama
from monograph.storage import tensor_layout

CONFIG = LlamaConfig.preset(
    "nano", vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=16
)
SHARD_BYTES = 20_000


@pytest.fixture
def saved(tmp_path):
    save_model(Llama(CONFIG), tmp_path / "model")
    return tmp_path / "model"


def test_files_have_the_modes_that_the_umask_gives(tmp_path):
    previous = os.umask(0o027)
    try:
        save_model(Llama(CONFIG), tmp_path / "model", max_shard_bytes=SHARD_BYTES)
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o640}
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
        (
            files.SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            ),
            DiskFull,
        ),
        (OSError(errno.EROFS, "Read-only file system"), InputRefused),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch, failure, error):
    written, write_shard = [], files.write_shard

    def write_some(path, tensors):
        if written:
            raise failure
        written.append(path)
        write_shard(path, tensors)

    monkeypatch.setattr(files, "write_shard", write_some)
    with pytest.raises(error):
        save_model(Llama(CONFIG), tmp_path / "out" / "model", max_shard_bytes=SHARD_BYTES)
    assert written
    assert not list((tmp_path / "out").iterdir())


def test_two_processes_do_not_write_one_folder(tmp_path):
    with files.new_folder(tmp_path / "model") as new:
        (new / "file").write_text("first")
        with (
            pytest.raises(InputRefused, match="another process writes it, in .*/.model.partial"),
            files.new_folder(tmp_path / "model"),
        ):
            pass
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "file"]


def test_a_place_that_cannot_be_written_is_named():
    with pytest.raises(InputRefused, match="/proc/nowhere: cannot be written"):
        save_model(Llama(CONFIG), "/proc/nowhere")


def _config(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def _weights(folder, drop=(), **changes):
    state = {**load_file(folder / "model.safetensors"), **changes}
    save_file(
        {name: tensor for name, tensor in state.items() if name not in drop},
        folder / "model.safetensors",
    )


def _index(folder, **weight_map):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = load_file(folder / "a.safetensors")
    content = {"weight_map": {**dict.fromkeys(names, "a.safetensors"), **weight_map}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def _link(folder):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), r"'config.json' is not a file"),
    "config not JSON": (
        lambda f: (f / "config.json").write_text("{"),
        r"config.json: cannot be read as JSON",
    ),
    "config not UTF-8": (
        lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'),
        r"config.json: cannot be read",
    ),
    "config too deep": (
        lambda f: (f / "config.json").write_text('{"a":' * 10**5),
        r"config.json: cannot be read",
    ),
    "config a list": (
        lambda f: (f / "config.json").write_text("[]"),
        r"config.json: expected a JSON object",
    ),
    "another family": (
        lambda f: _config(f, model_type="gpt2", layer_norm_epsilon=1e-5),
        r"config.json: model_type = 'gpt2'.*layer_norm_epsilon",
    ),
    "heads": (
        lambda f: _config(f, num_key_value_heads=3),
        r"config.json: num_attention_heads = 2 .* = 3",
    ),
    "a hundred million layers": (
        lambda f: _config(f, num_hidden_layers=10**8),
        r"num_hidden_layers = 100000000 in config.json, the weights have 2 layers",
    ),
    "a huge vocabulary": (
        lambda f: _config(f, vocab_size=2**31 - 1),
        r"has shape \[64, 32\], expected \[2147483647",
    ),
    "a vocabulary beyond any index": (
        lambda f: _config(f, vocab_size=10**18),
        r"config.json: vocab_size = 1000000000000000000: expected at most 2147483647",
    ),
    "untied by mistake": (
        lambda f: _config(f, tie_word_embeddings=False),
        r"1 missing .* 'lm_head.weight'",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"neither model.safetensors nor"),
    "weights cut": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-1]
        ),
        r"model.safetensors: damaged",
    ),
    "weights empty": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        r"model.safetensors: damaged",
    ),
    "weights a pickle": (
        lambda f: torch.save({}, f / "model.safetensors"),
        r"model.safetensors: damaged",
    ),
    "weights a folder": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
        r"'model.safetensors' is not a file",
    ),
    "weights a pipe": (
        lambda f: ((f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors")),
        r"'model.safetensors' is not a file",
    ),
    "weights linked out": (_link, r"model.safetensors: is a link out of its folder"),
    "one tensor missing": (
        lambda f: _weights(f, ["model.norm.weight"]),
        r"1 missing .* 'model.norm.weight'",
    ),
    "one tensor too many": (lambda f: _weights(f, bias=torch.ones(1)), r"1 unexpected .* 'bias'"),
    "one shape wrong": (
        lambda f: _weights(f, **{"model.norm.weight": torch.ones(31)}),
        r"model.norm.weight has shape \[31\], expected \[32\] by config.json \(hidden_size\)",
    ),
    "one dtype wrong": (
        lambda f: _weights(f, **{"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
        r"model.norm.weight is stored as I8",
    ),
    "index to a parent": (
        lambda f: _index(f, x="../a.safetensors"),
        r"'../a.safetensors' is not a file",
    ),
    "index to the root": (lambda f: _index(f, x="/etc/passwd"), r"'/etc/passwd' is not a file"),
    "index to dots": (lambda f: _index(f, x=".."), r"'..' is not a file"),
    "index to nothing": (lambda f: _index(f, x=""), r"'' is not a file"),
    "index to a null": (lambda f: _index(f, x="a\0b"), r"is not a file"),
    "index to no name": (lambda f: _index(f, x=7), r"index.json: expected a table weight_map"),
    "index to the wrong file": (
        lambda f: _index(f, x="a.safetensors"),
        r"says that 'x' is in a.safetensors",
    ),
    "index without a map": (
        lambda f: (_index(f), (f / "model.safetensors.index.json").write_text("{}")),
        r"index.json: expected a table weight_map",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_name_and_at_once(saved, damage):
    harm, said = DAMAGES[damage]
    harm(saved)

    def refused() -> None:
        with pytest.raises(InputRefused, match=said) as refusal:
            load_model(saved)
        assert "\n" not in str(refusal.value)
        assert str(saved) in str(refusal.value)

    assert least_s(refused, 0.5) < 0.5


def test_links_into_hugging_faces_cache_are_followed(saved):
    cache = saved.parent / "hub" / "models--a--b"
    for folder in ("blobs", "snapshots/0123"):
        (cache / folder).mkdir(parents=True)
    for path in saved.iterdir():
        path.rename(cache / "blobs" / path.name)
        (cache / "snapshots/0123" / path.name).symlink_to(f"../../blobs/{path.name}")
    assert load_model(cache / "snapshots/0123").config == CONFIG


def test_reading_a_file_again_takes_no_memory(tmp_path):
    """Bytes that were kept for each tensor would add up where adapters come and go."""
    path = tmp_path / "many.safetensors"
    save_file({f"tensor {number}": torch.ones(2) for number in range(300)}, path)
    stored = files.read_header(path)

    def read_often() -> None:
        for _ in range(100):
            files.read_tensors(stored, None)

    read_often()
    before = resident_bytes()
    read_often()
    # 64 bytes for each tensor would be 1.9 MB.
    assert resident_bytes() - before < 2**20


def test_a_file_that_changed_after_its_header_was_read_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(8), "b": torch.zeros(2, dtype=torch.bfloat16)}, path)
    stored = files.read_header(path)
    found = files.read_tensors(stored, None)
    assert found["a"].equal(torch.ones(8)) and found["b"].dtype == torch.bfloat16
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"0", b"", content[:9] + b"]" + content[10:]):
        path.write_bytes(damaged)
        with pytest.raises(InputRefused, match="a.safetensors: damaged, or not a safetensors file"):
            files.read_tensors(stored, None)
    save_file({"a": torch.ones(8)}, path)
    with pytest.raises(InputRefused, match="a.safetensors: damaged.* no tensor b"):
        files.read_tensors(stored, None)


def test_a_header_of_too_many_tensors_is_not_read(saved, monkeypatch):
    """The library takes long for each; and what is written here stays below the bound."""
    monkeypatch.setattr(tensor_layout, "MAX_HEADER_BYTES", 1000, raising=False)
    monkeypatch.setattr(files, "safe_open", lambda *_, **__: pytest.fail("the library was asked"))
    with pytest.raises(
        InputRefused, match="model.safetensors: damaged, or not a safetensors file: a header of"
    ):
        files.read_headers(saved)
    with pytest.raises(InputRefused, match="30 tensors: more than a file of weights may list"):
        tensor_layout.encode({f"tensor {index}": torch.zeros(0) for index in range(30)})
