"""Run: pytest tests/graph/test_traceable.py"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import monograph

SOURCE = Path(monograph.__file__).parent
# The decoder, and decoding, some of which is traced for a GPU alone, so that no test of a CPU compiles it.
TRACED = sorted(
    [
        *SOURCE.glob("decode/*.py"),
        *(
            SOURCE / f"model/{name}.py"
            for name in ("delta_net", "layer_inputs", "layers", "llama", "mamba", "mixture", "mtp")
        ),
    ]
)


@pytest.mark.parametrize("path", TRACED, ids=lambda path: path.name)
def test_no_generic_type_is_called_where_dynamo_traces(path: Path) -> None:
    """`list[Tensor]()` makes a list in Python and ends a trace: "Unsupported function call"."""
    # The call of a kernel, kernel[grid](...), has arguments.
    places = [
        f"{path.name}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and not (node.args or node.keywords)
    ]
    assert places == []
