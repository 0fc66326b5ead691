"""Find linear layers that read one tensor (such as query, key and value) and make them families.

They are found by watching calls, not by names or classes.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from monograph import compat
from monograph.graph.fused_linears import FusedLinears, Sibling, adjacent, mode_of, version_of
from monograph.graph.inspect import blocks, buffers_kept, modes_kept, shared_parameters, unwrap_

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# See `fuse_siblings`.
Example = Tensor | Mapping[str, object] | Sequence[object] | Callable[[], object]


class Call(NamedTuple):
    """One call of a layer. It keeps the tensors alive, so that no other one gets the same id."""

    name: str
    input: Tensor
    version: int
    mode: tuple[bool, bool, torch.dtype]
    output: Tensor
    output_version: int


def watched(module: nn.Module, run: Callable[[], object]) -> list[Call]:
    """Run a module in its own mode and in evaluation mode, and return all calls of linear layers
    with one tensor.
    """
    calls: list[Call] = []

    def seen(
        name: str,
        _layer: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        output: Tensor,
    ) -> None:
        values = [*args, *kwargs.values()]
        given = values[0] if len(values) == 1 else None
        if isinstance(given, Tensor):
            calls.append(
                Call(name, given, version_of(given), mode_of(given), output, version_of(output))
            )

    linear = [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)
    ]
    handles = [
        layer.register_forward_hook(partial(seen, name), with_kwargs=True) for name, layer in linear
    ]
    try:
        with modes_kept(module):
            run()
            # Evaluation may run other code of the module, and layers must be siblings in both
            # modes.
            if any(part.training for part in module.modules()):
                module.eval()
                run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def grouped(module: nn.Module, calls: list[Call]) -> tuple[list[list[str]], dict[str, str]]:
    """Return groups of layers to fuse, by name, and the reasons why others that share an input
    cannot be fused.
    """
    read: dict[str, list[Hashable]] = {}
    changed = set()
    for call in calls:
        # One product serves all only if neither the tensor nor the modes of autocast and autograd
        # change in between.
        read.setdefault(call.name, []).append((id(call.input), call.version, call.mode))
        # Outputs of siblings are views of one tensor, and autograd forbids changing those in place.
        if version_of(call.output) != call.output_version:
            changed.add(call.name)
    readers: dict[Hashable, list[str]] = {}
    for name, tensors in read.items():
        readers.setdefault(tuple(tensors), []).append(name)
    obstacles = _obstacles(module) | dict.fromkeys(changed, "its output is changed in place")
    groups = list[list[str]]()
    separate = dict[str, str]()
    for names in readers.values():
        alike: dict[Hashable, list[str]] = {}
        for name in names if len(names) > 1 else ():
            if name in obstacles:
                separate[name] = obstacles[name]
            else:
                layer = module.get_submodule(name)
                assert isinstance(layer, nn.Linear)  # no other layer is watched
                alike.setdefault(_kind(layer), []).append(name)
        for group in alike.values():
            sequence = [call.name for call in calls if call.name in group]
            if len(group) == 1:
                separate[group[0]] = (
                    "none of the others is like it in dtype, bias and requires_grad"
                )
            # The first layer called computes for all, so it must be the same one each time.
            elif sequence != group * (len(sequence) // len(group)):
                separate |= dict.fromkeys(group, "they are called in changing order")
            else:
                groups.append(group)
    return groups, separate


def _kind(layer: nn.Linear) -> Hashable:
    weight, bias = layer.weight, layer.bias
    return (
        weight.dtype,
        weight.device,
        weight.requires_grad,
        None if bias is None else (bias.dtype, bias.requires_grad),
    )


def _obstacles(module: nn.Module) -> dict[str, str]:
    """Return the reasons why linear layers cannot be fused, by name."""
    shared = shared_parameters(module)
    obstacles = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            parameters = [layer._parameters.get("weight"), layer._parameters.get("bias")]
            tied = [
                n for p in parameters for n in shared.get(id(p), []) if n.rpartition(".")[0] != name
            ]
            if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
                obstacles[name] = "its forward pass is not nn.Linear's"
            elif any(getattr(layer, hooks) for hooks in HOOKS):
                obstacles[name] = "it has hooks"
            # A computed weight, such as a parametrized one, cannot be placed next to another.
            elif type(layer._parameters.get("weight")) not in (nn.Parameter, FakeTensor):
                obstacles[name] = "its weight is no plain parameter"
            elif tied:
                obstacles[name] = f"it shares its weight with {tied[0]}"
    return obstacles


class Fusion(NamedTuple):
    """The result of a fusion; `str` gives one line.

    Attributes:
        families: names of the layers of each matrix product, in the order of their calls.
        separate: reasons why other layers that share an input were not fused, by name.
    """

    families: tuple[tuple[str, ...], ...]
    separate: Mapping[str, str] = {}

    def __str__(self) -> str:
        """Return a line such as
        `10 linear layers in 4 matrix products; separate: x.a (it has hooks)`.
        """
        layers = sum(len(family) for family in self.families)
        text = (
            f"{layers} linear layers in {len(self.families)} matrix products"
            if layers
            else "no siblings fused"
        )
        alone = "; ".join(f"{name} ({reason})" for name, reason in self.separate.items())
        return f"{text}; separate: {alone}" if alone else text


def fuse_siblings(module: nn.Module, example: Example) -> Fusion:
    """Let linear layers of a module that read one tensor compute together, in place.

        y_1, y_2, ... = split(x [W_1; W_2; ...]^T + [b_1; b_2; ...])

    Weights are moved next to each other in memory, once; modules, names, parameters and gradients
    stay as they are, and a `Step` that is made later keeps siblings side by side in its planes.
    Layers are fused if they read the same unchanged tensor at each call, always in the same order,
    and are alike in dtype, device, having a bias, and being trained. Families that span blocks are
    split if blocks are recomputed or captured one by one. Every call is checked
    again: a layer that is given another tensor computes alone.

    The example is run in the module's mode and in evaluation mode; random state and buffers are
    restored. Put a module that will be trained into training mode first.

    Args:
        module: any module; an earlier fusion is undone first.
        example: the arguments of a call: a tensor, a tuple of arguments or a mapping of keywords;
            or a function without arguments that calls the module.

    Returns:
        The families, and the layers that stay separate with the reason: subclasses with their own
        forward pass, layers with hooks, tied or computed weights, outputs that are changed in place
        or must be contiguous.
    """
    module = unwrap_(module)
    # A fused layer's forward pass is not nn.Linear's, so it would be left alone.
    unfuse_siblings(module)
    run = _runner(module, example)
    # Without a list of cards, torch would save the generators of all.
    cards = {p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"}
    with buffers_kept(module), torch.random.fork_rng(devices=sorted(cards)):
        groups, separate = grouped(module, watched(module, run))
        fused: list[FusedLinears] = []
        for names in groups:
            layers = [module.get_submodule(name) for name in names]
            formed = _families(layers)  # type: ignore[arg-type]
            fused += formed
            # Weights in a step's planes cannot be moved any more, so some layers may be left
            # without a family.
            related = {id(layer) for family in formed for layer in family.layers}
            alone = [
                name for name, layer in zip(names, layers, strict=True) if id(layer) not in related
            ]
            separate |= dict.fromkeys(
                alone, "its weight does not lie next to its siblings': fuse before the Step"
            )
        _install(module, fused, run, separate)
    # A family writes an attribute at each call, which Dynamo forbids by default in a captured,
    # recomputed block.
    compat.allow_stashes_in_recomputed()
    name_of = {id(layer): name for name, layer in module.named_modules()}
    return Fusion(
        tuple(tuple(name_of[id(layer)] for layer in family.layers) for family in families(module)),
        separate,
    )


def fuse_known(module: nn.Module) -> None:
    """Fuse the linear layers that parts of a module name as their `siblings`, without a run; see
    `fuse_siblings`.

    Layers stay separate if something forbids to fuse one of them, or if they are alike in too
    little.
    """
    obstacles = _obstacles(module)
    for name, part in module.named_modules():
        names = [f"{name}.{sibling}" for sibling in getattr(part, "siblings", ())]
        parts = [module.get_submodule(layer) for layer in names]
        layers = [layer for layer in parts if isinstance(layer, nn.Linear)]
        fine = len(layers) == len(parts) and not obstacles.keys() & set(names)
        if fine and len({_kind(layer) for layer in layers}) == 1:
            for family in _families(layers):
                family.install()
    compat.allow_stashes_in_recomputed()


def unfuse_siblings(module: nn.Module) -> None:
    """Let every layer of a module compute alone again, and give each parameter its own memory, with
    the same bits.

    Parameters that lie in a `Step`'s planes stay there.
    """
    for family in families(module):
        family.remove()
        family.part()


def families(module: nn.Module) -> list[FusedLinears]:
    """Return a module's families."""
    return list(
        {
            id(layer.family): layer.family
            for layer in module.modules()
            if isinstance(layer, Sibling)
        }.values()
    )


def side_by_side(
    module: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """Return the parameters in an order for one buffer in which siblings' parameters follow one
    another.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    after: dict[str, list[str]] = {}
    for family in families(module):
        for joined in (family.weights, family.biases):
            # A family stays in one piece only if all its parameters go to this buffer.
            if joined and all(id(parameter) in names for parameter in joined):
                first, *others = (names[id(parameter)] for parameter in joined)
                after[first] = others
    moved = {name for others in after.values() for name in others}
    order = [n for name in parameters if name not in moved for n in (name, *after.get(name, ()))]
    return {name: parameters[name] for name in order}


def part_moved(module: nn.Module) -> None:
    """Split families whose parameters were moved apart into smaller ones that still lie side by
    side.
    """
    for family in families(module):
        family.look()
        if family.weight is None:
            _replace(family, [family.layers])


def within_blocks(module: nn.Module) -> None:
    """Split families that span several blocks, because a block is recomputed or captured without
    the others.
    """
    where = {id(part): name for name, block in blocks(module).items() for part in block.modules()}
    for family in families(module):
        by_block: dict[str | None, list[nn.Linear]] = {}
        for layer in family.layers:
            by_block.setdefault(where.get(id(layer)), []).append(layer)
        if len(by_block) > 1:
            _replace(family, by_block.values())


def _replace(family: FusedLinears, groups: Iterable[list[nn.Linear]]) -> None:
    family.remove()
    for layers in groups:
        for smaller in _families(layers):
            smaller.install()


def _families(layers: list[nn.Linear]) -> list[FusedLinears]:
    """Return one family of all layers if their weights can be joined, else families of those that
    lie side by side.
    """
    if len(layers) > 1:
        whole = FusedLinears(layers)
        if whole.weight is not None:
            return [whole]
    runs = [[layers[0]]]
    for one, other in pairwise(layers):
        near = adjacent([one.weight, other.weight]) and (
            one.bias is None or adjacent([one.bias, other.bias])
        )
        if near:
            runs[-1].append(other)
        else:
            runs.append([other])
    return [FusedLinears(run) for run in runs if len(run) > 1]


def _install(
    module: nn.Module,
    fused: list[FusedLinears],
    run: Callable[[], object],
    separate: dict[str, str],
) -> None:
    """Fuse all families if the example runs with them, else try them one by one; add the failing
    ones to `separate`.
    """
    try:
        for family in fused:
            family.install()
        run()
        return
    except Exception:
        for family in fused:
            family.remove()
    names = {id(layer): name for name, layer in module.named_modules()}
    for family in fused:
        family.install()
        try:
            run()
        except Exception as error:
            family.remove()
            family.part()
            message = next(iter(str(error).splitlines()), type(error).__name__)
            reason = f"what follows needs outputs of its own: {message}"
            separate |= {names[id(layer)]: reason for layer in family.layers}


def _runner(module: nn.Module, example: Example) -> Callable[[], object]:
    if isinstance(example, Tensor):
        return lambda: module(example)
    if isinstance(example, Mapping):
        return lambda: module(**example)
    if callable(example):
        return example
    return lambda: module(*example)
