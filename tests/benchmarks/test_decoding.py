# Run: pytest tests/benchmarks/test_decoding.py
"""What counts a decoder's launches on a pretended card calls the decoder as it is; here a stand-in
is the card.
"""

from __future__ import annotations

from typing import Any

import pytest

from batches import tiny_config, tiny_llama
from monograph.decode.generator import Generator


@pytest.fixture
def without_a_card(script, monkeypatch):
    """Scripts that build their models here, call a step instead of replaying it, and count one
    product.
    """
    launches, pretended = script("launches"), script("pretended")

    class Counted(pretended.Counted):
        """Counts nothing of the work that is done in it."""

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *raised: object) -> None:
            self.launches.append(("cublas", "head"))

    def model_of(config: Any) -> Any:
        return tiny_llama(vocab_size=config.vocab_size, max_position_embeddings=1024)

    monkeypatch.setattr("monograph.decode.generator.compile_function", lambda function: function)
    monkeypatch.setattr(pretended, "Counted", Counted)
    monkeypatch.setattr(launches, "model_of", model_of)
    return script


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Generator]:
    """All generators that are made from now on, with blocks as long as a card's."""
    made, begin = list[Generator](), Generator.__init__

    def remembered(self: Generator, *args: Any, **options: Any) -> None:
        begin(self, *args, **{"pace": 16, **options})
        made.append(self)

    monkeypatch.setattr(Generator, "__init__", remembered)
    return made


def test_launches_counts_a_step_of_the_decoder(without_a_card, monkeypatch) -> None:
    launches, made = without_a_card("launches"), noted(monkeypatch)
    monkeypatch.setattr(launches, "PROMPT", 130)
    monkeypatch.setattr(launches, "TOKENS", 6)
    found = launches.decoding(tiny_config(vocab_size=300), rows=2)
    assert found.keys() == {"decode step, batch 2", "its sampler, batch 2"}
    assert (
        found["decode step, batch 2"]["product_bytes"] > 0
        and found["decode step, batch 2"]["cublas"] == 1
    )
    assert found["its sampler, batch 2"]["cublas"] == 0
    [machine] = made
    # All that a row may draw in a block: what is called beside it draws nothing more.
    assert machine.state.generated_B.tolist() == [6, 6] and machine.running == 0


def test_machine_code_calls_every_part_of_the_decoder(without_a_card, monkeypatch) -> None:
    machine_code, made = without_a_card("machine_code"), noted(monkeypatch)
    found = machine_code.CASES["decoding, every stage"]()
    assert [*found["parts"]] == [
        "block of 16 replayed", "block read", "step called, window", "step called, search"
    ]  # fmt: skip
    assert found["captured"] is False and all(part.launches for part in found["parts"].values())
    assert int(made[0].state.generated_B[0]) >= 3
