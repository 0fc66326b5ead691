"""Round the frozen weights under adapters to the 16-bit dtype in which matrix products read them."""

from collections.abc import Iterable

import torch
from torch import nn

from monograph.graph.experts import MATMUL_MODULES
from monograph.graph.lora import FACTORS
from monograph.graph.lora_base import OptionalDevice
from monograph.graph.mmap_weights import MappedWeight, in_file_order, kept_dtype, replace_data


def round_frozen_weights(
    module: nn.Module,
    dtype: torch.dtype,
    more: Iterable[nn.Module] = (),
    device: OptionalDevice = None,
) -> None:
    """Round the frozen fp32 weights and biases of linear layers, including the head, in place.

    Autocast would round them to the same bits at each call.

    Args:
        module: a module with adapters.
        dtype: autocast's dtype.
        more: other modules whose weights may be rounded, because they are read only in `dtype`.
        device: where these weights are moved, one after another; None: they are not moved.
    """
    rounding_modules: set[nn.Module] = {
        m for m in module.modules() if isinstance(m, MATMUL_MODULES) and not isinstance(m, FACTORS)
    }
    rounding_modules |= set(more)
    # A weight that another module reads as well, such as a tied embedding, keeps its precision.
    read_elsewhere = {
        id(p)
        for m in module.modules()
        if m not in rounding_modules
        for p in m.parameters(recurse=False)
    }
    to_round: dict[int, nn.Parameter] = {}
    for m in rounding_modules:
        for p in (m._parameters.get("weight"), m._parameters.get("bias")):
            if p is None or id(p) in read_elsewhere or kept_dtype(p) != torch.float32:
                continue
            to_round[id(p)] = p
    for parameter in in_file_order(to_round.values()):
        is_mapped = isinstance(parameter, MappedWeight)
        moved = parameter.data.to(device or parameter.device, copy=is_mapped)
        replace_data(parameter, moved.to(dtype))
