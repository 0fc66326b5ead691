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

from monograph.ensemble.variations import may_differ_in_shape, varying_attributes
from monograph.errors import InputRefused
from monograph.graph.fused_linears import Sibling
from monograph.graph.inspect import buffers_kept, modes_kept, shared_tensors
from monograph.optim.planes import require_movable

# The attributes of `nn.Module` itself, and those that torch.compile and nn.Module.compile add.
_MODULE_ATTRIBUTES = frozenset((*vars(nn.Module()), "_is_torch_compile", "_compiled_call_impl"))
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

# Pairs of ids: of an object of one member and an object of the other. The two objects count as equal,
# since they are compared elsewhere.
_Pairs = frozenset[tuple[int, int]]


class Difference(NamedTuple):
    """A path in two modules where they differ, and the two values at this path, in words."""

    path: str
    one: str
    other: str


class _Contents(NamedTuple):
    """What an object consists of, which decides how it behaves.

    Attributes:
        key: the part that is compared by ==.
        values: the objects that it contains, which are compared one by one.
    """

    key: object
    values: list[object]


def require_stackable(members: Sequence[nn.Module]) -> None:
    """Check that modules can be stacked.

    Raises:
        InputRefused: two modules differ in more than the numbers in their tensors, or one has
            something that torch cannot batch; the message names the first path.
        UsageError: a member would change if its parameters were moved (`require_movable`).
    """
    _require_separate(members)
    for member in members:
        require_movable(member)
        modules_and_tensors = itertools.chain(
            member.modules(), member.parameters(), member.buffers()
        )
        ids = {id(item) for item in modules_and_tensors}
        for path, module in member.named_modules():
            _require_stackable_module(path or "the module", module, ids)
    for number, other in enumerate(members[1:], start=1):
        difference = next(_differences(members[0], other), None)
        if difference:
            raise InputRefused(
                f"members 0 and {number} cannot share a graph: {difference.path} is {difference.one} in one "
                f"and {difference.other} in the other"
            )


def _require_separate(members: Sequence[nn.Module]) -> None:
    """Refuse members that share a trained parameter or a module with buffers.

    Each member gets its own part of the stack, so after stacking they would not share it any more.
    """
    first_member: dict[int, int] = {}  # by the id of a parameter or module
    for number, member in enumerate(members):
        # What training may change.
        changing: list[tuple[str, nn.Parameter | nn.Module]] = [
            (name, parameter)
            for name, parameter in member.named_parameters()
            if parameter.requires_grad
        ]
        changing += [(name, module) for name, module in member.named_modules() if module._buffers]
        for name, part in changing:
            first_number = first_member.setdefault(id(part), number)
            if first_number != number:
                raise InputRefused(
                    f"members {first_number} and {number} share {name}: build one for each"
                )


def _require_stackable_module(path: str, module: nn.Module, ids: set[int]) -> None:
    """Refuse a module that cannot be stacked.

    Args:
        path: its path in the member.
        module: the module, without its submodules.
        ids: the ids of the member's modules and tensors.
    """
    if isinstance(module, Sibling):
        raise InputRefused(
            f"{path} is fused with its siblings: unfuse_siblings(module) before members are stacked"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise InputRefused(
            f"{path} ({type(module).__name__}) is TorchScript, which nothing batches: give the module it was made of"
        )
    if isinstance(module, nn.RNNBase) and is_parametrized(module):
        if _writes_buffers(module.get_submodule("parametrizations")):
            raise InputRefused(
                f"{path} ({type(module).__name__}) has a parametrization that writes its own buffers, as a spectral "
                "norm does, and torch evaluates it several times a call: train such members one by one, each in a "
                "Resident"
            )
    may_have_hooks: dict[str, nn.Module | nn.Parameter | None] = {path: module}
    may_have_hooks |= {f"{path}.{name}": value for name, value in module._parameters.items()}
    for owner_path, owner in may_have_hooks.items():
        if any(getattr(owner, kind, None) for kind in _BACKWARD_HOOKS):
            raise InputRefused(
                f"{owner_path} has a hook for its gradient, and no gradient is one member's alone: "
                "remove the hook, or train such members one by one, each in a Resident"
            )
    # A call of the stack replaces the module's tensors by each member's tensors, by their names. If the forward
    # pass got a tensor in another way than by its name, it would get the first member's tensor for all members.
    ignored = _MODULE_ATTRIBUTES | _derived_attributes(module)
    attributes = {name: value for name, value in vars(module).items() if name not in ignored}
    attributes["hooks"] = [getattr(module, kind) for kind in _HOOKS]
    for name, value in attributes.items():
        if _reaches(value, ids, set()):
            raise InputRefused(
                f"{path}.{name} reaches the member's own tensors past their names, where nothing can put another "
                "member's: read them by name from the module that the forward pass is called on"
            )


def _writes_buffers(parametrizations: nn.Module) -> bool:
    """Return whether parametrizations write their buffers when they run in training mode."""

    def versions() -> list[tuple[int, int]]:
        # Each write to a buffer increases its version.
        return [(id(buffer), buffer._version) for buffer in parametrizations.buffers()]

    with torch.no_grad(), modes_kept(parametrizations), buffers_kept(parametrizations.train()):
        before = versions()
        if not before:
            return False
        for parametrization in parametrizations.children():
            parametrization()
        return before != versions()


def _reaches(
    value: object, ids: set[int], seen: set[tuple[int, bool]], in_closure: bool = False
) -> bool:
    """Return whether a value contains a tensor of the member, or a function whose closure contains
    one of the member's modules.

    A module outside of closures does no harm. The stack is a deep copy of the first member, and in the copy
    such a module is a copy, too. But variables in a function's closure are not copied, so a module there
    would still be the first member's.

    Args:
        value: the value, which is searched recursively.
        ids: the ids of the member's modules and tensors.
        seen: which values were searched, as (id, in_closure).
        in_closure: whether the value is in a function's closure.
    """
    if (id(value), in_closure) in seen or isinstance(value, types.ModuleType):
        return False
    seen.add((id(value), in_closure))
    if id(value) in ids:
        # It is one of the member's tensors or modules.
        return in_closure or isinstance(value, Tensor)
    in_closure = in_closure or isinstance(value, types.FunctionType)
    return any(_reaches(inner, ids, seen, in_closure) for inner in _contents(value).values)


def _differences(one: nn.Module, other: nn.Module) -> Iterator[Difference]:
    """Yield the differences of two members."""
    ours = dict(one.named_modules(remove_duplicate=False))
    theirs = dict(other.named_modules(remove_duplicate=False))
    # Modules at the same path are compared in the loop below. A module may also be the value of an attribute
    # of another one. There it need not be compared again.
    compared = frozenset((id(ours[name]), id(theirs[name])) for name in ours if name in theirs)
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in ours:
            yield Difference(name, "absent", type(theirs[name]).__name__)
        elif name not in theirs:
            yield Difference(name, type(ours[name]).__name__, "absent")
        else:
            for difference in _differences_of_modules(ours[name], theirs[name], compared):
                # Either of the two is empty if it means the module itself.
                parts = [part for part in (name, difference.path) if part]
                yield difference._replace(path=".".join(parts) or "the module")
    # Ties are a part of the structure. If a weight were tied in one member only, the stack would need one
    # parameter for this member, and two for the other.
    our_ties = _ties(one)
    their_ties = _ties(other)
    for names in sorted(our_ties ^ their_ties):
        tied = f"tied to {names[1]}"
        if names in our_ties:
            yield Difference(names[0], tied, "not tied")
        else:
            yield Difference(names[0], "not tied", tied)


def hook_attributes(module: nn.Module) -> set[str]:
    """Return the names of attributes that a forward pre-hook computes from parameters, as
    `nn.utils.weight_norm` and pruning do.
    """
    hooks = module._forward_pre_hooks.values()
    # The name is in the attribute `name` of a weight norm's hook, and in `_tensor_name` of a pruning hook.
    names = {getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks}
    return {name for name in names if name in vars(module)}


def _derived_attributes(module: nn.Module) -> set[str]:
    """Return the names of attributes that only repeat parameters: those that hooks compute, and a
    recurrent layer's lists of its weights.
    """
    names = hook_attributes(module)
    if isinstance(module, nn.RNNBase):
        names |= {"_flat_weights", "_flat_weight_refs"}
    return names


def _differences_of_modules(
    one: nn.Module, other: nn.Module, compared: _Pairs
) -> Iterator[Difference]:
    """Yield the differences of two modules; their submodules are not compared.

    Args:
        one: a module.
        other: the module at the same path of another member.
        compared: pairs of modules that are compared elsewhere.
    """
    # torch makes a class for each parametrized module, so the original classes are compared.
    our_class = type_before_parametrizations(one)
    their_class = type_before_parametrizations(other)
    if our_class is not their_class:
        yield Difference("", our_class.__name__, their_class.__name__)
        return
    if one.training != other.training:
        yield Difference("training", str(one.training), str(other.training))
    form = _form_without_shape if may_differ_in_shape(one) else _form
    for kind in ("_parameters", "_buffers"):
        yield from _differences_by_name(
            getattr(one, kind), getattr(other, kind), lambda a, b: form(a) == form(b), _form
        )
    for kind in _HOOKS:
        ours = list(getattr(one, kind).values())
        theirs = list(getattr(other, kind).values())
        if not _equal(ours, theirs, compared):
            yield Difference("hooks", f"{len(ours)} of its own", f"{len(theirs)} of its own")
    ignored = _MODULE_ATTRIBUTES | _LABELS | _derived_attributes(one) | varying_attributes(one)
    our_attributes = {name: value for name, value in vars(one).items() if name not in ignored}
    their_attributes = {name: value for name, value in vars(other).items() if name not in ignored}
    yield from _differences_of_attributes(our_attributes, their_attributes, compared)


def _differences_of_attributes(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], compared: _Pairs
) -> Iterator[Difference]:
    """Yield the differences of two objects' attributes.

    If an attribute is an object, the path leads to the first of its own attributes that differs.
    """
    for difference in _differences_by_name(
        ours, theirs, lambda a, b: _equal(a, b, compared), _short_text
    ):
        name = difference.path
        yield _narrow_down(difference, ours.get(name), theirs.get(name), compared)


def _narrow_down(
    difference: Difference, one: object, other: object, compared: _Pairs
) -> Difference:
    """Return the difference of two objects, with the path to the first attribute that differs."""
    if type(one) is not type(other) or isinstance(one, _PLAIN) or not hasattr(one, "__dict__"):
        return difference
    inner = next(_differences_of_attributes(vars(one), vars(other), compared), None)
    if inner is None:
        return difference
    return inner._replace(path=f"{difference.path}.{inner.path}")


def _differences_by_name(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    equal: Callable[[Any, Any], bool],
    text: Callable[[Any], str],
) -> Iterator[Difference]:
    """Yield the names whose values differ or which one mapping lacks.

    Args:
        ours: one object's values by name.
        theirs: the other object's.
        equal: returns whether two values count as equal.
        text: returns a value in words.
    """
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in ours:
            yield Difference(name, "absent", text(theirs[name]))
        elif name not in theirs:
            yield Difference(name, text(ours[name]), "absent")
        elif not equal(ours[name], theirs[name]):
            yield Difference(name, text(ours[name]), text(theirs[name]))


def _form(tensor: Tensor | None) -> str:
    """Return a tensor's shape, dtype, device and whether it is frozen, in words."""
    if tensor is None:
        return "none"
    return f"{list(tensor.shape)} {_form_without_shape(tensor)}"


def _form_without_shape(tensor: Tensor | None) -> str:
    """Return a tensor's dtype, device and whether it is frozen, in words."""
    if tensor is None:
        return "none"
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} on {tensor.device}{frozen}"


def _ties(module: nn.Module) -> set[tuple[str, ...]]:
    """Return the groups of names that name the same tensor."""
    named_tensors = itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    return {tuple(group) for group in shared_tensors(named_tensors).values()}


def _equal(one: object, other: object, assumed_equal: _Pairs) -> bool:
    """Return whether two values behave alike, although they may be different objects.

    Args:
        one: a value.
        other: another one.
        assumed_equal: pairs of objects that count as equal.
    """
    pair = (id(one), id(other))
    if one is other or pair in assumed_equal:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    ours = _contents(one)
    theirs = _contents(other)
    # Objects may refer to each other in circles. So while a pair is being compared, it counts as equal.
    assumed_equal |= {pair}
    if ours.key != theirs.key:
        return False
    pairs = zip(ours.values, theirs.values, strict=True)
    return all(_equal(a, b, assumed_equal) for a, b in pairs)


def _contents(value: object) -> _Contents:
    """Return what an object consists of, its attributes included."""
    contents = _contents_by_type(value)
    # Functions and instances of subclasses may have attributes, too.
    attributes: dict[str, Any] = {}
    if hasattr(value, "__dict__") and not isinstance(value, type):
        attributes = {name: inner for name, inner in vars(value).items() if name not in _LABELS}
    return _Contents((contents.key, list(attributes)), [*contents.values, *attributes.values()])


def _contents_by_type(value: object) -> _Contents:
    """Return what an object consists of, apart from its attributes, which `_contents` adds.

    An object without attributes whose type is not known here is compared as a whole, by ==.
    """
    match value:
        case float() | complex():
            return _Contents(repr(value), [])  # 0.0 differs from -0.0, and NaN equals NaN
        case Mapping():
            return _Contents(list(value), list(value.values()))
        case list() | tuple():
            return _Contents(len(value), list(value))
        case types.FunctionType():
            # A cell that equals `CellType()` is empty: its variable has no value yet.
            cells = [
                cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()
            ]
            key = (value.__code__, len(cells), id(value.__globals__))
            return _Contents(key, [value.__defaults__, value.__kwdefaults__, *cells])
        case types.MethodType():
            return _Contents("", [value.__func__, value.__self__])
        case functools.partial():
            return _Contents("", [value.func, value.args, value.keywords])
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            return _Contents((value.dtype.str, value.shape, value.tobytes()), [])
    if isinstance(value, (*_PLAIN, set, frozenset)) or not hasattr(value, "__dict__"):
        return _Contents(value, [])
    return _Contents("", [])


def _short_text(value: object) -> str:
    if isinstance(value, (*_PLAIN, tuple, list)):
        text = repr(value)
    else:
        text = f"another {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."
