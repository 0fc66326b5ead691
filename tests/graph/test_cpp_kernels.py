"""Run: pytest tests/graph/test_cpp_kernels.py    A graph's C++ kernels are built in few files, and compute the same."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor import async_compile
from torch._inductor.codecache import CppPythonBindingsCodeCache

from monograph.compat import cpp_kernels
from monograph.device import compiler_obstacle
from monograph.graph.capture import compiled
from monograph.storage import cache_dir

pytestmark = pytest.mark.skipif(compiler_obstacle() is not None, reason=compiler_obstacle() or "")


def chain(x):
    """Three matrix products, with a kernel after each that is unlike the others."""
    return ((x @ x).sin() @ x).cumsum(0) @ (x.exp() @ x).softmax(-1)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kernels_share_as_many_files_as_threads_compile_and_compute_the_same(threads, monkeypatch):
    written, load = [], CppPythonBindingsCodeCache.load_async.__func__

    def kept(cache, code, *others, **named):
        written.append(code)
        return load(cache, code, *others, **named)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", classmethod(kept))
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: threads)
    x = torch.linspace(-1, 1, 33 * 33, dtype=torch.float64).view(33, 33) / 8
    assert torch.allclose(compiled(chain)(x), chain(x), rtol=1e-12)
    kernels = sum(code.count("#define kernel ") or 1 for code in written)
    assert kernels >= 3 and len(written) == threads


@pytest.mark.parametrize(
    "entry",  # of torch 2.13 and 2.15
    [
        '{{"{entry_func}", {entry_func}_py, METH_VARARGS, ""}},',
        '{{\n"{entry_func}",\n({entry_func}_py),\nMETH_FASTCALL\n}},',
    ],
)
def test_torchs_template_has_the_parts_that_a_file_of_several_kernels_is_made_of(entry):
    template = CppPythonBindingsCodeCache.suffix_template
    template, changed = re.subn(
        r'\{\{\s*"\{entry_func\}".*?\}\},', lambda _: entry, template, count=1, flags=re.DOTALL
    )
    kind = ["const float*", "int64_t"]
    source = '#include <vector>\nextern "C"  void  kernel(const float* in_ptr0, const int64_t ks0)\n{\n}\n'
    made = cpp_kernels._module_code({"a": cpp_kernels._Source(kind, source), "b": cpp_kernels._Source(kind, source)},
                             template)  # fmt: skip
    assert changed and made.count("#include <vector>") == 1
    assert made.startswith("#include <vector>\n#define kernel kernel_0")
    for number in (0, 1):
        assert (
            f"kernel_{number}(parse_arg<float*>(args, 0), parse_arg<int64_t>(args, 1)); Py_RETURN_NONE;"
            in made
        )
        assert entry.format(entry_func=f"kernel_{number}") in made
    assert "PyInit_kernels" in made and "{entry" not in made


def test_the_graph_that_fills_a_new_cache_folder_compiles():
    exec(cache_dir._COMPILE_SMALL_GRAPH, {})
