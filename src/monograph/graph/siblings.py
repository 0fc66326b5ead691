"""Find linear layers that read the same tensor, such as query, key and value, and fuse them.

The layers are found by watching the calls of a run, not by their names or classes. Layers that are
computed in one product are siblings, and all siblings of one product are a family (`FusedLinears`).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from monograph import compat
from monograph.graph.fused_linears import (
    FusedLinears,
    Sibling,
    adjacent,
    fills_storage,
    mode_of,
    version_of,
)
from monograph.graph.inspect import blocks, buffers_kept, modes_kept, shared_parameters, unwrap_

# The attributes of a module that have its hooks. A layer with hooks must be called by itself.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# What runs a module once: the arguments of a call, or a function that calls it; see `fuse_siblings`.
Example = Tensor | Mapping[str, object] | Sequence[object] | Callable[[], object]


class LayerCall(NamedTuple):
    """One call of a layer.

    The tensors are kept alive, so that no later tensor gets the same id.

    Attributes:
        name: the layer's name.
        input: its input.
        input_version: how often the input had been changed in place, see `version_of`.
        mode: the modes of autograd and autocast, see `mode_of`.
        output: its output.
        output_version: `version_of` the output when the layer returned it.
    """

    name: str
    input: Tensor
    input_version: int
    mode: tuple[bool, bool, torch.dtype]
    output: Tensor
    output_version: int


def record_calls(module: nn.Module, run: Callable[[], object]) -> list[LayerCall]:
    """Run a module in its own mode and in evaluation mode.

    Returns:
        All calls of linear layers whose only argument is a tensor.
    """
    calls: list[LayerCall] = []

    def record(
        name: str,
        _layer: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        output: Tensor,
    ) -> None:
        """Note a call of a linear layer; this is a forward hook."""
        values = [*args, *kwargs.values()]
        if len(values) != 1 or not isinstance(values[0], Tensor):
            return
        input = values[0]
        calls.append(
            LayerCall(name, input, version_of(input), mode_of(input), output, version_of(output))
        )

    linear_layers = [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)
    ]
    handles = [
        layer.register_forward_hook(partial(record, name), with_kwargs=True)
        for name, layer in linear_layers
    ]
    try:
        with modes_kept(module):
            run()
            # Evaluation may run other code of the module, and layers must be siblings in both
            # modes.
            if any(submodule.training for submodule in module.modules()):
                module.eval()
                run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def groups_to_fuse(
    module: nn.Module, calls: list[LayerCall]
) -> tuple[list[list[str]], dict[str, str]]:
    """Find the layers that can be fused.

    Returns:
        Groups of layers to fuse, by name; and for each other layer that shares its input, by name,
        the reason why it cannot be fused.
    """
    # Outputs of siblings are views of one tensor, and autograd forbids changing those in place.
    with_changed_output = {
        call.name for call in calls if version_of(call.output) != call.output_version
    }
    obstacles = _obstacles(module)
    obstacles |= dict.fromkeys(with_changed_output, "its output is changed in place")
    groups = list[list[str]]()
    separate = dict[str, str]()
    for names in _layers_with_same_inputs(calls):
        if len(names) == 1:
            continue
        layers_by_kind: dict[Hashable, list[str]] = {}
        for name in names:
            if name in obstacles:
                separate[name] = obstacles[name]
            else:
                layer = module.get_submodule(name)
                assert isinstance(layer, nn.Linear)  # no other layer is watched
                layers_by_kind.setdefault(_kind(layer), []).append(name)
        for group in layers_by_kind.values():
            if len(group) == 1:
                separate[group[0]] = (
                    "none of the others is like it in dtype, bias and requires_grad"
                )
            elif not _are_called_in_order(group, calls):
                separate |= dict.fromkeys(group, "they are called in changing order")
            else:
                groups.append(group)
    return groups, separate


def _layers_with_same_inputs(calls: list[LayerCall]) -> Iterable[list[str]]:
    """Return the layers' names in groups: layers of a group had the same inputs in all their calls."""
    inputs_by_layer: dict[str, list[Hashable]] = {}
    for call in calls:
        # One product serves several layers only if neither the tensor nor the modes of autocast and
        # autograd change between their calls.
        input_key = (id(call.input), call.input_version, call.mode)
        inputs_by_layer.setdefault(call.name, []).append(input_key)
    layers_by_inputs: dict[Hashable, list[str]] = {}
    for name, inputs in inputs_by_layer.items():
        layers_by_inputs.setdefault(tuple(inputs), []).append(name)
    return layers_by_inputs.values()


def _are_called_in_order(group: list[str], calls: list[LayerCall]) -> bool:
    """Return whether the layers of a group are always called one after another in this order.

    The first layer computes for all, so it must be the same one each time.
    """
    sequence = [call.name for call in calls if call.name in group]
    rounds = len(sequence) // len(group)
    return sequence == group * rounds


def _kind(layer: nn.Linear) -> Hashable:
    """Return the properties that must be equal for layers to be fused."""
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
            # The names that these parameters have in other layers.
            other_names = [
                shared_name
                for parameter in parameters
                for shared_name in shared.get(id(parameter), [])
                if shared_name.rpartition(".")[0] != name
            ]
            if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
                obstacles[name] = "its forward pass is not nn.Linear's"
            elif any(getattr(layer, hooks) for hooks in HOOKS):
                obstacles[name] = "it has hooks"
            # A computed weight, such as a parametrized one, cannot be placed next to another.
            elif type(layer._parameters.get("weight")) not in (nn.Parameter, FakeTensor):
                obstacles[name] = "its weight is not a plain parameter"
            elif other_names:
                obstacles[name] = f"it shares its weight with {other_names[0]}"
    return obstacles


class Fusion(NamedTuple):
    """Which layers `fuse_siblings` fused, and why it left others; `str` says so in one line.

    Attributes:
        families: names of the layers of each matrix product, in the order of their calls.
        separate: reasons why other layers that share an input were not fused, by name.
    """

    families: tuple[tuple[str, ...], ...]
    separate: Mapping[str, str] = {}

    def __str__(self) -> str:
        """Return a line like `10 linear layers in 4 matrix products; separate: x.a (it has hooks)`."""
        layers = sum(len(family) for family in self.families)
        if layers:
            text = f"{layers} linear layers in {len(self.families)} matrix products"
        else:
            text = "no siblings fused"
        separate = "; ".join(f"{name} ({reason})" for name, reason in self.separate.items())
        return f"{text}; separate: {separate}" if separate else text


def fuse_siblings(module: nn.Module, example: Example) -> Fusion:
    """Make linear layers of a module that read the same tensor compute together, in place.

        y_1, y_2, ... = split(x [W_1; W_2; ...]^T + [b_1; b_2; ...])

    Weights are moved next to each other in memory, once. Modules, names, parameters and gradients
    do not change, and a `Step` that is made later keeps siblings side by side in its planes.

    Layers are fused if they read the same unchanged tensor at each call, always in the same order. They
    must have the same dtype and device. Either all or none must have a bias, and all or none be trained.
    Families that span blocks are split if blocks are recomputed or captured one by one. Every call
    is checked again: a layer that gets another tensor than its siblings computes alone.

    The example is run in the module's mode and in evaluation mode; random state and buffers are
    restored. Put a module that will be trained into training mode first.

    Args:
        module: any module; an earlier fusion is undone first.
        example: the arguments of a call: a tensor, a tuple of arguments or a mapping of keywords;
            or a function without arguments that calls the module.

    Returns:
        The families, and the layers that stay separate, with the reason for each. Reasons are a
        subclass with its own forward pass, hooks, a tied or computed weight, and an output that is
        changed in place or must be contiguous.
    """
    module = unwrap_(module)
    # First, because the forward pass of a fused layer is not nn.Linear's, so it would stay separate.
    unfuse_siblings(module)
    run = _runner(module, example)
    # Without this list, `fork_rng` would save the random state of every card of the machine.
    cards = {p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"}
    with buffers_kept(module), torch.random.fork_rng(devices=sorted(cards)):
        groups, separate = groups_to_fuse(module, record_calls(module, run))
        new_families: list[FusedLinears] = []
        for names in groups:
            layers = [module.get_submodule(name) for name in names]
            families_of_group = _families(layers)  # type: ignore[arg-type]
            new_families += families_of_group
            # Weights in a step's planes cannot be moved any more, so some layers may be left
            # without a family.
            in_families = {id(layer) for family in families_of_group for layer in family.layers}
            for name, layer in zip(names, layers, strict=True):
                if id(layer) not in in_families:
                    separate[name] = (
                        "its weight does not lie next to its siblings': fuse before the Step"
                    )
        _install(module, new_families, run, separate)
    # A family keeps outputs in an attribute at each call, which Dynamo forbids by default in a
    # captured, recomputed block.
    compat.allow_stashes_in_recomputed()
    name_of = {id(layer): name for name, layer in module.named_modules()}
    names_by_family = tuple(
        tuple(name_of[id(layer)] for layer in family.layers) for family in families(module)
    )
    return Fusion(names_by_family, separate)


def fuse_known(module: nn.Module) -> None:
    """Fuse the linear layers that submodules name in their attribute `siblings`, without a run.

    All layers of such a list stay separate if one of them cannot be fused, or if they differ in
    dtype, device, bias or requires_grad. See `fuse_siblings`.
    """
    obstacles = _obstacles(module)
    for name, submodule in module.named_modules():
        sibling_names = [f"{name}.{sibling}" for sibling in getattr(submodule, "siblings", ())]
        siblings = [module.get_submodule(sibling_name) for sibling_name in sibling_names]
        layers = [sibling for sibling in siblings if isinstance(sibling, nn.Linear)]
        all_are_linear = len(layers) == len(siblings)
        if not all_are_linear or any(each in obstacles for each in sibling_names):
            continue
        # `_kind` reads the weight. A layer with a quantised base has none, but it is among the obstacles.
        are_alike = len({_kind(layer) for layer in layers}) == 1
        if not are_alike:
            continue
        for family in _families(layers):
            family.install()
    compat.allow_stashes_in_recomputed()


def unfuse_siblings(module: nn.Module) -> None:
    """Make every layer of a module compute alone again, and give each parameter its own memory.

    The bits of parameters do not change. Parameters in a `Step`'s planes stay there.
    """
    for family in families(module):
        family.remove()
        family.separate_memory()


def families(module: nn.Module) -> list[FusedLinears]:
    """Return a module's families, each once."""
    siblings = [layer for layer in module.modules() if isinstance(layer, Sibling)]
    return list({id(sibling.family): sibling.family for sibling in siblings}.values())


def is_in_planes(module: nn.Module) -> bool:
    """Return whether parameters of a module lie in the planes of a step, which trains them."""
    # A parameter in a plane does not fill its storage. But nor does a parameter of a family, which is in
    # the family's memory, even if no step trains it.
    of_families = {
        id(parameter)
        for family in families(module)
        for parameter in (*family.weights, *family.biases)
    }
    return any(
        not fills_storage(parameter.data)
        for parameter in module.parameters()
        if id(parameter) not in of_families
    )


def in_family_order(
    module: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """Return the parameters in an order in which siblings' parameters follow one another."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    followers: dict[str, list[str]] = {}  # by the name of a family's first weight or bias
    for family in families(module):
        for tensors in (family.weights, family.biases):
            # A family stays together only if all its parameters are among these.
            if tensors and all(id(tensor) in name_of for tensor in tensors):
                first, *others = (name_of[id(tensor)] for tensor in tensors)
                followers[first] = others
    all_followers = {name for others in followers.values() for name in others}
    order = list[str]()
    for name in parameters:
        if name not in all_followers:
            order += [name, *followers.get(name, ())]
    return {name: parameters[name] for name in order}


def split_separated_families(module: nn.Module) -> None:
    """Split families whose parameters no longer lie side by side into smaller ones that do."""
    for family in families(module):
        family.update_views()
        if family.weight is None:
            _replace(family, [family.layers])


def split_fused_linears_at_blocks(module: nn.Module) -> None:
    """Split families that span several blocks.

    A block is recomputed or captured without the others, so it must not need their layers.
    """
    block_of = {
        id(submodule): name
        for name, block in blocks(module).items()
        for submodule in block.modules()
    }
    for family in families(module):
        layers_by_block: dict[str | None, list[nn.Linear]] = {}
        for layer in family.layers:
            layers_by_block.setdefault(block_of.get(id(layer)), []).append(layer)
        if len(layers_by_block) > 1:
            _replace(family, layers_by_block.values())


def _replace(family: FusedLinears, groups: Iterable[list[nn.Linear]]) -> None:
    """Replace a family by families within each group of its layers."""
    family.remove()
    for layers in groups:
        for smaller in _families(layers):
            smaller.install()


def _families(layers: list[nn.Linear]) -> list[FusedLinears]:
    """Return one family of all layers if their parameters lie, or can be moved, side by side.

    Otherwise return a family for each group of successive layers whose parameters already lie side by
    side.
    """
    if len(layers) > 1:
        family_of_all = FusedLinears(layers)
        if family_of_all.weight is not None:
            return [family_of_all]
    groups = [[layers[0]]]
    for one, other in pairwise(layers):
        biases_are_adjacent = one.bias is None or adjacent([one.bias, other.bias])
        if adjacent([one.weight, other.weight]) and biases_are_adjacent:
            groups[-1].append(other)
        else:
            groups.append([other])
    return [FusedLinears(group) for group in groups if len(group) > 1]


def _install(
    module: nn.Module,
    new_families: list[FusedLinears],
    run: Callable[[], object],
    separate: dict[str, str],
) -> None:
    """Fuse all families if the example runs with them, else try them one by one.

    Args:
        module: the module.
        new_families: its families, which are not installed yet.
        run: runs the example.
        separate: reasons by a layer's name. The layers of families that fail are added to it.
    """
    try:
        for family in new_families:
            family.install()
        run()
        return
    except Exception:
        for family in new_families:
            family.remove()
    name_of = {id(layer): name for name, layer in module.named_modules()}
    for family in new_families:
        family.install()
        try:
            run()
        except Exception as error:
            family.remove()
            family.separate_memory()
            message = next(iter(str(error).splitlines()), type(error).__name__)
            reason = f"what follows needs outputs of its own: {message}"
            separate |= {name_of[id(layer)]: reason for layer in family.layers}


def _runner(module: nn.Module, example: Example) -> Callable[[], object]:
    """Return a function that runs the module on an example; see `fuse_siblings`."""
    if isinstance(example, Tensor):
        return lambda: module(example)
    if isinstance(example, Mapping):
        return lambda: module(**example)
    if callable(example):
        return example
    return lambda: module(*example)
