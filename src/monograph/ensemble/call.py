"""Call a function of one module for all members of an ensemble at once, by `torch.func.vmap` over
the members' stacked tensors.

Modules that vmap cannot batch are refused. To find out, the module is tried before the first call in eager
mode: as it is and, if that fails, as if it were compiled.

Shapes: N members, B batch, H heads, T queries, S keys, D head dimension.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monograph import compat
from monograph.ensemble.agreement import hook_attributes
from monograph.ensemble.dropout import Dropout, DropoutCounter
from monograph.ensemble.layers import CannotBatch, Layers, PassObserver, refusal
from monograph.ensemble.recurrent import KERNELS
from monograph.ensemble.stack import Stack
from monograph.errors import InputRefused
from monograph.graph.inspect import buffers_kept
from monograph.step.retries import out_of_memory

# The types of values in a function's result that are no tensors, and are the same for all members.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Stands for a tensor among the leaves (in the sense of pytree) of a function's result.
_TENSOR = object()
# The name of the dropout seeds among the members' tensors. No parameter or buffer can have it.
_SEED = ""
Functions = dict[str, Callable[..., Tensor]]
Function = Callable[..., Any]  # (module, *inputs) -> tensors in any nesting
Tensors = dict[str, Tensor]


class _TensorLocation(NamedTuple):
    """Where a module has a parameter or buffer.

    Attributes:
        name: the tensor's name in the whole module. A tied tensor has several locations, all with the
            name of the first one.
        owner: the submodule that has the tensor.
        dictionary_name: the owner's attribute that has the tensor: "_parameters" or "_buffers".
        key: the tensor's key in that dictionary.
    """

    name: str
    owner: nn.Module
    dictionary_name: str
    key: str

    def dictionary(self) -> dict[str, Any]:
        """Return the owner's dictionary that has the tensor."""
        tensors: dict[str, Any] = getattr(self.owner, self.dictionary_name)
        return tensors


class MemberCaller:
    """Calls functions of one module for all members of a stack at once.

        outputs[i] = function(member i, inputs[i])
                     or function(member i, inputs) if all members get the same inputs

    There is no loop over members, so the number of kernels does not depend on N.

    Attributes:
        stack: the members.
        seeds: the seeds of the members' dropout, [N] int64.
        draw: the number of micro-batches trained on so far, 0-d int64. Dropout depends on it, so it
            drops other elements in each micro-batch.
    """

    def __init__(self, stack: Stack, seeds: Tensor, loss: object = None):
        """Prepare to call functions of the stack.

        Args:
            stack: the members.
            seeds: the seeds of their dropout.
            loss: the loss that the functions call with a member. If it is a module, its buffers are
                [N, ...], and a call for a member sees only the member's own part of them.
        """
        self.stack = stack
        self.seeds = seeds
        self.draw = torch.zeros((), dtype=torch.int64, device=seeds.device)
        # Dropout reads its seed from this module, and vmap puts each member's own seed there. The
        # module is made here because a traced function should not make modules.
        self._counter = DropoutCounter(seeds[0], self.draw)
        self._dropout = Dropout(self._counter)
        # torch's own warnings that vmap loops over members are off, since `_call_eagerly` warns itself.
        compat.set_vmap_loop_warning(False)
        # {the module's attribute `training`: whether the module must run as if it were compiled}, for the
        # modes that were tried out; see `_try_calls`.
        self._as_if_compiling: dict[bool, bool] = {}
        modules = list(stack.module.named_modules())
        # Buffers that are None, as (path of the owner, owner, name).
        self._none_buffers = [
            (path, owner, key)
            for path, owner in modules
            for key, buffer in owner._buffers.items()
            if buffer is None
        ]
        self._hook_attributes = [
            (owner, key) for _, owner in modules for key in hook_attributes(owner)
        ]
        # The locations are listed once. torch.func.functional_call would walk through the module at each
        # call, which takes most of the time of tracing a graph.
        self._module_locations = _tensor_locations(modules)
        seed_location = _TensorLocation(_SEED, self._counter, "_buffers", "seed")
        self._loss = loss if isinstance(loss, nn.Module) else nn.Module()
        self._loss_locations = _loss_locations(self._loss)
        self._locations = [*self._module_locations, *self._loss_locations, seed_location]
        # The names of the tensors that all members share. vmap gives each member the whole tensor. So a
        # product with a shared weight is a single product of the rows of all members.
        self._shared_names = {
            location.name
            for location in self._module_locations
            if id(location.dictionary()[location.key]) in stack.shared
        }

    def __call__(
        self, function: Function, *inputs: object, each: bool, parameters: Tensors | None = None
    ) -> Any:
        """Return the members' outputs with a leading member axis.

        The caller enters `context()`. It is not entered here because a captured graph would contain
        it.

        Args:
            function: a function of a module and the inputs. The module keeps its training mode.
            inputs: tensors in any nesting.
            each: whether each member has its own inputs, [N, ...]. Otherwise all members get the
                same inputs.
            parameters: parameters and buffers that replace those of the stack, by name; None: none.

        Raises:
            InputRefused: the function cannot be batched. The message names the part and the reason.
        """
        call_all, call_first = self._make_calls(function, *inputs, each=each, parameters=parameters)
        if torch.compiler.is_compiling():
            return call_all()
        return self._call_eagerly(call_all, call_first)

    def _make_calls(
        self, function: Function, *inputs: object, each: bool, parameters: Tensors | None = None
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return two functions without arguments: the call for all members at once, and the call
        for the first member alone.
        """
        stack = self.stack
        # Parameters, buffers and seeds are one mapping, so that no tensor can be left out by mistake.
        # vmap batches each in its first dimension, except those that all members share.
        stacked = {
            location.name: location.dictionary()[location.key] for location in self._locations
        }
        if parameters is not None:
            stacked |= parameters
        stacked[_SEED] = self.seeds
        tensor_dims = {name: None if name in self._shared_names else 0 for name in stacked}
        input_dim = 0 if each else None
        input_dims = tree_map(lambda leaf: input_dim if isinstance(leaf, Tensor) else None, inputs)
        # vmap returns only tensors. So `call_one` writes the rest of the function's result here: the
        # structure (a TreeSpec), and the leaves, in which _TENSOR stands for each tensor.
        structure: list[Any] = []

        def call_one(tensors: dict[str, Tensor], *inputs: object) -> list[Any]:
            # Calls of dropout are counted from 0 in each pass, so that a call has the same number
            # in the batch and alone.
            self._dropout.site = 0
            outputs = self._call_with(tensors, function, *inputs)
            self._dropout.site = 0  # a changed value would become an output of the graph
            # The forward pass may have set a buffer that was None. Its value is a tensor of this vmap,
            # which is useless after the vmap.
            for path, owner, key in self._none_buffers:
                value = owner._buffers[key]
                if value is not None:
                    owner._buffers[key] = None
                    name = ".".join(filter(None, (path, key)))
                    raise _changed_buffer(name, None, value)
            # Pre-hooks have set these attributes to tensors of this vmap, too.
            for owner, key in self._hook_attributes:
                setattr(owner, key, None)
            leaves, spec = tree_flatten(outputs)
            leaves_without_tensors = [
                leaf if isinstance(leaf, _PLAIN) else _TENSOR for leaf in leaves
            ]
            structure[:] = [spec, leaves_without_tensors]
            return [leaf for leaf in leaves if not isinstance(leaf, _PLAIN)]

        def call_all() -> Any:
            vmapped = torch.vmap(call_one, in_dims=(tensor_dims, *input_dims), randomness="error")
            tensors = iter(vmapped(stacked, *inputs))
            spec, leaves = structure
            return tree_unflatten(
                [next(tensors) if leaf is _TENSOR else leaf for leaf in leaves], spec
            )

        def call_first() -> Any:
            first_inputs = inputs
            if each:
                first_inputs = tree_map(
                    lambda leaf: leaf[0] if isinstance(leaf, Tensor) else leaf, inputs
                )
            with self._loss_of_first_member():
                return function(stack.members[0], *first_inputs)

        return call_all, call_first

    @contextmanager
    def _loss_of_first_member(self) -> Iterator[None]:
        """Make a context in which the loss has the first member's buffers instead of all members'."""
        slots = [(location.dictionary(), location.key) for location in self._loss_locations]
        stacked = [dictionary[key] for dictionary, key in slots]
        for (dictionary, key), buffer in zip(slots, stacked, strict=True):
            dictionary[key] = buffer[0]
        try:
            yield
        finally:
            for (dictionary, key), buffer in zip(slots, stacked, strict=True):
                dictionary[key] = buffer

    def addresses(self) -> list[int]:
        """Return the memory addresses of the members' tensors; 0 for a tensor that was taken out."""
        locations = (*self._module_locations, *self._loss_locations)
        tensors = [location.dictionary().get(location.key) for location in locations]
        tensors += [self.seeds, self.draw]
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    def buffers(self) -> Tensors:
        """Return the buffers of the stack and of the loss by name, without those that all members
        share.
        """
        return {
            location.name: location.dictionary()[location.key]
            for location in (*self._module_locations, *self._loss_locations)
            if location.dictionary_name == "_buffers" and location.name not in self._shared_names
        }

    def _call_with(self, tensors: Tensors, function: Function, *inputs: object) -> Any:
        """Call the function with these tensors in the place of the module's own.

        The forward pass may replace a tensor by another one, as a batch norm may do with its
        statistics. Then the new value is written into the given tensor.
        """
        # The owners' dictionaries are read and written directly: torch would check and register
        # each tensor again.
        slots = [(location.dictionary(), location.key) for location in self._locations]
        given = [tensors[location.name] for location in self._locations]
        own = [dictionary[key] for dictionary, key in slots]
        for (dictionary, key), tensor in zip(slots, given, strict=True):
            dictionary[key] = tensor
        try:
            outputs = function(self.stack.module, *inputs)
        finally:
            after = [dictionary.get(key) for dictionary, key in slots]
            for (dictionary, key), tensor in zip(slots, own, strict=True):
                dictionary[key] = tensor
        for location, tensor, new in zip(self._locations, given, after, strict=True):
            if new is not tensor:
                _write_buffer(location.name, tensor, new)
        return outputs

    def assume_batched(self) -> None:
        """Make no trial before the first calls: the module is known to run batched as it runs alone.

        A trial needs tensors with values. Those that only count memory have none.
        """
        self._as_if_compiling = dict.fromkeys((False, True), False)

    def layers(self, function: Function, *inputs: object, each: bool) -> Layers:
        """Run the function once, and return how each part of the module runs. Nothing changes.

        Args:
            function: see `__call__`.
            inputs: see `__call__`.
            each: see `__call__`.

        Raises:
            InputRefused: see `__call__`.
        """
        with self.context(), torch.no_grad():
            call_all, call_first = self._make_calls(function, *inputs, each=each)
            _, observer = self._try_calls(call_all, call_first)
            return observer.layers()

    def _call_eagerly(self, call_all: Callable[[], Any], call_first: Callable[[], Any]) -> Any:
        """Return `call_all()`.

        In each mode, training and evaluation, `_try_calls` first tells whether the module must run as
        if it were compiled.
        """
        training = self.stack.module.training
        if training not in self._as_if_compiling:
            self._as_if_compiling[training], observer = self._try_calls(call_all, call_first)
            observer.warn()
        as_if_compiling = self._as_if_compiling[training]
        try:
            with compat.as_if_compiling() if as_if_compiling else nullcontext():
                return call_all()
        except (RuntimeError, ValueError, TypeError) as failure:
            if out_of_memory(failure):
                raise
            # The function or its inputs may differ from those of the first trial, so a second trial is
            # made. If its result is the same, the error is the function's own. If not, the call is
            # made again, in the way that the second trial has found.
            self._as_if_compiling[training], _ = self._try_calls(call_all, call_first)
            if self._as_if_compiling[training] == as_if_compiling:
                raise
        return self._call_eagerly(call_all, call_first)

    def _try_calls(
        self, call_all: Callable[[], Any], call_first: Callable[[], Any]
    ) -> tuple[bool, PassObserver]:
        """Try `call_all` as it is. If that fails, try it as if it were compiled. Undo changes of
        buffers.

        Some modules read tensors' values unless they are being compiled; an attention may read its mask, for
        example. Inside vmap tensors have no values, so such modules must run as if they were compiled:
        `torch.compiler.is_compiling()` is true for them.

        Returns:
            Whether `call_all` must run as if it were compiled, and the observer of the pass.

        Raises:
            InputRefused: `call_all` fails both ways, although the first member runs alone. If the
                first member also fails alone, its error is raised unchanged.
        """
        module = self.stack.module
        failures = []
        # The usual way comes first: some modules take another path if they are being compiled.
        for as_if_compiling in (False, True):
            observer = PassObserver(module)
            # Gradients stay enabled or disabled, as a module may do other things without them.
            with buffers_kept(module, self._loss), observer():
                try:
                    with compat.as_if_compiling() if as_if_compiling else nullcontext():
                        call_all()
                except (RuntimeError, ValueError, TypeError) as failure:
                    failures.append((failure, observer.running))
                else:
                    return as_if_compiling, observer
        first_failure, running = failures[0]
        if out_of_memory(first_failure):
            raise first_failure
        # If the first member fails alone, too, the error has nothing to do with batching, and its own
        # message says more. Gradients stay enabled or disabled here, too.
        member = self.stack.members[0]
        with buffers_kept(member, self._loss):
            if not isinstance(first_failure, CannotBatch):
                call_first()
        raise refusal(first_failure, running) from first_failure

    @contextmanager
    def context(self) -> Iterator[None]:
        """Make a context in which torch's dropout, attention and other functions are replaced by those
        that `__call__` needs.
        """
        functions: Functions = {
            "scaled_dot_product_attention": self._attention,
            "embedding": _embedding,
            "normalize": _normalize,
        }
        with (
            compat.replace_functional(functions | self._dropout.functions()),
            compat.replace_layer_functions(
                KERNELS, _weight_norm, _cumulative_batch_norm, _refuse_checkpoint
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
        # A fused kernel draws its own random numbers. So with dropout, no fused kernel is used: the
        # probabilities are computed, and the ensemble's dropout is applied to them.
        if dropout_p == 0:
            folded: Tensor = torch.ops.monograph.attention_folding_members(
                query, key, value, attn_mask, is_causal, scale, enable_gqa
            )
            return folded
        probabilities = _attention_probabilities(
            query, key, attn_mask, is_causal, scale, enable_gqa
        )
        if enable_gqa:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        return self._dropout.apply(probabilities, dropout_p, tuple(probabilities.shape)) @ value


def _embedding(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.embedding`, whose batched form in torch is wrong: it drops the
    gradient of `padding_idx` only in member 0.
    """
    if max_norm is not None or scale_grad_by_freq:
        name = "scale_grad_by_freq" if max_norm is None else "max_norm"
        raise CannotBatch(
            f"it has {name}, which would count the tokens of all members together: leave {name} out"
        )
    rows = _torch_embedding(ids, weight)
    if padding_idx is None:
        return rows
    is_padding = ids == padding_idx % weight.shape[0]  # a negative index counts from the end
    return torch.where(is_padding.unsqueeze(-1), rows.detach(), rows)


def _refuse_checkpoint() -> None:
    """Refuse a module that calls torch.utils.checkpoint."""
    raise CannotBatch(
        "it recomputes by torch.utils.checkpoint, which does not work inside of torch.vmap: turn that off, as "
        "gradient_checkpointing_disable() does, and give the ensemble remat=Remat.Budget(share)"
    )


def _normalize(
    x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Tensor:
    """Compute `torch.nn.functional.normalize`, whose argument `out` has no batched form in torch.

    Spectral norms pass it.
    """
    normalized = _torch_normalize(x, p, dim, eps)
    return normalized if out is None else out.copy_(normalized)


def _weight_norm(direction: Tensor, norm: Tensor, dim: int = 0) -> Tensor:
    """Return norm * direction / |direction|, with the length over all dimensions except `dim`
    (-1: over all of them).
    """
    if dim == -1:
        rows = direction.reshape(1, -1)
    else:
        rows = direction.transpose(0, dim).reshape(direction.shape[dim], -1)
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


def _cumulative_batch_norm(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Compute a batch norm whose momentum is None.

    Its running statistics are means over the k batches seen so far:

    running_k = running_{k-1} + (batch_k - running_{k-1}) / k
    """
    norm._check_input_dim(x)
    norm.num_batches_tracked.add_(1)
    mean = torch.zeros_like(norm.running_mean)
    variance = torch.zeros_like(norm.running_var)
    # With momentum 1, torch writes the statistics of this batch alone into the two tensors.
    momentum = 1.0
    out = nn.functional.batch_norm(
        x, mean, variance, norm.weight, norm.bias, True, momentum, norm.eps
    )
    # torch would compute 1 / k on the host from a buffer's value, which a batched buffer does not
    # have.
    norm.running_mean.add_((mean - norm.running_mean) / norm.num_batches_tracked)
    norm.running_var.add_((variance - norm.running_var) / norm.num_batches_tracked)
    return out


def _write_buffer(name: str, buffer: Tensor, value: object) -> None:
    """Write a buffer's new value into the members' buffer, after the forward pass has replaced the buffer.

    Raises:
        InputRefused: the value is not a tensor of the buffer's shape and dtype.
    """
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
        raise _changed_buffer(name, buffer, value)
    # New statistics are results of the pass. No gradient flows through them.
    with torch.no_grad():
        buffer.copy_(value)


def _changed_buffer(name: str, before: object, after: object) -> InputRefused:
    """Return the error for a forward pass that gives a buffer another shape or dtype."""
    return InputRefused(
        f"the members cannot be batched: the forward pass sets the buffer {name}, {_form(before)}, to {_form(after)}: "
        "make it as large as it gets, and of one dtype, from the beginning"
    )


def _form(value: object) -> str:
    """Return a tensor's shape and dtype in words."""
    if not isinstance(value, Tensor):
        return "nothing"
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _tensor_locations(modules: list[tuple[str, nn.Module]]) -> list[_TensorLocation]:
    """Return the locations of all parameters, then of all buffers, of (path, module) pairs."""
    locations = []
    names = dict[int, str]()  # by the tensor's identity
    for dictionary_name in ("_parameters", "_buffers"):
        for path, owner in modules:
            for key, tensor in getattr(owner, dictionary_name).items():
                if tensor is not None:
                    name = names.setdefault(id(tensor), f"{path}.{key}".lstrip("."))
                    locations.append(_TensorLocation(name, owner, dictionary_name, key))
    return locations


def _loss_locations(loss: nn.Module) -> list[_TensorLocation]:
    """Return the locations of a loss's buffers.

    Their names begin with a dot, which no name of a member's tensor does.
    """
    return [
        _TensorLocation(f".{path}.{key}", owner, "_buffers", key)
        for path, owner in loss.named_modules()
        for key, buffer in owner._buffers.items()
        if buffer is not None
    ]


def _attention_probabilities(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return softmax(scale query key^T + mask), [B, H, T, S].

    The arguments are those of torch's attention. A mask of bools has True where attention is allowed.
    """
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
# torch's fused kernels have no batching rule, so vmap would loop over members, forward and backward.
# `_attention_of_members` is such a rule: it folds the members into the batch, and autograd then
# sees one call of the kernel. vmap needs an operator to which the rule belongs: "attention_folding_members".

_LIBRARY = torch.library.Library("monograph", "FRAGMENT")
_LIBRARY.define(
    "attention_folding_members(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, "
    "bool enable_gqa) -> Tensor"
)
# torch's own functions, kept here because `MemberCaller.context` replaces their names.
_torch_attention = nn.functional.scaled_dot_product_attention
_torch_embedding = nn.functional.embedding
_torch_normalize = nn.functional.normalize


@torch.library.impl(_LIBRARY, "attention_folding_members", "CompositeImplicitAutograd")
def _folded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    return _torch_attention(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=gqa)


def _attention_of_members(  # type: ignore[no-untyped-def]
    info, in_dims, query, key, value, mask, is_causal, scale, gqa
):
    """Compute attention for a batch of members; see torch.library.register_vmap for the arguments.

    query [N, ..., H, T, D], key and value [N, ..., H, S, D] (with the member axis at `in_dims`)
    """

    def with_members_first(tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            # All members share this tensor. The kernel gets N times as many rows, so it is expanded.
            return tensor.expand(info.batch_size, *tensor.shape)
        return tensor.movedim(dim, 0)

    query = with_members_first(query, in_dims[0])
    key = with_members_first(key, in_dims[1])
    value = with_members_first(value, in_dims[2])
    # A tensor [N, T, D] has no heads. Its member axis takes the place of H, and there is nothing to fold.
    has_heads = query.ndim > 3
    batch_shape = query.shape[:-3]  # N and the batch
    if mask is not None:
        mask = with_members_first(mask, in_dims[3])
        # A mask may have fewer dimensions than the query: the missing ones come after N.
        missing = query.ndim - mask.ndim
        mask = mask.view(mask.shape[0], *[1] * missing, *mask.shape[1:])
        if has_heads:
            mask = mask.expand(*batch_shape, *mask.shape[-3:]).flatten(0, -4)
    # Fold all axes before the last three, which are N and the batch, into one.
    query, key, value = (
        tensor.flatten(0, -4) if tensor.ndim > 3 else tensor for tensor in (query, key, value)
    )
    output = _folded_attention(query, key, value, mask, is_causal, scale, gqa)
    if has_heads:
        # In memory the heads of a position are next to each other, as in `query`. So the members are
        # unfolded while H is next to D: then an axis of length 1 gets the stride of a contiguous tensor.
        # With another stride, torch computes the next product for each member separately, and reads
        # its weight each time.
        output = output.transpose(-3, -2).unflatten(0, batch_shape).transpose(-3, -2)
    return output, 0


torch.library.register_vmap(
    "monograph::attention_folding_members", _attention_of_members, lib=_LIBRARY
)
