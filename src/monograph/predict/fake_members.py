"""Make the members of an ensemble on tensors without data, to count their memory."""

from collections.abc import Sequence

from torch import nn

from monograph.graph.lora import Lora, adapted_layers, set_scale_and_dropout
from monograph.graph.shared_base import copy_sharing_frozen


def members_like(model: nn.Module, adapters: Sequence[Lora | None]) -> list[nn.Module]:
    """Return members of an ensemble that are like a model and share what is frozen in it.

    Args:
        model: the first member. Its adapters have the largest rank, as all have in the stack.
        adapters: the adapters of each member, the first one's included; None: it has none.
    """
    members = [model, *(copy_sharing_frozen(model) for _ in adapters[1:])]
    for member, lora in zip(members, adapters, strict=True):
        if lora is None:
            continue
        for layer in adapted_layers(member).values():
            set_scale_and_dropout(layer, lora)
    return members
