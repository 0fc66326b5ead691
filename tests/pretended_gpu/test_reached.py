"""Run: pytest tests/pretended_gpu/test_reached.py (lines that only a GPU reaches are found, and one
without a reason is told)
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pretended_gpu import reached
from pretended_gpu.untraced import untraced

CODE = {
    "kernels": """
import triton

def launch():
    return in_a_kernel()
""",
    "uses_kernels": """
from package.kernels import launch

def fast():
    return by_kernels()
""",
    "asks": """
def one(x, cuda):
    if x.is_cuda and cuda:
        first()
    else:
        not_first()
    if not torch.cuda.is_available():
        return None
    third()
    with there:
        fourth()

def _on_cuda(x):
    fifth()

def two(device, gone):
    if device.type != "cuda" or gone:
        return not_sixth()
    try:
        seventh()
    except Bad:
        eighth()

def three(device):
    if device.type == "cuda" and not torch.cuda.is_available():
        not_ninth()
""",
    "names": """
class Ring:
    def __init__(self, device):
        self._stream = Stream(device) if device.type == "cuda" else None

    def send(self):
        if self._stream is None:
            return not_sent()
        sent()

def told(device):
    is_on_gpu = device.type == "cuda"
    if is_on_gpu:
        named()
""",
    "calls": """
class Streams:
    def __init__(self, device):
        self.stream = torch.cuda.Stream(device)

    def run(self):
        of_the_class()

class Lanes:
    def run(self):
        not_of_the_class()

def executor(device):
    return Streams(device) if device.type == "cuda" else Lanes()

def counted(device, is_known):
    if is_known:
        return not_counted()
    properties = torch.cuda.get_device_properties(device)
    return behind_the_call(properties)

def asked(x):
    return torch.cuda.current_stream() if x.is_cuda else not_asked()
""",
    "mentions": """
def chosen(x):
    if x.is_cuda:
        return helper(x)
    return shared(x)

def helper(x):
    return shared(further(x))

def further(x):
    return only_mentioned_there()

def shared(x):
    return not_only_there()

def unmentioned(x):
    return not_mentioned()

def named(x):
    if x.is_cuda:
        return by_name(x)

def by_name(x):
    return not_by_a_gpu_alone()

TABLE = {"name": "package.mentions:by_name"}
""",
    "planner/remedies": """
def remedy(device):
    if device.type == "cuda":
        return not_of_a_card()
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    for name, code in CODE.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, encoding="utf-8")
    return folder


def test_the_lines_that_only_a_gpu_reaches_are_found(package: Path) -> None:
    found = {line.text for line in reached.lines(package)}
    wanted = [
        "return in_a_kernel()",
        "return by_kernels()",
        "first()",
        "third()",
        "fourth()",
        "fifth()",
        "seventh()",
        "eighth()",
        "sent()",
        "named()",
        "of_the_class()",
        "return behind_the_call(properties)",
        "return helper(x)",
        "return shared(further(x))",
        "return only_mentioned_there()",
    ]
    assert [text for text in wanted if text not in found] == []
    assert [text for text in found if "not_" in text] == []


def test_a_line_that_is_not_reached_needs_a_reason(package: Path) -> None:
    mine = [line for line in reached.lines(package) if line.file == "names.py"]
    sent, named = mine
    assert (sent.function, named.function) == ("Ring.send", "told")
    reasons = {"names.py told": "no card says so"}
    everything = {"names.py": {sent.number, named.number}}
    only_sent = {"names.py": {sent.number}}
    assert reached.judged(mine, everything, {})[1] == 0
    assert reached.judged(mine, only_sent, reasons)[1] == 0
    said, wrong = reached.judged(mine, only_sent, {})
    assert wrong == 1 and f"names.py:{named.number} told: named()" in said
    said, wrong = reached.judged(mine, everything, reasons)
    assert wrong == 0 and any("no line" in line and "names.py told" in line for line in said)


@pytest.mark.slow
def test_every_reason_is_of_a_line_that_only_a_gpu_reaches() -> None:
    """`make gpu-less` tells whether it is still not reached."""
    mine = reached.lines()
    assert len(mine) > 1500
    stale = [key for key in reached.CANNOT if not any(line.name.startswith(key) for line in mine)]
    assert stale == []


def test_tests_that_a_reason_names_exist() -> None:
    root = Path(__file__).resolve().parents[2]
    named = set(re.findall(r"tests/[\w/]+\.py", " ".join(reached.CANNOT.values())))
    assert [path for path in sorted(named) if not (root / path).exists()] == []


def test_a_call_that_is_left_out_shows_no_lines_and_all_around_it_do() -> None:
    seen: list[tuple[str, str]] = []

    def traced(frame: Any, what: str, argument: Any) -> Any:
        seen.append((frame.f_code.co_name, what))
        return traced

    def inside() -> int:
        return 1

    def after() -> int:
        return 2

    def fails() -> None:
        raise ValueError

    def around() -> int:
        one = untraced(inside)()
        with suppress(ValueError):
            untraced(fails)()
        return one + after()

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        assert around() == 3
    finally:
        sys.settrace(before)
    assert {"inside", "fails"}.isdisjoint(name for name, _ in seen)
    assert [what for name, what in seen if name == "after"] == ["call", "line", "return"]
    assert [what for name, what in seen if name == "around"][-2:] == ["line", "return"]
