"""Numbers of Triton's kernels on the pretended card: they run interpreted, many programs of a grid
at once.

Kernels must have been made with TRITON_INTERPRET=1. Addresses and numbers are taken at the launch;
the kernel is computed when `launch` runs the work that it was given, perhaps later, perhaps several
times.

The numbers are those of a card within rounding: functions are rounded once, sums are added in
halves, products in float32 (never tf32). What raises instead, by name: block pointers, tensor
descriptors (TMA), `tl.dot_scaled`, rounding towards 0, assembly other than Inductor's own. Of what
a card leaves undefined, numbers that a mask takes away are 0, and programs of one launch run in the
order of their numbers. One that waits for a later one waits for ever.
"""

from __future__ import annotations

import ast
import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

from pretended_gpu import combine, narrow
from pretended_gpu.programs import Apart, Numbers, Programs
from pretended_gpu.untraced import untraced

Work = Callable[[], None]

runs: Counter[str] = Counter()  # kernels that were computed, by name

_programs = Programs()
_together: dict[Any, int] = {}  # how many programs of a kernel were found to fit
_lock = threading.RLock()  # what the language computes with is one for all threads
_launch: Callable[[Work], object] | None = None


class Semantic(TritonSemantic):  # type: ignore[misc]
    """Triton's rules, with what its interpreter leaves to Python, which knows only one program's
    truth.
    """

    def negated(self, value: Any) -> Any:
        """Return `not value`."""
        return self.equal(value, 0) if isinstance(value, tl.tensor) else not value

    def both(self, value: Any, other: Callable[[], Any]) -> Any:
        """Return `value and other()`."""
        return self.and_(value, self.to_tensor(other())) if _is_block(value) else value and other()

    def either(self, value: Any, other: Callable[[], Any]) -> Any:
        """Return `value or other()`."""
        return self.or_(value, self.to_tensor(other())) if _is_block(value) else value or other()

    def range(self, start: Any, stop: Any = None, step: Any = 1, **hints: Any) -> Iterator[Any]:
        """Return a loop's indices, tensors where programs have different ones; those of one length
        go on together.
        """
        start, stop = (0, start) if stop is None else (start, stop)
        bounds = [
            self.to_tensor(bound).handle for bound in (start, stop, 1 if step is None else step)
        ]
        first, last, each = (bound.data.astype(np.int64) for bound in bounds)
        turns = int(Numbers(np.maximum(0, -((first - last) // each)), tl.int64).one())
        dtype = max((bound.dtype for bound in bounds[:2]), key=lambda dtype: dtype.int_bitwidth)
        for turn in range(turns):
            index = Numbers((first + turn * each).astype(narrow.array_dtype(dtype)), dtype)
            yield tl.tensor(index, dtype) if len(first) > 1 else int(index.data[0])


class Rewriter(interpreter.ASTTransformer):  # type: ignore[misc]
    """Rewrites a kernel so that `not`, `and` and `or` of blocks are those of their numbers."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:  # noqa: N802
        """Rewrite `not`."""
        self.generic_visit(node)
        return _call("negated", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:  # noqa: N802
        """Rewrite `and` and `or`."""
        self.generic_visit(node)
        name = "both" if isinstance(node.op, ast.And) else "either"
        result = node.values[-1]
        for value in reversed(node.values[:-1]):
            nothing = ast.arguments(
                posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]
            )
            result = _call(name, value, ast.Lambda(args=nothing, body=result))
        return result

    def visit_For(self, node: ast.For) -> ast.AST:  # noqa: N802
        """Rewrite a loop over `range`."""
        self.generic_visit(node)
        if (
            isinstance(node.iter, ast.Call)
            and isinstance(node.iter.func, ast.Name)
            and node.iter.func.id == "range"
        ):
            node.iter.func = _method("range")
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:  # noqa: N802
        """Rewrite what is assigned, and make a tensor of it."""
        self.generic_visit(node)
        return super().visit_Assign(node)  # type: ignore[no-any-return]


def install(launch: Callable[[Work], object]) -> None:
    """Let Triton's kernels run interpreted; `launch` is given each launch's work, and does it now
    or later.
    """
    global _launch
    if os.environ.get("TRITON_INTERPRET") != "1" or not isinstance(
        tl.sum, interpreter.InterpretedFunction
    ):
        raise RuntimeError(
            "kernels are not interpreted: set TRITON_INTERPRET=1 before Triton is imported"
        )
    if _launch is None:
        _patch()
    _launch = launch


def _patch() -> None:
    """Patch the language once, for as long as the process lives."""
    interpreter.TensorHandle, interpreter._get_np_dtype = Numbers, narrow.array_dtype
    interpreter.interpreter_builder, interpreter.interpreter_semantic = (
        _programs,
        Semantic(_programs),
    )
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    for language in (tl, tl.core):
        language.reduce, language.associative_scan = combine.reduce, combine.scan
        language.range = language.static_range = interpreter.interpreter_semantic.range
    _keep_shapes()
    tl.tensor.__bool__ = _truth
    tl.tensor.__index__ = lambda self: int(self.handle.one())
    tl.tensor.T = property(lambda self: tl.trans(self))
    for name, function in vars(cuda_libdevice).items():
        if tl.core.is_builtin(function):
            setattr(libdevice, name, _in_kernels(function))
    interpreter.FunctionRewriter.ast_transformer = Rewriter()
    interpreter.InterpretedFunction.run = _run
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(
        *args, **kwargs
    )


_patch_one = interpreter._patch_attr


def _patch_attr(owner: Any, name: str, *how: Any) -> None:
    """Patch a function of the language; only kernels have lines that are to be traced."""
    _patch_one(owner, name, *how)
    setattr(owner, name, untraced(getattr(owner, name)))


def _keep_shapes() -> None:
    """Let types and tensors take what they have of their shape from an earlier one of it, as Triton
    makes both for each operation, with checks that take longer than the numbers.
    """
    begin_type, begin_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[Any, tuple[Any, ...]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def begin_kept_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        kept = types.get(key)
        if kept is None:
            begin_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = kept

    def begin_kept_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        key = tuple(type.shape) if type.is_block() else ()
        kept = tensors.get(key)
        if kept is None:
            begin_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = kept

    tl.block_type.__init__, tl.tensor.__init__ = begin_kept_type, begin_kept_tensor


def _in_kernels(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(
        *args, **(kwargs | {"_semantic": interpreter.interpreter_semantic})
    )


def _truth(value: tl.tensor) -> bool:
    # Triton asks of a block whether there is one.
    return True if _is_block(value) else bool(value.handle.one())


def _is_block(value: Any) -> bool:
    return isinstance(value, tl.tensor) and value.type.is_block()


def _call(name: str, *args: ast.AST) -> ast.AST:
    return ast.Call(func=_method(name), args=list(args), keywords=[])


def _method(name: str) -> ast.expr:
    return ast.Attribute(
        value=ast.Name(id="interpreter_semantic", ctx=ast.Load()), attr=name, ctx=ast.Load()
    )


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Launch a kernel."""
    if warmup:
        return
    function = self.rewrite()
    given = inspect.getcallargs(
        self.fn, *args, **{name: kwargs[name] for name in kwargs if name in self.arg_names}
    )
    constants = {name for name, kind in self.fn.__annotations__.items() if "constexpr" in str(kind)}
    arguments = {
        name: value if name in constants else _argument(value) for name, value in given.items()
    }
    shape = tuple(grid(arguments) if callable(grid) else grid)
    shape += (1,) * (3 - len(shape))
    kernel = self.fn, tuple((name, str(given[name])) for name in sorted(constants))

    def work() -> None:
        runs[self.fn.__name__] += 1
        with _lock, np.errstate(all="ignore"):
            _compute(function, arguments, shape, kernel)

    assert _launch
    _launch(work)


def _argument(value: Any) -> Any:
    if isinstance(value, int) or hasattr(value, "data_ptr"):
        dtype = tl.str_to_ty(mangle_type(value), None)
        number = value.data_ptr() if hasattr(value, "data_ptr") else value
        return tl.tensor(Numbers(np.array([number], narrow.array_dtype(dtype)), dtype), dtype)
    if isinstance(value, tuple):
        return tuple(map(_argument, value))
    if value is None or isinstance(value, float):
        return value
    raise NotImplementedError(f"an argument of {type(value)} has no numbers on the pretended card")


def _compute(
    function: Callable[..., Any], arguments: dict[str, Any], grid: tuple[int, ...], kernel: Any
) -> None:
    programs = np.arange(np.prod(grid))
    each = _together.get(kernel, len(programs))
    waiting = [programs[first : first + each] for first in range(0, len(programs), each)][::-1]
    while waiting:
        these = waiting.pop()
        _programs.begin(these, grid)
        try:
            function(**arguments)
        except Apart as apart:
            _programs.undo()
            _, firsts, group = np.unique(apart.keys, return_index=True, return_inverse=True)
            # Those that come first go on first, and all that went apart before the others begin.
            waiting += [these[group == number] for number in np.argsort(firsts)[::-1]]
            if apart.most:
                _together[kernel] = apart.most
        except Exception as error:
            error.add_note(f"in the Triton kernel {function.__name__}, programs {these} of {grid}")
            raise
