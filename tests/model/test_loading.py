"""Run: pytest tests/model/test_loading.py    (all cases: -m slow)

Law: whatever is made of a folder, the anonymous memory of the process never exceeds what is kept of
it by more than three times the largest tensor in fp32 and a constant; where weights are streamed,
than a few copies of a stage.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from daily import nightly
from scripts import script

loading = script("benchmarks/loading.py")

# 37 million parameters in tensors of a million at most: a second copy, even in bf16, is more than
# the bound allows.
SHAPE = loading.SHAPE | {
    "vocab_size": 1_000,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
}
# A tensor that is one in memory is one for each expert in the folder.
MIXTURE = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 320,
    "norm_topk_prob": True,
}  # fmt: skip
FAST = "lora, base in nf4", "export gguf bf16, merged"
# Which has tensors in fp32, and those of the file, one after another.
DAY = {"export gguf bf16, merged"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("loading"), {})


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("mixture"), MIXTURE | {"hidden_size": 512})


def made(folder: Path, sizes: dict[str, Any]) -> Path:
    loading.make(folder, SHAPE | sizes)
    loading.make(folder / "tiny", loading.TINY | sizes | {"hidden_size": 64})
    return folder


def check(folder: Path, case: str) -> None:
    # Or glibc keeps freed pieces below 32 MB, as large as these tensors.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    try:
        found = loading.called(loading.SRC, folder, case)
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
    assert found["peak_bytes"] <= found["kept_bytes"] + found["over_bytes"], found
    if not case.startswith(("train", "stream")):
        assert found["kept_bytes"] + found["over_bytes"] < 2 * found["folder_bytes"], (
            "it holds of no copy in fp32"
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST)
def test_the_peak_is_what_is_kept_and_three_tensors(folder: Path, case: str) -> None:
    if "gguf" in case:
        pytest.importorskip(
            "gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'"
        )
    check(folder, case)


@pytest.mark.parametrize("case", nightly((*loading.TRAINED, *loading.OTHERS), DAY))
def test_experts_of_a_mixture_are_put_together_one_stack_after_another(
    mixture: Path, case: str
) -> None:
    if "gguf" in case:
        pytest.importorskip(
            "gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'"
        )
    check(mixture, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in (*loading.TRAINED, *loading.OTHERS) if case not in FAST]
)
def test_in_every_way_that_a_folder_is_used(folder: Path, case: str) -> None:
    if "gguf" in case:
        pytest.importorskip(
            "gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'"
        )
    check(folder, case)
