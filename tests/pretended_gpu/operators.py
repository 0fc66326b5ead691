"""Numbers of ATen's CUDA operators: the CPU's kernels compute them on the same memory.

An operator has two halves, as on a real card. When it is called, the shapes, strides and dtypes of
its results are computed on the meta device, and memory is taken from torch's own CUDA allocator.
When the card does its work (`order.launch`), the CPU's kernel computes the numbers, at once, later,
or at each replay of a captured graph.

Without numbers: operators that have neither a CPU kernel nor a decomposition; these raise by name.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_map

from pretended_gpu import attention, order
from pretended_gpu.memory import on_host
from pretended_gpu.untraced import untraced

aten = torch.ops.aten
Operator = Any  # torch._ops.OpOverload
# These launch no kernel: they make tensors, views and storages, or read one number through the
# driver.
NATIVE = {
    "empty.memory_format", "empty_strided", "as_strided", "as_strided_", "view", "view.dtype", "view_as_real",
    "view_as_complex", "_reshape_alias", "alias", "unfold", "set_", "set_.source_Storage", "set_.source_Tensor",
    "set_.source_Storage_storage_offset", "resize_", "_local_scalar_dense", "record_stream", "is_pinned", "pin_memory",
    "_pin_memory", "_fused_sdp_choice", "_efficientzerotensor", "is_set_to", "_nested_tensor_from_mask",
}  # fmt: skip
CPU_KEYS = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
called: Counter[str] = Counter()
_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Replace the CUDA kernels of all operators, for as long as the process lives."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # loads the kernels, which are registered lazily
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each replaced kernel would be one
        for name, kernel in SPECIAL.items():
            _library.impl(name, kernel, "CUDA")
        for operator in _cuda_operators():
            name = operator.name().removeprefix("aten::")
            if name not in SPECIAL:
                _library.impl(name, Kernel(operator, name), "CUDA")


def _cuda_operators() -> Iterator[Operator]:
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        on_card = namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
            qualified, "CUDA"
        )
        if on_card and name not in NATIVE:
            operator = getattr(getattr(aten, base, None), overload or "default", None)
            if operator is not None and not operator.is_view:
                yield operator


class Kernel:
    """What an operator does on the card: memory for its results at the call, numbers when the card
    gets to it.
    """

    def __init__(self, operator: Operator, name: str) -> None:
        self.operator, self.name = operator, name
        schema, tags = operator._schema, set(operator.tags)
        self.written = [
            (i, a.name)
            for i, a in enumerate(schema.arguments)
            if a.alias_info and a.alias_info.is_write
        ]
        self.of_tensors = [
            index
            for index, argument in enumerate(schema.arguments)
            if str(argument.type) == "Tensor"
        ]
        self.kernel, self.packet = (
            _cpu_kernel(operator, name),
            getattr(aten, name.partition(".")[0]),
        )
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.reads = bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & tags)
        self.by_index = name.startswith(("index.", "index_put"))
        # As of norms that write statistics.
        self.fresh = any(not result.alias_info for result in schema.returns)
        # By the shapes of the arguments: most calls have those of an earlier one, and the meta
        # device takes longer than the numbers.
        self._shapes: dict[Any, Any] = {}

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called[self.name] += 1
        if self.kernel is None:
            raise NotImplementedError(
                f"aten::{self.name} has no numbers on a pretended card: no kernel of a CPU"
            )
        self._require_one_device(args, kwargs)
        waits = _has_mask(args[1]) if self.by_index else self.reads
        if waits:
            order.wait()  # the host reads numbers to know the result's shape
        # A number that became a tensor on its way here comes as a number again; another overload
        # takes it.
        numeric = any(
            isinstance(args[index], int | float) for index in self.of_tensors if index < len(args)
        )
        compute, of_shapes = (self.packet, self.packet) if numeric else (self.kernel, self.operator)
        targets = [_argument(*which, args, kwargs) for which in self.written]
        if any(isinstance(target, Tensor) and target.numel() == 0 for target in targets):
            self._make_room(targets, of_shapes, args, kwargs)
        numbers = self._numbers(compute, *_mapped(_as_argument, (args, kwargs)))
        if targets and not self.fresh:
            order.launch(numbers)
            return self._returned(targets)
        if waits:
            return tree_map(_on_card, numbers())
        results = tree_map(_like, self._results(of_shapes, args, kwargs))
        order.launch(partial(_write, numbers, [on_host(result) for result in _tensors(results)]))
        return results

    def _numbers(self, compute: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
        if not self.random:
            return partial(compute, *args, **kwargs)
        draws = Draws()

        def numbers() -> Any:
            with seeded(draws):
                return compute(*args, **kwargs)

        return numbers

    def _results(self, of_shapes: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of a call on the meta device."""
        try:
            key = of_shapes is self.operator, torch.get_default_dtype(), _key((args, kwargs))
        except _Unknown:
            return of_shapes(*_mapped(_on_meta, args), **_mapped(_on_meta, kwargs))
        if key not in self._shapes:
            meta = _mapped(_on_meta, (args, kwargs))
            self._shapes[key] = of_shapes(*meta[0], **meta[1])
        return self._shapes[key]

    def _require_one_device(self, args: Any, kwargs: Any) -> None:
        """Refuse tensors of the host, as kernels do; they take those of one number, and indices."""
        if self.by_index or self.name.startswith("_foreach"):
            return
        for tensor in _tensors((args, kwargs)):
            if tensor.device.type == "cpu" and tensor.ndim:
                raise RuntimeError(
                    f"Expected all tensors on one device: aten::{self.name} got one of the host"
                )

    def _make_room(self, targets: list[Any], of_shapes: Any, args: Any, kwargs: Any) -> None:
        """Make results as large as the operator will, which was given empty ones."""
        meta = _mapped(_on_meta, (args, kwargs))
        of_shapes(*meta[0], **meta[1])
        for target, which in zip(targets, self.written, strict=True):
            shape = _argument(*which, *meta)
            if isinstance(target, Tensor) and target.shape != shape.shape:
                target.resize_(shape.shape)

    def _returned(self, targets: list[Any]) -> Any:
        """Return what was written, as the operator's schema says."""
        count = len(self.operator._schema.returns)
        return targets[0] if count == 1 else tuple(targets) if count else None


def _write(numbers: Callable[[], Any], results: list[Tensor]) -> None:
    for result, number in zip(results, _tensors(numbers()), strict=True):
        # Norms that are evaluated give statistics on one device only, which nobody reads.
        if number.numel():
            result.copy_(number)


class _Unknown(Exception):  # noqa: N818 - no error
    """An argument's value may matter to the shapes of the results."""


def _key(value: Any) -> Any:
    """Return what the shapes of an operator's results depend on of its arguments."""
    if isinstance(value, Tensor):
        # One of the host may stand for a number, which does not say its dtype.
        if value.device.type != "cuda" or value.is_conj() or value.is_neg():
            raise _Unknown
        return value.dtype, value.size(), value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    if value is None or isinstance(value, torch.Generator):
        return None
    if isinstance(value, _PLAIN):
        return type(value), value  # as 1, 1.0 and True are equal
    raise _Unknown


_PLAIN = (
    bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments with a function's results in their places."""
    if isinstance(value, list):
        return [_mapped(function, each) for each in value]
    if isinstance(value, tuple):
        return tuple(_mapped(function, each) for each in value)
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _has_mask(indices: Any) -> bool:
    return any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices
    )


def _argument(index: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[index] if index < len(args) else kwargs.get(name)


def _as_argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A number that lies on the host is a kernel's argument: its value at the launch counts.
        return (
            on_host(value)
            if value.device.type == "cuda"
            else value.clone()
            if value.ndim == 0
            else value
        )
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device.type == "cuda":
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def _like(shape: Any) -> Any:
    if not isinstance(shape, Tensor):
        return shape
    return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device="cuda")


def _on_card(number: Any) -> Any:
    if not isinstance(number, Tensor):
        return number
    result = _like(number)
    on_host(result).copy_(number)
    return result


def _cpu_kernel(operator: Operator, name: str) -> Callable[..., Any] | None:
    if name in WIDE_RESULT:
        return WIDE_RESULT[name]
    if any(
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key) for key in CPU_KEYS
    ):
        return operator  # type: ignore[no-any-return]
    if operator in decomposition_table:
        return decomposition_table[operator]

    return None


def _product(
    *factors: Tensor, out_dtype: torch.dtype, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return a product of two matrices, plus a third if there are three, rounded once to
    `out_dtype`.
    """
    *added, left, right = (factor.double() for factor in factors)
    result = alpha * (left @ right)
    return (result + beta * added[0] if added else result).to(out_dtype)


# Products whose result is wider than their factors, which the CPU's kernels have not.
WIDE_RESULT = {
    f"{name}.dtype": lambda *args, **kwargs: _product(*args[:-1], out_dtype=args[-1], **kwargs)
    for name in ("mm", "bmm", "addmm", "baddbmm")
} | {
    f"{name}.dtype_out": lambda *args, out, **kwargs: out.copy_(_product(*args[:-1], out_dtype=args[-1], **kwargs))
    for name in ("mm", "bmm", "addmm", "baddbmm")
}  # fmt: skip


# ── random numbers ──────────────────────────────────────────────────────────────────────────────


class Draws:
    """Where one operator's random numbers are: the card's seed, and an offset that each operator
    advances by 4.

    For a captured operator both are those of the replay, and the offset is relative to its
    beginning.
    """

    replay = 0, 0  # seed and offset where the replay that runs now began
    in_graph = 0  # what the graph that is captured has drawn so far

    def __init__(self) -> None:
        self.captured = torch.cuda.is_current_stream_capturing()
        if self.captured:
            self.seed, self.offset = 0, Draws.in_graph
            Draws.in_graph += 4
        else:
            self.seed, self.offset = drawn(4)

    def number(self) -> int:
        """Return the seed of the CPU's generator that draws instead."""
        seed, offset = Draws.replay if self.captured else (0, 0)
        return hash((seed + self.seed, offset + self.offset)) % 2**63


def drawn(count: int) -> tuple[int, int]:
    """Advance the card's default generator by `count`; return its seed and the offset before."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    offset = generator.get_offset()
    generator.set_offset(offset + count)
    return generator.initial_seed(), offset


@contextmanager
def seeded(draws: Draws) -> Iterator[None]:
    """In the block the CPU's default generator draws what is the operator's, and nothing of its own
    is used up.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(draws.number())
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


# ── copies ──────────────────────────────────────────────────────────────────────────────────────


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between devices or on one; a copy from or to pageable memory of the host makes the host
    wait.
    """
    called["copy_"] += 1
    into, numbers = on_host(target), on_host(source)
    pageable = any(end.device.type == "cpu" and not end.is_pinned() for end in (target, source))
    waits = target.device != source.device and (pageable or not non_blocking)
    order.launch(lambda: into.copy_(numbers))
    if waits:
        order.wait()
    return target


SPECIAL: dict[str, Callable[..., Any]] = {"copy_": _copy_, **attention.KERNELS}
