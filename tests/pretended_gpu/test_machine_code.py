"""Run: make gpu-less ARGS=tests/pretended_gpu/test_machine_code.py

Every way to train and decode compiles down to this card's machine code
(`benchmarks/machine_code.py`): steps are captured, the host waits for nothing that it need not, and
kernels spill no more than their kind must. In a process of its own, since noting kernels changes
how Inductor caches them. `all.py --nightly` runs it for every card.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import machine_code
from cubins import Kernel
from machine_code import OWN, SM

from monograph.decode.reproducible import gumbel_noise

machine_code.watch()
SOURCES = Path(__file__).resolve().parents[2] / "src"
DAY = (
    "124m",
    "fp8",
    "ensemble of 3",
    "streamed",
    "decoding, no filter",
    f"{OWN} 1b",
    f"{OWN} qwen3-next",
)
CASES = [
    pytest.param(name, marks=() if name in DAY else pytest.mark.slow) for name in machine_code.CASES
]
# Bytes of spilled registers; it measures no configuration of a kernel with more, if it has another
# one.
INDUCTOR = 64
# Bytes of a thread's stack for attention, whose tiles are torch's own for each card: with heads of
# up to 128 channels in 16 bits, no more numbers are outside of the 255 registers than in them.
# Heads of 256 and fp32 have sums that are larger than all registers: nothing bounds them.
ATTENTION = 4 * 255
LARGE = ("heads of 256", "fp32")
# The most waits of the host by kind of case and part; no other part has any. A block of tokens is
# read once. A streamed update is followed by one wait here, and one of the host's thread for the
# gradients, if it updates.
WAITS = {
    "streamed": {"update": 2, "evaluation": 2},
    "decoding": {"block read": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_compiled_is_captured_waits_for_nothing_and_spills_little(name: str) -> None:
    case, kernels = machine_code.measured(name)
    if name == "fp8" and SM < 89:
        assert "has no fp8 arithmetic" in case["refused"]
        return
    if name.startswith(OWN) and SM < 80:
        assert "compute capability 8.0" in case["refused"]
        return
    if name == "adamw, bf16" and SM < 80:
        assert "BF16 is not supported" in case["eager"]
        return
    assert (case["eager"], case["said"]) == (None, []) and case["captured"] is not False
    assert_kernels_fit(kernels, name in LARGE)
    waits = {
        part: counts["waits"] + counts["waiting_copies"] for part, counts in case["parts"].items()
    }
    most = WAITS.get(name.split(",")[0], {})
    assert not {part: number for part, number in waits.items() if number > most.get(part, 0)}


def assert_kernels_fit(kernels: list[Kernel], large: bool) -> None:
    """A pointwise kernel holds few numbers: one of its configurations, at least, has registers for
    all of them.
    """
    room = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    assert not [kernel for kernel in kernels if kernel.shared_bytes > room]
    attending = [kernel for kernel in kernels if kernel.kind == "attention"]
    assert SM >= 80 or not attending, "flex attention has no tensor cores there"
    assert large or not [kernel for kernel in attending if kernel.stack_bytes > ATTENTION]
    assert not [kernel for kernel in kernels if kernel.spilled_bytes > most_spilled(kernel)]
    fine = {kernel.name for kernel in kernels if kernel.spilled_bytes == 0}
    assert not [
        kernel for kernel in kernels if kernel.kind == "pointwise" and kernel.name not in fine
    ]


def most_spilled(kernel: Kernel) -> float:
    """Return how many bytes a kernel may spill; attention's have a limit of their own."""
    if kernel.kind == "attention":
        return math.inf
    # A kernel that is written by hand has the kind of its function's name, and spills nothing.
    return 0 if kernel.name.startswith(kernel.kind) else INDUCTOR


@pytest.mark.skipif(SM < 80, reason="kernels for decoding are not for this card")
def test_every_kernel_that_is_written_by_hand_is_compiled_alone() -> None:
    """A new kernel gets a call of its own in `benchmarks/own_kernels.py`."""
    sources = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    written = set(re.findall(r"^@triton\.jit\ndef (\w+)", sources, re.MULTILINE))
    launched = written & set(re.findall(r"^ +(\w+)\[.*\]\($", sources, re.MULTILINE))
    called = {
        kernel.kind
        for model in ("1b", "qwen3-next")
        for kernel in machine_code.measured(f"{OWN} {model}")[1]
    }
    assert called == launched


def test_noise_for_a_range_of_tokens_is_compiled() -> None:
    """A product of a range's index and one of Philox's constants does not fit the 32 bits of an
    index.
    """
    seed_B = torch.zeros(2, dtype=torch.int64, device="cuda")
    noise = torch.compile(lambda seed, position: gumbel_noise(seed, position, 1000), fullgraph=True)
    assert noise(seed_B, seed_B).shape == (2, 1000)


def test_grouped_heads_in_fp32_have_a_fused_kernel() -> None:
    """torch's unfused way would keep the scores of all pairs, as products of cuBLAS."""
    counts = machine_code.attending("torch", 64, torch.float32, torch.device("cuda", 0))
    assert counts.launches and not counts.numbers()["cublas"]
