"""Run: pytest tests/decode/test_operators.py (needs a CUDA device)

What a compiler is told of each kernel that decodes: the shapes, strides and dtypes of its results, and
which of its arguments it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from batches import tiny_llama
from decode.test_fast_forward import FAMILIES, SHAPE
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling

pytestmark = pytest.mark.gpu
Call = tuple[tuple[Any, ...], dict[str, Any]]
OF_A_HYBRID = {
    "attend", "attend_cache", "convolve_token", "delta_rule_token", "expert_inner", "expert_sum", "multiply",
    "multiply_by_sigmoid", "prepare_heads", "route", "sample_few",
}  # fmt: skip


class Calls(TorchDispatchMode):
    """Keeps the arguments of the first call of each of our operators, as they were before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, Call] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        if operator.namespace == "monograph" and operator not in self.first:
            self.first[operator] = tree_map_only(torch.Tensor, torch.clone, given)
        return operator(*given[0], **given[1])


def test_a_compiler_is_told_what_the_kernels_return_and_write() -> None:
    model = tiny_llama(**SHAPE, **FAMILIES["a delta net and a shared expert"]).cuda()
    sampling = Sampling(0.9, seed=0, top_k=5)
    machine = Generator(
        model, chain_of([sampling]), rows=2, slots=64, vocabulary=259, mode="eager", pace=2
    )
    machine.submit(Request((5, 6, 7), sampling, 4, ()))
    with Calls() as calls:
        list(machine.run())
    named = {operator._opname: (operator, call) for operator, call in calls.first.items()}
    assert OF_A_HYBRID <= named.keys()
    for operator, (args, kwargs) in named.values():
        torch.library.opcheck(operator, args, kwargs, test_utils=("test_schema", "test_faketensor"))
