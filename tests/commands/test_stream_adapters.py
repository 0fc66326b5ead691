# Run: pytest tests/commands/test_stream_adapters.py
"""`train.memory=stream` with `lora.rank`, as a person types it: the same files as a run on the device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from commands.forked import CommandServer
from commands.inputs import OWN, newest, over, with_texts
from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.text.tokenizer import Tokenizer

MIXTURE = LlamaConfig(
    model_type="qwen3_moe", vocab_size=259, hidden_size=64, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32, intermediate_size=64,
)  # fmt: skip
ADAPTERS = over(
    OWN, "train.updates=4", "train.save_every=2", "data.held_out=0.1", "model.init=base", "lora.rank=4",
    "lora.base=nf4", "train.precision=bf16", 'lora.targets=["q_proj", "gate_proj"]', "train.micro_batch=2",
)  # fmt: skip
FILES = ("model.safetensors", "optimizer.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, server: CommandServer) -> Path:
    """A base of experts, and a run of adapters for each place of its frozen weights."""
    here = with_texts(tmp_path_factory.mktemp("streamed_adapters"))
    save_model(Llama(MIXTURE, seed=0).bfloat16(), here / "base", Tokenizer.bytes())
    for memory in ("device", "stream"):
        done = server.run(
            here, "train", *ADAPTERS, f"train.memory={memory}", "--out", memory, "--json", figures=0
        )
        assert done.code == 0, done.err
        (here / f"{memory}.json").write_text(done.out.splitlines()[-1])
    return here


def weights(run: Path) -> list[bytes]:
    return [(newest(run) / name).read_bytes() for name in FILES]


def test_the_same_files_as_on_the_device(folder: Path) -> None:
    assert weights(folder / "stream") == weights(folder / "device")
    device, stream = (
        json.loads((folder / f"{memory}.json").read_text()) for memory in ("device", "stream")
    )
    same = ("train_loss", "eval_loss", "tokens", "params")
    assert [stream[key] for key in same] == [device[key] for key in same]
    # A sample is printed at the end, from the model with all of its weights on the host.
    rows = [
        json.loads(line) for line in (folder / "stream" / "metrics.jsonl").read_text().splitlines()
    ]
    [memory] = [row["memory"] for row in rows if "memory" in row]
    assert memory["homes"]["host"] > 0 and memory["homes"]["device"] > 0


# By day tests/laws/test_streamed_adapters.py goes on in the other place.
@pytest.mark.slow
def test_it_goes_on_in_the_other_place(folder: Path, server: CommandServer) -> None:
    """From its second update on."""
    for memory, other in (("device", "stream"), ("stream", "device")):
        part = folder / f"{memory}-first"
        shutil.copytree(folder / memory, part)
        shutil.rmtree(newest(part))
        done = server.run(
            folder, "train", "--resume", part.name, f"train.memory={other}", figures=0
        )
        assert done.code == 0 and newest(part).name == newest(folder / memory).name, done.err
        assert weights(part) == weights(folder / memory)


def test_every_command_takes_the_run(folder: Path, server: CommandServer) -> None:
    done = server.run(
        folder, "generate", "stream", "alpha", "--max-tokens", "4", "--temperature", "0"
    )
    assert done.code == 0, done.err
    twin = server.run(
        folder, "generate", "device", "alpha", "--max-tokens", "4", "--temperature", "0"
    )
    assert done.out == twin.out
    for memory in ("stream", "device"):
        done = server.run(folder, "export", memory, "--to", f"{memory}-out")
        assert done.code == 0, done.err
    name = "model.safetensors"
    assert (folder / "stream-out" / name).read_bytes() == (
        folder / "device-out" / name
    ).read_bytes()


def test_a_sweep_keeps_its_base_on_the_device(folder: Path, server: CommandServer) -> None:
    settings = [each for each in ADAPTERS if not each.startswith("lora.targets")]
    settings = over(settings, "train.memory=stream", "optim.lr=1e-4,2e-4")
    done = server.run(folder, "sweep", *settings, "--out", "sweep", figures=0)
    assert done.code == 2 and "adapters of a sweep share a base on the device" in done.err, done.err
