"""Run: pytest tests/profiling/test_bottleneck.py

Where time went and what binds a run: made-up runs that are each bound by exactly one thing, and
shares that add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.profiling.bottleneck import (
    COMPUTING_PARTS,
    Machine,
    Situation,
    Verdict,
    bound,
    floor_s,
    verdict,
)
from monograph.profiling.intervals import (
    PARTS,
    Kernel,
    Span,
    Timeline,
    estimate_unprofiled,
    estimate_update,
    time_by_part,
)
from monograph.profiling.profiler import Profile
from monograph.report.profile_report import describe_limit

MACHINE = Machine(matmul_flops=1e12, copy_bytes_per_s=1e11)
MS = 1e-3


class Tape:
    """A run that is made up: kernels one after another, each launched long before unless said
    otherwise.
    """

    def __init__(self) -> None:
        self.now, self.kernels, self.spans = 0.0, [], []

    def kernel(
        self,
        part: str,
        ms: float,
        *,
        compute: float = 0.0,
        memory: float = 0.0,
        launched: float | None = None,
    ):
        """A kernel whose floors are these shares of its time."""
        seconds = ms * MS
        flops, moved = (
            compute * seconds * MACHINE.matmul_flops,
            memory * seconds * MACHINE.copy_bytes_per_s,
        )
        begun = 0.0 if launched is None else launched
        self.kernels.append(Kernel(part, self.now, self.now + seconds, flops, moved, begun))
        self.now += seconds
        return self

    def gap(self, ms: float, span: str | None = None):
        if span:
            self.spans.append(Span(span, self.now, self.now + ms * MS))
        self.now += ms * MS
        return self

    def at_the_roof(self):
        """A little of each part, all at its floor."""
        self.kernel("matmul", 8, compute=1.0).kernel("attention", 1, compute=1.0).kernel(
            "loss head", 1, compute=1.0
        )
        return self.kernel("elementwise", 1, memory=1.0).kernel("optimizer", 1, memory=1.0)

    def judged(self, **situation) -> Verdict:
        found = time_by_part(Timeline(0.0, self.now, self.kernels, self.spans))
        return verdict(found, self.kernels, MACHINE, Situation(**situation))


def slow_loader(tape: Tape) -> None:
    for _ in range(3):
        tape.gap(20, "data").at_the_roof()


def tiny_kernels(tape: Tape) -> None:
    for _ in range(300):
        tape.gap(0.05)
        tape.kernel("elementwise", 0.02, memory=0.9, launched=tape.now)


def a_copy_per_step(tape: Tape) -> None:
    for _ in range(3):
        tape.kernel("transfers", 15).at_the_roof()


def item_per_step(tape: Tape) -> None:
    for _ in range(3):
        tape.at_the_roof().gap(12, "sync")


def attention_heavy(tape: Tape) -> None:
    tape.at_the_roof().kernel("attention", 30, compute=0.3, memory=0.1)


def head_heavy(tape: Tape) -> None:
    tape.at_the_roof().kernel("loss head", 30, compute=0.4)


def optimizer_heavy(tape: Tape) -> None:
    tape.at_the_roof().kernel("optimizer", 30, memory=0.3)


def elementwise_in_fp32(tape: Tape) -> None:
    tape.at_the_roof().kernel("elementwise", 30, memory=0.5)


def small_products(tape: Tape) -> None:
    tape.at_the_roof().kernel("matmul", 30, compute=0.1)


def at_the_roof(tape: Tape) -> None:
    tape.at_the_roof()


def eager(tape: Tape) -> None:
    for _ in range(200):
        tape.gap(0.03)
        tape.kernel("elementwise", 0.02, memory=0.4, launched=tape.now)
    tape.kernel("matmul", 4, compute=0.9)


def many_micro_steps(tape: Tape) -> None:
    for _ in range(16):
        tape.gap(2).kernel("matmul", 1, compute=0.9, launched=tape.now)


def unknown_work(tape: Tape) -> None:
    tape.at_the_roof()
    tape.kernels.append(Kernel("other", tape.now, tape.now + 0.03))
    tape.now += 0.03


RUNS: list[tuple[Callable[[Tape], None], dict[str, object], str, str | None]] = [
    (slow_loader, {}, "data wait", "faster disk"),
    (tiny_kernels, {"micro_steps": 8}, "host gaps", "train.micro_batch"),
    (tiny_kernels, {}, "host gaps", None),
    (a_copy_per_step, {}, "transfers", "kept on the device"),
    (item_per_step, {}, "host gaps", ".item()"),
    (attention_heavy, {}, "attention", "data.sequence_length"),
    (head_heavy, {}, "loss head", "data.vocab_size"),
    (optimizer_heavy, {}, "optimizer", "train.tokens_per_update"),
    (optimizer_heavy, {"captured": False}, "optimizer", "train.compile=whole"),
    (elementwise_in_fp32, {"bf16": {"elementwise": 0.5}}, "elementwise", "train.precision=bf16"),
    (small_products, {}, "matmul", None),
    (at_the_roof, {}, "nothing", None),
    (at_the_roof, {"bf16": {"matmul": 0.5}}, "nothing", "train.precision=bf16"),
    (at_the_roof, {"used": 0.4}, "padding", "data.packing=packed"),
    (eager, {"captured": False}, "host gaps", "train.compile=whole"),
    (eager, {"captured": False, "can_compile": False}, "host gaps", None),
    (many_micro_steps, {"micro_steps": 16}, "host gaps", "train.micro_batch"),
    (unknown_work, {}, "nothing", None),
]


def test_one_graph_is_not_promised_to_save_the_optimizers_products() -> None:
    """Muon multiplies matrices: what a compiler makes one pass of is the rest."""

    def saved(products_ms: float) -> float:
        tape = Tape().at_the_roof().kernel("optimizer", 100 - products_ms, memory=0.5)
        if products_ms:
            tape.kernel("optimizer", products_ms, compute=0.6)
        [change] = [
            each
            for each in tape.judged(captured=False).changes
            if each.what == "train.compile=whole"
        ]
        return change.saved_s

    assert saved(80) == pytest.approx(saved(0) * 21 / 101, rel=0.03)


def test_what_cannot_be_counted_is_said_and_not_taken_for_well_done() -> None:
    tape = Tape().at_the_roof().gap(4)
    tape.kernel("matmul", 12, compute=1.0, launched=tape.now)
    tape.kernels.append(Kernel("attention", tape.now, tape.now + 42 * MS))
    tape.now += 42 * MS
    judged = tape.judged()
    assert judged.bottleneck == "host gaps" and judged.unknown_s == pytest.approx(42 * MS)
    found = Profile(
        judged.spent.total_s, judged.spent.total_s, 1, 1, MACHINE, judged, Path("trace.json")
    )
    assert describe_limit(found) == (
        "host gaps: 6% of the time could be won back at most; no key changes that; "
        "60% of it is work that cannot be counted, and is not judged"
    )


@pytest.mark.parametrize(("run", "situation", "binds", "change"), RUNS)
def test_a_run_that_one_thing_binds(run, situation, binds, change) -> None:
    run(tape := Tape())
    found = tape.judged(**situation)
    assert found.bottleneck == binds, found.recoverable
    assert (change is None) == (found.change is None) and (
        change is None or change in found.change.what
    ), found.change
    assert sum(found.spent.share(part) for part in PARTS) == pytest.approx(1.0, abs=1e-9)
    assert found.floor_s <= found.spent.total_s * (1 + 1e-9)


def test_products_that_compute_binds_gain_by_another_precision() -> None:
    tape = Tape().kernel("matmul", 40, compute=0.9).kernel("elementwise", 8, memory=1.0)
    found = tape.judged(bf16={"matmul": 0.25, "elementwise": 0.5})
    assert found.change and found.change.what == "train.precision=bf16"
    assert found.gain(found.change) == pytest.approx(48 / (48 - 30 - 4))
    slower = tape.judged(bf16={"matmul": 0.25, "elementwise": 2.0})
    assert slower.change and slower.gain(slower.change) == pytest.approx(48 / (48 - 30 + 8))
    muon = Tape().kernel("optimizer", 30, compute=1.0).kernel("optimizer", 10, memory=1.0)
    # Its products gain, all else of it does not.
    found = muon.judged(bf16={"matmul": 0.5, "optimizer": 1.7})
    assert found.change and found.gain(found.change) == pytest.approx(40 / (40 - 15 + 7))
    latent = Tape().kernel("matmul", 40, compute=0.1).judged(bf16={"matmul": 0.25})
    assert latent.change is None  # neither floor is what such a product waits for


def test_amdahl() -> None:
    tape = Tape().gap(30, "data").kernel("matmul", 10, compute=1.0)
    found = tape.judged()
    assert found.change and found.gain(found.change) == pytest.approx(4.0)


def test_a_change_of_the_training_comes_after_all_that_keep_it() -> None:
    tape = (
        Tape().kernel("optimizer", 60, memory=0.2).kernel("matmul", 30, compute=1.0).gap(10, "data")
    )
    found = tape.judged()
    assert found.bottleneck == "optimizer"
    assert [each.same_training for each in found.changes] == [True, False]


def test_two_streams_share_what_they_share_and_a_copy_beside_work_is_hidden() -> None:
    kernels = [
        Kernel("matmul", 0.0, 4.0),
        Kernel("elementwise", 2.0, 6.0),
        Kernel("transfers", 1.0, 7.0),
    ]
    found = time_by_part(Timeline(0.0, 8.0, kernels))
    parts = {part: seconds for part, seconds in found.parts.items() if seconds}
    assert parts == {"matmul": 3.0, "elementwise": 3.0, "transfers": 1.0, "host gaps": 1.0}


def test_each_gap_has_one_cause() -> None:
    kernels = [
        Kernel("matmul", 0.0, 1.0, launched_s=0.0),
        Kernel("matmul", 1.000001, 2.0, launched_s=0.1),  # queued: the device itself
        Kernel("matmul", 3.0, 4.0, launched_s=2.9),  # launched late
        Kernel("matmul", 5.0, 6.0, launched_s=0.2),  # queued, and yet nobody ran it
        Kernel("matmul", 8.0, 9.0, launched_s=7.5),
    ]
    spans = [Span("data", 6.0, 7.0)]
    found = time_by_part(Timeline(0.0, 9.0, kernels, spans))
    assert found.gaps == pytest.approx(
        {"kernel gap": 1e-6, "launch": 2.0, "other": 1.0, "data": 1.0}
    )


def test_what_a_kernel_is_bound_by() -> None:
    kernel = Kernel("matmul", 0.0, 1.0, 8e11, 1e10)
    assert bound(kernel, MACHINE) == "compute" and floor_s(kernel, MACHINE) == 0.8
    assert bound(replace(kernel, moved_bytes=9e10), MACHINE) == "memory"
    assert bound(replace(kernel, flops=1e11), MACHINE) == "latency"
    unknown = replace(kernel, flops=None, moved_bytes=None)
    assert bound(unknown, MACHINE) == "unknown" and floor_s(unknown, MACHINE) == 1.0
    assert floor_s(replace(kernel, flops=1e13), MACHINE) == 1.0  # a floor is never above the time


def test_the_profilers_own_time_is_taken_from_where_it_was_spent() -> None:
    launched = [Kernel("matmul", 0.0, 4.0), Kernel("matmul", 8.0, 10.0, launched_s=8.0)]
    watched = time_by_part(Timeline(0.0, 10.0, launched))
    found = estimate_unprofiled(watched, {"matmul": 1, "host gaps": 2}, 1.0, 7.0)
    assert (found.parts["matmul"], found.parts["host gaps"]) == pytest.approx((5.0, 2.0))
    assert found.gaps == pytest.approx({"launch": 2.0})
    assert estimate_unprofiled(watched, {"host gaps": 9}, 1.0, 3.0).parts[
        "matmul"
    ] == pytest.approx(3.0)
    assert estimate_unprofiled(
        watched, {"host gaps": 9, "matmul": 9}, 1.0, 30.0
    ).total_s == pytest.approx(30.0)


def test_what_watching_does_to_the_optimizer_is_not_taken_for_the_others() -> None:
    """An eager update's memory that is given back and fetched again, as the profiler's own is
    beside it.
    """
    kernels = [Kernel("matmul", 0.0, 4.0), Kernel("optimizer", 5.0, 9.0), Kernel("matmul", 10.0, 14.0),
               Kernel("optimizer", 15.0, 19.0)]  # fmt: skip
    watched = Timeline(0.0, 20.0, kernels, updates=[(4.5, 9.5), (14.5, 19.5)])
    found = estimate_update(watched, 0.0, update_s=7.5, optimizer_s=2.5, overlaps=False)
    assert found.parts["matmul"] == pytest.approx(4.0) and found.parts[
        "optimizer"
    ] == pytest.approx(2.0)
    assert found.total_s == pytest.approx(7.5)
    overlapping = estimate_update(watched, 0.0, update_s=7.5, optimizer_s=2.5, overlaps=True)
    assert overlapping.parts["matmul"] == pytest.approx(
        3.0
    ) and overlapping.total_s == pytest.approx(7.5)


times = st.floats(-2.0, 12.0, allow_nan=False)
kernels = st.builds(
    lambda part, a, b, launched: Kernel(part, min(a, b), max(a, b), launched_s=launched),
    st.sampled_from(["matmul", "attention", "elementwise", "optimizer", "loss head", "transfers", "other"]),
    times, times, st.none() | times,
)  # fmt: skip
spans = st.builds(
    lambda kind, a, b: Span(kind, min(a, b), max(a, b)),
    st.sampled_from(["data", "sync"]),
    times,
    times,
)


@given(st.lists(kernels, max_size=12), st.lists(spans, max_size=4))
def test_shares_are_never_negative_and_add_to_one(drawn: list[Kernel], said: list[Span]) -> None:
    found = time_by_part(Timeline(0.0, 10.0, drawn, said))
    shares = [found.share(part) for part in PARTS]
    assert (
        min(shares) >= 0
        and sum(shares) == pytest.approx(1.0)
        and found.total_s == pytest.approx(10.0)
    )
    idle = {"data wait", "host gaps"} | ({"other"} if found.gaps.get("other") else set())
    assert (
        sum(found.gaps.values())
        <= sum(found.parts[part] for part in (*idle, "transfers", "other")) + 1e-9
    )
    cut = Timeline(0.0, 10.0, drawn, said, updates=[(1.0, 3.0), (3.0, 6.5)])
    pieces = time_by_part(cut, cut.updates) + time_by_part(cut, cut.rest)
    assert {part: pieces.parts[part] for part in COMPUTING_PARTS[:-1]} == pytest.approx(
        {part: found.parts[part] for part in COMPUTING_PARTS[:-1]}
    )
    assert pieces.total_s == pytest.approx(10.0)
    rest = estimate_unprofiled(found, {"matmul": 3, "host gaps": 50}, 0.1, 7.0)
    assert rest.total_s == pytest.approx(7.0) and min(rest.parts.values()) >= 0
