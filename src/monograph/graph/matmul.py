"""Replace fp32 matrix products in captured graphs on CPUs where torch's own library, MKL, is slow.

MKL uses half of the vector width of some processors with AVX-512, such as AMD's Zen 5. On these
processors, a product's number of multiplications decides what computes it (dev/log.md):

    products of two matrices    MKL below `NATIVE_FROM`, oneDNN from `ONEDNN_FROM`, `matmul.cpp` in between
    batches of products         `matmul.cpp` below `ONEDNN_FROM`, MKL from there

MKL also computes products that are too narrow for `matmul.cpp` (`MIN_NATIVE_WIDTH`). Eager code is the
reference, and uses MKL, except for the products of `linear`, which oneDNN computes, and for grouped
products (`grouped_out`), which `matmul.cpp` computes.

Shapes: B products at once, N rows, K summed, M columns; P rows in E groups.
"""

import functools
from collections.abc import Callable, Sequence
from ctypes import c_long, c_void_p
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from monograph import compat
from monograph.compat import inductor
from monograph.device import clock, cpu_model
from monograph.storage.cache_dir import cached_answer

# Multiplications from which `matmul.cpp` is faster than MKL. For smaller products MKL is the fastest,
# because a call of it has the smallest fixed cost.
NATIVE_FROM = 2**18
# Multiplications from which `matmul.cpp` is no longer the fastest.
ONEDNN_FROM = 2**27
# The least number of rows and of columns for `matmul.cpp`: with fewer, most of its tile of 8 x 32 would
# be empty.
MIN_NATIVE_WIDTH = 32
SOURCE = Path(__file__).with_suffix(".cpp")
# MKL counts as slow if oneDNN is more than this many times as fast: 2.2 times on a Zen 5, 0.9 on a
# Xeon (dev/log.md).
SLOW_MKL_RATIO = 1.4
# Operators are defined in a library, because `torch.library.custom_op` adds 10 microseconds to
# every call.
_LIBRARY = torch.library.Library("monograph", "DEF")


@functools.cache
def mkl_is_slow() -> bool:
    """Return whether MKL wastes this CPU's vector width in fp32, so that oneDNN is far faster.

    It is measured once on a machine, and the answer is stored: it decides the bits of a run, so a
    resumed run must get the same answer.
    """
    name, flags = cpu_model()
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or "avx512f" not in flags:
        return False
    return cached_answer(f"slow MKL {name} {torch.__version__}", _onednn_is_faster)


def _onednn_is_faster() -> bool:
    """Measure whether oneDNN is more than SLOW_MKL_RATIO times as fast as MKL."""

    def time_s(product: Callable[[Tensor, Tensor], Tensor]) -> float:
        left = torch.ones(1024, 192)
        right = torch.ones(192, 512)
        start = clock()
        product(left, right)
        return clock() - start

    # The caller's modes are switched off: autocast, or one that makes tensors without numbers.
    with compat.without_modes(), torch.autocast("cpu", enabled=False):
        # The two take turns, and the shortest time of each counts, because other processes hardly
        # affect the shortest time.
        times = [(time_s(torch.mm), time_s(onednn)) for _ in range(10)]
    mkl_s = min(mkl for mkl, _ in times)
    onednn_s = min(onednn for _, onednn in times)
    return mkl_s > SLOW_MKL_RATIO * onednn_s


def onednn(left_NK: Tensor, right_KM: Tensor) -> Tensor:
    """Return left @ right, fp32, by oneDNN."""
    return compat.onednn_matmul(left_NK, right_KM)


def linear(input: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Return input @ weight.T + bias, [..., M], on a CPU, in eager code and without a gradient.

    In fp32 it is computed by oneDNN where MKL is slow, whatever the number of rows, so that a row has the
    same bits in any batch of at least two rows. That pays for weights of 2^17 entries or more: oneDNN is then
    1.2 to 2.3 times as fast for 16 to 512 rows (dev/log.md). The oneDNN of torch 2.11 is not used, because
    it rounds a row differently in batches of different sizes.

    Args:
        input: [..., K].
        weight_MK: the weight.
        bias_M: the bias, or None.
    """
    is_fp32 = input.dtype == weight_MK.dtype == torch.float32
    is_autocast = torch.is_autocast_enabled("cpu")
    if not is_fp32 or is_autocast or not mkl_is_slow() or not compat.onednn_rows_are_alone():
        return F.linear(input, weight_MK, bias_M)
    rows_NK = input.reshape(-1, input.shape[-1])
    output = onednn(rows_NK, weight_MK.T).view(*input.shape[:-1], -1)
    return output if bias_M is None else output + bias_M


def native(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, fp32, by `matmul.cpp`.

    Args:
        left: [N, K], or [B, N, K] for B products; any strides.
        right: [K, M], or [B, K, M]; any strides.

    Returns:
        [N, M], or [B, N, M].
    """
    out = left.new_empty(*left.shape[:-1], right.shape[-1])
    native_out(left, right, out=out)
    return out


def native_out(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """Write left @ right to `out`, contiguous; see `native`."""
    operands = left.data_ptr(), *left.stride(), right.data_ptr(), *right.stride()
    name = "matmul" if out.ndim == 2 else "batched"
    multiply = _native_function(name, (out.ndim, out.ndim))
    multiply(*left.shape, out.shape[-1], *operands, out.data_ptr())


def grouped_out(left_PK: Tensor, right_EKM: Tensor, ends_E: Tensor, *, out: Tensor) -> None:
    """Write the product of each group's rows with its matrix, by `matmul.cpp`.

    Args:
        left_PK: rows, fp32, sorted by group; any strides.
        right_EKM: the groups' matrices, fp32; any strides.
        ends_E: the index of the row after each group's last one, int32.
        out: [P, M], fp32, contiguous.
    """
    operands = left_PK.data_ptr(), *left_PK.stride(), right_EKM.data_ptr(), *right_EKM.stride()
    multiply = _native_function("grouped", (2, 3))
    multiply(len(ends_E), ends_E.data_ptr(), *right_EKM.shape[1:], *operands, out.data_ptr())


def grouped_outer_out(left_PN: Tensor, right_PM: Tensor, ends_E: Tensor, *, out: Tensor) -> None:
    """Write left[rows].T @ right[rows] of each group's rows, by `matmul.cpp`.

    Args:
        left_PN: rows, fp32, sorted by group; any strides.
        right_PM: rows, fp32, sorted by group; any strides.
        ends_E: the index of the row after each group's last one, int32.
        out: [E, N, M], fp32, contiguous.
    """
    operands = left_PN.data_ptr(), *left_PN.stride(), right_PM.data_ptr(), *right_PM.stride()
    multiply = _native_function("grouped_outer", (2, 2))
    multiply(len(ends_E), ends_E.data_ptr(), *out.shape[1:], *operands, out.data_ptr())


@functools.cache
def _native_function(name: str, dimensions: tuple[int, int]) -> Callable[..., None]:
    """Return a function of `matmul.cpp`; the first call compiles the file, which takes a second.

    The function takes the sizes, then the address and the strides of the left and of the right operand, then
    the address of the result.

    Args:
        name: the function's name.
        dimensions: the number of dimensions of the left and of the right operand.
    """
    function: Callable[..., None] = getattr(compat.compile_cpp(SOURCE.read_text()), name)
    left_dimensions, right_dimensions = dimensions
    left = [c_void_p, *[c_long] * left_dimensions]
    right = [c_void_p, *[c_long] * right_dimensions]
    if name.startswith("grouped"):
        sizes = [c_long, c_void_p, c_long, c_long]
    else:
        sizes = [c_long] * (left_dimensions + 1)
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


def inductor_options() -> dict[str, Any]:
    """Return the option of `torch.compile` that applies `rewrite` to each graph.

    Where MKL is slow, also let compiled code call `matmul.cpp` without torch's dispatcher.
    """
    is_slow = mkl_is_slow()
    if is_slow:
        # Such a call takes 2.3 microseconds instead of 4.3 (dev/log.md).
        compat.lower_to_call(torch.ops.monograph.small_matmul.default, native_out)
        compat.lower_to_call(torch.ops.monograph.batched_matmul.default, native_out)
    # The answer is part of the pass's key in Inductor's cache: two users of a machine may share the cache
    # although they measured different answers, and a graph that was compiled for a slow MKL calls
    # functions that are registered only there.
    choice = f"MKL is slow: {is_slow}"
    rewrite_products = compat.graph_pass(rewrite, __file__, inductor.__file__, choice=choice)
    return {"post_grad_custom_post_pass": rewrite_products}


def rewrite(graph: torch.fx.Graph) -> None:
    """Change a graph's products in place.

    A batched product is transposed if only its transpose is read. Then each fp32 product on a CPU
    gets the operator that is the fastest for its size.
    """
    # This comes first, because the loop below also chooses operators for the products made here.
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default):
        _compute_transposed(graph, node)
    if not mkl_is_slow():
        return
    for target, choose_operator in (
        (torch.ops.aten.mm.default, _operator_of_mm),
        (torch.ops.aten.bmm.default, _operator_of_bmm),
    ):
        for node in graph.find_nodes(op="call_function", target=target):
            product = node.meta["val"]
            depth = node.args[0].meta["val"].shape[-1]
            if product.dtype == torch.float32 and product.device.type == "cpu":
                node.target = choose_operator(product.shape[-2], depth, product.shape[-1])


def _compute_transposed(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Replace the transpose (L R)^T of a batched product by R^T L^T, which is contiguous.

    Under vmap, gradients of weights are such transposes. Nothing is changed if the node is another
    permutation, or if the product has other readers.

    Args:
        graph: the graph.
        node: a permutation in it.
    """
    product, order = node.args
    assert isinstance(product, torch.fx.Node) and isinstance(order, Sequence)
    is_bmm = product.target is torch.ops.aten.bmm.default
    if not is_bmm or len(product.users) > 1 or list(order) != [0, 2, 1]:
        return
    # Later passes read shapes, dtypes and devices from the `val` of every node, so new nodes need
    # one.
    operands = []
    with graph.inserting_before(product):
        for operand in reversed(product.args):
            assert isinstance(operand, torch.fx.Node)
            transposed = graph.call_function(torch.ops.aten.permute.default, (operand, [0, 2, 1]))
            transposed.meta["val"] = operand.meta["val"].mT
            operands.append(transposed)
        transposed_product = graph.call_function(torch.ops.aten.bmm.default, tuple(operands))
    transposed_product.meta["val"] = node.meta["val"].contiguous()
    node.replace_all_uses_with(transposed_product)
    graph.erase_node(node)
    graph.erase_node(product)


def workspace_bytes(left_NK: Tensor, right_KM: Tensor) -> int:
    """Return the bytes of temporary memory that a product of two matrices on a CPU takes.

    oneDNN copies a transposed left operand in fp32. In bf16 it copies parts one after another; they
    take some hundred kB and count as 0.
    """
    is_transposed = left_NK.stride(-1) != 1
    if left_NK.dtype != torch.float32 or not is_transposed or not mkl_is_slow():
        return 0
    rows, depth = left_NK.shape
    operator = _operator_of_mm(rows, depth, right_KM.shape[1])
    if operator is not torch.ops.monograph.onednn_matmul.default:
        return 0
    return left_NK.numel() * left_NK.element_size()


def _operator_of_mm(rows: int, depth: int, columns: int) -> OpOverload:
    """Return the fastest operator for an fp32 product of two matrices where MKL is slow."""
    multiplications = rows * depth * columns
    if multiplications >= ONEDNN_FROM:
        return torch.ops.monograph.onednn_matmul.default
    if multiplications >= NATIVE_FROM and min(rows, columns) >= MIN_NATIVE_WIDTH:
        return torch.ops.monograph.small_matmul.default
    return torch.ops.aten.mm.default


def _operator_of_bmm(rows: int, depth: int, columns: int) -> OpOverload:
    """Return the fastest operator for a batch of fp32 products of this size where MKL is slow."""
    # There is no lower limit, because MKL is slow at batches of many small matrices (dev/log.md).
    if rows * depth * columns < ONEDNN_FROM and min(rows, columns) >= MIN_NATIVE_WIDTH:
        return torch.ops.monograph.batched_matmul.default
    return torch.ops.aten.bmm.default
