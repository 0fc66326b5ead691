# Run: pytest tests/measure/test_lifetimes.py
"""Orders and lifetimes of made-up kernels: what is read early, written over, and needed to the end of a loop."""

from __future__ import annotations

import torch

from monograph.measure.lifetimes import Kernel, scheduled


def kernel(name, reads, size_bytes=100, fused=True):
    return Kernel(name, torch.empty(0), size_bytes, frozenset(reads), fused)


def names(kernels):
    return [each.name for each in kernels]


def test_what_frees_more_than_it_takes_is_computed_at_once():
    written = [kernel("logits", [], fused=False), kernel("other", [], fused=False), kernel("sum", ["logits"], 1)]
    assert names(scheduled(written, {"sum", "other"}, {})) == ["logits", "sum", "other"]
    # It frees nothing while another kernel reads the same later.
    written.append(kernel("late", ["logits"], 200))
    assert names(scheduled(written, {"sum", "other", "late"}, {})) == ["logits", "other", "sum", "late"]


def test_a_result_is_written_over_what_it_is_the_last_to_read():
    first, second = scheduled([kernel("a", [], fused=False), kernel("b", ["a"])], {"b"}, {})
    assert second.over == "a" and not first.last_reads and not second.last_reads
    # Not if it is of another size, a product, or kept by the caller.
    kept_b, kept_both = {"b"}, {"a", "b"}
    others = (
        (kernel("b", ["a"], 50), kept_b),
        (kernel("b", ["a"], fused=False), kept_b),
        (kernel("b", ["a"]), kept_both),
    )
    for last, kept in others:
        _, second = scheduled([kernel("a", [], fused=False), last], kept, {})
        assert second.over is None and ("a" in second.last_reads) == ("a" not in kept)


def test_a_loop_keeps_what_it_reads_to_its_end():
    written = [
        kernel("scores", [], 50, fused=False),
        kernel("weighted", ["scores"]),
        kernel("sum", ["weighted"], 1),
        kernel("out", ["weighted", "sum"], 70),
    ]
    *_, out = scheduled(written, {"out"}, {})
    assert set(out.last_reads) == {"scores", "weighted", "sum"}


def test_arguments_are_given_back_only_by_a_graph_that_owns_them():
    (owner,) = scheduled([kernel("a", [0], 50)], {"a"}, {0: 100})
    assert owner.last_reads == [0]
    (guest,) = scheduled([kernel("a", [0], 50)], {"a"}, {})
    assert guest.last_reads == []


def test_what_nobody_reads_is_gone_at_once():
    (only,) = scheduled([kernel("copy", [], fused=False)], set(), {})
    assert only.last_reads == ["copy"]
