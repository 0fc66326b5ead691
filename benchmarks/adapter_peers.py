"""Compare adapters on ragged conversations with transformers and PEFT, on padded batches and on
packed rows.

All ways have the same Llama, adapters, conversations per update, AdamW and clipping, and the loss
on the answers alone; they take turns in one process. Monograph packs, with the step captured. PEFT
trains transformers' model in a plain loop that normalises by the update's targets, eager and under
torch.compile (padded: with dynamic lengths). Its batches are padded to their longest conversation,
as by transformers' usual collators, or are the same packed rows as Monograph's, with documents kept
apart by positions. The first losses of all ways are compared. On a CPU a small shape in fp32, on a
GPU the 1B shape, bf16 with fp32 adapters. Goal on a GPU: 1.3 times as fast as PEFT's best way, 3
times as fast as its padded eager batches.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

import harness
import torch
from systems import BETAS, CLIP, DECAY, drawn_on, sizes
from torch import Tensor, nn

from monograph.device import default_device
from monograph.graph.lora import Lora
from monograph.graph.precision import Precision
from monograph.model.adapter import install_adapters
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident

IGNORE, LR, RANK = -100, 2e-4, 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Setting(NamedTuple):
    """Sizes: positions of a row, conversations of an update and of a padded batch, packed rows of a
    micro-batch.
    """

    shape: LlamaConfig
    length: int
    conversations: int
    batch: int
    rows: int
    precision: str


SMOKE = Setting(sizes(2, 64, 256, 64), 64, 6, 3, 2, "fp32")
ON_A_CPU = Setting(sizes(4, 192, 2048, 256), 256, 32, 8, 4, "fp32")
ON_A_GPU = Setting(LlamaConfig.preset("1b", vocab_size=128_256), 2048, 64, 8, 4, "bf16")

Conversation = tuple[Tensor, Tensor]  # tokens, and targets that are IGNORE outside the answer


def conversations(setting: Setting) -> list[Conversation]:
    """Return random conversations of log-normal lengths, median T / 5, sigma 0.8; the second half
    is the answer.
    """
    generator = torch.Generator().manual_seed(0)
    made = []
    for spread in torch.randn(setting.conversations, generator=generator).tolist():
        length = int(
            min(setting.length, max(8, setting.length / 5 * 2.718281828 ** (0.8 * spread)))
        )
        ids = torch.randint(1, setting.shape.vocab_size, (length + 1,), generator=generator)
        targets = ids[1:].clone()
        targets[: length // 2] = IGNORE
        made.append((ids[:-1], targets))
    return made


def padded(made: list[Conversation]) -> dict[str, Tensor]:
    """Return rows padded to the longest, with an attention mask of the real tokens."""
    tokens, targets = (
        nn.utils.rnn.pad_sequence(
            [each[part] for each in made], batch_first=True, padding_value=value
        )
        for part, value in ((0, 0), (1, IGNORE))
    )
    there = nn.utils.rnn.pad_sequence([torch.ones_like(each[0]) for each in made], batch_first=True)
    return {"tokens": tokens, "targets": targets, "attention_mask": there}


def packed(setting: Setting, made: list[Conversation]) -> dict[str, Tensor]:
    """Return full rows, packed by first fit from the longest conversation on; `setting.rows`
    divides their number.
    """
    rows: list[list[Conversation]] = []
    for each in sorted(made, key=lambda each: -len(each[0])):
        room = (
            row
            for row in rows
            if sum(len(tokens) for tokens, _ in row) + len(each[0]) <= setting.length
        )
        row = next(room, None)
        if row is None:
            rows.append(row := [])
        row.append(each)
    shape = (-(-len(rows) // setting.rows) * setting.rows, setting.length)
    window = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "segments")}
    window["targets"] = torch.full(shape, IGNORE)
    # Padding is a separate document.
    window["positions"] = torch.arange(setting.length).repeat(shape[0], 1)
    for number, row in enumerate(rows):
        at = 0
        for index, (tokens, targets) in enumerate(row, 1):
            here = (number, slice(at, at + len(tokens)))
            window["tokens"][here], window["targets"][here], window["segments"][here] = (
                tokens,
                targets,
                index,
            )
            window["positions"][here] = torch.arange(len(tokens))
            at += len(tokens)
        window["positions"][number, at:] -= at
    return window


# ── the ways ──────────────────────────────────────────────────────────────────────────────────────


def base(setting: Setting) -> Llama:
    """Return the model, with the same weights for every way."""
    torch.manual_seed(0)
    return drawn_on(default_device(), setting.shape)


def monograph(setting: Setting, made: list[Conversation]) -> Callable[[], Tensor]:
    """Return this project's engine, packed and captured."""
    model, precision = base(setting), Precision(setting.precision)
    install_adapters(model, Lora(RANK, targets=TARGETS), precision=precision)
    optim = AdamW(lr=LR, betas=BETAS, weight_decay=DECAY)
    engine = Resident(model, optim=optim, clip=CLIP, precision=precision, micro_batch=setting.rows)
    window = packed(setting, made)
    if obstacle := engine.capture(window):
        raise SystemExit(f"adapter_peers.py: the step cannot be captured: {obstacle}")

    def update() -> Tensor:
        engine.accumulate(window)
        return engine.update().loss

    return update


def peft(
    setting: Setting, made: list[Conversation], packs: bool, compiled: bool
) -> Callable[[], Tensor]:
    """Return a plain loop over transformers' model with PEFT's adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    device = default_device()
    config = TheirConfig.from_dict(setting.shape.to_hf() | {"use_cache": False})
    with device:
        theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(base(setting).state_dict(), strict=False)
    theirs.tie_weights()
    if setting.precision == "bf16":
        theirs = theirs.to(torch.bfloat16)
    adapted = get_peft_model(
        theirs, LoraConfig(r=RANK, lora_alpha=32, target_modules=list(TARGETS))
    )
    adapted.train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)
    forward = torch.compile(adapted, dynamic=not packs) if compiled else adapted
    if packs:
        window = packed(setting, made)
        batches = [{name: rows[at : at + setting.rows] for name, rows in window.items()}
                   for at in range(0, len(window["tokens"]), setting.rows)]  # fmt: skip
    else:
        batches = [
            padded(made[at : at + setting.batch]) for at in range(0, len(made), setting.batch)
        ]

    def update() -> Tensor:
        total = sum((batch["targets"] != IGNORE).sum() for batch in batches)
        losses = []
        for batch in batches:
            there = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            more = (
                {"position_ids": there["positions"]}
                if packs
                else {"attention_mask": there["attention_mask"]}
            )
            with Precision(setting.precision).context(device.type):
                # `shift_labels` are targets at the positions that predict them.
                loss = forward(
                    input_ids=there["tokens"], labels=there["targets"], shift_labels=there["targets"],
                    num_items_in_batch=total, **more,
                ).loss  # fmt: skip
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(trained, CLIP)
        adamw.step()
        adamw.zero_grad()
        return torch.stack(losses).sum()

    return update


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    device = default_device()
    setting = SMOKE if given.smoke else ON_A_GPU if device.type == "cuda" else ON_A_CPU
    made = conversations(setting)
    ways: dict[str, Callable[[], Tensor]] = {"monograph": monograph(setting, made)}
    for name, packs in (("padded", False), ("packed", True)):
        for compiled in (False, True):
            ways[f"PEFT, {name}, {'compiled' if compiled else 'eager'}"] = peft(
                setting, made, packs, compiled
            )
    first = {name: float(way()) for name, way in ways.items()}
    for way in ways.values():
        for _ in range(2):  # once a length has changed, torch.compile makes a second graph
            way()
    times = harness.interleaved(ways, 2 if given.smoke else given.rounds, device)
    targets = sum(int((each[1] != IGNORE).sum()) for each in made)
    tokens = sum(len(each[0]) for each in made)
    settings = setting._asdict() | {
        "shape": setting.shape.to_hf(),
        "rank": RANK,
        "tokens": tokens,
        "targets": targets,
    }
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "peft")}
    found = harness.result("adapter-peers", settings | {"versions": versions, "smoke": given.smoke})
    harness.print_machine(found)
    rows = []
    for name, each in times.items():
        ratio = harness.ratios(each, times["monograph"])
        speed = harness.spread([tokens / time.wall_s for time in each])
        found["cases"].append(
            {"way": name, "tokens_per_s": speed, "monograph_is_faster": ratio, "loss": first[name]}
        )
        shown = [harness.shown(ratio[clock]) for clock in ("wall", "cpu")]
        rows.append([name, f"{speed['median']:,.0f}", *shown, f"{first[name]:.5f}"])
    harness.write(given.out, found)
    harness.print_table(["", "tokens/s", "monograph is faster", "in CPU time", "first loss"], rows)


if __name__ == "__main__":
    main()
