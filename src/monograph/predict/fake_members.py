"""Make the members of an ensemble on tensors without data, to count their memory."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from monograph.graph.lora import Lora, adapted_layers


def members_like(model: nn.Module, adapters: Sequence[Lora | None]) -> list[nn.Module]:
    """Return members of an ensemble that are like a model and share what is frozen in it.

    Copies of tensors without data cannot be made by `copy.deepcopy`, so the copies get new tensors.

    Args:
        model: the first member. Its adapters have the largest rank, as all have in the stack.
        adapters: the adapters of each member, the first one's included; None: it has none.
    """
    members = [_like(model) for _ in adapters[1:]]
    members.insert(0, model)
    for member, lora in zip(members, adapters, strict=True):
        if lora is None:
            continue
        for layer in adapted_layers(member).values():
            layer.scale = lora.scale
            layer.lora_dropout = nn.Dropout(lora.dropout)
    return members


def _like(model: nn.Module) -> nn.Module:
    """Return a copy with new tensors of the same shapes in place of all that a run may change."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, memo)
    new_parameters: dict[int, nn.Parameter] = {}  # by the id of the model's, so tied ones stay tied
    for part in copied.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.requires_grad:
                if id(parameter) not in new_parameters:
                    new_parameters[id(parameter)] = nn.Parameter(torch.empty_like(parameter))
                part._parameters[name] = new_parameters[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                part._buffers[name] = torch.empty_like(buffer)
    return copied
