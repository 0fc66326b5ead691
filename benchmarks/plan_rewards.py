"""What `monograph plan` says of a run with rewards, and what the run took: bytes at the peak, and
drawing, on a CPU.

Eleven ways to train one small model on answers of 64 tokens (a form makes them all as long), 8
prompts and 8 answers each an update. The installed command line makes the runs, and plans each way
again for a device of so little memory that it traces the step. A plan is the peak of the step, and
what is held beside it: keys and values, the reference, the teacher. Each way runs twice: the
seconds of drawing an update's answers are planned before the second run, from earlier ones, and are
the median over the second run's updates.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import harness

SHAPE = ["model.hidden_size=256", "model.num_hidden_layers=4", "model.num_attention_heads=4"]
ANSWERS = [
    "rl.prompts=8", "rl.group=8", "rl.max_new_tokens=64", "rl.answer_regex=[a-z ]{64,80}", "data.held_out=0",
]  # fmt: skip
LENGTH = 105  # a prompt of 41 tokens, and an answer
EAGER = "train.compile=none"
WAYS: dict[str, list[str]] = {
    "fp32": [EAGER, "train.precision=fp32"],
    "fp32, k2": [EAGER, "train.precision=fp32", "rl.kl=k2", "rl.kl_coef=0.1"],
    "bf16": [EAGER],
    "bf16, micro-batches of 4": [EAGER, "train.micro_batch=4"],
    "bf16, recomputed": [EAGER, "train.remat=full"],
    "adapters": [EAGER, "lora.rank=8"],
    "adapters on nf4, k2": [EAGER, "lora.rank=8", "lora.base=nf4", "rl.kl=k2", "rl.kl_coef=0.1"],
    "adamw, 8bit": [EAGER, "optim.name=adamw", "optim.state=8bit"],
    "teacher": [EAGER, "rl.reward=teacher", "rl.teacher={base}"],
    "a graph per block, fp32": ["train.compile=blocks", "train.precision=fp32"],
    "one graph": ["train.compile=whole"],
}
REWARD = (
    "def score(prompt, answer, record):\n    return sum(letter < 'h' for letter in answer) / 64\n"
)


def write(folder: Path) -> None:
    """Write prompts of 40 letters, a text, and a reward."""
    draws = random.Random(1)
    texts = ["".join(draws.choice("abcdefgh ") for _ in range(40)) for _ in range(400)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    (folder / "text.txt").write_text("\n".join(texts))
    (folder / "low.py").write_text(REWARD)


def measured(home: Path, base: Path, way: str, more: list[str]) -> dict[str, Any]:
    """Run one way, and plan it."""
    folder, out = base.parent, base.parent / way.replace(" ", "-").replace(":", "-")
    more = [each.format(base=base) for each in more]
    reward = (
        []
        if any(each.startswith("rl.reward") for each in more)
        else [f"rl.reward={folder / 'low.py'}:score"]
    )
    if EAGER not in more:  # six updates alone would not be compiled
        more.append("train.compile=whole")
    typed = [
        str(folder / "prompts.jsonl"), f"model.init={base}", *reward, f"data.sequence_length={LENGTH}", *ANSWERS, *more,
    ]  # fmt: skip
    harness.command(
        home, "train", *typed, "train.updates=6", "train.seed=1", "--out", f"{out}-first"
    )
    before, _ = harness.command(home, "plan", *typed)
    run, _ = harness.command(home, "train", *typed, "train.updates=6", "--out", str(out))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    chosen = tomllib.loads((out / "config.toml").read_text())["train"]
    pinned = [
        f"train.{key}={chosen[key]}" for key in ("micro_batch", "compile", "precision", "remat")
    ]
    taken = {each.split("=")[0] for each in pinned}
    typed = [each for each in typed if each.split("=")[0] not in taken]
    # A plan is traced unless it fits twice over, and half of a CPU's memory counts as usable.
    memory = f"{max(0.3, 2.7 * run['peak_memory_bytes'] / 2**30):.3f}GiB"
    plan, _ = harness.command(home, "plan", *typed, *pinned, "--device-memory", memory)
    planned = plan["chosen"]["peak_memory_bytes"] + sum(plan["beside"].values())
    return {
        "way": way, "planned_bytes": planned, "measured_bytes": run["peak_memory_bytes"],
        "planned_s": before["drawing_s"], "calibrated": before["drawing_calibrated"],
        "measured_s": statistics.median(row["drawn_s"] for row in rows if "drawn_s" in row),
    }  # fmt: skip


def main() -> None:
    """Run and plan every way, and print a table."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--ways", default="", help="some ways, separated by semicolons; default: all"
    )
    options = parser.parse_args()
    ways = options.ways.split(";") if options.ways else ["bf16"] if options.smoke else [*WAYS]
    found = harness.result("plan_rewards", {"ways": ways})
    harness.print_machine(found)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        write(folder)
        harness.command(
            folder, "train", str(folder / "text.txt"), *SHAPE, "data.tokenizer=bytes", "data.sequence_length=32",
            "model.max_position_embeddings=256", "train.updates=1", EAGER, "data.held_out=0", "--out",
            str(folder / "begun"),
        )  # fmt: skip
        base = folder / "base"
        harness.called(folder, "export", str(folder / "begun"), "--to", str(base))
        for way in ways:
            found["cases"].append(measured(folder, base, way, WAYS[way]))
    rows = [
        [
            case["way"], f"{case['planned_bytes'] / 2**20:.1f}", f"{case['measured_bytes'] / 2**20:.1f}",
            f"{case['planned_bytes'] / case['measured_bytes'] - 1:+.1%}", f"{case['planned_s']:.2f}",
            f"{case['measured_s']:.2f}", f"{case['planned_s'] / case['measured_s'] - 1:+.0%}",
        ]
        for case in found["cases"]
    ]  # fmt: skip
    harness.print_table(
        ["way", "planned, MiB", "measured", "off by", "drawing, planned s", "measured", "off by"],
        rows,
    )
    harness.write(options.out, found)


if __name__ == "__main__":
    main()
