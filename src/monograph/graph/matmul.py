"""Replace fp32 matrix products in captured graphs on CPUs where torch's own library, MKL, is slow.

MKL uses half of the vector width of some processors with AVX-512, such as AMD's Zen 5. There,
products up to `LARGE` are computed by `matmul.cpp`, whose calls cost almost nothing, and larger
ones by oneDNN, which torch includes and uses for bf16 anyway (dev/log.md). Eager code keeps MKL and
is the reference.

Shapes: B products at once, N rows, K summed, M columns.
"""

import functools
from collections.abc import Callable, Sequence
from ctypes import c_long, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from monograph import compat
from monograph.compat import inductor
from monograph.device import clock, cpu_model
from monograph.storage.cache_dir import found_once

# Numbers of multiplications from and up to which `matmul.cpp` is the fastest of the three. MKL has
# the cheapest call for smaller products (dev/log.md).
SMALLEST, LARGE = 2**18, 2**27
NARROWEST = 32  # narrower products leave most of a tile of 8 x 32 empty
SOURCE = Path(__file__).with_suffix(".cpp")
# Times as fast as MKL that oneDNN is where MKL is slow; a Zen 5 has 2.2, a Xeon 0.9 (dev/log.md).
SLOW = 1.4
# Plain registration: `torch.library.custom_op` adds 10 microseconds to every call.
_LIBRARY = torch.library.Library("monograph", "DEF")


@functools.cache
def mkl_is_slow() -> bool:
    """Return whether MKL wastes this CPU's vector width in fp32: whether oneDNN is far faster.

    A machine is measured once, as the choice decides on the bits of a run, which may be resumed.
    """
    name, flags = cpu_model()
    built_in = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return (
        built_in
        and "avx512f" in flags
        and found_once(f"slow MKL {name} {torch.__version__}", _onednn_is_faster)
    )


def _onednn_is_faster() -> bool:
    def seconds(product: Callable[[Tensor, Tensor], Tensor]) -> float:
        left = torch.ones(1024, 192)
        right = torch.ones(192, 512)
        start = clock()
        product(left, right)
        return clock() - start

    # In turns, and the best time of each, which other processes can hardly change. The caller may
    # be in a mode whose tensors have no numbers, or in autocast.
    with compat.without_modes(), torch.autocast("cpu", enabled=False):
        times = [(seconds(torch.mm), seconds(onednn)) for _ in range(10)]
    mkl_s, onednn_s = (min(column) for column in zip(*times, strict=True))
    return mkl_s > SLOW * onednn_s


def onednn(left_NK: Tensor, right_KM: Tensor) -> Tensor:
    """Return left @ right, fp32, by oneDNN."""
    return compat.onednn_matmul(left_NK, right_KM)


def native(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right [N, M] or B such products [B, N, M], fp32, by `matmul.cpp`; any strides."""
    out = left.new_empty(*left.shape[:-1], right.shape[-1])
    native_out(left, right, out=out)
    return out


def native_out(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """Write left @ right to `out`, contiguous; see `native`."""
    operands = left.data_ptr(), *left.stride(), right.data_ptr(), *right.stride()
    name = {2: "matmul", 3: "batched"}[out.ndim]
    _native(name, (out.ndim, out.ndim))(*left.shape, out.shape[-1], *operands, out.data_ptr())


def grouped_out(left_PK: Tensor, right_EKM: Tensor, ends_E: Tensor, *, out: Tensor) -> None:
    """Write the product of each group's rows with its matrix to `out` [P, M], contiguous, fp32, by
    `matmul.cpp`.
    """
    operands = left_PK.data_ptr(), *left_PK.stride(), right_EKM.data_ptr(), *right_EKM.stride()
    _native("grouped", (2, 3))(
        len(ends_E), ends_E.data_ptr(), *right_EKM.shape[1:], *operands, out.data_ptr()
    )


def grouped_outer_out(left_PN: Tensor, right_PM: Tensor, ends_E: Tensor, *, out: Tensor) -> None:
    """Write left[rows].T @ right[rows] of each group's rows to `out` [E, N, M], contiguous, fp32,
    by `matmul.cpp`.
    """
    operands = left_PN.data_ptr(), *left_PN.stride(), right_PM.data_ptr(), *right_PM.stride()
    _native("grouped_outer", (2, 2))(
        len(ends_E), ends_E.data_ptr(), *out.shape[1:], *operands, out.data_ptr()
    )


@functools.cache
def _native(name: str, dimensions: tuple[int, int]) -> Callable[..., None]:
    """Return a function of `matmul.cpp` by its operands' dimensions; the first call compiles the
    file in a second.
    """
    function: Callable[..., None] = getattr(compat.native(SOURCE.read_text()), name)
    left, right = ([c_void_p, *[c_long] * number] for number in dimensions)
    sizes = (
        [c_long, c_void_p, c_long, c_long]
        if name.startswith("grouped")
        else [c_long] * (dimensions[0] + 1)
    )
    function.argtypes = [*sizes, *left, *right, c_void_p]  # type: ignore[attr-defined]
    function.restype = None  # type: ignore[attr-defined]
    return function


for _name, _function in (
    ("onednn_matmul", onednn),
    ("small_matmul", native),
    ("batched_matmul", native),
):
    _LIBRARY.define(f"{_name}(Tensor left, Tensor right) -> Tensor")
    _LIBRARY.impl(_name, _function, "CPU")


@torch.library.register_fake("monograph::onednn_matmul", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch's has no types
@torch.library.register_fake("monograph::small_matmul", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch's has no types
@torch.library.register_fake("monograph::batched_matmul", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch's has no types
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def passes() -> dict[str, Any]:
    """Return the pass as an option of `torch.compile` with Inductor."""
    if mkl_is_slow():
        # Bypassing torch's dispatcher, a call takes 2.3 microseconds instead of 4.3 (dev/log.md).
        compat.lower_to_call(torch.ops.monograph.small_matmul.default, native_out)
        compat.lower_to_call(torch.ops.monograph.batched_matmul.default, native_out)
    return {"post_grad_custom_post_pass": compat.graph_pass(rewrite, __file__, inductor.__file__)}


def rewrite(graph: torch.fx.Graph) -> None:
    """Transpose batched products of which only the transpose is read; choose an operator for each
    CPU fp32 product.
    """
    # First, because the loop below also chooses for the products that are made here.
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default):
        _turn(graph, node)
    if not mkl_is_slow():
        return
    for target, choose in (
        (torch.ops.aten.mm.default, _chosen),
        (torch.ops.aten.bmm.default, _chosen_batched),
    ):
        for node in graph.find_nodes(op="call_function", target=target):
            product, depth = node.meta["val"], node.args[0].meta["val"].shape[-1]
            if product.dtype == torch.float32 and product.device.type == "cpu":
                node.target = choose(product.shape[-2], depth, product.shape[-1])


def _turn(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Replace (L R)^T by R^T L^T, which is contiguous: under vmap, gradients of weights come
    transposed.
    """
    product, order = node.args
    assert isinstance(product, torch.fx.Node) and isinstance(order, Sequence)
    is_bmm = product.target is torch.ops.aten.bmm.default
    if not is_bmm or len(product.users) > 1 or list(order) != [0, 2, 1]:
        return
    # Every new node needs its `val`, from which shapes, dtypes and devices are read.
    turned = []
    with graph.inserting_before(product):
        for operand in reversed(product.args):
            assert isinstance(operand, torch.fx.Node)
            turned.append(graph.call_function(torch.ops.aten.permute.default, (operand, [0, 2, 1])))
            turned[-1].meta["val"] = operand.meta["val"].mT
        new = graph.call_function(torch.ops.aten.bmm.default, tuple(turned))
    new.meta["val"] = node.meta["val"].contiguous()
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    graph.erase_node(product)


def workspace_bytes(left_NK: Tensor, right_KM: Tensor) -> int:
    """Return the bytes of temporary memory that a product of two matrices on a CPU takes.

    oneDNN copies a transposed left operand; in bf16 only parts of it at a time, some hundred kB,
    which count as 0.
    """
    rows, depth = left_NK.shape
    columns = right_KM.shape[1]
    by_onednn = (
        mkl_is_slow() and _chosen(rows, depth, columns) is torch.ops.monograph.onednn_matmul.default
    )
    by_onednn &= left_NK.dtype == torch.float32
    return left_NK.numel() * left_NK.element_size() if by_onednn and left_NK.stride(-1) != 1 else 0


def _chosen(rows: int, depth: int, columns: int) -> OpOverload:
    size = rows * depth * columns
    if size >= LARGE:
        return torch.ops.monograph.onednn_matmul.default
    if size >= SMALLEST and min(rows, columns) >= NARROWEST:
        return torch.ops.monograph.small_matmul.default
    return torch.ops.aten.mm.default


def _chosen_batched(rows: int, depth: int, columns: int) -> OpOverload:
    # There is no smallest size, because MKL is slow at batches of many small matrices (dev/log.md).
    if rows * depth * columns < LARGE and min(rows, columns) >= NARROWEST:
        return torch.ops.monograph.batched_matmul.default
    return torch.ops.aten.bmm.default
