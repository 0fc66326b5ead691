"""Run: pytest tests/commands/test_finetune.py (a folder that chats is trained on conversations, and
exported).
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from commands.forked import CommandServer
from commands.inputs import TINY, newest, over
from dialogues import TEMPLATES, said, speaking, write_chats
from llama_cpp import LlamaCpp
from monograph.model.config import LlamaConfig
from monograph.model.hub import load_model, save_model
from monograph.model.llama import Llama
from monograph.run.folder import Run
from monograph.text.chat import chat_ids

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed"
)
SHORT = [
    "chats.jsonl", "model.init=chatty", "data.sequence_length=96", "data.held_out=0.2", "train.tokens_per_update=384",
    "train.compile=none", "train.precision=fp32", "optim.lr=3e-3", "train.save_every=3",
]  # fmt: skip
WORDS = ("why", "what", "so", "thus")
SYSTEM = "the answer is what the user said"


def folder_that_chats(here: Path, name: str) -> None:
    """A model that knows nothing, and 40 conversations in which the answer is the question's word."""
    tokenizer = speaking(here / "words", name)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.18,
    )
    save_model(Llama(config), here / "chatty", tokenizer)
    chats = [said(*[word for turn in range(1 + number % 2) for word in (f"{WORDS[(number + turn) % 4]} {number}",
             WORDS[(number + turn) % 4])]) for number in range(40)]  # fmt: skip
    write_chats(here / "chats.jsonl", chats)


def test_a_folder_is_trained_on_conversations(server: CommandServer, here: Path) -> None:
    folder_that_chats(here, "chatml")
    done = server.run(
        here, "train", *SHORT, "train.updates=12", "--out", "run", "--json", figures=0
    )
    assert done.code == 0, done.err
    assert (
        "conversations, " in done.err
        and "tokens trained (" in done.err
        and "held out: " in done.err
    )
    rows = Run(here / "run").rows()
    scored = [(row["update"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    assert scored[0][0] == 0 and scored[-1][0] == 12 and scored[-1][1] < scored[0][1]
    assert (
        f"held-out answers {scored[-1][1]:.3f} nats/token ({scored[0][1]:.3f} before)" in done.err
    )
    assert "monograph chat run" in done.err
    assert any("sample" in row for row in rows)

    scores = server.run(here, "evaluate", "run", "--json")
    assert json.loads(scores.out.splitlines()[-1])["loss"] == pytest.approx(scored[-1][1], rel=1e-5)
    other = server.run(here, "evaluate", "run", "--data", "chats.jsonl", "--json")
    assert other.code == 0 and json.loads(other.out.splitlines()[-1])["tokens"] > 100

    shown = server.run(
        here, "data", "show", "chats.jsonl", "data.tokenizer=chatty", "data.sequence_length=96"
    )
    assert "answers end with <|im_end|> (id " in shown.out and "]so<|im_end|>" in shown.out
    assert "conversations in " in shown.out and "tokens trained (" in shown.out


def test_resumed_is_uninterrupted(server: CommandServer, here: Path) -> None:
    folder_that_chats(here, "qwen3")
    assert (
        server.run(here, "train", *SHORT, "train.updates=6", "--out", "whole", figures=0).code == 0
    )
    shutil.copytree(here / "whole", here / "cut")
    shutil.rmtree(here / "cut" / "checkpoints" / "step-00000006")
    again = server.run(here, "train", "--resume", "cut", figures=0)
    assert again.code == 0, again.err
    one, other = (
        (newest(here / run) / "model.safetensors").read_bytes() for run in ("whole", "cut")
    )
    assert one == other


@needs_gguf
@pytest.mark.parametrize(
    "name",
    [
        "llama-3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("zephyr", "chatml", "gemma")),
    ],
)
def test_an_export_stops_where_training_did(server: CommandServer, here: Path, name: str) -> None:
    """One answer learnt by heart: the same words, and the same end, in our own decoding,
    transformers and llama.cpp.
    """
    folder_that_chats(here, name)
    question = said("what is it", "so thus")
    write_chats(here / "chats.jsonl", [question] * 2)
    options = [
        setting for setting in SHORT if not setting.startswith(("data.held_out", "train.save"))
    ]
    # One row.
    options = over(options, "data.held_out=0", "train.updates=60", "train.tokens_per_update=96")
    done = server.run(here, "train", *options, "--out", "run", figures=0)
    assert done.code == 0, done.err
    assert server.run(here, "export", "run", "--to", "hf").code == 0
    assert (
        server.run(here, "export", "run", "--to", "gguf", "--format", "gguf", "--dtype", "f32").code
        == 0
    )
    stops = {
        "chatml": ["<|im_end|>"],
        "gemma": ["<end_of_turn>"],
        "llama-3": ["<|eot_id|>", "<|eom_id|>"],
    }.get(name)
    tokenizer = speaking(here / "again", name)
    ends = list(dict.fromkeys(tokenizer.special[stop] for stop in [*(stops or ()), "<|eos|>"]))
    assert json.loads((here / "hf" / "generation_config.json").read_text())["eos_token_id"] == ends
    assert (here / "hf" / "chat_template.jinja").read_text() == TEMPLATES[name]
    modelfile = (here / "gguf" / "Modelfile").read_text()
    assert modelfile.count("PARAMETER stop") >= 1

    ours = server.run(
        here, "generate", "run", "what is it", "--chat", "--temperature", "0", "--json"
    )
    [ours_said] = json.loads(ours.out.splitlines()[-1])["completions"]
    assert (ours_said["text"].strip(), ours_said["finish_reason"]) == ("so thus", "stop")
    from transformers import AutoModelForCausalLM

    ids = chat_ids(tokenizer, question[:1], add_generation_prompt=True)
    theirs = AutoModelForCausalLM.from_pretrained(here / "hf")
    written = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=32)[
        0, len(ids) :
    ].tolist()
    assert written[-1] in ends
    assert tokenizer.decode(written).strip() == "so thus"
    answer = LlamaCpp(here / "gguf" / "model.gguf").answered(question[:1], 32)
    assert answer["choices"][0]["message"]["content"].strip() == "so thus"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert load_model(here / "hf").config.vocab_size == tokenizer.vocab_size


def test_a_new_model_learns_completions_without_a_template(
    server: CommandServer, here: Path
) -> None:
    records = (
        {"prompt": f"{word} {number}=", "completion": f" {word}"}
        for number in range(10)
        for word in WORDS
    )
    (here / "words.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = [
        "words.jsonl", *(each for each in TINY[2:] if not each.startswith("train.updates")), "data.vocab_size=270",
        "train.updates=20",
    ]  # fmt: skip
    done = server.run(here, "train", *options, "--out", "run", "--json", figures=0)
    assert done.code == 0, done.err
    assert (
        "completions, " in done.err
        and "monograph generate run " in done.err
        and "monograph chat" not in done.err
    )
    rows = Run(here / "run").rows()
    scored = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert scored[-1] < scored[0]
    written = server.run(here, "generate", "run", "why 3=", "--temperature", "0", "--json")
    assert json.loads(written.out)["completions"][0]["finish_reason"] in ("stop", "length")
    chat = server.run(here, "chat", "run")
    assert chat.code == 3 and "`monograph generate run TEXT`" in chat.err


def test_what_is_missing_is_said(server: CommandServer, here: Path) -> None:
    folder_that_chats(here, "glm")
    done = server.run(here, "train", *SHORT, "train.updates=2", "--out", "run")
    assert done.code == 3 and "chats.jsonl:1: the model would never learn to stop" in done.err
    done = server.run(here, "train", "chats.jsonl", "train.updates=2", "--out", "run")
    assert (
        done.code == 2
        and "conversations need the tokenizer and chat template of a model" in done.err
    )
