"""Check that modules differ only in the numbers in their tensors, so that one graph can compute all
of them.
"""

import enum
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from monograph.errors import InputRefused
from monograph.graph.fused_linears import Sibling
from monograph.graph.inspect import buffers_kept, modes_kept, shared_tensors
from monograph.optim.planes import require_movable

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# Attributes that `nn.Module` itself has, and those that torch.compile and nn.Module.compile leave
# in a module.
_OWN = frozenset((*vars(nn.Module()), "_is_torch_compile", "_compiled_call_impl"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
# Attributes of transformers' models and configs that no forward pass reads: the model's origin,
# hooks of adapters.
_LABELS = frozenset(
    ("_name_or_path", "name_or_path", "_commit_hash", "_require_grads_hooks", "_require_grads_hook")
)
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    enum.Enum,
    type,
)


class Difference(NamedTuple):
    """A path at which two modules differ, and the values that they have there, in words."""

    path: str
    one: str
    other: str


def agree(members: Sequence[nn.Module]) -> None:
    """Check that modules can be stacked.

    Raises:
        InputRefused: two differ in more than their numbers, or one has something that torch cannot
            batch; the message names the first path.
        UsageError: `require_movable` refuses a member.
    """
    _require_apart(members)
    for member in members:
        require_movable(member)
        own = {
            id(item)
            for items in (member.modules(), member.parameters(), member.buffers())
            for item in items
        }
        for path, module in member.named_modules():
            _require_stackable(path or "the module", module, own)
    for number, other in enumerate(members[1:], start=1):
        if difference := next(_differences(members[0], other), None):
            raise InputRefused(
                f"members 0 and {number} cannot share a graph: {difference.path} is {difference.one} in one "
                f"and {difference.other} in the other"
            )


def _require_apart(members: Sequence[nn.Module]) -> None:
    """Refuse members that share trained parameters or modules with buffers, as each gets its own
    part of the stack.
    """
    owner: dict[int, int] = {}
    for number, member in enumerate(members):
        changing = [
            (name, parameter)
            for name, parameter in member.named_parameters()
            if parameter.requires_grad
        ]
        for name, part in (
            *changing,
            *((name, part) for name, part in member.named_modules() if part._buffers),
        ):
            if owner.setdefault(id(part), number) != number:
                raise InputRefused(
                    f"members {owner[id(part)]} and {number} share {name}: build one for each"
                )


def _require_stackable(path: str, module: nn.Module, own: set[int]) -> None:
    """Refuse a module that cannot be stacked; `own` are the ids of the member's modules and
    tensors.
    """
    if isinstance(module, Sibling):
        raise InputRefused(
            f"{path} is fused with its siblings: unfuse_siblings(module) before members are stacked"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise InputRefused(
            f"{path} ({type(module).__name__}) is TorchScript, which nothing batches: give the module it was made of"
        )
    if (
        isinstance(module, nn.RNNBase)
        and is_parametrized(module)
        and _writes_buffers(module.get_submodule("parametrizations"))
    ):
        raise InputRefused(
            f"{path} ({type(module).__name__}) has a parametrization that writes its own buffers, as a spectral norm "
            "does, and torch evaluates it several times a call: train such members one by one, each in a Resident"
        )
    for where, owner in {
        path: module,
        **{f"{path}.{name}": p for name, p in module._parameters.items()},
    }.items():
        if any(getattr(owner, kind, None) for kind in _BACKWARD_HOOKS):
            raise InputRefused(
                f"{where} has a hook for its gradient, and no gradient is one member's alone: "
                "remove the hook, or train such members one by one, each in a Resident"
            )
    # The stack's forward pass gets each member's tensors by name. A tensor that is reached in
    # another way would be the first member's, for all members.
    held = {
        name: value for name, value in vars(module).items() if name not in _OWN | _no_own(module)
    }
    held["hooks"] = [getattr(module, kind) for kind in _HOOKS]
    if name := next((name for name, value in held.items() if _reaches(value, own, set())), None):
        raise InputRefused(
            f"{path}.{name} reaches the member's own tensors past their names, where nothing can put another member's: "
            "read them by name from the module that the forward pass is called on"
        )


def _writes_buffers(parametrizations: nn.Module) -> bool:
    """Return whether parametrizations write their buffers when they are evaluated in training mode."""
    with torch.no_grad(), modes_kept(parametrizations), buffers_kept(parametrizations.train()):
        before = [(id(buffer), buffer._version) for buffer in parametrizations.buffers()]
        for parametrization in parametrizations.children() if before else ():
            parametrization()
        return before != [(id(buffer), buffer._version) for buffer in parametrizations.buffers()]


def _reaches(
    value: object, own: set[int], seen: set[tuple[int, bool]], closed: bool = False
) -> bool:
    """Return whether a value holds one of the member's `own` tensors, or one of its modules in a
    function's closure.

    Such a module is the first member's in every copy, as closures are not copied.
    """
    if (id(value), closed) in seen or isinstance(value, types.ModuleType):
        return False
    seen.add((id(value), closed))
    if id(value) in own:
        return closed or isinstance(value, Tensor)
    # A deep copy copies modules and containers, but not the variables that a function has closed
    # over.
    closed = closed or isinstance(value, types.FunctionType)
    return any(_reaches(part, own, seen, closed) for part in _parts(value)[1])


def _differences(one: nn.Module, other: nn.Module) -> Iterator[Difference]:
    ours, theirs = (dict(module.named_modules(remove_duplicate=False)) for module in (one, other))
    # Modules at the same path are compared here; a module without a path is compared like any
    # attribute.
    by_path = frozenset((id(ours[name]), id(theirs[name])) for name in ours if name in theirs)
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in ours or name not in theirs:
            yield Difference(
                name,
                *(type(of[name]).__name__ if name in of else "absent" for of in (ours, theirs)),
            )
        else:
            for path, mine, yours in _of_parts(ours[name], theirs[name], by_path):
                yield Difference(".".join(filter(None, (name, path))) or "the module", mine, yours)
    # Ties are a part of the structure: a weight that is untied in one member would be two
    # parameters of the stack.
    ties = [_ties(module) for module in (one, other)]
    for tie in sorted(ties[0] ^ ties[1]):
        yield Difference(tie[0], *("tied to " + tie[1] if tie in of else "not tied" for of in ties))


def computed(module: nn.Module) -> set[str]:
    """Return attributes that a forward pre-hook computes from parameters, as `nn.utils.weight_norm`
    and pruning do.
    """
    hooks = module._forward_pre_hooks.values()
    names = {getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks}
    return {name for name in names if name in vars(module)}


def _no_own(module: nn.Module) -> set[str]:
    """Return attributes that only repeat parameters: computed ones, and a recurrent layer's list of
    its weights.
    """
    return computed(module) | (
        {"_flat_weights", "_flat_weight_refs"} if isinstance(module, nn.RNNBase) else set()
    )


def _of_parts(
    one: nn.Module, other: nn.Module, by_path: frozenset[tuple[int, int]]
) -> Iterator[Difference]:
    """Yield the differences of two modules, without those of their submodules."""
    # Each parametrized module has a class.
    kinds = [type_before_parametrizations(module) for module in (one, other)]
    if kinds[0] is not kinds[1]:
        yield Difference("", *(kind.__name__ for kind in kinds))
        return
    if one.training != other.training:
        yield Difference("training", str(one.training), str(other.training))
    for kind in ("_parameters", "_buffers"):
        yield from _of_names(
            getattr(one, kind), getattr(other, kind), lambda a, b: _form(a) == _form(b), _form
        )
    for kind in _HOOKS:
        hooks = [list(getattr(module, kind).values()) for module in (one, other)]
        if not _equal(hooks[0], hooks[1], by_path):
            yield Difference("hooks", f"{len(hooks[0])} of its own", f"{len(hooks[1])} of its own")
    # Members may have different rates of dropout.
    ignored = _OWN | _LABELS | _no_own(one) | ({"p"} if isinstance(one, DROPOUTS) else set())
    mine, yours = (
        {k: v for k, v in vars(module).items() if k not in ignored} for module in (one, other)
    )
    for difference in _of_names(mine, yours, lambda a, b: _equal(a, b, by_path), _short):
        yield _inside(difference, mine.get(difference.path), yours.get(difference.path), by_path)


def _inside(
    difference: Difference, one: object, other: object, by_path: frozenset[tuple[int, int]]
) -> Difference:
    """Return the difference of two objects, narrowed down to the attribute in which they differ."""
    if type(one) is not type(other) or isinstance(one, _PLAIN) or not hasattr(one, "__dict__"):
        return difference
    mine = vars(one)
    yours = vars(other)
    for deeper in _of_names(mine, yours, lambda a, b: _equal(a, b, by_path), _short):
        whole = deeper._replace(path=f"{difference.path}.{deeper.path}")
        return _inside(whole, mine.get(deeper.path), yours.get(deeper.path), by_path)
    return difference


def _of_names(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    equal: Callable[[Any, Any], bool],
    say: Callable[[Any], str],
) -> Iterator[Difference]:
    for name in dict.fromkeys((*one, *other)):
        if name not in one or name not in other:
            yield Difference(
                name, *(say(held[name]) if name in held else "absent" for held in (one, other))
            )
        elif not equal(one[name], other[name]):
            yield Difference(name, say(one[name]), say(other[name]))


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}{frozen}"


def _ties(module: nn.Module) -> set[tuple[str, ...]]:
    """Return the groups of names that stand for the same tensor."""
    listed = (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    return {tuple(group) for group in shared_tensors(itertools.chain(*listed)).values()}


def _equal(one: object, other: object, within: frozenset[tuple[int, int]]) -> bool:
    """Return whether two attributes have equal values, also if they are different objects."""
    pair = (id(one), id(other))
    if one is other or pair in within:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    mine = _parts(one)
    yours = _parts(other)
    # Objects may refer to one another in circles, so a pair that is being compared counts as equal
    # inside itself.
    within |= {pair}
    return mine[0] == yours[0] and all(
        _equal(a, b, within) for a, b in zip(mine[1], yours[1], strict=True)
    )


def _parts(value: object) -> tuple[object, list[object]]:
    """Return a key to compare by ==, and further values to compare: together all that a call of the
    value may use.
    """
    key, held = _content(value)
    # Functions and instances of subclasses may have attributes of their own.
    own = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
    own = {name: part for name, part in own.items() if name not in _LABELS}
    return (key, list(own)), [*held, *own.values()]


def _content(value: object) -> tuple[object, list[object]]:
    key: object = ""
    held: list[object] = []
    match value:
        case float() | complex():
            key = repr(value)  # 0.0 differs from -0.0, and NaN equals NaN
        case Mapping():
            key = list(value)
            held = list(value.values())
        case list() | tuple():
            key = len(value)
            held = list(value)
        case types.FunctionType():
            cells = [
                cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()
            ]
            key = value.__code__, len(cells), id(value.__globals__)
            held = [value.__defaults__, value.__kwdefaults__, *cells]
        case types.MethodType():
            held = [value.__func__, value.__self__]
        case functools.partial():
            held = [value.func, value.args, value.keywords]
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            key = value.dtype.str, value.shape, value.tobytes()
        case _ if isinstance(value, (*_PLAIN, set, frozenset)) or not hasattr(value, "__dict__"):
            key = value
    return key, held


def _short(value: object) -> str:
    text = (
        repr(value)
        if isinstance(value, (*_PLAIN, tuple, list))
        else f"another {type(value).__name__}"
    )
    return text if len(text) <= 40 else f"{text[:37]}..."
