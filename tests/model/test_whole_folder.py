# Run: pytest tests/model/test_whole_folder.py
"""A trained text model in the folder of the whole model: transformers loads it, the other tensors keep
their bits, and nothing is written of a model that does not fit.
"""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chats import speaking
from model.seeing import MODELS, seeing
from monograph.errors import DiskFull, InputRefused
from monograph.graph.lora import Lora, adapt
from monograph.graph.lora_merge import merge
from monograph.laws.comparisons import relative_error
from monograph.model import files, whole_folder
from monograph.model.hub import load_model
from monograph.model.llama import Llama
from monograph.model.vocabulary import set_new_rows
from monograph.model.whole_folder import save_whole
from monograph.text.tokenizer import Tokenizer

FUSED = "qwen3_5_moe, fused"  # gates and ups of all experts in one tensor, as in published folders
KINDS = [*MODELS, FUSED, "qwen3_next"]
MTP = "mtp.layers.0.input_layernorm.weight"
# Files of the original, of which the last two are not copied.
OTHERS = {
    "preprocessor_config.json": "{}",
    "LICENSE": "as it is",
    "tokenizer.model": "pieces",
    "modeling_evil.py": "raise SystemExit",
    "pytorch_model.bin": "pickle",
}


def next_model() -> Any:
    """A model that sees nothing, but has layers for multi-token prediction."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text, _, _ = MODELS["qwen3_5_moe"]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **text)).eval()


def write_original(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> None:
    """Write a whole model in shards, with layers for multi-token prediction and other files."""
    torch.manual_seed(0)
    theirs = next_model() if kind == "qwen3_next" else seeing(kind.partition(",")[0])
    theirs.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    if kind == FUSED:
        fuse_experts(folder, theirs.state_dict())
    if not kind.startswith(("gemma", "mistral")):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"][MTP] = "mtp.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file({MTP: torch.randn(32).to(dtype)}, folder / "mtp.safetensors")
    for name, text in OTHERS.items():
        (folder / name).write_text(text)


def fuse_experts(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of each expert by those of all experts, which transformers has in memory."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = [name for name in index["weight_map"] if ".mlp.experts." in name]
    for name in names:
        file = folder / index["weight_map"].pop(name)
        tensors = load_file(file)
        del tensors[name]
        save_file(tensors, file, {"format": "pt"})
    fused = {name: each for name, each in state.items() if ".mlp.experts." in name}
    save_file(fused, folder / "experts.safetensors", {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(fused, "experts.safetensors")
    path.write_text(json.dumps(index))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by name."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def trained(folder: Path, dtype: torch.dtype | None = None) -> Llama:
    """The text model of a folder, as a training in fp32 would leave it: each weight has moved."""
    model = load_model(folder, dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.05 * noise.to(parameter.dtype)
    return model


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by their paths in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind, by its name."""
    folder = tmp_path_factory.mktemp("originals")
    for kind in KINDS:
        write_original(folder / kind, kind)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_what_the_trained_text_model_does(
    originals: Path, tmp_path: Path, kind: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    original = originals / kind
    model = trained(original)
    written = save_whole(model, original, tmp_path / "whole", None)
    loader = AutoModelForCausalLM if kind == "qwen3_next" else AutoModelForImageTextToText
    theirs, loading = loader.from_pretrained(
        tmp_path / "whole",
        dtype=torch.float64,
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(loading.values()), loading
    again = load_model(tmp_path / "whole").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(again[name], weight), name
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.double()
        expected = theirs.eval()(input_ids=tokens).logits
        # transformers computes norms and rotary angles in fp32, also of a model in fp64.
        assert relative_error(ours.logits(ours(tokens)), expected) < 1e-6
    before, after = stored(original), stored(tmp_path / "whole")
    assert before.keys() == after.keys()
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    others = {name for name in before if name.startswith(tuple(written.prefixes))}
    assert unchanged == others and len(others) == written.others
    assert written.trained == len(before) - len(others)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_an_untrained_model_put_back_is_the_original_to_the_byte(
    tmp_path: Path, kind: str, dtype: torch.dtype | None
) -> None:
    """Also from a run, whose weights are fp32, where the original has bf16."""
    write_original(tmp_path / "original", kind, torch.bfloat16)
    model = load_model(tmp_path / "original", dtype)
    written = save_whole(model, tmp_path / "original", tmp_path / "whole", None)
    expected = contents(tmp_path / "original")
    for name in written.not_copied:
        del expected[name]
    assert contents(tmp_path / "whole") == expected
    assert written.not_copied == ["modeling_evil.py", "pytorch_model.bin"]
    assert written.rounded_to == ([] if dtype is None else ["BF16"])


def test_trained_weights_are_rounded_once(tmp_path: Path) -> None:
    write_original(tmp_path / "original", "qwen3_5", torch.bfloat16)
    model = trained(tmp_path / "original", torch.float32)
    save_whole(model, tmp_path / "original", tmp_path / "whole", None)
    again = load_model(tmp_path / "whole").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(again[name], weight.bfloat16()), name


def test_a_tied_head_is_stored_as_often_as_in_the_original(tmp_path: Path) -> None:
    write_original(tmp_path / "original", "gemma3")
    tensors = stored(tmp_path / "original")
    for path in (tmp_path / "original").glob("model*"):
        path.unlink()
    embedding = "model.language_model.embed_tokens.weight"
    if embedding not in tensors:
        embedding = "language_model.model.embed_tokens.weight"
    tensors["lm_head.weight"] = tensors[embedding].clone()
    save_file(tensors, tmp_path / "original" / "model.safetensors", {"format": "pt"})
    model = trained(tmp_path / "original")
    save_whole(model, tmp_path / "original", tmp_path / "whole", None)
    after = stored(tmp_path / "whole")
    assert torch.equal(after["lm_head.weight"], model.model.embed_tokens.weight)
    assert torch.equal(after[embedding], model.model.embed_tokens.weight)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5_moe", FUSED])
def test_adapters_are_merged(originals: Path, tmp_path: Path, kind: str) -> None:
    model = load_model(originals / kind)
    targets = ("q_proj", "down_proj")
    adapt(model, Lora(rank=2, targets=targets))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):
                parameter.fill_(0.5)
    save_whole(model, originals / kind, tmp_path / "whole", None)
    merge(model)
    merged, after = model.state_dict(), load_model(tmp_path / "whole").state_dict()
    before = load_model(originals / kind).state_dict()
    for name in merged:
        assert torch.equal(after[name], merged[name]), name
        is_adapted = name.removesuffix(".weight").endswith(targets)
        assert torch.equal(after[name], before[name]) != is_adapted, name


def changed_config(original: Path) -> None:
    path = original / "config.json"
    values = json.loads(path.read_text())
    values["text_config"]["rms_norm_eps"] = 0.5
    path.write_text(json.dumps(values))


def lost_shard(original: Path) -> None:
    sorted(original.glob("model-*"))[1].unlink()


def lost_tensor(original: Path) -> None:
    path = original / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(name for name in index["weight_map"] if name.endswith("0.mlp.up_proj.weight"))
    file = original / index["weight_map"].pop(name)
    path.write_text(json.dumps(index))
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})


def cut_shard(original: Path) -> None:
    path = next(original.glob("model-*"))
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (changed_config, "its text model has rms_norm_eps = 0.5, and the model .* 1e-06: name"),
        (lost_shard, "'model-00002-of-.*' is not a file in this folder"),
        (lost_tensor, r"1 missing in the weights .* 'model.layers.0.mlp.up_proj.weight'"),
        (cut_shard, "model-.*safetensors: damaged, or not a safetensors file"),
    ],
)
def test_an_original_that_does_not_fit_is_refused(
    originals: Path, tmp_path: Path, damage: Any, why: str
) -> None:
    shutil.copytree(originals / "qwen3_5", tmp_path / "original")
    model = load_model(originals / "qwen3_5")
    damage(tmp_path / "original")
    with pytest.raises(InputRefused, match=why) as refused:
        save_whole(model, tmp_path / "original", tmp_path / "whole", None)
    assert "\n" not in str(refused.value) and str(tmp_path / "original") in str(refused.value)
    assert not (tmp_path / "whole").exists()


def test_a_model_with_other_tokens_or_chats_is_refused(originals: Path, tmp_path: Path) -> None:
    original = tmp_path / "original"
    shutil.copytree(originals / "gemma3", original)
    model = load_model(original)
    tokenizer = speaking(original, "thinking")
    save_whole(model, original, tmp_path / "whole", tokenizer)
    with pytest.raises(InputRefused, match=r"its tokenizer.json is not the model's"):
        save_whole(model, original, tmp_path / "no", Tokenizer.bytes())
    (original / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(InputRefused, match=r"its chat templates are not the model's"):
        save_whole(model, original, tmp_path / "no", tokenizer)
    assert not (tmp_path / "no").exists()


def test_a_model_with_rows_for_new_tokens_is_refused(originals: Path, tmp_path: Path) -> None:
    model = load_model(originals / "gemma3")
    set_new_rows(model, known=64, tokens=66)
    with pytest.raises(
        InputRefused, match=r"has vocab_size = 64, and .* 66: .* without new tokens"
    ):
        save_whole(model, originals / "gemma3", tmp_path / "whole", None)


def test_a_weight_that_the_original_cannot_hold_is_refused(tmp_path: Path) -> None:
    write_original(tmp_path / "original", "qwen3_5", torch.float16)
    model = load_model(tmp_path / "original", torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = 1e5
    with pytest.raises(InputRefused, match=r"1.mlp.up_proj.weight: a trained .* large for F16"):
        save_whole(model, tmp_path / "original", tmp_path / "whole", None)
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


@pytest.mark.parametrize("step", ["copy_file", "overwrite_tensor"])
def test_a_full_disk_leaves_nothing(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    calls = []
    usual = getattr(files, step)

    def write_some(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(*arguments)

    monkeypatch.setattr(whole_folder, step, write_some)
    model = load_model(originals / "qwen3_5")
    with pytest.raises(DiskFull, match="no space left to write the model"):
        save_whole(model, originals / "qwen3_5", tmp_path / "out" / "whole", None)
    assert len(calls) == 3 and not list((tmp_path / "out").iterdir())


def test_a_file_that_is_a_link_out_of_the_original_is_not_followed(
    originals: Path, tmp_path: Path
) -> None:
    shutil.copytree(originals / "gemma3", tmp_path / "original")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "original" / "notes.txt").symlink_to(tmp_path / "secret")
    model = load_model(tmp_path / "original")
    with pytest.raises(InputRefused, match=r"notes.txt: is a link out of its folder"):
        save_whole(model, tmp_path / "original", tmp_path / "whole", None)
