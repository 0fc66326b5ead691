# Run: pytest tests/model/test_quantised.py
"""Folders with weights in 4 or 8 bits have the numbers that their formats define, in every family's files, and
a base of adapters keeps their codes.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import few_bits
from few_bits import by_definition, by_rows, four_bits, fp8, int8, quantise
from model.family_shapes import in_files
from model.seeing import seeing
from monograph.errors import InputRefused
from monograph.graph.frozen import FrozenWeight, NF4Weight
from monograph.graph.lora import Lora, adapted_layers
from monograph.graph.lora_merge import plain_parameters
from monograph.graph.mmap_weights import MappedPieces, Pieces, materialize_
from monograph.graph.precision import Precision
from monograph.model import quantised, stored_parts
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.files import mapped_weights, read_header
from monograph.model.hub import load_model, mapped_model, read_config, read_few_bits, save_model
from monograph.model.layouts import to_file_tensors
from monograph.model.llama import Llama
from monograph.model.quantisation import Format, Quantisation
from monograph.model.whole_folder import save_whole
from monograph.predict.estimate import _count_sizes
from monograph.run.source import ModelSource

# 192 is no multiple of 128, so that blocks of fp8 are cut at the edges.
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {"pad_token_id": 0, "eos_token_id": 1},  # files join projections
    "qwen3_moe": MIXTURE,  # files list experts
}
FORMS = ("nf4", "int8", "fp8", "rows")


def write(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(0)
    sizes = SIZES | FAMILIES.get(family, {})
    if family in ("llama", "phi3"):
        sizes = sizes | {"head_dim": 16}
    save_model(Llama(LlamaConfig(model_type=family, **sizes)).to(dtype), folder)
    return folder


def file_tensors(model: Llama) -> dict[str, Tensor]:
    """A model's tensors with the names and shapes of its family's files."""
    named = to_file_tensors(plain_parameters(model), model.config)
    return {tensor.name: tensor.read() for tensor in named}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_what_their_format_defines(
    tmp_path: Path, family: str, form: str, dtype: torch.dtype
) -> None:
    stored = quantise(
        write(tmp_path / "model", family, dtype), form, skipped=("layers.1.self_attn",)
    )
    found = file_tensors(load_model(tmp_path / "model"))
    quantised_names = set[str]()
    for name, tensor in found.items():
        expected = stored[name]
        if expected.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            expected = by_definition(stored, name).to(dtype)
            quantised_names.add(name)
        assert tensor.dtype == dtype and torch.equal(tensor, expected), name
    skipped = {name for name in found if "layers.1.self_attn" in name}
    assert quantised_names and skipped and not quantised_names & skipped


SQUARE = (128, 128)
# What writes a weight, its shape, and the blocks of fp8.
SHAPES: list[tuple[few_bits.Writer, tuple[int, ...], tuple[int, int] | None]] = [
    (four_bits, (5, 37), None),  # a byte with one code, and a block that is cut
    (partial(four_bits, nested=False), (7, 50), None),
    (partial(four_bits, block=128), (300, 128), None),  # more than one group of scales
    (partial(four_bits, block=4096), (70, 64), None),
    (partial(four_bits, kind="fp4"), (6, 64), None),
    (partial(four_bits, kind="fp4", nested=False, storage=torch.bfloat16), (8, 64), None),
    (partial(four_bits, storage=torch.float32), (3, 24, 64), None),
    (int8, (5, 37), None),
    (fp8, (128, 256), SQUARE),
    (fp8, (200, 130), SQUARE),  # blocks are cut at both edges
    (fp8, (130, 40), SQUARE),
    (partial(fp8, block=(16, 64)), (70, 130), (16, 64)),
    (partial(fp8, block=(10**12, 10**12)), (9, 20), (10**12, 10**12)),  # larger than any memory
    (partial(fp8, block=None), (9, 20), None),
    (partial(fp8, block=None, scale="_scale"), (9, 20), None),
    (fp8, (3, 150, 140), SQUARE),  # experts in one tensor
    (partial(by_rows, dtype=torch.float8_e4m3fn), (9, 20), None),
    (by_rows, (9, 20), None),
]


@pytest.mark.parametrize(("write_weight", "shape", "block"), SHAPES)
@pytest.mark.parametrize("at_once", [1, 128, stored_parts.NUMBERS_AT_ONCE])
def test_a_weight_of_any_shape_is_dequantised_as_defined(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_weight: few_bits.Writer,
    shape: tuple[int, ...],
    block: tuple[int, int] | None,
    at_once: int,
) -> None:
    """It is, however many numbers are dequantised at once."""
    monkeypatch.setattr(stored_parts, "NUMBERS_AT_ONCE", at_once)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=draw) * torch.linspace(0.1, 3, shape[-1])
    stored = write_weight("x.weight", weight)
    found = read_alone(tmp_path, stored, block)
    assert torch.equal(found, by_definition(stored, "x.weight", block or SQUARE).bfloat16())
    # The fixture itself is a rounded copy of the weight.
    assert (found.float() - weight).abs().max() < 0.2 * weight.abs().max()


def read_alone(folder: Path, stored: dict[str, Tensor], block: tuple[int, int] | None) -> Tensor:
    """Read the weight x.weight from a file with a larger tensor in bf16."""
    path = folder / "x.safetensors"
    save_file({**stored, "embedding": torch.zeros(1000, 100, dtype=torch.bfloat16)}, path)
    form: Format = "scaled"
    if any("quant_state" in name for name in stored):
        form = "4bit"
    elif "x.SCB" in stored:
        form = "int8"
    folded = quantised.fold(read_header(path), Quantisation(form, "label", block=block))
    assert set(folded) == {"x.weight", "embedding"}
    weight = dict(mapped_weights(folded))["x.weight"]
    assert isinstance(weight, Pieces)
    return weight.read()


@pytest.mark.parametrize("block", [[128, 128], None])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fp8_is_the_numbers_that_transformers_reads(
    tmp_path: Path, family: str, block: list[int] | None
) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    # transformers refuses blocks that are cut at the edges.
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    sizes |= (MIXTURE | {"moe_intermediate_size": 128}) if family == "qwen3_moe" else {}
    torch.manual_seed(0)
    save_model(Llama(LlamaConfig(model_type=family, **sizes)).bfloat16(), tmp_path / "model")
    write_weight = partial(fp8, block=tuple(block) if block else None)
    quantise(tmp_path / "model", "fp8", write_weight, weight_block_size=block)
    plain = FineGrainedFP8Config(dequantize=True, weight_block_size=block)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=plain, dtype=torch.bfloat16
    ).state_dict()
    ours = load_model(tmp_path / "model")
    mine = in_files(ours.state_dict(), ours.config)
    if family == "qwen3_moe":
        mine = fused(mine)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a mixture as transformers has them in memory: gate and up of all experts as one."""
    result = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            result[name.replace("gate_proj.weight", "gate_up_proj")] = torch.cat([tensor, up], 1)
        elif name.endswith("experts.down_proj.weight"):
            result[name.removesuffix(".weight")] = tensor
        elif not name.endswith("experts.up_proj.weight"):
            result[name] = tensor
    return result


@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_the_text_model_of_one_that_sees_is_dequantised(tmp_path: Path, form: str) -> None:
    """Its tensors have another prefix in the file; layers for pictures are dense."""
    seeing("qwen3_5").save_pretrained(tmp_path / "seeing")
    stored = quantise(tmp_path / "seeing", form, skipped=("visual",))
    found = load_model(tmp_path / "seeing").state_dict()
    few = read_few_bits(tmp_path / "seeing")
    assert few is not None and few.dtype == "F32"
    quantised_names = 0
    for name, tensor in found.items():
        in_file = name.replace("model.", "model.language_model.", 1)
        if in_file in stored and stored[in_file].dtype in (torch.uint8, torch.float8_e4m3fn):
            quantised_names += 1
            assert torch.equal(tensor, by_definition(stored, in_file)), name
    assert quantised_names > 3


ADOPTED = {"nf4": "nf4", "int8": "int8", "rows": "int8"}


@pytest.mark.parametrize("form", ADOPTED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_keeps_the_codes_of_its_folder(tmp_path: Path, family: str, form: str) -> None:
    """Its weights have the bits of the dequantised ones, and layers that are dense in the folder stay so."""
    folder = write(tmp_path / "model", family)
    quantise(folder, form, skipped=("layers.1.self_attn",))
    base = ADOPTED[form]
    few = read_few_bits(folder)
    assert few is not None and few.base == base and few.dtype == "BF16"
    lora = Lora(4, base=base, dense=few.dense)  # type: ignore[arg-type]
    model = mapped_model(folder, torch.float32)
    install_adapters(model, lora, precision=Precision("bf16"), device=torch.device("cpu"))
    expected = dict(load_model(folder).named_parameters())
    frozen = 0
    for name, layer in model.named_modules():
        if isinstance(layer, FrozenWeight):
            frozen += 1
            assert torch.equal(layer.dense().bfloat16(), expected[f"{name}.weight"]), name
    in_few_bits = {
        name
        for name, weight in mapped_model(folder).named_parameters()
        if isinstance(weight, MappedPieces)
    }
    assert frozen == len(in_few_bits) > 0
    attention = adapted_layers(model)["model.layers.1.self_attn.q_proj"]
    assert "model.layers.1.self_attn.q_proj" in few.dense
    assert torch.equal(attention.weight, expected["model.layers.1.self_attn.q_proj.weight"])


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("block", [64, 256])
def test_on_the_codes_of_its_folder_a_model_computes_the_bits_of_the_dequantised_one(
    tmp_path: Path, kind: str, block: int
) -> None:
    folder = write(tmp_path / "model", "qwen3_moe")
    write_weight = partial(four_bits, kind=kind, block=block)
    quantise(folder, "nf4", write_weight, bnb_4bit_quant_type=kind)
    tokens = torch.arange(24).view(2, 12)
    outputs = []
    for base in ("auto", "nf4", "int8"):
        model = mapped_model(folder, torch.float32)
        precision = Precision("bf16")
        install_adapters(model, Lora(4, base=base), precision=precision)  # type: ignore[arg-type]
        materialize_(model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            outputs.append(model(tokens))
        levels = [layer.levels for layer in model.modules() if isinstance(layer, NF4Weight)]
        assert bool(levels) == (base == "nf4")
        assert all(each.dtype == torch.float32 for each in levels)
    assert torch.equal(outputs[0], outputs[1])
    # Eight bits round the numbers again.
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("form", ADOPTED)
def test_the_plan_counts_the_bytes_of_the_base(tmp_path: Path, form: str) -> None:
    folder = write(tmp_path / "model", "qwen3_moe")
    quantise(folder, form, skipped=("layers.1.self_attn",))
    few = ModelSource.open(str(folder)).few_bits
    assert few is not None
    lora = Lora(4, base=few.base, dense=few.dense, exact_scales=few.base == "nf4")
    model = mapped_model(folder, torch.float32)
    install_adapters(model, lora, precision=Precision("bf16"))
    kept = sum(p.nbytes for p in materialize_(model).parameters() if not p.requires_grad)
    assert _count_sizes(read_config(folder), lora, "bf16").base_bytes == kept


def _changed(part: str, change: Any) -> Any:
    """Change the tensors with a part of a name; leave those out that become None."""

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = {name: change(each) if part in name else each for name, each in tensors.items()}
        assert changed.keys() == tensors.keys() and any(part in name for name in tensors)
        return {name: each for name, each in changed.items() if each is not None}

    return spoil


def drop(_: Tensor) -> None:
    return None


LAYER = "layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("form", "part", "change", "said"),
    [
        ("nf4", f"{LAYER}.weight.absmax", drop, r"weight.absmax is missing, which .*quant_state"),
        ("nf4", f"{LAYER}.weight.nested_quant_map", drop, r"weight.nested_quant_map is missing"),
        ("nf4", f"{LAYER}.weight.quant_state", drop, r"weight is U8, and no scales of bitsandbytes nf4"),
        ("nf4", f"{LAYER}.weight.quant_state", lambda t: t[:-1], r"bitsandbytes__nf4 is not JSON"),
        ("nf4", f"{LAYER}.weight.quant_state", lambda t: t[:0], r"bitsandbytes__nf4 is not JSON"),
        ("nf4", f"{LAYER}.weight.quant_state", lambda t: torch.tensor([91, 93]).byte(), r"__nf4 is not a t"),  # []
        ("nf4", f"{LAYER}.weight.quant_state", lambda t: t.repeat(100), r"expected at most 4096 bytes, U8"),
        ("nf4", f"{LAYER}.weight.nested_absmax", lambda t: t.repeat(2), r"nested_absmax is F32 of shape \[2\], expe"),
        ("nf4", f"{LAYER}.weight.absmax", lambda t: t[1:], r"absmax is U8 of shape \[191\], expected U8 "),
        ("nf4", f"{LAYER}.weight.absmax", Tensor.float, r"absmax is F32 of shape \[192\], expected U8 of "),
        ("int8", f"{LAYER}.SCB", drop, r"down_proj.SCB is missing, which .*down_proj.weight needs"),
        ("int8", f"{LAYER}.SCB", lambda t: t[1:], r"SCB is F32 of shape \[63\], expected F32 of shape \[64\]"),
        ("int8", f"{LAYER}.weight_format", lambda t: t + 2, r"weight_format = 2: expected 0, rows in order"),
        ("int8", f"{LAYER}.weight_format", Tensor.float, r"weight_format is F32 of shape \[\], expected one byte"),
        ("int8", "model.norm.weight", Tensor.char, r"norm.weight is I8 of shape \[64\], expected a mat"),
        ("fp8", f"{LAYER}.weight_scale_inv", drop, r"weight_scale_inv or .*weight_scale is missing, which"),
        ("fp8", f"{LAYER}.weight_scale_inv", lambda t: t.mT, r"scale_inv is F32 of shape \[2, 1\], expected .*\[1, 2"),
        ("fp8", f"{LAYER}.weight_scale_inv", lambda t: t[0], r"scale_inv is F32 of shape \[2\], expected .*\[1, 2\]"),
        ("fp8", f"{LAYER}.weight_scale_inv", Tensor.int, r"scale_inv is I32 of shape \[1, 2\], expected one of F64"),
        ("fp8", "gate_proj.weight_scale_inv", lambda t: t.mT, r"scale_inv is F32 of shape \[1, 2\], expected"),
        ("rows", f"{LAYER}.weight_scale", lambda t: t.mT, r"weight_scale is F32 of shape \[1, 64\], expected"),
        ("fp8", "norm.weight", lambda t: t.to(torch.float8_e4m3fn), r"norm.weight_scale is missing"),
    ],
)  # fmt: skip
def test_a_damaged_weight_is_refused_by_name(
    tmp_path: Path, form: str, part: str, change: Any, said: str
) -> None:
    quantise(write(tmp_path / "model"), form, spoil=_changed(part, change))
    with pytest.raises(InputRefused, match=said) as caught:
        mapped_model(tmp_path / "model")
    assert "model.safetensors" in str(caught.value) and "\n" not in str(caught.value)


STATES: list[dict[str, Any]] = [
    {"shape": [64]},
    {"shape": "64"},
    {"shape": [64, -1]},
    {"shape": [64, True]},
    {"blocksize": 0},
    {"blocksize": 64.0},
    {"blocksize": None},
    {"nested_blocksize": -1},
    {"nested_offset": "0"},
    {"nested_offset": 1e300},
    {"nested_offset": float("nan")},
]


@pytest.mark.parametrize("values", STATES)
def test_a_description_with_a_wrong_value_is_refused(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    def spoiled(content: Tensor) -> Tensor:
        state = {**json.loads(bytes(content.tolist())), **values}
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    quantise(
        write(tmp_path / "model"), "nf4", spoil=_changed(f"{LAYER}.weight.quant_state", spoiled)
    )
    with pytest.raises(
        InputRefused, match=r"down_proj.weight.quant_state.bitsandbytes__nf4 says shape ="
    ):
        mapped_model(tmp_path / "model")


def test_without_its_key_blocks_have_the_size_that_transformers_takes(tmp_path: Path) -> None:
    for number, block in enumerate([(128, 128), None]):
        folder = tmp_path / str(number)
        stored = quantise(write(folder), "fp8", partial(fp8, block=block))
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]["weight_block_size"]
        (folder / "config.json").write_text(json.dumps(config))
        name = "model.layers.0.mlp.up_proj.weight"
        found = load_model(folder).get_parameter(name)
        assert torch.equal(found, by_definition(stored, name).bfloat16())


def test_a_weight_of_another_shape_is_refused_by_the_keys_of_its_config(tmp_path: Path) -> None:
    quantise(write(tmp_path / "model"), "nf4")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 128}))
    with pytest.raises(
        InputRefused, match=r"proj.weight has shape \[.*192.*\], expected .*intermediate_size"
    ):
        mapped_model(tmp_path / "model")


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
INTEGERS = COMPRESSED | {"format": "int-quantized"}
BITS_4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FLOAT = {"weights": {"num_bits": 8, "type": "float"}}
INT = {"weights": {"num_bits": 8, "type": "int"}}
FLOAT_4 = {"weights": {"num_bits": 4, "type": "float"}}
ASYMMETRIC = {"weights": {"num_bits": 8, "type": "int", "symmetric": False}}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quant_method = 'gptq' is not read, only .*: name the folder in 16"),
        ({"quant_method": "awq"}, r"quant_method = 'awq' is not read, only .*: name the folder in 16 bits"),
        ({"quant_method": "hqq"}, r"quant_method = 'hqq' is not read, only .*since this method quantises when"),
        ({"quant_method": "aqlm"}, r"quant_method = 'aqlm' is not read, .*: load the model in the program"),
        ({"quant_method": "torchao"}, r"quant_method = 'torchao' is not read"),
        ({"quant_method": "mxfp4"}, r"quant_method = 'mxfp4' is not read"),  # only gpt-oss has it
        ({"bits": 4}, r"quant_method = None is not read"),
        ("nf4", r"quantization_config = 'nf4': expected a table"),
        ({"quant_method": "bitsandbytes"}, r"expected load_in_4bit or load_in_8bit = true"),
        (BITS_4 | {"bnb_4bit_quant_type": "int4"}, r"bnb_4bit_quant_type = 'int4'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size = \[128\]: expected two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 9]}, r"weight_block_size = \[0, 9\]: expected two whole"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, r"expert_dtype = 'fp4' is not read"),
        (COMPRESSED | {"format": "pack-quantized"}, r"format = 'pack-quantized' of compressed"),
        (COMPRESSED | {"config_groups": {"a": FLOAT_4}}, r"config_groups.a.weights = .*: expected 8 bits"),
        (COMPRESSED | {"config_groups": {"a": FLOAT, "b": INT}}, r"several formats in one folder"),
        (COMPRESSED | {"config_groups": {"a": {}}}, r"config_groups.a.weights = None: expected 8 bits"),
        (COMPRESSED | {"config_groups": {"a": FLOAT}, "transform_config": {"b": 1}}, r"sparse or transformed"),
        (INTEGERS | {"config_groups": {"a": INT}, "sparsity_config": ["2:4"]}, r"sparse or transformed"),
        (INTEGERS | {"config_groups": {"a": ASYMMETRIC}}, r"config_groups.a.weights = .*: expected 8 bits"),
    ],
)  # fmt: skip
def test_another_method_is_refused_with_what_to_do(tmp_path: Path, table: Any, said: str) -> None:
    path = write(tmp_path / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": table}))
    with pytest.raises(InputRefused, match=said):
        read_config(tmp_path / "model")


def test_an_unknown_model_type_in_few_bits_is_computed_as_the_nearest_family(
    tmp_path: Path,
) -> None:
    stored = quantise(write(tmp_path / "model"), "nf4")
    path = tmp_path / "model" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(
        json.dumps(values | {"model_type": "newest", "architectures": ["NewestForCausalLM"]})
    )
    name = "model.layers.0.mlp.up_proj.weight"
    weight = load_model(tmp_path / "model").get_parameter(name)
    assert torch.equal(weight, by_definition(stored, name).bfloat16())


def test_an_export_has_no_quantised_weight(tmp_path: Path) -> None:
    quantise(write(tmp_path / "model"), "nf4")
    model = load_model(tmp_path / "model")
    save_model(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    exported = load_model(tmp_path / "out")
    assert all(
        torch.equal(tensor, exported.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_no_trained_weights_are_put_back_into_few_bits(
    tmp_path: Path, form: str, family: str
) -> None:
    skipped = ("self_attn",) if family == "qwen3_moe" else ()
    quantise(write(tmp_path / "model", family), form, skipped=skipped)
    model = load_model(tmp_path / "model")
    with pytest.raises(
        InputRefused, match=r"is stored in 4 or 8 bits, to which trained weights are not"
    ):
        save_whole(model, tmp_path / "model", tmp_path / "whole", None)
    assert not (tmp_path / "whole").exists()


def test_experts_are_dequantised_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a weight of all experts is read, no more than one expert is held besides it."""
    quantise(write(tmp_path / "model", "qwen3_moe"), "nf4")
    weight = mapped_model(tmp_path / "model").get_parameter(
        "model.layers.0.mlp.experts.up_proj.weight"
    )
    assert isinstance(weight, MappedPieces)
    alive = 0
    most = 0

    class Counted(Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def counted(parts: list[Tensor], join: Any) -> Tensor:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return join(parts).as_subclass(Counted)

    pieces = weight.pieces
    parts = [
        part._replace(join=partial(counted, join=part.join))
        for part in pieces.parts  # type: ignore[union-attr]
    ]
    pieces._replace(parts=parts).read()
    assert most <= 2
