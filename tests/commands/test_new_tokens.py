"""Run: pytest tests/commands/test_new_tokens.py (a base that never saw chat tokens is taught them)."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapted import LINEAR
from commands.forked import CommandServer
from commands.inputs import newest, over
from dialogues import TEMPLATES, said, write_chats
from llama_cpp import LlamaCpp
from monograph.model.config import LlamaConfig
from monograph.model.hub import load_model, save_model
from monograph.model.llama import Llama
from monograph.run.models import load
from monograph.text.chat import chat_ids
from monograph.text.tokenizer import Tokenizer

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed"
)
NEW = ("<|im_start|>", "<|im_end|>")
CHATS = [
    "chats.jsonl", "model.init=base", "data.tokenizer=chatty", "data.sequence_length=96", "data.held_out=0.2",
    "train.tokens_per_update=384", "train.compile=none", "train.precision=fp32", "optim.lr=3e-3", "train.updates=2",
]  # fmt: skip
LORA = over(CHATS, "lora.rank=4")
SAID = "2 new tokens: <|im_start|>, <|im_end|>; their rows begin as the mean"


def with_tokens(tokenizer: Tokenizer, *tokens: str) -> Tokenizer:
    content = json.loads(tokenizer.to_json())
    for place, token in enumerate(tokens):
        entry = {
            "id": tokenizer.vocab_size + place,
            "content": token,
            "special": True,
            "normalized": False,
        }
        content["added_tokens"].append(entry)
    return Tokenizer(content, "longer")


def write_inputs(
    here: Path, rows: int | None = None, tied: bool = True, dtype: torch.dtype = torch.bfloat16
) -> Llama:
    """A base with plain texts' tokenizer, a folder with its tokenizer, two tokens more and a chat
    template, chats.
    """
    plain = Tokenizer.train_bpe(["the answer is what the user said, and why " * 9], 300)
    config = LlamaConfig(
        vocab_size=rows or plain.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=128, initializer_range=0.18, tie_word_embeddings=tied,
    )  # fmt: skip
    base = Llama(config).to(dtype)
    save_model(base, here / "base", plain)
    longer = with_tokens(plain, *NEW)
    (here / "chatty").mkdir()
    longer.save(here / "chatty" / "tokenizer.json")
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
    }
    (here / "chatty" / "tokenizer_config.json").write_text(json.dumps(tokens))
    (here / "chatty" / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    write_chats(
        here / "chats.jsonl", [said(f"what {number}", "the answer") for number in range(20)]
    )
    return base


def ok(server: CommandServer, here: Path, *arguments: str, **options: Any) -> Any:
    done = server.run(here, *arguments, **options)
    assert done.code == 0, done.err
    return done


def shown(done: Any) -> str:
    """What a person read, without the breaks of its lines."""
    return " ".join(done.err.split())


def mean_of(rows: Tensor) -> Tensor:
    return rows.double().mean(0)


def tables(model: Llama) -> list[Tensor]:
    return [model.model.embed_tokens.weight] + [model.lm_head.weight] * (
        not model.config.tie_word_embeddings
    )


def first(run: Path) -> dict[str, Tensor]:
    return load_file(run / "checkpoints/step-00000000/model.safetensors")


@pytest.mark.parametrize(
    ("spare", "tied"),
    [
        (9, True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, False), (0, True), (0, False))
        ),
    ],
)
def test_all_weights_are_trained_with_a_row_for_each_token(
    here: Path, server: CommandServer, spare: int, tied: bool
) -> None:
    known = Tokenizer.train_bpe(["the answer is what the user said, and why " * 9], 300).vocab_size
    base = write_inputs(here, known + spare, tied)
    size = max(known + 2, known + spare)
    done = ok(server, here, "train", *over(CHATS, "train.keep=9"), "--out", "run", figures=0)
    assert SAID in shown(done)
    saved = first(here / "run")
    for name, own in zip(
        ("model.embed_tokens.weight", "lm_head.weight"), tables(base), strict=False
    ):
        assert list(saved[name].shape) == [size, 32]
        assert torch.equal(saved[name][:known], own[:known].float()), "the old rows' bits"
        for row in saved[name][known : known + 2]:
            torch.testing.assert_close(row.double(), mean_of(own[:known]), rtol=1e-6, atol=1e-9)
        assert torch.equal(saved[name][known + 2 :], own[known + 2 :].float()), (
            "spare rows that nobody uses"
        )
    assert ("lm_head.weight" in saved) is not tied
    ok(server, here, "export", "run", "--to", "out")
    exported = load_model(here / "out")
    assert exported.config.vocab_size == size and exported.config.tie_word_embeddings is tied
    assert json.loads((here / "out/config.json").read_text())["vocab_size"] == size
    assert (here / "out/chat_template.jinja").exists()
    if tied:
        return  # what comes of a run is the same for every table
    ok(server, here, "evaluate", "run")
    ok(server, here, "generate", "run", "what is it", "--chat", "--max-tokens", "3")
    ok(server, here, "train", "--from", "run", "train.updates=2", "--out", "branch", figures=0)
    settings = [each for each in CHATS if not each.startswith("data.tokenizer")]
    again = ok(server, here, "train", *over(settings, "model.init=run"), "--out", "on", figures=0)
    assert "new token" not in again.err, "the run knows them"
    with_tokens(Tokenizer.from_file(here / "chatty"), "<|more|>").save(
        here / "chatty" / "tokenizer.json"
    )
    refused = server.run(
        here, "train", "--from", "run", "data.tokenizer=chatty", "--out", "refused"
    )
    assert (
        refused.code == 2
        and "data.tokenizer has 1 token that run has no row and no optimizer state for"
        in shown(refused)
    ), refused.err


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
def test_adapters_train_the_new_rows(here: Path, server: CommandServer, tied: bool) -> None:
    base = write_inputs(here, tied=tied)
    known, parts = base.config.vocab_size, 1 if tied else 2
    done = ok(server, here, "train", *LORA, "train.keep=9", "--out", "run", "--json", figures=0)
    assert f"{SAID} and are trained with the adapters" in shown(done)
    begun, saved = first(here / "run"), load_file(newest(here / "run") / "model.safetensors")
    assert len(saved) == 2 * 2 * len(LINEAR) + parts
    assert {name for name in saved if "lora" not in name} == {
        "model.embed_tokens.token_rows", *([] if tied else ["lm_head.token_rows"])
    }  # fmt: skip
    for name, own in zip(("model.embed_tokens", "lm_head"), tables(base), strict=False):
        rows = begun[f"{name}.token_rows"]
        torch.testing.assert_close(rows.double(), mean_of(own).expand(2, -1), rtol=1e-6, atol=1e-9)
        assert not torch.equal(saved[f"{name}.token_rows"], rows)
    scored = ok(server, here, "evaluate", "run", "--json")
    loss = json.loads(done.out.splitlines()[-1])["eval_loss"]
    assert json.loads(scored.out.splitlines()[-1])["loss"] == pytest.approx(loss, rel=1e-6)
    ok(server, here, "generate", "run", "what is it", "--chat", "--max-tokens", "3")

    ok(server, here, "export", "run", "--to", "out")
    merged = load_model(here / "out")
    assert merged.config.vocab_size == known + 2 and merged.config.tie_word_embeddings is tied
    for name, own, now in zip(
        ("model.embed_tokens", "lm_head"), tables(base), tables(merged), strict=False
    ):
        assert torch.equal(now[:known], own), "all other rows stay the base's bits"
        assert torch.equal(now[known:], saved[f"{name}.token_rows"].bfloat16()), "rounded once"
    again, tokenizer = load(here / "out/adapter")
    assert tokenizer.vocab_size == known + 2
    assert all(
        torch.equal(p, q) for p, q in zip(merged.parameters(), again.parameters(), strict=True)
    )
    ok(server, here, "generate", "out/adapter", "what is it", "--chat", "--max-tokens", "3")
    settings = [each for each in CHATS if not each.startswith(("data.tokenizer", "model."))]
    further = [*settings, "model.init=out/adapter", "train.keep=9"]
    ok(server, here, "train", *further, "--out", "further", figures=0)
    whole = load_file(here / "out/adapter/adapter_model.safetensors")
    for name, tensor in first(here / "further").items():
        stored = name.replace("token_rows", "token_adapter.trainable_tokens_delta")
        assert torch.equal(whole[f"base_model.model.{stored}"], tensor), name


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(here: Path, server: CommandServer) -> None:
    write_inputs(here, tied=False)
    for settings, name in ((CHATS, "all"), (LORA, "lora")):
        ok(
            server,
            here,
            "train",
            *over(settings, "train.save_every=2"),
            "--out",
            f"{name}-whole",
            figures=0,
        )
        shutil.copytree(here / f"{name}-whole", here / f"{name}-cut")
        shutil.rmtree(newest(here / f"{name}-cut"))
        ok(server, here, "train", "--resume", f"{name}-cut", figures=0)
        one, other = (
            (newest(here / f"{name}-{out}") / "model.safetensors").read_bytes()
            for out in ("whole", "cut")
        )
        assert one == other


def test_the_models_own_tokenizer_may_have_more_tokens_than_rows(
    here: Path, server: CommandServer
) -> None:
    base = write_inputs(here)
    for file in (here / "chatty").glob("*"):
        file.rename(here / "base" / file.name)
    settings = [each for each in CHATS if not each.startswith("data.tokenizer")]
    done = ok(server, here, "train", *settings, "--out", "run", figures=0)
    assert SAID in shown(done)
    ok(server, here, "export", "run", "--to", "out")
    assert load_model(here / "out").config.vocab_size == base.config.vocab_size + 2


def test_reserved_tokens_that_the_base_has_rows_for(here: Path, server: CommandServer) -> None:
    base = write_inputs(here)
    settings = over(LORA, 'lora.tokens=["<|pad|>", " the"]', "train.save_every=2")
    done = ok(server, here, "train", *settings, "--out", "run", figures=0)
    assert "2 tokens with rows of their own: <|pad|>, " in shown(done) and SAID in shown(done)
    plain = Tokenizer.from_file(here / "base")
    ids = [
        plain.special["<|pad|>"],
        plain.id_of(" the"),
        base.config.vocab_size,
        base.config.vocab_size + 1,
    ]
    assert load_file(newest(here / "run") / "model.safetensors")[
        "model.embed_tokens.token_rows"
    ].shape == (4, 32)
    ok(server, here, "export", "run", "--to", "out")
    config = json.loads((here / "out/adapter/adapter_config.json").read_text())
    assert config["trainable_token_indices"] == ids
    merged = load_model(here / "out").model.embed_tokens.weight
    changed = (
        (merged[: base.config.vocab_size] != base.model.embed_tokens.weight)
        .any(1)
        .nonzero()
        .flatten()
    )
    assert changed.tolist() == ids[:2]


def test_a_plan_knows_the_rows(here: Path, server: CommandServer) -> None:
    write_inputs(here)
    plans = [
        json.loads(ok(server, here, "plan", *settings, "--json").out.splitlines()[-1])
        for settings in (LORA, [each for each in LORA if not each.startswith("data.tokenizer")])
    ]
    longer, plain = (plan["chosen"]["peak_memory_bytes"] for plan in plans)
    # Two rows of the table, as many trained (weight, gradient and two moments), and two logits of
    # each token with their gradients.
    assert longer - plain == 2 * 32 * (4 + 16) + 2 * 384 * (4 + 4)
    printed = ok(server, here, "plan", *LORA).out
    assert f"note     {SAID} and are trained with the adapters" in printed


@pytest.mark.slow
def test_a_sweep_trains_the_rows_of_each_member(here: Path, server: CommandServer) -> None:
    write_inputs(here)
    settings = over(LORA, "optim.lr=1e-3,3e-3")
    done = ok(server, here, "sweep", *settings, "--out", "sweep", figures=0)
    assert SAID in shown(done)
    found = [
        load_file(path)
        for path in sorted((here / "sweep").rglob("step-00000002/model.safetensors"))
    ]
    assert len(found) == 2 and all(len(tensors) == 2 * 2 * len(LINEAR) + 1 for tensors in found)
    assert not torch.equal(*(tensors["model.embed_tokens.token_rows"] for tensors in found))


def test_another_tokenizer_is_refused_by_the_first_id_that_differs(
    here: Path, server: CommandServer
) -> None:
    write_inputs(here)
    content = json.loads((here / "chatty" / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    one, other = (next(text for text, index in vocab.items() if index == place) for place in (7, 9))
    vocab[one], vocab[other] = 9, 7
    (here / "chatty" / "tokenizer.json").write_text(json.dumps(content))
    for arguments in (["train", *CHATS, "--out", "run"], ["plan", *CHATS]):
        done = server.run(here, *arguments)
        assert (
            done.code == 3
            and f"id 7 is {other!r}, but the model has trained its row for {one!r}" in done.err
        ), done.err
    assert not (here / "run").exists()


def test_what_cannot_be_compared_is_said_or_refused(here: Path, server: CommandServer) -> None:
    base = write_inputs(here)
    (here / "base" / "tokenizer.json").unlink()
    done = server.run(here, "train", *CHATS, "--out", "run")
    assert (
        done.code == 3
        and "no tokenizer.json next to its weights says which tokens are new" in done.err
    ), done.err
    config = here / "base" / "config.json"
    model = Llama(
        LlamaConfig.from_hf(
            json.loads(config.read_text()) | {"vocab_size": base.config.vocab_size + 2}
        )
    )
    for path in (here / "base").glob("*"):
        path.unlink()
    save_model(model, here / "base")
    done = ok(server, here, "train", *CHATS, "train.keep=9", "--out", "run", figures=0)
    assert (
        "base has no tokenizer.json to compare data.tokenizer with: its ids are taken as they are"
        in shown(done)
    )
    assert torch.equal(
        first(here / "run")["model.embed_tokens.weight"], model.model.embed_tokens.weight
    )


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (
            over(LORA, 'lora.tokens=["<|im_start|>", "no token"]'),
            2,
            "lora.tokens: 'no token' is not a single token of chatty",
        ),
        (
            over(CHATS, 'lora.tokens=["<|pad|>"]'),
            2,
            "lora.tokens is for adapters, and none are trained",
        ),
        (over(LORA, "lora.tokens=[]"), 2, "lora.tokens"),
    ],
)
def test_tokens_that_are_none_are_refused_by_name(
    here: Path, server: CommandServer, settings: list[str], code: int, words: str
) -> None:
    write_inputs(here)
    done = server.run(here, "train", *settings, "--out", "run")
    assert done.code == code and words in done.err, done.err
    assert not (here / "run").exists()


@needs_gguf
@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_the_new_tokens_are_learnt_and_written(
    here: Path, server: CommandServer, adapters: bool
) -> None:
    """One answer learnt by heart, with a head of its own: ours, transformers and llama.cpp say it,
    and stop.
    """
    write_inputs(here, tied=False, dtype=torch.float32)
    question = said("what is it", "so thus")
    write_chats(here / "chats.jsonl", [question] * 2)
    settings = over(
        LORA if adapters else CHATS, "data.held_out=0", "train.updates=80", "optim.lr=1e-2"
    )
    ok(server, here, "train", *settings, "--out", "run", figures=0)
    ok(server, here, "export", "run", "--to", "hf")
    ok(server, here, "export", "run", "--to", "gguf", "--format", "gguf", "--dtype", "f32")
    ours = ok(
        server, here, "generate", "run", "what is it", "--chat", "--temperature", "0", "--json"
    )
    [written] = json.loads(ours.out.splitlines()[-1])["completions"]
    assert (written["text"].strip(), written["finish_reason"]) == ("so thus", "stop")
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(here / "chatty")
    ids = chat_ids(tokenizer, question[:1], add_generation_prompt=True)
    theirs = AutoModelForCausalLM.from_pretrained(here / "hf")
    answer = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=32)[
        0, len(ids) :
    ].tolist()
    assert (
        answer[-1] == tokenizer.special["<|im_end|>"]
        and tokenizer.decode(answer).strip() == "so thus"
    )
    said_there = LlamaCpp(here / "gguf" / "model.gguf").answered(question[:1], 32)["choices"][0]
    assert (
        said_there["message"]["content"].strip() == "so thus"
        and said_there["finish_reason"] == "stop"
    )
