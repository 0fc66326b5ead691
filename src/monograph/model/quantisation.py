"""Read quantization_config of a config.json: in which format a folder's weights are stored in few bits.

`monograph.model.quantised` reads the weights themselves. The lists of modules that are not quantised, such as
llm_int8_skip_modules, are not needed for that: a weight is quantised if its file has codes and scales of it.
The module needs no torch.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from monograph.errors import InputRefused

KEY = "quantization_config"
Base = Literal["auto", "int8", "nf4"]  # values of lora.base
Format = Literal["mxfp4", "4bit", "int8", "scaled"]

# The formats of compressed-tensors in which a code is a whole byte.
_BYTE_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_SAVE_DENSE = "load the model in the program that quantised it, and save it in bf16 or fp32"
# What to do about methods that are not read.
_OTHER_METHODS = {
    "gptq": "name the folder in 16 bits from which it was made",
    "awq": "name the folder in 16 bits from which it was made",
    "hqq": "name the folder in 16 bits, since this method quantises when a model is loaded",
}


class Quantisation(NamedTuple):
    """What quantization_config says of a folder.

    Attributes:
        format: the format of the weights. "4bit" and "int8" are those of bitsandbytes. "scaled" has floats or
            integers of 8 bits, and a scale for each block, for each row or for the whole weight.
        label: what a line calls the format.
        base: the value of lora.base that keeps codes of this format as they are; "auto": none does.
        block: rows and columns of a block of "scaled" that has its own scale; None: no blocks.
    """

    format: Format
    label: str
    base: Base = "auto"
    block: tuple[int, int] | None = None


def read(values: Mapping[str, Any], may_be_mxfp4: bool) -> Quantisation | None:
    """Return what a config.json says of quantised weights; None if there are none.

    Args:
        values: the content of the config.json.
        may_be_mxfp4: whether the model's family may have experts in MXFP4.

    Raises:
        InputRefused: a method that is not read, or a wrong value. The message has the key.
    """
    table = values.get(KEY)
    if table is None:
        return None
    if not isinstance(table, dict):
        raise InputRefused(f"{KEY} = {table!r}: expected a table with quant_method")
    method = table.get("quant_method")
    if method is None and (table.get("load_in_4bit") or table.get("load_in_8bit")):
        method = "bitsandbytes"  # early folders do not name it
    if method == "mxfp4" and may_be_mxfp4:
        return Quantisation("mxfp4", "mxfp4")
    if method == "bitsandbytes":
        return _read_bitsandbytes(table)
    if method == "fp8":
        return _read_fp8(table)
    if method == "compressed-tensors":
        return _read_compressed(table)
    remedy = _OTHER_METHODS.get(str(method), _SAVE_DENSE)
    raise InputRefused(
        f"{KEY}: quant_method = {method!r} is not read, only bitsandbytes, fp8, compressed-tensors of 8 bits and "
        f"gpt-oss' mxfp4: {remedy}"
    )


def _read_bitsandbytes(table: Mapping[str, Any]) -> Quantisation:
    """Return the format of a folder of bitsandbytes."""
    if table.get("load_in_8bit", table.get("_load_in_8bit")):
        return Quantisation("int8", "bitsandbytes int8", "int8")
    if not table.get("load_in_4bit", table.get("_load_in_4bit")):
        raise InputRefused(
            f"{KEY}: expected load_in_4bit or load_in_8bit = true with quant_method = 'bitsandbytes'"
        )
    kind = table.get("bnb_4bit_quant_type", "fp4")  # bitsandbytes' default
    if kind not in ("nf4", "fp4"):
        raise InputRefused(f"{KEY}.bnb_4bit_quant_type = {kind!r}: expected 'nf4' or 'fp4'")
    return Quantisation("4bit", f"bitsandbytes {kind}", "nf4")


def _read_fp8(table: Mapping[str, Any]) -> Quantisation:
    """Return the format of a folder of 8-bit floats, in blocks or with one scale for a weight."""
    experts = table.get("expert_dtype", "fp8")
    if experts != "fp8":
        raise InputRefused(
            f"{KEY}.expert_dtype = {experts!r} is not read, only 'fp8': {_SAVE_DENSE}"
        )
    # transformers' default. Files without this key may also have one scale for a weight.
    default = [128, 128]
    block = _block(table.get("weight_block_size", default), "weight_block_size")
    label = "fp8" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"
    return Quantisation("scaled", label, block=block)


def _read_compressed(table: Mapping[str, Any]) -> Quantisation:
    """Return the format of a folder of compressed-tensors, if its weights have 8 bits each."""
    form = table.get("format")
    groups = table.get("config_groups")
    if form not in _BYTE_FORMATS or not isinstance(groups, dict) or not groups:
        raise InputRefused(
            f"{KEY}.format = {form!r} of compressed-tensors is not read, only {', '.join(_BYTE_FORMATS)} with "
            f"config_groups: {_SAVE_DENSE}"
        )
    sparsity = table.get("sparsity_config") or {"format": "dense"}
    is_dense = isinstance(sparsity, dict) and sparsity.get("format") == "dense"
    if table.get("transform_config") or not is_dense:
        raise InputRefused(
            f"{KEY}: sparse or transformed weights of compressed-tensors are not read: {_SAVE_DENSE}"
        )
    kinds = set[str]()
    blocks = set[tuple[int, int] | None]()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        kind = weights.get("type") if isinstance(weights, dict) else None
        is_read = (
            isinstance(weights, dict)
            and weights.get("num_bits") == 8
            and kind in ("float", "int")
            and weights.get("symmetric", True) is True
        )
        if not is_read or not isinstance(weights, dict):
            raise InputRefused(
                f"{KEY}.config_groups.{name}.weights = {weights!r}: expected 8 bits, type float or int, symmetric: "
                f"{_SAVE_DENSE}"
            )
        kinds.add(str(kind))
        is_block = weights.get("strategy") == "block"
        block_structure = weights.get("block_structure") if is_block else None
        blocks.add(_block(block_structure, f"config_groups.{name}.weights.block_structure"))
    if len(kinds) > 1 or len(blocks) > 1:
        raise InputRefused(
            f"{KEY}.config_groups: several formats in one folder are not read: {_SAVE_DENSE}"
        )
    block = blocks.pop()
    if kinds == {"float"}:
        return Quantisation("scaled", "compressed-tensors fp8", block=block)
    # The base of adapters has a scale for each row. Only the files say whether there are blocks.
    return Quantisation("scaled", "compressed-tensors int8", "int8", block)


def _block(block: object, key: str) -> tuple[int, int] | None:
    """Return the rows and columns of a block.

    Raises:
        InputRefused: the value is neither null nor two whole numbers of at least 1.
    """
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2:
        raise InputRefused(f"{KEY}.{key} = {block!r}: expected two numbers, rows and columns")
    rows, columns = block
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise InputRefused(f"{KEY}.{key} = {block!r}: expected two whole numbers of at least 1")
    return rows, columns
