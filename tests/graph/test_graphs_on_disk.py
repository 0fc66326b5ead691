"""Run: pytest tests/graph/test_graphs_on_disk.py (torch's cache on disk gives no graph that was made by
earlier rules of this package's operators).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.compiler.config

import monograph
from monograph.device import compiler_obstacle
from monograph.graph.capture import OPERATORS, compiled
from monograph.storage import package_code
from monograph.storage.package_code import code_digest

PACKAGE = Path(monograph.__file__).parent
# What gives an operator a rule: its gradient, its batched form, the shape of its result, its code.
GIVES_A_RULE = re.compile(
    r"torch\.library\.|\.register_(fake|autograd|vmap|kernel|torch_dispatch)\(|register_lowering\("
)
# Prints a gradient, which an operator's rule gives, and how many graphs were found and not found.
PROGRAM = """
import torch
from torch._dynamo.utils import counters
from monograph.graph.balance import _with_added_grad
from monograph.graph.capture import compiled

weights, probabilities = torch.ones(3), torch.ones(3, requires_grad=True)
graph = compiled(lambda weights, probabilities, added: _with_added_grad(weights, probabilities, added).sum())
graph(weights.requires_grad_(), probabilities, torch.ones(3)).backward()
found = counters["aot_autograd"]
print(probabilities.grad[0].item(), found["autograd_cache_hit"], found["autograd_cache_miss"])
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package, whose files have new dates."""
    folder = tmp_path / "copied" / "monograph"
    shutil.copytree(
        PACKAGE, folder, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def test_the_key_has_every_file_that_gives_operators_rules() -> None:
    compiled(lambda x: x)
    assert code_digest(*OPERATORS) in torch.compiler.config.cache_key_tag
    files = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if GIVES_A_RULE.search(path.read_text())
    }
    assert {"graph/balance.py", "ensemble/call.py", "ops/rotation.py"} <= files
    assert [file for file in sorted(files) if not file.startswith(OPERATORS)] == []


def test_content_and_names_decide_and_no_dates(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(*parts: str) -> str:
        return code_digest.__wrapped__(*parts)

    before = digest("ops"), digest("ops/rotation.py"), digest()
    monkeypatch.setattr(package_code, "PACKAGE", copied)
    assert (digest("ops"), digest("ops/rotation.py"), digest()) == before
    rotation = copied / "ops/rotation.py"
    text = rotation.read_text()
    rotation.write_text(text.replace("1", "2", 1))
    status = (PACKAGE / "ops/rotation.py").stat()
    os.utime(rotation, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert rotation.stat().st_size == status.st_size
    changed = digest("ops"), digest("ops/rotation.py"), digest()
    assert not {*changed} & {*before} and digest("graph") == code_digest("graph")
    rotation.write_text(text)
    rotation.rename(copied / "ops/rotation_2.py")
    assert digest("ops") not in (before[0], changed[0])


@pytest.mark.slow
@pytest.mark.skipif(compiler_obstacle() is not None, reason=compiler_obstacle() or "")
def test_equal_rules_are_found_and_changed_ones_compiled(copied: Path, tmp_path: Path) -> None:
    def ran(package: Path) -> list[float]:
        paths = [str(package.parent), *sys.path]
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "graphs"),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        command = [sys.executable, "-P", "-c", PROGRAM]
        printed = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout
        return [float(number) for number in printed.split()]

    assert ran(PACKAGE) == [1, 0, 1]
    assert ran(copied) == [1, 1, 0], "equal code in another place"
    rule = copied / "graph/balance.py"
    rule.write_text(
        rule.read_text().replace(
            "weights_grad, added_grad, None", "weights_grad, 2 * added_grad, None"
        )
    )
    assert ran(copied) == [2, 0, 1]
