"""Run: pytest tests/laws/test_exported_heads.py

Law 11 for a head for multi-token prediction: llama.cpp's own drafts from the exported file.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

import monograph as mono
from laws.test_exported_is_original import needs_gguf
from laws.test_exported_log_probabilities import FILE, REAL, SMALL, TOKENIZER, VOCABULARY
from llama_cpp import LlamaCpp
from monograph import Sampling, generate
from monograph.model.config import LlamaConfig
from monograph.model.families import FAMILIES
from monograph.model.gguf import save_gguf
from monograph.model.llama import Llama

WITH_HEADS = [name for name, its in FAMILIES.items() if its.llama_cpp and its.llama_cpp.has_mtp]


def chains(successor: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Random first tokens, each followed by its successors, [rows, length]."""
    columns = [torch.randint(VOCABULARY, (rows,), generator=generator)]
    for _ in range(length - 1):
        columns.append(successor[columns[-1]])
    return torch.stack(columns, dim=1)


@needs_gguf
@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_HEADS)
def test_llama_cpp_accepts_what_a_trained_head_proposes(family: str, tmp_path: Path) -> None:
    """Each token has one successor, which the model and its head learn. A head whose halves, norms or
    rows were written in another order would propose tokens that the model does not accept.
    """
    sizes = {**SMALL, **REAL[family], "mtp_num_hidden_layers": 1}
    model = Llama(LlamaConfig(model_type=family, **sizes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # norms that cannot stand for one another
        for norm in (model.mtp.pre_fc_norm_embedding, model.mtp.pre_fc_norm_hidden, model.mtp.norm):
            norm.weight.add_(torch.randn(norm.weight.shape, generator=generator))
    successor = torch.randperm(VOCABULARY, generator=generator)
    step = mono.Step(model, loss=mono.MtpLoss(1.0), optim=mono.AdamW(lr=3e-3), clip=1.0)
    for _ in range(80):
        tokens = chains(successor, 16, 33, generator)
        step([{"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}])
    said: list[str] = []
    save_gguf(model, tmp_path / "out", TOKENIZER, "f32", said.append)
    assert not any("multi-token" in line for line in said)
    prompt = chains(successor, 1, 12, generator)[0].tolist()
    answer = LlamaCpp(tmp_path / "out" / FILE, own_drafts=1).greedy(prompt, 24)
    [ours] = generate(model, TOKENIZER, [prompt], Sampling(temperature=0), max_tokens=24)
    for mine, theirs in itertools.zip_longest(ours.token_ids, answer["tokens"]):
        assert mine == theirs
    timings = answer["timings"]
    assert timings["draft_n"] >= 8
    assert timings["draft_n_accepted"] >= timings["draft_n"] - 1
