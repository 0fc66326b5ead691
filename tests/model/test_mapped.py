"""Run: pytest tests/model/test_mapped.py    (every form of every stored dtype: -m slow)

Law: a folder's weights that are taken out of the mapped files one by one are, to the bit, those of
a folder that was read whole first, in whatever form a run keeps them; and what is exported tensor
by tensor is what was exported at once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from adapted import trained
from batches import tiny_llama
from monograph.graph.inspect import unique_state
from monograph.graph.lora import Lora
from monograph.graph.lora_merge import merge
from monograph.graph.mmap_weights import MappedPieces, MappedWeight, materialize_
from monograph.graph.precision import Precision
from monograph.model.adapter import install_adapters, pack_adapters, read_adapter, save_adapter
from monograph.model.files import read_headers
from monograph.model.gguf import save_gguf
from monograph.model.hub import assemble, load_model, mapped_model, read_config, save_model
from monograph.model.llama import Llama
from monograph.optim import AdamW, Muon
from monograph.resident import Resident
from monograph.run.models import build, load, load_to_export
from monograph.run.recipe import ModelRecipe, module_digest
from monograph.stream import Placement, Streamed
from monograph.text.tokenizer import Tokenizer

SHARD_BYTES = 20_000
STORED = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "mixed": None,
}


def read_whole(folder: Path, dtype: torch.dtype | None) -> Llama:
    """The slow reference: all tensors of all files in memory, then cast."""
    state = {
        n: t.clone()
        for path in sorted(folder.glob("*.safetensors"))
        for n, t in load_file(path).items()
    }
    config = read_config(folder)
    for name in [name for name in state if ".experts.0." in name]:
        names = [
            name.replace(".experts.0.", f".experts.{number}.")
            for number in range(config.num_experts)
        ]
        state[name.replace(".experts.0.", ".experts.")] = torch.stack(
            [state.pop(each) for each in names]
        )
    return assemble(config, {n: t.to(dtype or t.dtype) for n, t in state.items()}, folder)


def thinned(*choices: Iterable[Any]) -> list[Any]:
    """The product of the choices, by day every third case: of three choices any two values of two
    of them meet.
    """
    product = itertools.product(*map(enumerate, choices))
    return [
        pytest.param(
            *(value for _, value in case),
            marks=[pytest.mark.slow] * (sum(at for at, _ in case) % 3 > 0),
        )
        for case in product
    ]


MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def write(folder: Path, stored: str, tied: bool = False, **sizes: Any) -> Path:
    """A base in shards; of "mixed" the vectors in fp32 and every other matrix in fp16, the rest in
    bf16.
    """
    model = tiny_llama(tie_word_embeddings=tied, vocab_size=259, intermediate_size=64, **sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(
                0.3
                * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            )
            if stored == "mixed" and parameter.ndim == 2:
                parameter.data = parameter.data.to(
                    torch.float16 if name.endswith("up_proj.weight") else torch.bfloat16
                )
    save_model(model.to(STORED[stored] or None), folder, Tokenizer.bytes(), SHARD_BYTES)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name])
        for name, tensor in mine.items()
    )


@pytest.mark.parametrize(
    ("stored", "dtype", "tied"),
    thinned(STORED, [None, torch.float32, torch.bfloat16], [False, True]),
)
def test_settled(tmp_path: Path, stored: str, dtype: torch.dtype | None, tied: bool) -> None:
    if stored == "mixed" and dtype is None:
        pytest.skip("a folder of several dtypes is loaded in one that is named")
    folder, expected = write(tmp_path / "base", stored, tied), None
    expected = read_whole(folder, dtype)
    found = materialize_(mapped_model(folder, dtype))
    assert same(found, expected) and same(load_model(folder, dtype), expected)
    assert not any(isinstance(p, MappedWeight) for p in found.parameters())
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    ("stored", "base", "precision"),
    thinned(STORED, ["auto", "int8", "nf4"], ["fp32", "bf16", "fp16"]),
)
def test_a_frozen_base_in_every_form(
    tmp_path: Path, stored: str, base: str, precision: str
) -> None:
    folder, lora = write(tmp_path / "base", stored), Lora(4, base=base)
    found, _ = build(ModelRecipe(str(folder), "auto", {}, 0))
    expected = read_whole(folder, torch.float32)
    for model in (found, expected):
        install_adapters(
            model, lora, seed=3, precision=Precision(precision), device=torch.device("cpu")
        )
    assert any(isinstance(p, MappedWeight) for p in found.parameters()) == (stored != "fp64")
    materialize_(found)
    assert same(found, expected)
    assert {n: p.requires_grad for n, p in found.named_parameters()} == {
        n: p.requires_grad for n, p in expected.named_parameters()
    }


OPTIMIZERS = {
    "adamw": AdamW(), "muon": Muon(), "ema": AdamW(ema=0.9), "8bit": AdamW(state="8bit"),
    "no masters": AdamW(state="bf16", master_weights=False),
}  # fmt: skip


@pytest.mark.parametrize(("name", "stored"), thinned(OPTIMIZERS, STORED))
def test_masters_in_planes(tmp_path: Path, name: str, stored: str) -> None:
    folder = write(tmp_path / "base", stored)
    found, _ = build(ModelRecipe(str(folder), "auto", {}, 0))
    models = materialize_(found, trained=False), read_whole(folder, torch.float32)
    one, other = (Resident(m, optim=OPTIMIZERS[name], precision=Precision("bf16")) for m in models)
    for mine, theirs in zip(one.step.planes, other.step.planes, strict=True):
        assert torch.equal(mine.param, theirs.param) and mine.param.dtype == theirs.param.dtype
        assert torch.equal(mine.grad, theirs.grad) and mine.grad.dtype == theirs.grad.dtype
        assert all(torch.equal(mine.state[key], theirs.state[key]) for key in theirs.state)
    assert same(*models) and not any(isinstance(p, MappedWeight) for p in found.parameters())


ON_DISK = frozenset({"weights", "rest", "exp_avg", "ema"})


@pytest.mark.parametrize(
    ("stored", "placement"),
    thinned(STORED, [Placement(), Placement(when="backward"), Placement(on_disk=ON_DISK)]),
)
def test_masters_in_stages(tmp_path: Path, stored: str, placement: Placement) -> None:
    folder = write(tmp_path / "base", stored, tied=True)
    found, _ = build(ModelRecipe(str(folder), "auto", {}, 0))
    one, other = (
        Streamed(m, optim=AdamW(ema=0.9), precision=Precision("bf16"), placement=placement)
        for m in (found, read_whole(folder, torch.float32))
    )
    mine, theirs = one.state(), other.state()
    for kind in ("model", "optimizer"):
        first, second = getattr(mine, kind), getattr(theirs, kind)
        assert first.keys() == second.keys() and all(
            torch.equal(first[key], second[key]) for key in second
        )
    assert all(t.dtype == torch.float32 for t in mine.model.values())
    assert not any(isinstance(p, MappedWeight) for p in found.parameters())


@pytest.mark.parametrize("stored", STORED)
def test_the_digest_is_of_the_numbers_in_fp32(tmp_path: Path, stored: str) -> None:
    """Its value is in the checkpoints of runs: by its definition, over what was read whole."""
    folder, expected = write(tmp_path / "base", stored, tied=True), hashlib.sha256()
    for name, tensor in sorted(unique_state(read_whole(folder, torch.float32)).items()):
        expected.update(f"{name} {list(tensor.shape)} ".encode() + tensor.numpy().tobytes())
    model, _ = build(ModelRecipe(str(folder), "auto", {}, 0))
    assert module_digest(model) == expected.hexdigest() == module_digest(materialize_(model))


def exported(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("max_shard_bytes", [SHARD_BYTES, 10**9])
@pytest.mark.parametrize("stored", ["bf16", "fp32"])
def test_shards_are_the_librarys_bytes(tmp_path: Path, stored: str, max_shard_bytes: int) -> None:
    folder = write(tmp_path / "base", stored)
    save_model(mapped_model(folder), tmp_path / "out", max_shard_bytes=max_shard_bytes)
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        save_file(load_file(path), tmp_path / "library", metadata={"format": "pt"})
        assert (tmp_path / "library").read_bytes() == path.read_bytes()
    assert same(load_model(tmp_path / "out"), load_model(folder))


def adapter_of(folder: Path, base: Path) -> Path:
    model, lora = load_model(base, torch.float32), Lora(4, 6.0)
    install_adapters(model, lora)
    save_adapter(pack_adapters(trained(model), lora, str(base)), folder)
    return folder


def merged_at_once(folder: Path, base: Path) -> Llama:
    """The slow reference: the whole model in memory, then merged, in the dtype of the base or in
    fp32.
    """
    mixed = len({each.dtype for each in read_headers(base).values()}) > 1
    model, stored = read_whole(base, torch.float32 if mixed else None), read_adapter(folder)
    install_adapters(model, stored.lora, start=stored)
    merge(model)
    return model


@pytest.mark.parametrize(("stored", "tied"), thinned(STORED, [False, True]))
def test_merged_and_exported(tmp_path: Path, stored: str, tied: bool) -> None:
    base = write(tmp_path / "base", stored, tied)
    adapter = adapter_of(tmp_path / "adapter", base)
    expected = merged_at_once(adapter, base)
    model, tokenizer, _ = load_to_export(adapter)
    for name, each in (("at once", expected), ("one by one", model)):
        save_model(each, tmp_path / name, tokenizer, SHARD_BYTES)
    assert exported(tmp_path / "one by one") == exported(tmp_path / "at once")
    assert same(load(adapter)[0], expected) and same(load_model(tmp_path / "one by one"), expected)
    assert not same(expected, read_whole(base, expected.lm_head.weight.dtype)), (
        "the adapters change something"
    )


@pytest.mark.parametrize(
    ("stored", "dtype"), thinned(["bf16", "fp32", "mixed"], [None, "f32", "q8_0"])
)
def test_merged_for_llama_cpp(tmp_path: Path, stored: str, dtype: str | None) -> None:
    pytest.importorskip(
        "gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'"
    )
    base = write(tmp_path / "base", stored)
    adapter = adapter_of(tmp_path / "adapter", base)
    for name, model in (
        ("at once", merged_at_once(adapter, base)),
        ("one by one", load_to_export(adapter)[0]),
    ):
        save_gguf(model, tmp_path / name, Tokenizer.bytes(), dtype, lambda line: None)
    assert exported(tmp_path / "one by one") == exported(tmp_path / "at once")


@pytest.mark.parametrize(
    ("stored", "dtype"), thinned(["fp32", "bf16", "fp64"], [None, torch.float32, torch.bfloat16])
)
def test_experts_of_all_shards_become_one_tensor(
    tmp_path: Path, stored: str, dtype: torch.dtype | None
) -> None:
    folder = write(tmp_path / "base", stored, **MIXTURE)
    found, expected = mapped_model(folder, dtype), read_whole(folder, dtype)
    rounded = torch.promote_types(STORED[stored], dtype or STORED[stored]) != (
        dtype or STORED[stored]
    )
    assert sum(isinstance(p, MappedPieces) for p in found.parameters()) == (0 if rounded else 6)
    assert module_digest(found) == module_digest(expected)
    for name, each in (("at once", expected), ("one by one", found)):
        save_model(each, tmp_path / name, None, SHARD_BYTES)
    assert exported(tmp_path / "one by one") == exported(tmp_path / "at once")
    assert same(materialize_(found), expected) and not any(
        isinstance(p, MappedWeight) for p in found.parameters()
    )


# Which is for a resident engine alone.
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"no masters"}))
def test_experts_in_planes_and_stages(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "base", "bf16", **MIXTURE)
    masters = [build(ModelRecipe(str(folder), "auto", {}, 0))[0] for _ in range(2)]
    whole, options = (
        read_whole(folder, torch.float32),
        {"optim": OPTIMIZERS[name], "precision": Precision("bf16")},
    )
    resident = Resident(materialize_(masters[0], trained=False), **options)
    streamed = Streamed(masters[1], placement=Placement(), **options)
    states = [engine.state().model for engine in (resident, streamed, Resident(whole, **options))]
    assert all(torch.equal(state[key], states[2][key]) for state in states for key in states[2])
