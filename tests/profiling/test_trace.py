"""Run: pytest tests/profiling/test_trace.py

A profiler's trace as intervals: made-up traces of a CPU and of a GPU, and a real step.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.select_algorithm import extern_kernels

from monograph import device
from monograph.compat import lower_to_call, record_cpu_kernels
from monograph.errors import InputRefused, UsageError
from monograph.graph import matmul
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.profiling import profiler, trace
from monograph.profiling.intervals import PARTS, time_by_part
from monograph.profiling.profiler import (
    MIN_WINDOWS,
    PROFILED_UPDATES,
    _export_trace,
    has_kernel,
    profile,
)
from monograph.resident import Resident
from monograph.step import parts
from monograph.stream import Streamed

SHAPE = LlamaConfig(vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                    max_position_embeddings=16)  # fmt: skip


class Made:
    """A Chrome trace, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []

    def event(
        self, name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1, **args: object
    ):
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": tid,
                            "args": args})  # fmt: skip
        return self

    def span(self, name: str, begin: float, end: float):
        return self.event(name, begin, end, "user_annotation")

    def read(self, vocabulary: int | None = 97, heads_are_batched: bool = True):
        found = trace.read_trace(
            {"traceEvents": self.events}, has_kernel, vocabulary, heads_are_batched
        )
        return found, {
            part: 1e6 * seconds
            for part, seconds in time_by_part(found).parts.items()
            if seconds > 1e-12
        }


def shaped(*shapes: list[int], kind: str = "float") -> dict[str, object]:
    return {"Input Dims": list(shapes), "Input type": [kind] * len(shapes)}


def product(*shapes: list[int]) -> dict[str, object]:
    return shaped(*shapes)


def test_a_step_on_a_cpu() -> None:
    made = (
        Made()
        .span(trace.STEP, 1000, 1100)
        .span(trace.DATA, 1000, 1010)
        .span(trace.UPDATE, 1080, 1100)
    )
    made.event("aten::linear", 1010, 1022).event(
        "aten::mm", 1012, 1020, **product([8, 16], [16, 32])
    )
    made.event("aten::resolve_conj", 1013, 1014)  # inside of a product: not a gap
    made.event("aten::mm", 1022, 1027, **product([8, 16], [16, 97]))
    made.event("aten::scaled_dot_product_attention", 1030, 1044)
    made.event(
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        1031,
        1043,
        **shaped(*[[1, 2, 8, 8]] * 3),
    )
    made.event("aten::bmm", 1045, 1050, **product([2, 8, 8], [2, 8, 8]))
    made.event("cpp_fused_mul_3", 1050, 1060).event("aten::view", 1060, 1065)
    made.event("aten::_local_scalar_dense", 1065, 1070).event("my::own", 1070, 1075)
    made.event("aten::mul", 1085, 1095, **shaped([64], [64]))
    timeline, parts = made.read()
    # Between operators, in views and in what only calls others, the host is at work; and so it is
    # in what is not known.
    assert parts == pytest.approx(
        {"data wait": 10, "matmul": 8, "loss head": 5, "attention": 17, "elementwise": 10, "optimizer": 10,
         "host gaps": 40}
    )  # fmt: skip
    assert 1e6 * time_by_part(timeline).gaps["sync"] == pytest.approx(5)
    first = next(kernel for kernel in timeline.kernels if kernel.part == "matmul")
    assert first.flops == 2 * 8 * 16 * 32 and first.moved_bytes == 4 * (8 * 16 + 16 * 32 + 8 * 32)
    noted, of_updates = timeline.event_counts, timeline.update_event_counts
    assert noted["matmul"] == 1 and sum(noted.values()) + sum(of_updates.values()) == len(
        made.events
    )
    assert [1e6 * edge for edge in timeline.updates[0]] == pytest.approx([80, 100]) and sum(
        of_updates.values()
    ) == 1
    _, parts = made.read(vocabulary=None, heads_are_batched=False)
    assert parts["matmul"] == pytest.approx(18) and parts["attention"] == pytest.approx(12)


def test_operators_of_our_own() -> None:
    made = Made().span(trace.STEP, 0, 100)
    made.event("monograph::small_matmul", 0, 10, **product([8, 16], [16, 32]))
    made.event("monograph::batched_matmul", 10, 15, **product([2, 8, 8], [2, 8, 8]))
    # Some rows at a time.
    made.event("monograph::add_product_", 20, 40, **shaped([97, 16], [8, 97], [8, 16]))
    made.event("aten::mm", 22, 30, **product([40, 8], [8, 16])).event(
        "aten::add_", 30, 38, **shaped([40, 16])
    )
    made.event("monograph::grouped_linear", 40, 50, **shaped([6, 8], [3, 16, 8], [3]))
    timeline, parts = made.read()
    assert timeline.kernels[-1].flops == 2 * 6 * 8 * 16
    assert parts == pytest.approx({"matmul": 20, "attention": 5, "loss head": 16, "host gaps": 59})
    assert [kernel.flops for kernel in timeline.kernels if kernel.part == "loss head"] == [
        2 * 40 * 8 * 16,
        0,
    ]


@pytest.mark.skipif(
    "avx512f" not in device.cpu_model()[1], reason="no AVX-512, for which the product is written"
)
def test_products_that_graphs_call_past_the_dispatcher_are_seen() -> None:
    lower_to_call(torch.ops.monograph.small_matmul.default, matmul.native_out)
    left, right, out = torch.randn(64, 48), torch.randn(48, 64), torch.empty(64, 64)
    before = extern_kernels.monograph_small_matmul
    with (
        record_cpu_kernels(),
        torch.profiler.profile(record_shapes=True, acc_events=True) as watching,
    ):
        extern_kernels.monograph_small_matmul(left, right, out=out)
    assert extern_kernels.monograph_small_matmul is before
    [seen] = [each for each in watching.events() if each.name == "monograph::small_matmul"]
    assert seen.input_shapes == [[64, 48], [48, 64]]
    torch.testing.assert_close(out, left @ right)


def test_the_heads_span_and_its_backward_pass() -> None:
    made = Made().span(trace.STEP, 0, 100).span(trace.HEAD, 10, 30)
    made.event("aten::mm", 12, 20, **product([8, 16], [16, 32]), **{"Sequence number": 7})
    for number, begin in ((7, 40), (6, 60)):
        node = {"Sequence number": number}
        made.event("autograd::engine::evaluate_function: MmBackward0", begin, begin + 15, **node)
        made.event("aten::mm", begin + 2, begin + 12, **product([8, 16], [16, 32]))
    _, parts = made.read()
    assert parts == pytest.approx({"loss head": 18, "matmul": 10, "host gaps": 72})


def test_a_step_on_a_gpu() -> None:
    made = Made().span(trace.STEP, 0, 200).span(trace.UPDATE, 150, 200)
    made.event("aten::mm", 5, 12, **product([8, 16], [16, 32]))
    made.event("cudaLaunchKernel", 8, 10, "cuda_runtime", correlation=1)
    made.event("cudaMemcpyAsync", 14, 16, "cuda_runtime", correlation=2)
    made.event("aten::mul", 155, 160, **shaped([4])).event(
        "cudaLaunchKernel", 156, 158, "cuda_runtime", correlation=3
    )
    made.event("cudaDeviceSynchronize", 160, 198, "cuda_runtime", correlation=4)
    made.event("sm90_gemm", 20, 60, "kernel", 7, correlation=1)
    made.event("Memcpy HtoD (Pinned -> Device)", 50, 90, "gpu_memcpy", 8, correlation=2)
    made.event("elementwise_kernel", 170, 180, "kernel", 7, correlation=3)
    made.event("nobody's", 180, 185, "kernel", 7, correlation=99)
    made.event(trace.STEP, 20, 180, "gpu_user_annotation", 7)  # the device's own copy of the span
    timeline, parts = made.read()
    assert parts == pytest.approx(
        {"matmul": 40, "transfers": 30, "optimizer": 10, "other": 5, "host gaps": 115}
    )  # fmt: skip
    gaps = {cause: 1e6 * seconds for cause, seconds in time_by_part(timeline).gaps.items()}
    assert gaps == pytest.approx({"launch": 92, "sync": 23, "transfer": 30})
    assert [kernel.flops for kernel in timeline.kernels if kernel.part == "matmul"] == [
        2 * 8 * 16 * 32
    ]


def test_generated_code_moves_its_arguments_once() -> None:
    """What it writes is among them; what a template multiplies is nowhere said."""
    event = {
        "name": "triton_poi_fused_mul_0",
        "args": shaped([4, 8], [8], [4, 8]) | {"Input type": ["float"] * 3},
    }
    assert trace.operator_work(event) == (0.0, 4 * (32 + 8 + 32))
    assert trace.operator_work(event | {"name": "cpp_fused_mul_0"}) == (0.0, 4 * (32 + 8 + 32))
    assert trace.operator_work(event | {"name": "triton_tem_fused_mm_0"}) == (None, None)
    number = {"name": "aten::mul", "args": shaped([], []) | {"Input type": ["double", "Scalar"]}}
    assert trace.operator_work(number) == (0.0, 16.0)  # a tensor of one number


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="monograph.step"):
        Made().event("aten::mm", 0, 1).read()


@pytest.mark.parametrize(
    ("name", "computes"),
    [
        ("aten::mm", True), ("aten::add_", True), ("aten::copy_", True), ("aten::embedding", True),
        ("aten::linear", False), ("aten::matmul", False), ("aten::to", False), ("aten::view", False),
        ("aten::as_strided", False), ("aten::empty", False), ("aten::empty_like", False), ("aten::item", False),
        ("CompiledFunction", False), ("autograd::engine::evaluate_function: MmBackward0", False), ("nobody::is", False),
        ("monograph::add_product_", False), ("monograph::product", False), ("monograph::add_scaled_", True),
        ("monograph::small_matmul", True),
    ],
)  # fmt: skip
def test_which_operators_compute(name: str, computes: bool) -> None:
    assert has_kernel(name) == computes


def test_a_real_step_eagerly(tmp_path) -> None:
    tokens = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(0))
    engine = Resident(Llama(SHAPE), micro_batch=2)
    loss = engine.step.loss
    windows = [{"tokens": tokens, "targets": tokens.roll(-1, 1)}] * MIN_WINDOWS
    found = profile(engine, windows, tmp_path / "trace.json")
    assert engine.step.loss is loss and engine.index == len(windows) and found.micro_steps == 2
    judged = found.verdict
    assert sum(judged.spent.share(part) for part in PARTS) == pytest.approx(1.0)
    assert judged.spent.total_s == pytest.approx(found.update_s)
    assert judged.floor_s < found.update_s and judged.spent.share("other") < 0.05
    timeline = trace.read_trace(
        json.loads((tmp_path / "trace.json").read_text()), has_kernel, 97, True
    )
    # As recorded: of a model this small, what recording cost may be all that a part took.
    recorded = time_by_part(timeline).parts
    for part in ("matmul", "attention", "loss head", "optimizer", "elementwise", "host gaps"):
        assert recorded[part] > 0, part
    # Every product of a block and its two of the backward pass: 7 linear layers, 2 micro-batches.
    products = [kernel for kernel in timeline.kernels if kernel.part == "matmul"]
    assert len(products) == 3 * 7 * 2 * PROFILED_UPDATES
    per_token = sum(kernel.flops or 0.0 for kernel in products) / (
        PROFILED_UPDATES * tokens.numel()
    )
    blocks = sum(
        p.numel() for name, p in engine.model.named_parameters() if "layers" in name and p.ndim == 2
    )
    assert per_token == 6 * blocks
    # Adding a head of V rows: logits, and two products of the backward pass, which is in the
    # forward pass here.
    head = [kernel for kernel in timeline.kernels if kernel.part == "loss head"]
    assert sum(kernel.flops or 0.0 for kernel in head) / (
        PROFILED_UPDATES * tokens.numel()
    ) == pytest.approx(6 * 97 * 16)


@pytest.mark.slow
def test_a_real_step_captured(tmp_path) -> None:
    """However it was captured, its generated kernels are seen, with their work."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh())

    def loss(model, batch):
        return (model(batch["rows"]) - batch["targets"]).square().sum(), batch["targets"].shape[0]

    engine = Resident(model, loss=loss)
    rows = torch.randn(64, 48)
    window = {"rows": rows, "targets": rows.flip(1)}
    assert engine.capture(window) is None
    kernels = generated()
    found = profile(engine, [window] * MIN_WINDOWS, tmp_path / "trace.json").verdict
    timeline = trace.read_trace(
        json.loads((tmp_path / "trace.json").read_text()), has_kernel, None, True
    )
    seen = [kernel for kernel in timeline.kernels if kernel.name.startswith("cpp_fused_")]
    assert {kernel.part for kernel in seen} == {"elementwise", "optimizer"}
    assert (
        all(kernel.moved_bytes for kernel in seen) and found.unknown_s < 0.05 * found.spent.total_s
    )
    assert generated() == kernels and kernels  # as they were


def test_a_trace_is_read_whatever_its_folder_is_called(tmp_path) -> None:
    folder = tmp_path / 'a "b" \\ é\n'
    folder.mkdir()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as watched:
        torch.zeros(2).neg()
    found = _export_trace(watched, folder / "trace.json")
    assert found == json.loads((folder / "trace.json").read_text()) and found["traceName"] == str(
        folder / "trace.json"
    )


def test_an_engine_that_times_no_parts_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"profile\(Streamed, .*expected a mono.Resident"):
        profile(Streamed(Llama(SHAPE)), [{"tokens": torch.zeros(1, 4)}], tmp_path / "trace.json")


def test_the_optimizer_s_seconds_are_those_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Resident(Llama(SHAPE))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    monkeypatch.setattr(parts, "seconds", lambda marks: {f"{parts.OPTIMIZER}_s": float(len(marks))})
    # Forward, backward, forward of a next micro-batch, optimizer, end.
    assert profiler._update(engine, {"tokens": tokens, "targets": tokens}) == 5


def test_a_folder_that_is_not_there_is_told_before_anything_is_trained(tmp_path) -> None:
    with pytest.raises(InputRefused, match="nowhere: no such folder for the trace"):
        profile(None, [], tmp_path / "nowhere" / "trace.json")


def generated() -> dict[tuple[str, str], object]:
    return {
        (module.__name__, name): value
        for module in PyCodeCache.modules
        for name, value in vars(module).items()
        if name.startswith("cpp_fused_")
    }
