"""Read weights that files have in few bits, of the programs that `monograph.model.quantisation` names.

A quantised weight is several tensors of the files: codes, scales, and what describes them. Here they become one
`StoredTensor`, which dequantises the weight when it is read. No numbers are read before, except the descriptions of
4-bit weights. The dequantised weight is computed in fp32 and rounded once to the dtype that the folder's largest
other tensor has, which is usually the embedding.
"""

import math
from collections.abc import Mapping

from monograph.errors import InputRefused
from monograph.model.files import DTYPES, StoredTensor
from monograph.model.quantisation import Quantisation
from monograph.model.quantised_4bit import four_bit_weights
from monograph.model.quantised_8bit import (
    BYTE_DTYPES,
    SCALES,
    UNUSED,
    int8_weights,
    scaled_weights,
)
from monograph.model.stored_parts import name_in_file

# Endings of the names of all tensors that only describe a quantised weight.
_DESCRIPTIONS = (*SCALES, ".SCB", ".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")


def fold(
    stored: Mapping[str, StoredTensor], quantisation: Quantisation | None
) -> dict[str, StoredTensor]:
    """Return a folder's tensors with one tensor in place of those that are a quantised weight together.

    Args:
        stored: the folder's tensors, with the names that they have in the files, except for prefixes.
        quantisation: what config.json says of them.

    Raises:
        InputRefused: a part of a quantised weight is missing, or has a wrong shape or dtype. The message has
            its name.
    """
    # MXFP4 is read by a `FileRule` of its family.
    if quantisation is None or quantisation.format == "mxfp4":
        return dict(stored)
    dtype = _dtype_of_others(stored)
    find = {"4bit": four_bit_weights, "int8": int8_weights, "scaled": scaled_weights}
    weights = find[quantisation.format](stored, dtype, quantisation)
    parts = {name for weight in weights.values() for name in weight.pieces}
    kept = dict[str, StoredTensor]()
    for name, tensor in stored.items():
        if name in weights:
            kept[name] = weights[name]
        elif name not in parts and not name.endswith(UNUSED):
            kept[name] = tensor
    for name, tensor in kept.items():
        if tensor.dtype in (*BYTE_DTYPES, "U8"):
            raise InputRefused(
                f"{tensor.path}: {name_in_file(name, tensor)} is {tensor.dtype}, and no scales of "
                f"{quantisation.label} belong to it: the folder is not complete"
            )
    return kept


def _dtype_of_others(stored: Mapping[str, StoredTensor]) -> str:
    """Return the dtype of the largest tensor that is not quantised, by its name in safetensors."""
    sizes = {
        (math.prod(tensor.shape), tensor.dtype)
        for name, tensor in stored.items()
        if tensor.dtype in DTYPES and not name.endswith(_DESCRIPTIONS)
    }
    return max(sizes, default=(0, "BF16"))[1]
