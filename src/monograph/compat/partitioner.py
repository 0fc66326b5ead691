"""What a compiled graph keeps for its backward pass, asked of the partitioner that decides it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Later than any region that checkpointing marks: what a later one reads from an earlier one is kept.
_LAST_REGION = 1 << 30


def make_again(graph: Any) -> None:
    """Mark what a graph computes from integers of 8 bits, up to matrix products, to be computed again going back.

    Left alone the partitioner keeps a frozen weight that was made dense in the forward pass, as the backward pass needs
    it whole. `graph` has both passes; the marks are those of checkpointing.
    """
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    products = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}
    codes = [node for node in graph.find_nodes(op="placeholder") if _dtype(node) in (torch.int8, torch.uint8)]
    found, waiting = set[Any](), [user for node in codes for user in node.users]
    while waiting:
        node = waiting.pop()
        if node.op != "call_function" or node in found or getattr(node.target, "overloadpacket", None) in products:
            continue
        found.add(node)
        waiting += [*node.users, *node.all_input_nodes]
    for node in found:
        node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": _LAST_REGION}


def _dtype(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _partition(graph: Any, inputs: Any, **options: Any) -> Any:
    """As Inductor cuts a graph in two."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    make_again(graph.graph)
    return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)


def stored_by_graph(forward: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> int:
    """Bytes that a compiled graph of a module's forward pass keeps for its backward pass, beside what it is given.

    It is the answer of the same partitioner that Inductor asks, which recomputes what fuses into the backward pass.
    """
    from torch import Tensor
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table
    from torch.nn.utils.stateless import _reparametrize_module
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    leaves, form = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    stored: dict[int, int] = {}

    def run(*tensors: Any) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors[len(own) :], strict=True):
            given[place] = tensor
        with _reparametrize_module(module, dict(zip(own, tensors, strict=False))):
            args, kwargs = tree_unflatten(given, form)
            return [leaf for leaf in tree_leaves(forward(*args, **kwargs)) if isinstance(leaf, Tensor)]

    def partition(graph: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        parts = _partition(graph, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        outputs: Any = parts[0].graph.output_node().args[0]
        kept = outputs[num_fwd_outputs:]
        for nodes, size in ((kept, None), (parts[0].graph.find_nodes(op="placeholder"), 0)):
            for value in (node.meta["val"] for node in nodes):
                if isinstance(value, Tensor):
                    storage = value.untyped_storage()
                    stored[storage._cdata] = storage.nbytes() if size is None else size
        return parts

    tensors = [*own.values(), *(leaves[place] for place in places)]
    fresh = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    aot_function(
        run,
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )(*fresh)
    return sum(stored.values())


def partitioned(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` that makes a forward and a backward graph as Inductor does and builds neither.

    `forward` and `backward` turn a graph into a function of the list of its arguments.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=lambda graph, _: forward(graph),
        bw_compiler=lambda graph, _: backward(graph),
        inference_compiler=lambda graph, _: forward(graph),
        decompositions=select_decomp_table(),
        partition_fn=_partition,
        keep_inference_input_mutations=True,
    )


@contextmanager
def activations_kept(share: float) -> Iterator[None]:
    """In the block graphs are compiled so that their backward pass is left at most this share of the activations."""
    if share == 1:
        yield
        return
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=share):
        yield
