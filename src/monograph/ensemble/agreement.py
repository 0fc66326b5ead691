"""Whether modules are alike but for the numbers in their tensors, so that one graph computes all of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from monograph.errors import InputRefused
from monograph.graph.family import Sibling

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# What `nn.Module` itself keeps in a module, and what torch.compile and nn.Module.compile leave there.
_OWN = frozenset((*vars(nn.Module()), "_is_torch_compile", "_compiled_call_impl"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum, type)


class Difference(NamedTuple):
    """Where two modules differ, and what stands there."""

    path: str
    one: str
    other: str


def agree(members: Sequence[nn.Module]) -> None:
    """Check that modules can be stacked.

    Raises:
        InputRefused: two differ in more than their numbers, or one has what torch cannot batch; the message names the
            first path.
    """
    for path, module in members[0].named_modules():
        if isinstance(module, nn.RNNBase):
            kind = type(module).__name__
            raise InputRefused(
                f"{path or 'the module'} is an nn.{kind}, which torch cannot batch: write its loop over nn.{kind}Cell"
            )
        if isinstance(module, Sibling):
            raise InputRefused(f"{path} is fused with its siblings: unfuse_siblings(module) before members are stacked")
    for number, other in enumerate(members[1:], start=1):
        if found := next(_differences(members[0], other), None):
            raise InputRefused(
                f"members 0 and {number} cannot share a graph: {found.path} is {found.one} in one and {found.other} "
                "in the other"
            )


def _differences(one: nn.Module, other: nn.Module) -> Iterator[Difference]:
    ours, theirs = (dict(module.named_modules(remove_duplicate=False)) for module in (one, other))
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in ours or name not in theirs:
            yield Difference(
                name, *(type(held[name]).__name__ if name in held else "absent" for held in (ours, theirs))
            )
        else:
            for path, mine, yours in _of_parts(ours[name], theirs[name]):
                yield Difference(".".join(filter(None, (name, path))) or "the module", mine, yours)
    ties = [_ties(module) for module in (one, other)]
    for tie in sorted(ties[0] ^ ties[1]):
        yield Difference(tie[0], *("tied to " + tie[1] if tie in of else "not tied" for of in ties))


def _of_parts(one: nn.Module, other: nn.Module) -> Iterator[Difference]:
    """Differences of two modules without their parts."""
    if type(one) is not type(other):
        yield Difference("", type(one).__name__, type(other).__name__)
        return
    if one.training != other.training:
        yield Difference("training", str(one.training), str(other.training))
    for kind in ("_parameters", "_buffers"):
        yield from _of_names(getattr(one, kind), getattr(other, kind), lambda a, b: _form(a) == _form(b), _form)
    for kind in _HOOKS:
        hooks = [list(getattr(module, kind).values()) for module in (one, other)]
        if not _equal(hooks[0], hooks[1]):
            yield Difference("hooks", f"{len(hooks[0])} of its own", f"{len(hooks[1])} of its own")
    # A rate of dropout may be each member's own.
    ignored = _OWN | ({"p"} if isinstance(one, DROPOUTS) else set())
    mine, yours = ({k: v for k, v in vars(module).items() if k not in ignored} for module in (one, other))
    yield from _of_names(mine, yours, _equal, _short)


def _of_names(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    equal: Callable[[Any, Any], bool],
    say: Callable[[Any], str],
) -> Iterator[Difference]:
    for name in dict.fromkeys((*one, *other)):
        if name not in one or name not in other:
            yield Difference(name, *(say(held[name]) if name in held else "absent" for held in (one, other)))
        elif not equal(one[name], other[name]):
            yield Difference(name, say(one[name]), say(other[name]))


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}{frozen}"


def _ties(module: nn.Module) -> set[tuple[str, ...]]:
    """The names of tensors that are one."""
    names: dict[int, list[str]] = {}
    for listed in (module.named_parameters, module.named_buffers):
        for name, tensor in listed(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return {tuple(group) for group in names.values() if len(group) > 1}


def _equal(one: Any, other: Any, within: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two values of plain attributes are alike, whatever objects they are."""
    pair = (id(one), id(other))
    if one is other or pair in within:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, nn.Module):
        return True  # parts are compared by their paths
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    mine, yours = _parts(one), _parts(other)
    if mine is None or yours is None:
        return bool(one == other) or one != one  # noqa: PLR0124 - nan
    within |= {pair}
    return bool(mine[0] == yours[0]) and all(_equal(a, b, within) for a, b in zip(mine[1], yours[1], strict=True))


def _parts(value: Any) -> tuple[Any, list[Any]] | None:
    """What a value consists of: something to compare by ==, and further values; None: compare it by == itself."""
    if isinstance(value, (*_PLAIN, set, frozenset)):
        return None
    if isinstance(value, Mapping):
        return list(value), list(value.values())
    if isinstance(value, (list, tuple)):
        return len(value), list(value)
    if (code := getattr(value, "__code__", None)) is not None:
        return code, [cell.cell_contents for cell in value.__closure__ or ()]
    if hasattr(value, "__dict__"):
        return list(vars(value)), list(vars(value).values())
    return None


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, (*_PLAIN, tuple, list)) else f"another {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."
