# Run: pytest tests/ops/test_attention_kernels.py
"""The kernel that a run's attention takes: whichever is fastest, the same equation, and found again
in the cache.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from batches import ragged, tiny_llama
from monograph.graph.capture import compiled
from monograph.laws.comparisons import error_within
from monograph.ops.attention import attention
from monograph.ops.attention_kernels import (
    CALLS,
    KERNELS,
    ROUNDS,
    describe_speeds,
    fastest,
    time_each,
    time_kernels,
)

CPU = torch.device("cpu")


class Machine:
    """A device on which kernels take what they are said to take; what is not named cannot run."""

    def __init__(self, seconds, jitter=()):
        self.seconds, self.jitter, self.now, self.calls = seconds, list(jitter), 0.0, []

    def attempt(self, kernel):
        self.calls.append(kernel)
        if kernel not in self.seconds:
            raise RuntimeError("No available kernel. Aborting execution.")
        first = self.calls.count(kernel) == 1  # builds its plan
        self.now += (
            50.0 if first else self.seconds[kernel] + (self.jitter.pop() if self.jitter else 0.0)
        )

    def timed(self):
        return time_each(self.attempt, lambda: None, lambda: self.now)


def test_the_least_time_counts_and_not_what_a_first_call_or_other_work_took():
    machine = Machine(
        {"torch": 2.0, "cudnn": 1.0, "flash": 2.0}, jitter=[9.0, 0.0, 0.0, 0.0, 0.0, 7.0]
    )
    times = machine.timed()
    assert times == pytest.approx({"torch": 2.0, "cudnn": 1.0, "flash": 2.0})
    assert fastest(times) == "cudnn" and machine.calls.count("efficient") == 1
    assert machine.calls.count("flash") == 1 + ROUNDS * CALLS
    assert (
        describe_speeds(times, "cudnn")
        == "cudnn; times as fast as torch's choice: cudnn 2.00, flash 1.00"
    )


@pytest.mark.parametrize(
    ("seconds", "choice"),
    [
        ({"torch": 1.0, "cudnn": 0.97, "flash": 1.0}, "torch"),  # the clock's noise chooses nothing
        ({"torch": 1.0, "cudnn": 1.7, "efficient": 1.2}, "torch"),
        ({"torch": 1.0, "flash": 0.9, "efficient": 0.8}, "efficient"),
        ({"flash": 3.0, "efficient": 4.0}, "flash"),  # torch's choice ran out of memory
        ({"torch": 1.0}, "torch"),
        ({}, "torch"),
    ],
)
def test_the_fastest_is_taken_if_it_is_faster_by_more_than_noise(seconds, choice):
    times = Machine(seconds).timed()
    assert fastest(times) == choice and list(times) == [each for each in KERNELS if each in seconds]


def test_what_is_said_names_what_is_used():
    assert (
        describe_speeds({"torch": 1.0}, "torch")
        == "torch's choice; times as fast as torch's choice: no other can run here"
    )
    assert describe_speeds({"flash": 1.0}, "flash") == "flash, as torch's choice cannot run here"


def test_a_device_is_asked_on_the_real_shapes_and_its_random_numbers_stay():
    before = torch.get_rng_state()
    with torch.random.fork_rng():
        found = time_kernels(2, (4, 2), 32, 16, torch.float32, CPU)
        assert torch.equal(before, torch.get_rng_state())
    assert set(found) == {"torch", "flash"} and all(
        0 < seconds < math.inf for seconds in found.values()
    )


def test_nothing_is_timed_where_there_is_no_memory_for_the_inputs(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "randn", full)
    assert time_kernels(2, (4, 2), 32, 16, torch.float32, CPU) == {}


def heads(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, count, 150, 64) for count in (4, 2, 2)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for s in shapes
    ]


def run(impl, kernel, dtype, device="cpu", call=attention):
    inputs = heads(dtype, device)
    out = call(*inputs, None, impl, kernel)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=device).reshape(
        out.shape
    )
    return [out, *torch.autograd.grad((out * cotangent).sum(), inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_by_name_is_as_exact_as_the_reference(dtype):
    """Eager and as a part of one captured graph."""
    exact, naive = (run("reference", "torch", kind) for kind in (torch.float64, dtype))
    graph = torch.compile(attention, fullgraph=True, dynamic=False, backend="aot_eager")
    for call in (attention, graph):
        for ours, same, truth in zip(
            run("sdpa", "flash", dtype, call=call), naive, exact, strict=True
        ):
            assert error_within(ours, same, truth, k=4)


def test_a_model_takes_it_everywhere_and_keeps_it_from_masks():
    model, batch = tiny_llama(), ragged(2)
    expected = model(batch["tokens"])
    model.use_attention("auto", "flash")
    assert {block.self_attn.kernel for block in model.model.layers} == {"flash"}
    assert torch.equal(model(batch["tokens"]), expected)  # on a CPU it is torch's choice
    model.use_attention("auto", "cudnn")
    with pytest.raises(RuntimeError, match="No (viable|available)"):
        model(batch["tokens"])
    segments = torch.ones_like(batch["tokens"])
    # A dense mask: not its business.
    torch.testing.assert_close(model(batch["tokens"], segments=segments), expected)


@pytest.mark.slow
def test_a_graph_with_a_kernel_in_it_is_cached_and_another_kernel_is_another_entry(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # A backward pass would be as many kernels again.
    inputs = [each.detach() for each in heads(torch.float32)]

    def captured(backend):
        torch._dynamo.reset()
        counters.clear()

        def call(*given):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)

        compiled(call)(*inputs)
        return {name.removeprefix("autograd_cache_") for name in counters["aot_autograd"]} & {
            "hit",
            "miss",
            "bypass",
        }

    flash, math_ = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
    assert [captured(each) for each in (flash, math_, flash, math_)] == [
        {"miss"},
        {"miss"},
        {"hit"},
        {"hit"},
    ]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_every_kernel_that_can_run_is_as_exact_as_the_reference(dtype):
    # A function is compiled eight times at most, and there are four kernels for each dtype.
    torch.compiler.reset()
    card = torch.device("cuda", 0)
    exact, naive = (run("reference", "torch", kind, card) for kind in (torch.float64, dtype))
    able = time_kernels(2, (4, 2), 150, 64, dtype, card)
    assert {"torch", "efficient"} <= set(able)
    for kernel in able:
        graph = torch.compile(attention, fullgraph=True, dynamic=False)
        for call in (attention, graph):
            for ours, same, truth in zip(
                run("sdpa", kernel, dtype, card, call), naive, exact, strict=True
            ):
                assert error_within(ours, same, truth, k=4), kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_no_dtype_keeps_the_scores_of_all_pairs(dtype):
    """Torch's fused kernels for fp32, and for fp16 before sm_80, do not read fewer key-value heads
    than query heads.
    """
    if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this card has no bf16")
    heads, length = 8, 1024
    query, key, value = (
        torch.zeros(1, count, length, 64, device="cuda", dtype=dtype, requires_grad=True)
        for count in (heads, 2, 2)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(query, key, value, None).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * length**2 * query.element_size()
