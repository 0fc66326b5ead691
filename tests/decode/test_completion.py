"""Run: pytest tests/decode/test_completion.py"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from batches import tiny_llama
from monograph.automata import constraint
from monograph.decode import Completion, Sampling, generate, prompt_ids
from monograph.errors import InputRefused, OutOfDeviceMemory, UsageError
from monograph.model.llama import Llama
from monograph.text.tokenizer import Tokenizer

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


def one(model: Llama, prompt: str | list[int] = "a", **options: Any) -> Completion:
    [completion] = generate(model, TOKENIZER, [prompt], Sampling(0), **options)
    return completion


def test_it_ends_at_max_tokens() -> None:
    done = one(writing("xyz"), max_tokens=5)
    assert (done.text, str(done), done.finish_reason, len(done.token_ids)) == (
        "xyzxy",
        "xyzxy",
        "length",
        5,
    )


def test_it_ends_with_the_document() -> None:
    done = one(writing("xy", then=TOKENIZER.eos_id), max_tokens=20)
    assert (done.text, done.finish_reason) == ("xy", "stop") and done.token_ids[
        -1
    ] == TOKENIZER.eos_id


@pytest.mark.parametrize(
    "stop",
    [
        ["z"],
        ["yz", 5],
        ["q", "zx"],
        ["zz"],
        [TOKENIZER.encode("z")[0]],
        [np.int64(TOKENIZER.encode("z")[0])],
    ],
)
def test_it_ends_before_a_stop_string_and_at_a_stop_id(stop: list[str | int]) -> None:
    done = one(writing("xyz"), max_tokens=6, stop=stop)
    text = {"z": "xy", "yz": "x", "q": "xy", "zz": "xyzxyz"}.get(str(stop[0]), "xyz")
    assert done.text == text and done.finish_reason == ("length" if stop == ["zz"] else "stop")


def test_it_ends_with_the_context() -> None:
    done = one(writing("xy", max_position_embeddings=10), "abc", max_tokens=50)
    assert len(done.token_ids) == 10 - 4 and done.finish_reason == "length"


@pytest.mark.parametrize("length", [9, 10, 40])
def test_a_prompt_that_leaves_no_room_is_refused(length: int) -> None:
    model = writing("x", max_position_embeddings=10)
    with pytest.raises(
        InputRefused, match=f"the prompt has {length + 1} tokens, but the model's context is 10"
    ):
        one(model, "a" * length)
    assert len(prompt_ids(model, TOKENIZER, "a" * 8)) == 9
    with pytest.raises(InputRefused, match="the prompt has no tokens"):
        one(model, [])


def test_any_number_of_tokens_and_of_texts_may_be_asked_for() -> None:
    model = tiny_llama(vocab_size=259)
    long = generate(model, TOKENIZER, ["a"], max_tokens=10**20)
    assert not long.generator.compiled, "a text is as long as the context at most"
    many = generate(model, TOKENIZER, ["a", "b"], Sampling(seed=3), max_tokens=3, n=10**12)
    assert many.count == 2 * 10**12 and many.generator.compiled
    eager = generate(model, TOKENIZER, ["a", "b"], Sampling(seed=3), max_tokens=3, n=25)
    assert eager.count == 50 and len(set(map(str, eager))) > 20
    assert eager.tokens <= 150


def test_texts_that_the_memory_does_not_hold_are_refused() -> None:
    model = tiny_llama(vocab_size=259, max_position_embeddings=2**31 - 1)
    assert one(model, max_tokens=3).finish_reason == "length"
    with pytest.raises(
        OutOfDeviceMemory, match="keys and values of 2,147,483,647 positions take .* GiB, more"
    ):
        generate(model, TOKENIZER, ["a"], max_tokens=2**31 - 1)


def test_ids_are_a_prompt_as_they_are() -> None:
    model = tiny_llama(vocab_size=259)
    assert one(model, [TOKENIZER.bos_id, *TOKENIZER.encode("ab")]) == one(model, "ab")


def test_what_is_streamed_is_the_text_in_the_order_of_the_prompts() -> None:
    model = tiny_llama(vocab_size=259)
    for seed in range(4):
        sampling = Sampling(1.0, seed=seed)
        options: dict[str, Any] = {"max_tokens": 30, "n": 2, "stop": ["e", " t"]}
        pieces = list(generate(model, TOKENIZER, ["a", "bc", ""], sampling, **options).stream())
        whole = list(generate(model, TOKENIZER, ["a", "bc", ""], sampling, **options))
        assert [piece.number for piece in pieces] == sorted(piece.number for piece in pieces)
        for number, completion in enumerate(whole):
            assert (
                "".join(piece.text for piece in pieces if piece.number == number) == completion.text
            )
        assert [piece.completion for piece in pieces if piece.completion] == whole


def test_a_continuation_depends_on_its_prompt_and_seed_alone() -> None:
    model = tiny_llama(vocab_size=259)
    done = list(generate(model, TOKENIZER, ["a", "b"], Sampling(1.0, seed=3), max_tokens=4, n=4))
    again = list(generate(model, TOKENIZER, ["b", "c"], Sampling(1.0, seed=3), max_tokens=4, n=4))
    assert len(done) == 8 and [c.token_ids for c in done[4:]] == [c.token_ids for c in again[:4]]
    assert len({tuple(c.token_ids) for c in done[:4]}) == 4


def test_ids_that_the_tokenizer_does_not_have_are_never_drawn() -> None:
    model = tiny_llama(vocab_size=600)
    [done] = generate(model, TOKENIZER, ["a"], Sampling(20.0), max_tokens=60)
    assert max(done.token_ids) < TOKENIZER.vocab_size


def test_a_constraint_and_stop_strings_together() -> None:
    model, ends = tiny_llama(vocab_size=259), [TOKENIZER.eos_id]
    for seed in range(6):
        form = constraint("regex", "[ab]{3,8}c", TOKENIZER.pieces, ends)
        [done] = generate(
            model, TOKENIZER, ["x"], Sampling(3.0, seed=seed), max_tokens=20, constraint=form
        )
        assert (
            done.finish_reason == "stop"
            and done.text[-1] == "c"
            and set(done.text[:-1]) <= {"a", "b"}
        )
        [cut] = generate(
            model,
            TOKENIZER,
            ["x"],
            Sampling(3.0, seed=seed),
            max_tokens=20,
            constraint=form,
            stop=["ba"],
        )
        assert cut.text == done.text.partition("ba")[0]


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    model = tiny_llama(torch.float64, vocab_size=259)
    sampling = Sampling(1.5, top_k=30, logprobs=4)
    [done, _] = generate(model, TOKENIZER, ["abc"], sampling, max_tokens=9, n=2)
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode("abc")]
    with torch.no_grad():
        logits_TV = model.logits(model(torch.tensor([[*ids, *done.token_ids]])))[
            0, len(ids) - 1 : -1
        ]
    values_TV = logits_TV.log_softmax(-1)
    assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
    for token, values_V, found in zip(done.token_ids, values_TV, done.logprobs, strict=True):
        assert found.drawn == pytest.approx(float(values_V[token]), abs=1e-5)
        assert [index for index, _ in found.likeliest] == values_V.topk(4).indices.tolist()
        assert [value for _, value in found.likeliest] == pytest.approx(
            values_V.topk(4).values.tolist(), abs=1e-5
        )
    [plain, _] = generate(model, TOKENIZER, ["abc"], Sampling(1.5, top_k=30), max_tokens=9, n=2)
    assert plain.token_ids == done.token_ids and plain.logprobs is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"n": 0},
        {"n": True},
        {"n": 2**70},
        {"stop": [""]},
        {"stop": "END"},
        {"sampling": [Sampling()] * 2},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        generate(tiny_llama(vocab_size=259), TOKENIZER, ["a"], **wrong)
    with pytest.raises(UsageError, match="prompts is one text, .*: give a list, \\['once'\\]"):
        generate(tiny_llama(vocab_size=259), TOKENIZER, "once")
    with pytest.raises(UsageError, match="prompts: expected at least one"):
        generate(tiny_llama(vocab_size=259), TOKENIZER, [])
    with pytest.raises(UsageError, match="sampling: 1 for 2 prompts"):
        generate(tiny_llama(vocab_size=259), TOKENIZER, ["a", "b"], [Sampling()])
    with pytest.raises(UsageError, match="order is hf and llama_cpp in one batch"):
        generate(
            tiny_llama(vocab_size=259),
            TOKENIZER,
            ["a", "b"],
            [Sampling(), Sampling(order="llama_cpp")],
        )
    for text in ("ab", "\ud800"):
        breaking = Sampling(dry_multiplier=1, dry_sequence_breakers=[text])
        with pytest.raises(UsageError, match=re.escape(f"no token contains {text!r}; give a text")):
            generate(tiny_llama(vocab_size=259), TOKENIZER, ["a"], breaking)
    with pytest.raises(UsageError, match="logprobs = 260: expected at most 259"):
        generate(tiny_llama(vocab_size=259), TOKENIZER, ["a"], Sampling(logprobs=260))
    with pytest.raises(UsageError, match="logit_bias has the id 259"):
        generate(tiny_llama(vocab_size=259), TOKENIZER, ["a"], Sampling(logit_bias={259: 1.0}))
