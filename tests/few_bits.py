"""Folders with weights in 4 or 8 bits, written as other programs write them, and their numbers by definition."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# The numbers of bitsandbytes 0.50's 4-bit codes.
TABLES = {
    "nf4": [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    "fp4": [
        sign * magnitude / 12 for sign in (1.0, -1.0) for magnitude in (0, 0.0625, 8, 12, 4, 6, 2, 3)
    ],
}  # fmt: skip
# A stand-in for the table of quantised scales, whose steps are not equal either.
SCALE_TABLE = torch.linspace(-1, 1, 256) ** 3

Writer = Callable[[str, Tensor], dict[str, Tensor]]


def four_bits(
    name: str,
    weight: Tensor,
    kind: str = "nf4",
    nested: bool = True,
    block: int = 64,
    storage: torch.dtype = torch.uint8,
) -> dict[str, Tensor]:
    """A weight as bitsandbytes stores it in 4 bits; `nested`: the scales of blocks are quantised as well."""
    flat = weight.float().flatten()
    table = torch.tensor(TABLES[kind])
    absmax = torch.stack([part.abs().max() for part in flat.split(block)])
    scales = absmax.repeat_interleave(block)[: len(flat)]
    codes = ((flat / scales)[:, None] - table).abs().argmin(1).to(torch.uint8)
    codes = torch.cat([codes, codes.new_zeros(len(codes) % 2)])
    packed = (codes[::2] << 4) | codes[1::2]
    state: dict[str, Any] = {
        "quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape),
    }  # fmt: skip
    tensors = {name: packed.view(storage)[:, None], f"{name}.quant_map": table}
    if nested:
        offset = absmax.mean()
        deviation = absmax - offset
        largest = torch.stack([part.abs().max() for part in deviation.split(256)])
        shares = deviation / largest.repeat_interleave(256)[: len(deviation)].clamp_min(1e-30)
        tensors[f"{name}.absmax"] = (shares[:, None] - SCALE_TABLE).abs().argmin(1).to(torch.uint8)
        tensors[f"{name}.nested_absmax"] = largest
        tensors[f"{name}.nested_quant_map"] = SCALE_TABLE.clone()
        state |= {
            "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item(),
        }  # fmt: skip
    else:
        tensors[f"{name}.absmax"] = absmax
    text = json.dumps(state).encode()
    described = torch.tensor(list(text), dtype=torch.uint8)
    return {**tensors, f"{name}.quant_state.bitsandbytes__{kind}": described}


def int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A weight as bitsandbytes stores it in 8 bits."""
    largest = weight.float().abs().amax(-1)
    codes = (weight.float() * 127 / largest[:, None]).round().to(torch.int8)
    layer = name.removesuffix("weight")
    return {
        name: codes,
        f"{layer}SCB": largest,
        f"{layer}weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def fp8(
    name: str, weight: Tensor, block: tuple[int, int] | None = (128, 128), scale: str = "_scale_inv"
) -> dict[str, Tensor]:
    """A weight in 8-bit floats with a scale for each block, or one for all."""
    *experts, rows, columns = weight.shape
    block_rows, block_columns = block or (rows, columns)
    counts = math.ceil(rows / block_rows), math.ceil(columns / block_columns)
    scales = torch.empty(*experts, *counts)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(counts[0]):
        for column in range(counts[1]):
            part = (
                ...,
                slice(row * block_rows, (row + 1) * block_rows),
                slice(column * block_columns, (column + 1) * block_columns),
            )
            values = weight[part].float()
            scales[..., row, column] = values.abs().amax((-2, -1)) / 448
            codes[part] = (values / scales[..., row, column, None, None]).to(codes.dtype)
    return {name: codes, f"{name}{scale}": scales if block else scales.reshape(())}


def by_rows(name: str, weight: Tensor, dtype: torch.dtype = torch.int8) -> dict[str, Tensor]:
    """A weight as compressed-tensors stores it in 8 bits, with a scale for each row."""
    scales = weight.float().abs().amax(-1, keepdim=True) / (127 if dtype == torch.int8 else 448)
    codes = weight.float() / scales
    codes = codes.round() if dtype == torch.int8 else codes
    return {name: codes.to(dtype), f"{name}_scale": scales}


def by_definition(
    tensors: dict[str, Tensor], name: str, block: tuple[int, int] = (128, 128)
) -> Tensor:
    """The weight that its stored tensors stand for, number by number, in fp32."""
    codes = tensors[name]
    state_name = next((key for key in tensors if key.startswith(f"{name}.quant_state.")), None)
    if state_name:
        state = json.loads(bytes(tensors[state_name].tolist()))
        packed = codes.flatten().view(torch.uint8)
        index = torch.arange(math.prod(state["shape"]))
        byte = packed[index // 2].int()
        code = torch.where(index % 2 == 0, byte // 16, byte % 16)
        scale = tensors[f"{name}.absmax"]
        if "nested_blocksize" in state:
            place = torch.arange(len(scale)) // state["nested_blocksize"]
            share = tensors[f"{name}.nested_quant_map"][scale.int()]
            scale = share * tensors[f"{name}.nested_absmax"][place] + state["nested_offset"]
        numbers = tensors[f"{name}.quant_map"][code] * scale[index // state["blocksize"]]
        return numbers.view(state["shape"])
    largest = tensors.get(f"{name.removesuffix('weight')}SCB")
    if largest is not None:
        return codes.float() * (largest * (1 / 127))[:, None]
    scales = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
    assert scales is not None
    *_, rows, columns = codes.shape
    if scales.numel() == 1:
        return codes.float() * scales.reshape(())
    if scales.shape[-1] == 1 and scales.shape[-2] == rows:
        return codes.float() * scales
    row = torch.arange(rows) // block[0]
    column = torch.arange(columns) // block[1]
    return codes.float() * scales[..., row, :][..., column]


CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "rows": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
        },
    },
}
WRITERS: dict[str, Writer] = {"nf4": four_bits, "int8": int8, "fp8": fp8, "rows": by_rows}


def quantise(
    folder: Path,
    form: str,
    write: Writer | None = None,
    skipped: tuple[str, ...] = (),
    spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    **changed: Any,
) -> dict[str, Tensor]:
    """Write the linear layers of a folder in few bits, and return the tensors of its file.

    Args:
        folder: a folder with one file of weights, which is changed in place.
        form: a key of CONFIGS.
        write: what writes a weight; None: the form's own.
        skipped: layers with such a part of a name stay as they are.
        spoil: changes the tensors at the end.
        changed: values of quantization_config that differ.
    """
    path = folder / "model.safetensors"
    written = dict[str, Tensor]()
    for name, tensor in load_file(path).items():
        is_linear = name.endswith("_proj.weight") or name.endswith(("gate_up_proj", "down_proj"))
        if is_linear and not any(part in name for part in skipped):
            written |= (write or WRITERS[form])(name, tensor)
        else:
            written[name] = tensor
    written = spoil(written)
    save_file(
        {name: tensor.contiguous() for name, tensor in written.items()},
        path,
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**CONFIGS[form], **changed}
    (folder / "config.json").write_text(json.dumps(config))
    return written
