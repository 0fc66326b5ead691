"""Run: pytest tests/decode/test_generator.py"""

from __future__ import annotations

import pytest
import torch

from batches import tiny_llama
from monograph.data.tokenizer import Tokenizer
from monograph.decode import Completion, Sampling, generate, prompt_ids
from monograph.decode.sample import row_generators
from monograph.errors import InputRefused, UsageError
from monograph.model.llama import Llama

TOKENIZER = Tokenizer.bytes()


def writing(text: str, then: int | None = None, **sizes: int) -> Llama:
    """A model that continues any text with `text`, over and over, or ends with the token `then`."""
    model = tiny_llama(vocab_size=259, **sizes)
    ids = [*TOKENIZER.encode(text), *([] if then is None else [then])]

    def logits(hidden_BD: torch.Tensor) -> torch.Tensor:
        step = model.steps = getattr(model, "steps", -1) + 1
        scores = torch.zeros(*hidden_BD.shape[:-1], model.config.vocab_size)
        scores[..., ids[step % len(ids)]] = 50.0
        return scores

    model.logits = logits  # type: ignore[method-assign]
    return model


def one(model: Llama, prompt: str = "a", **options: object) -> Completion:
    [completion] = generate(model, TOKENIZER, [prompt], Sampling(0), **options)  # type: ignore[arg-type]
    return completion


def test_it_ends_at_max_tokens() -> None:
    done = one(writing("xyz"), max_tokens=5)
    assert (done.text, str(done), done.finish_reason, len(done.token_ids)) == ("xyzxy", "xyzxy", "length", 5)


def test_it_ends_with_the_document() -> None:
    done = one(writing("xy", then=TOKENIZER.eos_id), max_tokens=20)
    assert (done.text, done.finish_reason) == ("xy", "stop") and done.token_ids[-1] == TOKENIZER.eos_id


@pytest.mark.parametrize(("stop", "text"), [(["z"], "xy"), (["yz"], "x"), (["q", "zx"], "xy"), (["zz"], "xyzxyz")])
def test_it_ends_before_a_stop_string(stop: list[str], text: str) -> None:
    done = one(writing("xyz"), max_tokens=6, stop=stop)
    assert done.text == text and done.finish_reason == ("length" if stop == ["zz"] else "stop")


def test_it_ends_with_the_context() -> None:
    done = one(writing("xy", max_position_embeddings=10), "abc", max_tokens=50)
    assert len(done.token_ids) == 10 - 4 and done.finish_reason == "length"


@pytest.mark.parametrize("length", [9, 10, 40])
def test_a_prompt_that_leaves_no_room_is_refused(length: int) -> None:
    model = writing("x", max_position_embeddings=10)
    with pytest.raises(InputRefused, match=f"the prompt has {length + 1} tokens, but the model's context is 10"):
        one(model, "a" * length)
    assert len(prompt_ids(model, TOKENIZER, "a" * 8)) == 9


def test_text_comes_in_whole_characters() -> None:
    pieces: list[str] = []
    done = one(writing("é€𝄞"), max_tokens=9, on_text=pieces.append)
    assert pieces == ["é", "€", "𝄞"] and done.text == "é€𝄞"


def test_what_is_streamed_is_the_text_whatever_the_bytes() -> None:
    model = tiny_llama(vocab_size=259)
    for seed in range(8):
        pieces: list[str] = []
        [done] = generate(model, TOKENIZER, ["a"], Sampling(1.0, seed=seed), max_tokens=30, on_text=pieces.append)
        assert done.text.startswith("".join(pieces)) or "".join(pieces) == done.text.rstrip("\ufffd")


def test_n_continuations_of_each_prompt_in_order() -> None:
    model = tiny_llama(vocab_size=259)
    done = list(generate(model, TOKENIZER, ["a", "b"], Sampling(1.0), max_tokens=4, n=3))
    again = list(generate(model, TOKENIZER, ["b"], Sampling(1.0), max_tokens=4, n=3))
    assert len(done) == 6 and [c.token_ids for c in done[3:]] == [c.token_ids for c in again]


def test_ids_that_the_tokenizer_does_not_have_are_never_drawn() -> None:
    model = tiny_llama(vocab_size=600)
    [done] = generate(model, TOKENIZER, ["a"], Sampling(20.0), max_tokens=60)
    assert max(done.token_ids) < TOKENIZER.vocab_size


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}])
def test_a_choice_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_seeds_do_not_meet() -> None:
    states = {bytes(g.get_state().tolist()) for seed in range(5) for g in row_generators(Sampling(seed=seed), 40)}
    assert len(states) == 200
