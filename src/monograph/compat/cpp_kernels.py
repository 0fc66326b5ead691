"""Let Inductor compile the C++ kernels of a graph in a few files.

By default each kernel is a file of its own. But the compiler reads torch's headers for each file,
which takes longer than compiling most kernels.

Inductor writes a Python module for each compiled graph. Among the module's globals are the graph's
kernels.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch._inductor.async_compile import AsyncCompile


class _Source(NamedTuple):
    """A kernel that is not compiled yet.

    Attributes:
        argument_types: the C++ types of its arguments.
        code: the C++ code that Inductor has generated.
    """

    argument_types: list[str]
    code: str


@functools.cache
def build_kernels_together() -> None:
    """Replace methods of Inductor, so that a graph's kernels are in as many files as threads compile."""
    from torch._inductor import async_compile, codecache

    compiler: Any = async_compile.AsyncCompile
    wait = compiler.wait

    class LibraryCache(codecache.CppPythonBindingsCodeCache):
        # torch's own subclasses also define these: a cache of their own, and the name of the Python
        # module that each library holds.
        cache: dict[str, Any] = {}  # noqa: RUF012 - torch declares it so
        entry_function = "kernels"

    def collect_kernel(self: AsyncCompile, argument_types: list[str], code: str) -> _Source:
        # A graph's module calls this once for each kernel, and assigns the result to a global.
        return _Source(argument_types, code)

    def compile_kernels(self: AsyncCompile, scope: dict[str, Any]) -> None:
        # A graph's module calls this after the last kernel; `scope` has the module's globals.
        sources = {name: value for name, value in scope.items() if isinstance(value, _Source)}
        threads = async_compile.get_compile_threads()
        sources_by_file = _split_evenly(sources, threads)
        template = LibraryCache.suffix_template
        # With a single thread nothing is submitted: `load_async` itself compiles the library. A submitted
        # job would wait for a lock that this thread holds.
        submit = self.submit if threads > 1 else None
        pending_libraries = [
            LibraryCache.load_async(_module_code(file_sources, template), "cpu", submit_fn=submit)
            for file_sources in sources_by_file
        ]
        wait(self, scope)  # for kernels of other kinds, while the libraries are compiled
        for file_sources, pending_library in zip(sources_by_file, pending_libraries, strict=True):
            library = pending_library()
            for number, name in enumerate(file_sources):
                scope[name] = getattr(library, f"kernel_{number}")

    compiler.cpp_pybinding = collect_kernel
    compiler.wait = compile_kernels


def _split_evenly(sources: dict[str, _Source], files: int) -> list[dict[str, _Source]]:
    """Return the sources, by name, of up to `files` files of about the same length."""
    sources_by_file: list[dict[str, _Source]] = [{} for _ in range(min(files, len(sources)))]
    # Longest first: each source goes into the file that is the shortest so far.
    for name in sorted(sources, key=lambda name: -len(sources[name].code)):
        shortest_file = min(sources_by_file, key=_code_length)
        shortest_file[name] = sources[name]
    return sources_by_file


def _code_length(sources: dict[str, _Source]) -> int:
    return sum(len(source.code) for source in sources.values())


def _module_code(sources: dict[str, _Source], template: str) -> str:
    """Return the C++ code of a Python module with the functions `kernel_0`, `kernel_1` and so on.

    Args:
        sources: the kernels, in the order of their numbers.
        template: torch's code for a module of one kernel. Its four parts are functions that parse
            arguments; the Python binding of the kernel; the first line of the table of bindings,
            and the kernel's entry in it; the table's empty last entry, and the module's definition.
    """
    lines_by_number = [source.code.splitlines() for source in sources.values()]
    # A header is included once, before all kernels: inside a namespace it would be wrong.
    headers = dict.fromkeys(
        line for lines in lines_by_number for line in lines if line.startswith("#include")
    )
    table_begin = "static PyMethodDef py_methods[] = {{"
    # The entry is cut out of the template, since torch 2.15 writes it differently.
    parsing, binding, table, module_end = _cut_at(
        template, "static PyObject* {entry_func}_py", table_begin, "{{NULL, NULL"
    )
    entry = table.removeprefix(table_begin)
    kernels = [*headers]
    bindings = [parsing.format(entry_func="kernels", extra_parse_arg="")]
    entries = []
    for number, source in enumerate(sources.values()):
        name = f"kernel_{number}"
        types = [cpp_type.replace("const ", "") for cpp_type in source.argument_types]
        body = "\n".join(line for line in lines_by_number[number] if line not in headers)
        # Inductor calls each kernel "kernel". The namespace keeps its other names apart.
        kernels.append(
            f"#define kernel {name}\nnamespace in_{name} {{\n{body}\n}}\n#undef kernel\nusing in_{name}::{name};"
        )
        arguments = ", ".join(
            f"parse_arg<{cpp_type}>(args, {index})" for index, cpp_type in enumerate(types)
        )
        call = f"{name}({arguments}); Py_RETURN_NONE;"
        bindings.append(binding.format(entry_func=name, arg_len=len(types), call_entry_func=call))
        entries.append(entry.format(entry_func=name))
    return "\n".join(
        [
            *kernels,
            *bindings,
            table_begin.format(),  # which turns {{ into {
            *entries,
            module_end.format(entry_func="kernels"),
        ]
    )


def _cut_at(text: str, *marks: str) -> list[str]:
    """Return the part of a text before the first mark, and the parts that begin at each mark."""
    cuts = [0, *(text.index(mark) for mark in marks), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(cuts)]
