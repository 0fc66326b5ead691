"""The private corners of torch that this package touches, in one place; tested on torch 2.11 and 2.13."""

from monograph.compat.dynamo import (
    allow_variants,
    as_if_compiling,
    cache_attention_kernels,
    cache_custom_functions,
    captured_graphs,
    graph_breaks,
    is_capture_error,
    quiet_inputs_of_blocks,
    quiet_selective_recompute,
    without_modes,
    without_numbers,
)
from monograph.compat.inductor import graph_pass, lower_to_call, lower_to_memory, native, onednn_matmul, scaled_mm
from monograph.compat.operators import (
    allow_stashes_in_recomputed,
    flops_of,
    functional,
    in_transform,
    quiet_layout_of_stacked_gradients,
    sums_gradients,
    without_fast_path,
    writes_in_place,
)
from monograph.compat.partitioner import activations_kept, partitioned, stored_by_graph

__all__ = [
    "activations_kept",
    "allow_stashes_in_recomputed",
    "allow_variants",
    "as_if_compiling",
    "cache_attention_kernels",
    "cache_custom_functions",
    "captured_graphs",
    "flops_of",
    "functional",
    "graph_breaks",
    "graph_pass",
    "in_transform",
    "is_capture_error",
    "lower_to_call",
    "lower_to_memory",
    "native",
    "onednn_matmul",
    "partitioned",
    "quiet_inputs_of_blocks",
    "quiet_layout_of_stacked_gradients",
    "quiet_selective_recompute",
    "scaled_mm",
    "stored_by_graph",
    "sums_gradients",
    "without_fast_path",
    "without_modes",
    "without_numbers",
    "writes_in_place",
]
