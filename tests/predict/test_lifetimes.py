# Run: pytest tests/predict/test_lifetimes.py
"""Orders and lifetimes of made-up kernels: what is read early, written over, and needed to the end
of a loop.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from monograph.predict.lifetimes import PlannedKernel, order_kernels


def kernel(name, reads, size_bytes=100, fusable=True):
    return PlannedKernel(
        name, torch.empty(size_bytes), size_bytes, size_bytes, frozenset(reads), fusable
    )


def names(kernels):
    return [each.name for each in kernels]


def test_what_frees_more_than_it_takes_is_computed_at_once():
    written = [
        kernel("logits", [], fusable=False),
        kernel("other", [], fusable=False),
        kernel("sum", ["logits"], 1),
    ]
    assert names(order_kernels(written, {"sum", "other"}, {})) == ["logits", "sum", "other"]
    # It frees nothing while another kernel reads the same later.
    written.append(kernel("late", ["logits"], 200))
    assert names(order_kernels(written, {"sum", "other", "late"}, {})) == [
        "logits",
        "other",
        "sum",
        "late",
    ]


def test_a_result_is_written_over_what_it_is_the_last_to_read():
    first, second = order_kernels([kernel("a", [], fusable=False), kernel("b", ["a"])], {"b"}, {})
    assert second.written_over == "a" and not first.freed_after and not second.freed_after
    # Not if it is of another size, a product, or kept by the caller.
    kept_b, kept_both = {"b"}, {"a", "b"}
    others = (
        (kernel("b", ["a"], 50), kept_b),
        (kernel("b", ["a"], fusable=False), kept_b),
        (kernel("b", ["a"]), kept_both),
    )
    for last, kept in others:
        _, second = order_kernels([kernel("a", [], fusable=False), last], kept, {})
        assert second.written_over is None and ("a" in second.freed_after) == ("a" not in kept)


def test_a_loop_keeps_what_it_reads_to_its_end():
    written = [
        kernel("scores", [], 50, fusable=False),
        kernel("weighted", ["scores"]),
        kernel("sum", ["weighted"], 1),
        kernel("out", ["weighted", "sum"], 70),
    ]
    *_, out = order_kernels(written, {"out"}, {})
    assert set(out.freed_after) == {"scores", "weighted", "sum"}


def gated(needed):
    """A gated layer's backward pass: two results of one loop, the second of which reads a product
    of `needed`.
    """
    return [
        kernel("gate", [], fusable=False),
        kernel("first", ["gate"]),
        kernel("of first", ["first"], 10, fusable=False),
        kernel("up", needed, fusable=False),
        kernel("second", ["gate", "up"]),
    ]


def test_a_loop_waits_for_what_its_other_results_need():
    found = order_kernels(gated([]), {"of first", "second"}, {})
    assert names(found) == ["gate", "up", "first", "second", "of first"]
    # Not if that needs the loop itself, directly or not.
    for needed in (["first"], ["of first"]):
        assert names(order_kernels(gated(needed), {"of first", "second"}, {})) == names(
            gated(needed)
        )


def test_of_a_callers_own_tensor_two_loops_may_read_different_parts():
    """As chunks of a loss do of the targets; what a graph has been given to free it reads whole."""
    for owned, order in (({}, ["first", "up", "second"]), ({0: 100}, ["up", "first", "second"])):
        written = [
            kernel("first", [0]),
            kernel("up", [], fusable=False),
            kernel("second", [0, "up"]),
        ]
        assert names(order_kernels(written, {"first", "second"}, owned)) == order


def test_loops_are_not_joined_where_memory_would_not_be_used_again():
    """Each alone reads a large buffer, of which the second could be where the first was."""
    for size_bytes, order in (
        (100, ["a", "b", "first", "second"]),
        (5000, ["a", "first", "b", "second"]),
    ):
        written = [
            kernel("shared", [], 100, fusable=False),
            kernel("a", [], size_bytes, fusable=False),
            kernel("first", ["a", "shared"], 10),
            kernel("b", [], size_bytes, fusable=False),
            kernel("second", ["b", "shared"], 10),
        ]
        assert names(order_kernels(written, {"first", "second"}, {}))[1:] == order


def test_loops_are_not_joined_over_a_long_way():
    for between, near in ((50, True), (70, False)):
        products = [kernel(f"product {index}", [], 1, fusable=False) for index in range(between)]
        written = [*gated([])[:2], *products, *gated([])[3:]]
        found = names(order_kernels(written, {"first", "second", *names(products)}, {}))
        assert (found.index("second") == found.index("first") + 1) == near


def test_what_several_of_a_loop_read_is_not_written_over():
    *_, first, second, _ = order_kernels(gated([]), {"of first", "second"}, {})
    assert (
        first.written_over is None
        and second.written_over == "up"
        and second.freed_after == ["gate"]
    )
    # Alone with it the second writes over it.
    *_, second = order_kernels(gated(["first"]), {"of first", "second"}, {})
    assert second.written_over == "gate" and second.freed_after == ["up"]


def test_arguments_are_given_back_only_by_a_graph_that_owns_them():
    (owner,) = order_kernels([kernel("a", [0], 50)], {"a"}, {0: 100})
    assert owner.freed_after == [0]
    (guest,) = order_kernels([kernel("a", [0], 50)], {"a"}, {})
    assert guest.freed_after == []


def test_what_nobody_reads_is_gone_at_once():
    (only,) = order_kernels([kernel("copy", [], fusable=False)], set(), {})
    assert only.freed_after == ["copy"]


def test_what_was_changed_in_place_is_not_written_over():
    """As the embedding's gradient, rows of which are added up at their places, is not by its sum
    with a tied head's.
    """
    written = [kernel("zeros", []), kernel("added", ["zeros"]), kernel("sum", ["added"])]
    for changes, over in (("zeros", None), (None, "added")):
        written[1].changes = changes
        found = order_kernels(
            [replace(each, written_over=None, freed_after=[]) for each in written], {"sum"}, {}
        )
        assert found[1].written_over == "zeros" and found[2].written_over == over
        assert found[2].freed_after == (["added"] if over is None else [])


def test_a_product_that_is_added_in_place_waits_for_and_is_waited_for():
    written = [
        kernel("total", [], fusable=False),
        PlannedKernel(
            "inside",
            torch.empty(60),
            60,
            60,
            frozenset(["total"]),
            fusable=False,
            is_workspace=True,
        ),
        PlannedKernel(
            "added",
            torch.empty(100),
            100,
            100,
            frozenset(["total", "inside"]),
            fusable=False,
            changes="total",
        ),
        kernel("scaled", ["added"]),
    ]
    _, inside, added, scaled = order_kernels(written, {"scaled"}, {})
    assert (
        added.written_over == "total" and added.freed_after == ["inside"] and not inside.freed_after
    )
    assert scaled.written_over is None and scaled.freed_after == ["added"]


def test_what_lies_behind_a_value_of_another_size_is_not_written_over():
    first, second = order_kernels([kernel("a", [], fusable=False), kernel("b", ["a"])], {"b"}, {})
    assert second.written_over == "a"
    second = replace(second, written_over=None, not_over=frozenset(["a"]))
    _, second = order_kernels([kernel("a", [], fusable=False), second], {"b"}, {})
    assert second.written_over is None and second.freed_after == ["a"]


def test_a_dead_buffer_is_kept_for_a_later_one_of_its_kind_unless_that_raises_the_peak():
    for size_bytes, kept in ((90, True), (150, False)):
        written = [
            kernel("a", [], fusable=False),
            kernel("b", ["a"], 110, fusable=False),
            kernel("between", ["b"], size_bytes, fusable=False),
            kernel("less", ["between"], 10, fusable=False),
            kernel("c", ["less"], fusable=False),
            kernel("most", [], 250, fusable=False),
        ]
        found = {each.name: each for each in order_kernels(written, {"c", "most"}, {})}
        assert (
            found["c"].written_over == ("a" if kept else None)
            and ("a" in found["b"].freed_after) != kept
        )


def test_what_an_operator_needs_inside_does_not_keep_a_buffer_from_being_reused():
    """The compiler does not know of it: so the memory is there beside it."""
    written = [
        kernel("a", [], fusable=False),
        kernel("b", ["a"], 110, fusable=False),
        replace(kernel("inside", ["b"], 500, fusable=False), is_workspace=True),
        kernel("of b", ["b", "inside"], 10, fusable=False),
        kernel("c", ["of b"], fusable=False),
        kernel("most", [], 200, fusable=False),
    ]
    found = {each.name: each for each in order_kernels(written, {"c", "most"}, {})}
    assert found["c"].written_over == "a" and "a" not in found["b"].freed_after
