# Run: pytest tests/laws/test_answers_are_separate.py
"""Laws 2 and 9 where only answers are targets: packed, padded and cut in any way, each conversation
is as if alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dialogues import said, speaking, write_chats
from monograph.data.corpus import Corpus, corpus
from monograph.data.rows import IGNORE, Rows
from monograph.laws.comparisons import relative_error
from monograph.loss import token_loss
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama


@pytest.fixture(
    scope="module", params=[pytest.param("chatml", marks=pytest.mark.slow), "qwen3", "completions"]
)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Corpus]:
    """The same conversations, packed and padded."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    words = ("why", "what is it", "so ü", "it is\nthe answer")
    if request.param == "completions":  # which no template renders
        path = folder / "chats.jsonl"
        texts = [
            {"prompt": f"{words[n % 4]} {n}=", "completion": " so" * (1 + n % 7)} for n in range(24)
        ]
        path.write_text("".join(json.dumps(text) + "\n" for text in texts))
        return {
            packing: corpus(
                path,
                tokenizer="bytes",
                sequence_length=160,
                packing=packing,
                held_out=0,
                cache=folder,
            )
            for packing in ("packed", "padded")
        }
    chats = [
        said(*[f"{words[(number + turn) % 4]} {number}" for turn in range(2 + 2 * (number % 3))])
        for number in range(24)
    ]
    path, tokenizer = (
        write_chats(folder / "chats.jsonl", chats),
        speaking(folder / "words", request.param),
    )
    return {
        packing: corpus(
            path,
            tokenizer=tokenizer,
            sequence_length=160,
            packing=packing,
            held_out=0,
            cache=folder,
        )
        for packing in ("packed", "padded")
    }


def model_of(text: Corpus) -> Llama:
    config = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=160,
        initializer_range=0.3,  # far from linear, so that attention matters
    )
    return Llama(config).double()


def gradient(
    model: Llama, batches: list[dict[str, torch.Tensor]]
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """(sum of losses, targets, the gradient of the sum) of all batches."""
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        loss, targets = token_loss(model, batch)
        loss.backward()
        total, count = total + loss.detach(), count + int(targets)
    return total, count, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def alone(rows: Rows) -> list[dict[str, torch.Tensor]]:
    """Each stretch as a batch of its own, as long as it is."""
    batches = []
    for index in range(len(rows)):
        row = rows.row(index)
        length = rows.pieces(index)[0].length
        batches.append(
            {key: torch.from_numpy(row[key][None, :length]) for key in ("tokens", "targets")}
        )
    return batches


@pytest.mark.parametrize(
    "batch_rows", [3, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (1, 100))]
)
def test_packed_answers_are_separate_answers(opened: dict[str, Corpus], batch_rows: int) -> None:
    packed, padded = opened["packed"].train, opened["padded"].train
    model = model_of(opened["packed"])
    expected = gradient(model, alone(padded))
    assert expected[1] == packed.tokens == padded.tokens < padded.inputs
    for rows in (packed, padded):
        total, count, found = gradient(model, list(rows.batches_in_order(batch_rows)))
        assert (
            count
            == rows.tokens
            == sum(int(token_loss.count(batch)) for batch in rows.batches_in_order(batch_rows))
        )
        assert (
            relative_error(total, expected[0]) < 1e-12
            and relative_error(found, expected[2]) < 1e-12
        )


def test_what_is_not_an_answer_is_no_target(opened: dict[str, Corpus]) -> None:
    """The law above is not one of all tokens: with the others as targets the gradient is another
    one.
    """
    model, rows = model_of(opened["padded"]), opened["padded"].train
    batches = alone(rows)
    expected = gradient(model, batches)[2]
    for index, batch in enumerate(batches):
        following = rows.row(index)["tokens"][1 : batch["tokens"].shape[1]]
        everything = torch.cat([torch.from_numpy(following), batch["targets"][0, -1:]])[None]
        assert ((batch["targets"] == everything) | (batch["targets"] == IGNORE)).all()
        batch["targets"] = everything
    assert relative_error(gradient(model, batches)[2], expected) > 0.1
