# Run: pytest tests/model/test_vocabulary.py
"""Rows for tokens that a model never saw: the mean of those that it did, everything else as it was."""

from __future__ import annotations

import pytest
import torch

from batches import ragged, tiny_llama
from monograph.model import vocabulary
from monograph.model.vocabulary import set_new_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("known", "tokens"), [(61, 64), (50, 52), (50, 64), (61, 62)])
def test_new_rows_are_the_mean_and_old_ones_keep_their_bits(
    known, tokens, tied, dtype, monkeypatch
):
    monkeypatch.setattr(vocabulary, "ROWS_AT_ONCE", 7)
    model, plain = (tiny_llama(dtype, tie_word_embeddings=tied) for _ in range(2))
    set_new_rows(model, known, tokens)
    rows = max(61, tokens)
    assert (
        model.config.vocab_size
        == rows
        == model.model.embed_tokens.num_embeddings
        == model.lm_head.out_features
    )
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    for layer, own in (
        (model.model.embed_tokens, plain.model.embed_tokens.weight),
        (model.lm_head, plain.lm_head.weight),
    ):
        assert layer.weight.shape == (rows, 32) and layer.weight.requires_grad
        assert torch.equal(layer.weight[:known], own[:known])
        assert torch.equal(layer.weight[tokens:], own[tokens:]), (
            "spare rows that are still nobody's"
        )
        mean = own[:known].double().mean(0)
        wide = torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(layer.weight[known:tokens].double(), mean.to(wide).to(dtype).double().expand(
            tokens - known, -1), rtol=1e-6, atol=1e-12)  # fmt: skip
        assert len(layer.weight[known:tokens].unique(dim=0)) == 1
    batch = ragged(2)["tokens"].clamp(max=known - 1)
    assert torch.equal(model(batch), plain(batch))


def test_the_mean_is_the_same_bits_in_any_dtype_of_the_folder_and_in_any_parts(monkeypatch):
    found = []
    for dtype, parts in ((torch.bfloat16, 4096), (torch.float32, 4096), (torch.float32, 5)):
        monkeypatch.setattr(vocabulary, "ROWS_AT_ONCE", parts)
        model = tiny_llama(torch.bfloat16).to(dtype)
        set_new_rows(model, 61, 62)
        found.append(model.model.embed_tokens.weight[61])
    assert torch.equal(found[1].bfloat16(), found[0]) and torch.equal(found[1], found[2])
