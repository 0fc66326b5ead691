"""Run: pytest tests/commands/test_export.py (a model that chats, through training and out again)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from chats import TEMPLATES, speaking
from commands.forked import CommandServer
from commands.inputs import OWN, over
from monograph.model.config import LlamaConfig
from monograph.model.hub import save_model
from monograph.model.llama import Llama
from monograph.text.chat import stop_ids
from monograph.text.tokenizer import Tokenizer

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed"
)


@needs_gguf
def test_a_chat_template_stays_with_the_model(server: CommandServer, here: Path) -> None:
    speaking(here / "words", "thinking", stops=[1, 2])
    (here / "words" / "additional_chat_templates").mkdir()
    (here / "words" / "additional_chat_templates" / "tool_use.jinja").write_text(
        "{{ tools }}<|im_end|>"
    )
    tokenizer = Tokenizer.from_file(here / "words")
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
    )
    save_model(Llama(config), here / "chatty", tokenizer)
    settings = [
        setting
        for setting in over(OWN, "train.updates=2")
        if not setting.startswith("data.tokenizer")
    ]
    assert (
        server.run(here, "train", *settings, "model.init=chatty", "--out", "run", figures=0).code
        == 0
    )
    assert server.run(here, "train", "--resume", "run", figures=0).code == 0
    for of, to in (("run", "out"), ("out", "again")):
        assert server.run(here, "export", of, "--to", to).code == 0
        kept = Tokenizer.from_file(here / to)
        assert (here / to / "chat_template.jinja").read_text() == TEMPLATES["thinking"]
        assert kept.config.files() == tokenizer.config.files() and stop_ids(kept) == stop_ids(
            tokenizer
        )
    done = server.run(here, "export", "run", "--to", "gguf", "--format", "gguf", "--dtype", "q8_0")
    assert done.code == 0 and "ollama create NAME -f gguf/Modelfile" in done.out, done.err
    assert {path.name for path in (here / "gguf").iterdir()} == {"model.gguf", "Modelfile"}
    import gguf

    fields = gguf.GGUFReader(here / "gguf" / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATES["thinking"]
    assert fields["tokenizer.chat_templates"].contents() == ["tool_use"]
    assert fields["tokenizer.chat_template.tool_use"].contents() == "{{ tools }}<|im_end|>"


def test_a_bases_defaults_for_sampling_stay_with_what_is_trained_from_it(
    server: CommandServer, here: Path
) -> None:
    """Through training, a branch, another run, adapters and their merge, and when the base has lost
    its file.
    """
    tokenizer = Tokenizer.bytes()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    save_model(
        Llama(LlamaConfig(vocab_size=tokenizer.vocab_size, **sizes)), here / "base", tokenizer
    )
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    path = here / "base" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 1, **defaults}))

    def exported(run: str) -> dict:
        done = server.run(here, "export", run, "--to", f"{run}-out")
        assert done.code == 0, done.err
        written = json.loads((here / f"{run}-out" / "generation_config.json").read_text())
        return {key: value for key, value in written.items() if not key.endswith("_token_id")}

    short = over(OWN, "train.updates=1")
    for name, others in (
        ("tuned", ["model.init=base"]),
        ("adapted", ["model.init=base", "lora.rank=2"]),
        ("further", ["model.init=tuned"]),
        ("other-words", ["model.init=base", "data.tokenizer=bpe", "data.vocab_size=259"]),
    ):
        done = server.run(here, "train", *over(short, *others), "--out", name, figures=0)
        assert done.code == 0, done.err
    assert (
        server.run(
            here, "train", "--from", "tuned", "train.updates=1", "--out", "branch", figures=0
        ).code
        == 0
    )
    path.unlink()
    for name in ("tuned", "adapted", "further", "other-words", "branch"):
        assert exported(name) == defaults, name
    assert server.run(here, "train", *over(short, "model.hidden_size=16", "model.num_hidden_layers=1",
        "model.num_attention_heads=1", "data.tokenizer=base"), "--out", "new", figures=0).code == 0  # fmt: skip
    assert exported("new") == {}, "a new model with the base's tokenizer is not the base"


@needs_gguf
def test_what_llama_cpp_will_do_otherwise_is_a_warning(server: CommandServer, here: Path) -> None:
    tokenizer = speaking(here / "words", "plain")
    (here / "words" / "tokenizer_config.json").write_text(
        '{"eos_token": "<|eos|>", "bos_token": "<|bos|>"}'
    )
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    save_model(Llama(config), here / "chatty", tokenizer)
    done = server.run(here, "export", "chatty", "--to", "gguf", "--format", "gguf")
    assert done.code == 0
    assert (
        "warning: llama.cpp stops at <|im_end|>, which does not end a text of this model"
        in done.err
    )
