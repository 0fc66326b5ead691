"""What a module with adapters is without them, one weight at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from monograph.graph.inspect import unwrapped
from monograph.graph.lora import Factor, adapters, merged
from monograph.graph.token_rows import Table, tables
from monograph.graph.windows import kept_dtype, require_finite
from monograph.ops.token_rows import replaced


class Plain(NamedTuple):
    """A parameter of the merged module.

    Attributes:
        name: of it.
        like: has its shape and dtype, and no numbers.
        read: gives it; what an adapter is merged into is computed anew each time.
    """

    name: str
    like: Tensor
    read: Callable[[], Tensor]


def plain_parameters(module: nn.Module) -> Iterator[Plain]:
    """The parameters of a module as `merge` would leave them, each once; the module itself stays as it is.

    Its adapters must stand beside plain weights, not beside quantised ones. Reading one raises InputRefused where it
    holds NaN or an infinity.
    """
    module = unwrapped(module)
    layers = adapters(module)
    of_tokens = tables(module)
    of_adapters = {id(p) for each in module.modules() if isinstance(each, Factor) for p in each.parameters()}
    of_adapters |= {id(table.token_rows) for table in of_tokens.values()}
    for name, parameter in module.named_parameters():  # not the state dict: a tied head appears once
        if id(parameter) in of_adapters:
            continue
        holder, _, last = name.rpartition(".")
        like = parameter.detach().to("meta", kept_dtype(parameter))
        read = _reading(parameter)
        if last == "weight" and holder in layers:
            read = functools.partial(merged, layers[holder])
        elif last == "weight" and holder in of_tokens:
            read = functools.partial(_replacing, read, of_tokens[holder])
        yield Plain(name, like, functools.partial(_finite, name, read))


def _finite(name: str, read: Callable[[], Tensor]) -> Tensor:
    return require_finite(read(), name)


def _reading(parameter: nn.Parameter) -> Callable[[], Tensor]:
    return lambda: parameter.detach().to(kept_dtype(parameter))


def _replacing(read: Callable[[], Tensor], table: Table) -> Tensor:
    return replaced(read(), table.rows).detach()
