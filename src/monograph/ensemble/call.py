"""Call a function of one module for all members of a stack at once, by `torch.func.vmap` over their
tensors.

Shapes: N members, B batch, H heads, T queries, S keys, D head dimension.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monograph import compat
from monograph.ensemble.agreement import computed
from monograph.ensemble.layers import KERNELS, CannotBatch, Counter, Dropout, Layers, Watch, refusal
from monograph.ensemble.stack import Stack
from monograph.errors import InputRefused
from monograph.graph.inspect import buffers_kept
from monograph.step.retries import out_of_memory

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_TENSOR = object()
Functions = dict[str, Callable[..., Tensor]]
Function = Callable[..., Any]  # (module, *inputs) -> tensors in any nesting
Tensors = dict[str, Tensor]


class Members:
    """A caller of functions of one module for all members of a stack.

        out[i] = function(member i, inputs[i])     or function(member i, inputs) if all get the same inputs

    There is no loop over members, so the number of kernels does not depend on N.

    Attributes:
        stack: the members.
        seeds: the seeds of their dropout, [N] int64.
        draw: the number of micro-batches trained on, 0-d int64; each drops other elements.
    """

    def __init__(self, stack: Stack, seeds: Tensor):
        self.stack, self.seeds = stack, seeds
        self.draw = torch.zeros((), dtype=torch.int64, device=seeds.device)
        # Dropout reads its seed from this module, in which vmap puts each member's own.
        # Made here, as a traced function should not make modules.
        self._counter = Counter(seeds[0], self.draw)
        self._dropout = Dropout(self._counter)
        compat.set_vmap_loop_warning(False)  # `_eager` warns of loops after its first look
        self._for_graphs: dict[bool, bool] = {}  # by training mode: whether to call as if compiling
        named = list(stack.module.named_modules())
        self._absent = [
            (path, owner, key)
            for path, owner in named
            for key, of in owner._buffers.items()
            if of is None
        ]
        self._computed = [(owner, key) for _, owner in named for key in computed(owner)]
        # Places are listed once. torch.func.functional_call would walk through the module at each
        # call, which takes most of the time of tracing a graph.
        self._places = [*_places(named), ("", self._counter, "_buffers", "seed")]

    def __call__(
        self, function: Function, *inputs: object, each: bool, parameters: Tensors | None = None
    ) -> Any:
        """Return the members' outputs with a leading member axis.

        Call it in `context()`, which is not entered here because a captured graph would contain it.

        Args:
            function: a function of a module and the inputs; the module keeps its mode.
            inputs: tensors in any nesting.
            each: whether each member has inputs of its own, [N, ...]; else all get the same.
            parameters: tensors that replace the stack's own of these names.

        Raises:
            InputRefused: the function cannot be batched; the message says what cannot, and where.
        """
        batched, alone = self._ways(function, *inputs, each=each, parameters=parameters)
        return batched() if torch.compiler.is_compiling() else self._eager(batched, alone)

    def _ways(
        self, function: Function, *inputs: object, each: bool, parameters: Tensors | None = None
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return a call of the function for all members, and one for the first member alone."""
        stack = self.stack
        # Parameters, buffers and seeds are one mapping. vmap batches all of it in its first
        # dimension, so that no tensor of a member's own can be left out by mistake.
        held = {name: getattr(owner, kind)[key] for name, owner, kind, key in self._places}
        held |= (parameters or {}) | {"": self.seeds}
        dims = tree_map(lambda leaf: 0 if each and isinstance(leaf, Tensor) else None, inputs)
        # vmap returns tensors alone. The function's other results are noted here when it is traced,
        # for all members.
        structure: list[Any] = []

        def one(tensors: dict[str, Tensor], *inputs: object) -> list[Any]:
            # Sites are counted from 0 in each pass, so that a call of dropout has the same number
            # in the batch and alone.
            self._dropout.site = 0
            out = self._call_with(tensors, function, *inputs)
            self._dropout.site = 0  # a changed value would be an output of the graph
            # A buffer that was None and is set in the forward pass would be a tensor inside vmap,
            # useless outside it.
            for path, owner, key in self._absent:
                if (value := owner._buffers[key]) is not None:
                    owner._buffers[key] = None
                    raise _not_that(".".join(filter(None, (path, key))), None, value)
            for owner, key in self._computed:
                setattr(owner, key, None)  # a tensor inside vmap must not outlive it
            leaves, spec = tree_flatten(out)
            # A plain value, such as None in place of a loss, is the same for all members.
            structure[:] = [
                spec,
                [leaf if isinstance(leaf, _PLAIN) else _TENSOR for leaf in leaves],
            ]
            return [leaf for leaf in leaves if not isinstance(leaf, _PLAIN)]

        def batched() -> Any:
            tensors = iter(torch.vmap(one, in_dims=(0, *dims), randomness="error")(held, *inputs))
            spec, leaves = structure
            return tree_unflatten(
                [next(tensors) if leaf is _TENSOR else leaf for leaf in leaves], spec
            )

        def alone() -> Any:
            own = (
                tree_map(lambda leaf: leaf[0] if isinstance(leaf, Tensor) else leaf, inputs)
                if each
                else inputs
            )
            return function(stack.members[0], *own)

        return batched, alone

    def buffers(self) -> Tensors:
        """Return the stack's buffers by name."""
        return {
            name: getattr(owner, kind)[key]
            for name, owner, kind, key in self._places[:-1]
            if kind == "_buffers"
        }

    def _call_with(self, tensors: Tensors, function: Function, *inputs: object) -> Any:
        """Call the function with these tensors in the module, and write buffers that it replaces
        back into them.
        """
        held = [getattr(owner, kind) for _, owner, kind, _ in self._places]
        before = [of[key] for of, (*_, key) in zip(held, self._places, strict=True)]
        for of, (name, _, _, key) in zip(held, self._places, strict=True):
            of[key] = tensors[name]
        try:
            out = function(self.stack.module, *inputs)
        finally:
            after = [of.get(key) for of, (*_, key) in zip(held, self._places, strict=True)]
            for of, (*_, key), tensor in zip(held, self._places, before, strict=True):
                of[key] = tensor
        for (name, *_), tensor in zip(self._places, after, strict=True):
            if tensor is not tensors[name]:
                _write(name, tensors[name], tensor)
        return out

    def layers(self, function: Function, *inputs: object, each: bool) -> Layers:
        """Run the function once, and return how each part of the module runs; nothing changes.

        Raises:
            InputRefused: see `__call__`.
        """
        with self.context(), torch.no_grad():
            return self._looked_at(*self._ways(function, *inputs, each=each))[1].layers()

    def _eager(self, batched: Callable[[], Any], alone: Callable[[], Any]) -> Any:
        """Return `batched()`; a first look tells whether it must run as if compiling."""
        training = self.stack.module.training
        if training not in self._for_graphs:
            self._for_graphs[training], watch = self._looked_at(batched, alone)
            watch.warn()
        try:
            with compat.as_if_compiling() if self._for_graphs[training] else nullcontext():
                return batched()
        except (RuntimeError, ValueError, TypeError) as failure:
            if out_of_memory(failure):
                raise
            # Inputs or function may differ from those of the first look, so look again. If the
            # answer is the same, the error is the function's own.
            before = self._for_graphs[training]
            self._for_graphs[training], _ = self._looked_at(batched, alone)
            if before == self._for_graphs[training]:
                raise
        return self._eager(batched, alone)

    def _looked_at(
        self, batched: Callable[[], Any], alone: Callable[[], Any]
    ) -> tuple[bool, Watch]:
        """Return whether `batched` must run as if compiling, and what was observed.

        Some modules read tensors' values (attention those of its mask) unless they believe that
        they are compiled.

        Raises:
            InputRefused: the module cannot be batched either way; an error that a member raises
                alone is raised as it is.
        """
        module = self.stack.module
        failures = []
        # The module first runs as it is, as some modules take another path if they believe that
        # they are compiled.
        for compiling in (False, True):
            watch = Watch(module)
            # Gradients stay enabled or disabled, as a module may do other things.
            with buffers_kept(module), watch():
                try:
                    with compat.as_if_compiling() if compiling else nullcontext():
                        batched()
                except (RuntimeError, ValueError, TypeError) as failure:
                    failures.append((failure, watch.where))
                else:
                    return compiling, watch
        first, where = failures[0]
        if out_of_memory(first):
            raise first
        member = self.stack.members[0]
        # Gradients stay enabled, too, as the module may compute some itself.
        with buffers_kept(member):
            # A member that fails alone has a bug that has nothing to do with batching, and its own
            # message says more.
            if not isinstance(first, CannotBatch):
                alone()
        raise refusal(first, where) from first

    @contextmanager
    def context(self) -> Iterator[None]:
        """In the block torch's dropout, attention and other functions are replaced by those that
        `__call__` needs.
        """
        functions: Functions = {
            "scaled_dot_product_attention": self._attention,
            "embedding": _embedding,
            "normalize": _normalize,
        }
        with (
            compat.replace_functional(functions | self._dropout.functions()),
            compat.replace_layer_functions(
                KERNELS, _weight_norm, _average_of_batches, _refuse_checkpoint
            ),
            compat.without_fast_path(),
        ):
            yield

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # A fused kernel draws its own random numbers, so with dropout the probabilities are
        # computed in memory.
        if dropout_p == 0:
            folded: Tensor = torch.ops.monograph.folded_attention(
                query, key, value, attn_mask, is_causal, scale, enable_gqa
            )
            return folded
        probabilities = _probabilities(query, key, attn_mask, is_causal, scale, enable_gqa)
        value = (
            value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
            if enable_gqa
            else value
        )
        return self._dropout.of(probabilities, dropout_p, tuple(probabilities.shape)) @ value


def _embedding(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Do as `torch.nn.functional.embedding`; torch's batched form drops padding's gradient in
    member 0 only.
    """
    if max_norm is not None or scale_grad_by_freq:
        name = "scale_grad_by_freq" if max_norm is None else "max_norm"
        raise CannotBatch(f"it has {name}, which would count all members' tokens: leave it out")
    rows = _embed(ids, weight)
    if padding_idx is None:
        return rows
    return torch.where((ids == padding_idx % weight.shape[0]).unsqueeze(-1), rows.detach(), rows)


def _refuse_checkpoint() -> None:
    raise CannotBatch(
        "it recomputes by torch.utils.checkpoint, which does not work inside of torch.vmap: turn that off, as "
        "gradient_checkpointing_disable() does, and give the ensemble remat=Remat.Budget(share)"
    )


def _normalize(
    x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Tensor:
    """Do as `torch.nn.functional.normalize`, whose argument `out`, which spectral norms use, has no
    batched form.
    """
    normal = _plain_normalize(x, p, dim, eps)
    return normal if out is None else out.copy_(normal)


def _weight_norm(direction: Tensor, norm: Tensor, dim: int = 0) -> Tensor:
    rows = (
        direction.reshape(1, -1)
        if dim == -1
        else direction.transpose(0, dim).reshape(direction.shape[dim], -1)
    )
    lengths: Tensor = rows.norm(dim=1)
    return direction * (norm / lengths.view(norm.shape))


class _BatchNorm(Protocol):
    """A batch norm that keeps running statistics."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def _check_input_dim(self, input: Tensor) -> None: ...


def _average_of_batches(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Compute a batch norm whose momentum is None: its statistics are means over the k batches seen
    so far.

    running_k = running_{k-1} + (batch_k - running_{k-1}) / k
    """
    norm._check_input_dim(x)
    norm.num_batches_tracked.add_(1)
    of_batch = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    out = nn.functional.batch_norm(x, *of_batch, norm.weight, norm.bias, True, 1.0, norm.eps)
    for running, batch in zip((norm.running_mean, norm.running_var), of_batch, strict=True):
        # torch would compute 1 / k on the host from a buffer's value, which a batched buffer does
        # not have.
        running.add_((batch - running) / norm.num_batches_tracked)
    return out


def _write(name: str, buffer: Tensor, value: object) -> None:
    """Write a value, which the forward pass has put in a buffer's place, into the members' buffer.

    Raises:
        InputRefused: it is no tensor of the buffer's shape and dtype.
    """
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
        raise _not_that(name, buffer, value)
    # The new statistics are results of the pass, which no gradient flows through.
    with torch.no_grad():
        buffer.copy_(value)


def _not_that(name: str, *of: object) -> InputRefused:
    was, now = (
        f"{list(t.shape)} {str(t.dtype)[6:]}" if isinstance(t, Tensor) else "nothing" for t in of
    )
    return InputRefused(
        f"the members cannot be batched: the forward pass sets the buffer {name}, {was}, to {now}: make it as large as "
        "it gets, and of one dtype, from the beginning"
    )


def _places(modules: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module, str, str]]:
    """Return the places of parameters and buffers: (name, owner, the owner's dictionary, key).

    A tied tensor is in several places, and has the name of the first one in all of them.
    """
    places = []
    names = dict[int, str]()
    for kind in ("_parameters", "_buffers"):
        for path, owner in modules:
            for key, tensor in getattr(owner, kind).items():
                if tensor is not None:
                    name = names.setdefault(id(tensor), f"{path}.{key}".lstrip("."))
                    places.append((name, owner, kind, key))
    return places


def _probabilities(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


# ---- attention -----------------------------------------------------------------------------------
# The fused kernels have no batching rule, so vmap would loop over members, forward and backward.
# The rule below folds the members into the batch, and autograd then sees one call.

_LIBRARY = torch.library.Library("monograph", "FRAGMENT")
_LIBRARY.define(
    "folded_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, "
    "bool enable_gqa) -> Tensor"
)
_sdpa, _embed = nn.functional.scaled_dot_product_attention, nn.functional.embedding
_plain_normalize = nn.functional.normalize


@torch.library.impl(_LIBRARY, "folded_attention", "CompositeImplicitAutograd")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    return _sdpa(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=gqa)


def _folded_attention(  # type: ignore[no-untyped-def]
    info, in_dims, query, key, value, mask, is_causal, scale, gqa
):
    def front(tensor: Tensor, dim: int | None) -> Tensor:
        return (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        )

    # Tensors that members share are expanded, as the kernel sees N times as many rows.
    heads = [front(tensor, dim) for tensor, dim in zip((query, key, value), in_dims, strict=False)]
    if mask is not None:
        mask = front(mask, in_dims[3])
        mask = mask.view(mask.shape[0], *[1] * (heads[0].ndim - mask.ndim), *mask.shape[1:])
        mask = (
            mask.expand(*heads[0].shape[:-3], *mask.shape[-3:]).flatten(0, -4)
            if heads[0].ndim > 3
            else mask
        )
    query, key, value = (tensor.flatten(0, -4) if tensor.ndim > 3 else tensor for tensor in heads)
    out = _attention(query, key, value, mask, is_causal, scale, gqa)
    return out.view(*heads[0].shape[:-1], out.shape[-1]), 0


torch.library.register_vmap("monograph::folded_attention", _folded_attention, lib=_LIBRARY)
