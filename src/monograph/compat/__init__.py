"""Wrap every use of torch's private parts; tested on torch 2.11 and 2.13.

Functions import Dynamo and Inductor only when called: that takes about 1.5 s of CPU time, nearly twice as long as torch
itself, and a run that compiles nothing does not need it.
"""

from monograph.compat.dynamo import (
    allow_variants,
    as_if_compiling,
    cache_attention_kernels,
    cache_custom_functions,
    captured_graphs,
    graph_breaks,
    graphs_from_cache,
    hooks_kept,
    is_capture_error,
    one_graph_under_ddp,
    quiet_inputs_of_blocks,
    quiet_missing_tf32,
    quiet_selective_recompute,
    without_modes,
    without_numbers,
)
from monograph.compat.inductor import (
    activations_kept,
    aot_eager,
    cats_in_parts,
    graph_pass,
    keep_strides_of_block_masks,
    lower_to_call,
    lower_to_memory,
    mark_recomputed,
    native,
    onednn_matmul,
    partitioned,
    quiet_profiler,
    remove_cut_off_libraries,
    scaled_mm,
    stored_by_graph,
    tell_processors_apart,
    watched_kernels,
)
from monograph.compat.operators import (
    allow_recurrent,
    allow_stashes_in_recomputed,
    end_failed_capture,
    flops_of,
    functional,
    in_transform,
    layers,
    loops_told,
    quiet_layout_of_stacked_gradients,
    sums_gradients,
    warn_of_loops,
    without_fast_path,
    writes_in_place,
)

__all__ = [
    "activations_kept", "allow_recurrent", "allow_stashes_in_recomputed", "allow_variants", "aot_eager",
    "as_if_compiling", "cache_attention_kernels", "cache_custom_functions", "captured_graphs", "cats_in_parts",
    "end_failed_capture", "flops_of", "functional", "graph_breaks", "graph_pass", "graphs_from_cache", "hooks_kept",
    "in_transform", "is_capture_error", "keep_strides_of_block_masks", "layers", "loops_told", "lower_to_call",
    "lower_to_memory", "mark_recomputed", "native", "one_graph_under_ddp", "onednn_matmul", "partitioned",
    "quiet_inputs_of_blocks", "quiet_layout_of_stacked_gradients", "quiet_missing_tf32", "quiet_profiler",
    "quiet_selective_recompute", "remove_cut_off_libraries", "scaled_mm", "stored_by_graph", "sums_gradients",
    "tell_processors_apart", "warn_of_loops", "watched_kernels", "without_fast_path", "without_modes",
    "without_numbers", "writes_in_place",
]  # fmt: skip
