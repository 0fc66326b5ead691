"""How much faster a trained model writes with a draft model that was trained on the same text.

The text consists of the sentences of `instructions`: some words are a choice of the writer, and the others
follow from them. So both models are unsure of the same words, and the draft model can learn the rest. It is
also measured after a tenth of its training, and before it, when it hardly ever agrees with the model.

The model is trained here, from a seed, before anything is measured. Texts with and without drafts are
written in turns in one process, in alternating order. On a CPU one thread is used, and its CPU seconds are
taken, so that the others who use the machine matter less. Figures are medians over pairs.

    tokens in a pass   how many tokens a pass over proposed tokens gives, at most one more than proposed
    ratio              tokens per second with drafts / without, within a pair
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import drafts
import harness
import instructions
import torch
from torch import Tensor

import monograph as mono
from monograph.decode.draft import DRAFT_TOKENS
from monograph.device import default_device
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.text.tokenizer import Tokenizer

# Of an update.
ROWS, LENGTH = 8, 128
LEARNING_RATE = 6e-3
# A text begins like this, and goes on with any sentences.
PROMPT = "Mirror of"


class Shape(NamedTuple):
    """The size of a model."""

    width: int
    layers: int


MODEL, DRAFT = Shape(128, 12), Shape(64, 2)


def text_ids(sentences: int) -> tuple[Tensor, Tokenizer]:
    """Return the ids of a long text of sentences, and the tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.from_file(instructions.tokenizer_folder(Path(folder)))
    text = " ".join(instructions.sentences(sentences, seed=0))
    return torch.tensor(tokenizer.encode(text)), tokenizer


def trained(
    ids_N: Tensor, vocabulary: int, shape: Shape, updates: int, stop: int | None = None
) -> tuple[Llama, float | None]:
    """Train a model from a seed.

    Args:
        ids_N: the ids of the text.
        vocabulary: how many ids there are.
        shape: the model's size.
        updates: the updates of the learning rate's schedule.
        stop: the updates that are made; None: all of them.

    Returns:
        the model, and the loss of its last update in nats per token; None without an update.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        intermediate_size=4 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.width // 32,
        max_position_embeddings=1_024,
    )
    device = default_device()
    model = Llama(config, seed=0).to(device)
    step = mono.Step(
        model,
        optim=mono.Muon(lr=LEARNING_RATE),
        schedule=mono.warmup_cosine(warmup=updates // 20, total=updates),
        clip=1.0,
    )
    chance = random.Random(0)
    loss = None
    for _ in range(updates if stop is None else stop):
        begins = [chance.randrange(len(ids_N) - LENGTH) for _ in range(ROWS)]
        rows_BT = torch.stack([ids_N[begin : begin + LENGTH + 1] for begin in begins]).to(device)
        result = step([{"tokens": rows_BT[:, :-1], "targets": rows_BT[:, 1:]}])
        loss = float(result.loss)
    return model.eval(), loss


def measured(
    model: Llama, draft: Llama, prompt: tuple[int, ...], rows: int, tokens: int, pairs: int
) -> dict[str, Any]:
    """Return the figures of one draft model and number of rows."""
    is_cuda = model.lm_head.weight.is_cuda
    mode: drafts.Mode = "captured" if is_cuda else "eager"
    clock = time.perf_counter if is_cuda else time.process_time
    plain = drafts.Writer(model, None, rows, tokens, mode, prompt)
    drafted = drafts.Writer(model, draft, rows, tokens, mode, prompt)
    found = drafts.compared(plain, drafted, pairs, clock)
    drafted_tokens = drafted.generator.drafted_tokens
    return {
        "rows": rows,
        **found,
        "share_of_tokens": drafted_tokens / ((pairs + 1) * rows * tokens),
    }


def table(cases: list[dict[str, Any]]) -> str:
    """Return the cases as a table in Markdown."""
    lines = [
        "| updates of the draft | rows | tokens in a pass | tokens/s with drafts / without |",
        "|---|---|---|---|",
    ]
    for case in cases:
        ratio = case["ratio"]
        lines.append(
            f"| {case['draft_updates']} | {case['rows']} | {case['tokens_in_a_pass']:.2f} | "
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train, measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--updates", type=int, default=300, help="of each model")
    parser.add_argument("--tokens", type=int, default=192, help="of a text")
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    model_shape = MODEL
    sentences = 4_000
    if args.smoke:
        args.updates, args.tokens, args.pairs, args.rows = 2, 25, 1, [1]
        model_shape, sentences = Shape(64, 3), 200
    torch.set_num_threads(1)
    settings = {name: getattr(args, name) for name in ("updates", "tokens", "pairs", "smoke")} | {
        "draft_tokens": DRAFT_TOKENS,
        "model": model_shape,
        "draft": DRAFT,
    }
    found = harness.result("trained-drafts", settings)
    harness.print_machine(found)
    ids_N, tokenizer = text_ids(sentences)
    prompt = tuple(tokenizer.encode(PROMPT))
    model, loss = trained(ids_N, tokenizer.vocab_size, model_shape, args.updates)
    found["model_loss"] = loss
    for draft_updates in (args.updates, args.updates // 10, 0):
        draft, loss = trained(ids_N, tokenizer.vocab_size, DRAFT, args.updates, draft_updates)
        for rows in args.rows:
            case = measured(model, draft, prompt, rows, args.tokens, args.pairs)
            found["cases"].append({"draft_updates": draft_updates, "draft_loss": loss} | case)
            harness.write(args.out, found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
