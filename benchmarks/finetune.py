"""Teach a model that knows three tasks to answer chats about them, with all weights and with
adapters, on a CPU.

A small Llama is first trained on sentences (`instructions.py`). Then the installed command line
does what a person would do: `train` on conversations in the base's own chat format,
`generate --chat` for instances that no conversation had, `export`, and llama.cpp on the exported
file. An answer is right if it is the expected text and ended at its stop token.

    exact     right answers of those asked
    agrees    llama.cpp's answers that are the same text with the same number of tokens
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import harness
import instructions
import torch

import monograph as mono
from monograph.device import clock

BASE_UPDATES, CHATS, ASKED, EPOCHS = 400, 4000, 200, {"full": 6, "lora": 20}
WAYS = {
    "full": ["optim.name=muon", "optim.lr=1e-2"],
    "lora": ["optim.name=adamw", "optim.lr=4e-3", "lora.rank=32", "lora.alpha=64"],
}


def base_model(folder: Path, updates: int) -> tuple[Path, float]:
    """Return a Hugging Face folder of a model trained on sentences only, and the seconds that took."""
    began, tokenizer = clock(), instructions.tokenizer_folder(folder / "tokenizer")
    texts = instructions.write_records(
        folder / "sentences.jsonl",
        "text",
        list(instructions.sentences(160 * updates + 500, seed=7)),
    )
    data = mono.corpus(texts, tokenizer=tokenizer, sequence_length=64, held_out=0.02)
    shape = mono.LlamaConfig(
        vocab_size=data.vocab_size, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=128**-0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = mono.Llama(shape)
    optim = mono.Muon(
        lr=1.5e-2,
        weight_decay=0.0,
        groups=[mono.Group("*embed*", lr=1 / 3), mono.Group("lm_head*", lr=1 / 3)],
    )
    engine = mono.Resident(model, optim=optim, schedule=mono.warmup_cosine(20, updates), clip=1.0)
    for update in mono.train(engine, data.batches(tokens_per_update=2048), updates=updates):
        if update.index % 100 == 0:
            print(f"base    update {update.index}: {float(update.loss):.3f}", flush=True)
    mono.save(model, folder / "base", tokenizer=data.tokenizer)
    return folder / "base", clock() - began


def finetuned(home: Path, base: Path, chats: Path, way: str, epochs: int) -> dict[str, Any]:
    """Train on the chats in one of the ways; return the run's folder and its costs."""
    found, wall_s = harness.command(
        home, "train", f"model.init={base}", str(chats), "data.sequence_length=64", "data.held_out=0.05",
        "train.tokens_per_update=1024", f"train.epochs={epochs}", "train.precision=fp32", *WAYS[way],
    )  # fmt: skip
    return {"way": way, "run": found["run"], "wall_s": wall_s, "eval_loss": found["eval_loss"]}


def answers(home: Path, model: str, questions: Path) -> list[dict[str, Any]]:
    """Return the model's greedy answer to each question."""
    asked = ("--chat", "--prompts", str(questions), "--temperature", "0", "--max-tokens", "16")
    found, _ = harness.command(home, "generate", model, *asked)
    return list(found["completions"])


def llama_cpp_answers(file: Path, questions: list[str]) -> list[tuple[str, int, str]]:
    """Return llama.cpp's answers (text, tokens, why it ended), by the chat template in the file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel, params.n_ctx, params.verbosity = 1, 256, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # Monograph's cache is fp32, too.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server, found = xllamacpp.Server(params), []
    for question in questions:
        message = {"role": "user", "content": question}
        answer = server.handle_chat_completions(
            {"messages": [message], "max_tokens": 16, "temperature": 0.0}
        )
        choice = answer["choices"][0]
        found.append(
            (
                choice["message"]["content"],
                answer["usage"]["completion_tokens"],
                choice["finish_reason"],
            )
        )
    return found


def measured(home: Path, base: Path, way: str, settings: Namespace) -> dict[str, Any]:
    """Measure one way, from chats to llama.cpp."""
    unseen = instructions.conversations(settings.asked, seed=12)
    taught = instructions.conversations(
        settings.chats, seed=11, unlike={chat[0]["content"] for chat in unseen}
    )
    chats = instructions.write_records(home / "chats.jsonl", "messages", list(taught))
    expected = [chat[1]["content"] for chat in unseen]
    asked = instructions.write_records(
        home / "asked.jsonl", "messages", [chat[:1] for chat in unseen]
    )
    found = finetuned(home, base, chats, way, 1 if settings.smoke else EPOCHS[way])
    ours = answers(home, found.pop("run"), asked)
    right = [
        text == one["text"] and one["finish_reason"] == "stop"
        for text, one in zip(expected, ours, strict=True)
    ]
    out = home / f"{way}-gguf"
    harness.called(home, "export", "last", "--to", str(out), "--format", "gguf", "--dtype", "f32")
    theirs = llama_cpp_answers(next(out.glob("*.gguf")), [chat[0]["content"] for chat in unseen])
    same = [
        (one["text"], len(one["token_ids"]), one["finish_reason"]) == other
        for one, other in zip(ours, theirs, strict=True)
    ]
    found |= {
        "exact": sum(right) / len(right),
        "agrees": sum(same) / len(same),
        "asked": len(right),
    }
    print(f"{way:7} {found['exact']:.1%} of {len(right)} unseen right, llama.cpp the same in {found['agrees']:.1%}, "
          f"{found['wall_s']:.0f} s", flush=True)  # fmt: skip
    return found


def main() -> None:
    """Measure both ways, print the table, and write the JSON."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--base-updates", type=int, default=BASE_UPDATES, help="of the base, 2,048 tokens each"
    )
    parser.add_argument("--chats", type=int, default=CHATS, help="conversations to learn from")
    parser.add_argument("--asked", type=int, default=ASKED, help="unseen instances")
    options = parser.parse_args()
    if options.smoke:
        options.base_updates, options.chats, options.asked = 4, 60, 4
    settings = {key: getattr(options, key) for key in ("base_updates", "chats", "asked")} | {
        "ways": WAYS,
        "epochs": EPOCHS,
    }
    found = harness.result("finetune", settings)
    harness.print_machine(found)
    with tempfile.TemporaryDirectory() as folder:
        base, found["base_s"] = base_model(Path(folder), options.base_updates)
        for way in WAYS:
            home = Path(folder, way)
            home.mkdir()
            found["cases"].append(measured(home, base, way, options))
    harness.print_table(
        ["", "right of unseen", "llama.cpp the same", "training"],
        [
            [
                case["way"],
                f"{case['exact']:.1%}",
                f"{case['agrees']:.1%}",
                f"{case['wall_s']:.0f} s",
            ]
            for case in found["cases"]
        ],
    )
    harness.write(options.out, found)


if __name__ == "__main__":
    main()
