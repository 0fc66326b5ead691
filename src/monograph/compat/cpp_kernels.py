"""Let Inductor build a graph's C++ kernels in few files: reading headers takes longer than
compiling most kernels.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch._inductor.async_compile import AsyncCompile


class _Source(NamedTuple):
    """A kernel that waits for the others of its graph: the types of its arguments, in C++, and its
    code.
    """

    argument_types: list[str]
    code: str


@functools.cache
def build_kernels_together() -> None:
    """Build the kernels of each graph in as many files as there are threads to compile them.

    By default each kernel is a file and a library of its own.
    """
    from torch._inductor import async_compile, codecache

    compiler: Any = async_compile.AsyncCompile
    wait = compiler.wait

    class Libraries(codecache.CppPythonBindingsCodeCache):
        cache: dict[str, Any] = {}  # noqa: RUF012 - torch's own form
        entry_function = "kernels"

    def collect(self: AsyncCompile, argument_types: list[str], code: str) -> _Source:
        return _Source(argument_types, code)

    def build(self: AsyncCompile, scope: dict[str, Any]) -> None:
        sources = {name: value for name, value in scope.items() if isinstance(value, _Source)}
        threads = async_compile.get_compile_threads()
        files = _shared_out(sources, threads)
        template = Libraries.suffix_template
        # One thread would wait for a lock that it holds.
        submit = self.submit if threads > 1 else None
        libraries = [
            Libraries.load_async(_file(file, template), "cpu", submit_fn=submit) for file in files
        ]
        wait(self, scope)
        for file, library in zip(files, libraries, strict=True):
            made = library()
            scope.update(
                {name: getattr(made, f"kernel_{number}") for number, name in enumerate(file)}
            )

    compiler.cpp_pybinding, compiler.wait = collect, build


def _shared_out(sources: dict[str, _Source], files: int) -> list[dict[str, _Source]]:
    """Return the sources in files of about the same length."""
    parts: list[dict[str, _Source]] = [{} for _ in range(min(files, len(sources)))]
    for name in sorted(sources, key=lambda name: -len(sources[name].code)):
        min(parts, key=lambda part: sum(len(source.code) for source in part.values()))[name] = (
            sources[name]
        )
    return parts


def _file(sources: dict[str, _Source], template: str) -> str:
    """Return the code of a Python module of these kernels, as `kernel_0` and so on.

    The template is torch's for a module of one kernel: what reads arguments, the kernel's binding,
    a table of bindings.
    """
    lines = {number: source.code.splitlines() for number, source in enumerate(sources.values())}
    headers = dict.fromkeys(
        line for code in lines.values() for line in code if line.startswith("#include")
    )
    # An entry, which torch 2.15 writes otherwise, then an empty one.
    opening = "static PyMethodDef py_methods[] = {{"
    reading, binding, table, end = _cut(
        template, "static PyObject* {entry_func}_py", opening, "{{NULL, NULL"
    )
    code = [*headers]
    bindings = [reading.format(entry_func="kernels", extra_parse_arg="")]
    entries = []
    for number, source in enumerate(sources.values()):
        name = f"kernel_{number}"
        types = [kind.replace("const ", "") for kind in source.argument_types]
        own = "\n".join(line for line in lines[number] if line not in headers)
        code.append(
            f"#define kernel {name}\nnamespace in_{name} {{\n{own}\n}}\n#undef kernel\nusing in_{name}::{name};"
        )
        parsed = ", ".join(f"parse_arg<{kind}>(args, {at})" for at, kind in enumerate(types))
        call = f"{name}({parsed}); Py_RETURN_NONE;"
        bindings.append(binding.format(entry_func=name, arg_len=len(types), call_entry_func=call))
        entries.append(table.removeprefix(opening).format(entry_func=name))
    return "\n".join(
        [*code, *bindings, opening.format(), *entries, end.format(entry_func="kernels")]
    )


def _cut(text: str, *marks: str) -> list[str]:
    """Return the parts of a text that begin at the marks, and the one before."""
    places = [0, *(text.index(mark) for mark in marks), len(text)]
    return [text[begin:end] for begin, end in zip(places, places[1:], strict=False)]
