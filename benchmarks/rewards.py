"""Three tasks that a small model learns from rewards on a CPU, each after a little supervised
training.

    makes    "57=" -> any "aa+bb" that adds up to it           a program as the reward
    sums     "37+58=" -> the sum, written backwards            exact
    sorts    six digits and ">" -> the digits in order         exact

The installed command line does all of it, as a person would: `train` on a few thousand solved
examples, then `train` with `rl.reward` from that run. Figures are shares of right answers, eight
each at temperature 1, and the seconds of training that `train` counts.

    right before, after    of the first update's answers, and of the last five updates'
    unseen                 at the end, of answers to prompts that were held out
    dead                   groups of the last tenth of the updates whose answers were all right or all wrong
    apart                  the largest difference of drawn and scored log-probabilities, over all updates
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import harness

REWARD = """
import re

def score(prompt, completion, record):
    found = re.fullmatch(r"([0-9]{2})[+]([0-9]{2})", completion)
    return float(bool(found) and int(found[1]) + int(found[2]) == record["number"])
"""
SHAPE = ["model.hidden_size=128", "model.num_hidden_layers=2", "model.num_attention_heads=4"]
COMMON = ["train.precision=fp32", "optim.name=adamw", "data.tokenizer=bytes"]


class Task(NamedTuple):
    """A task: how a problem is drawn, and how long both trainings last.

    Attributes:
        draw: returns (prompt, one right answer, further keys of the record).
        reward: the value of rl.reward.
        updates: supervised updates.
        rate: the learning rate with rewards.
        minutes: of training with rewards.
        most_tokens: of an answer.
    """

    draw: Callable[[random.Random], tuple[str, str, dict[str, Any]]]
    reward: str
    updates: int
    rate: float
    minutes: float
    most_tokens: int


def _makes(draws: random.Random) -> tuple[str, str, dict[str, Any]]:
    number = draws.randint(0, 99)
    one = draws.randint(0, number)
    return f"{number:02}=", f"{one:02}+{number - one:02}", {"number": number}


def _sums(draws: random.Random) -> tuple[str, str, dict[str, Any]]:
    one, other = draws.randint(10, 99), draws.randint(10, 99)
    return f"{one}+{other}=", str(one + other)[::-1], {}


def _sorts(draws: random.Random) -> tuple[str, str, dict[str, Any]]:
    digits = [draws.choice("0123456789") for _ in range(6)]
    return f"{''.join(digits)}>", "".join(sorted(digits)), {}


TASKS = {
    "makes": Task(_makes, "makes.py:score", 290, 5e-4, 1.0, 6),
    "sums": Task(_sums, "exact", 450, 2e-4, 1.5, 4),
    "sorts": Task(_sorts, "exact", 35, 5e-4, 1.5, 7),
}


def write(folder: Path, task: Task, examples: int, prompts: int) -> None:
    """Write solved examples, and prompts of other problems as far as there are others."""
    draws = random.Random(7)
    solved = [task.draw(draws) for _ in range(examples)]
    lines = [json.dumps({"text": prompt + answer}) for prompt, answer, _ in solved]
    (folder / "solved.jsonl").write_text("\n".join(lines))
    asked = {
        prompt: (answer, more)
        for prompt, answer, more in (task.draw(draws) for _ in range(prompts))
    }
    lines = [
        json.dumps({"prompt": prompt, "answer": answer, **more})
        for prompt, (answer, more) in asked.items()
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "makes.py").write_text(REWARD)


def supervised(home: Path, name: str, seed: int) -> Path:
    """Train a model on solved examples, and return the folder of its run, with the task's files
    next to it.
    """
    folder = home / f"{name}-{seed}"
    folder.mkdir()
    write(folder, TASKS[name], 40_000, 2000)
    harness.command(
        home, "train", str(folder / "solved.jsonl"), *COMMON, *SHAPE, "data.sequence_length=32", "optim.lr=1e-3",
        "optim.schedule=constant", "train.compile=none", "train.tokens_per_update=2048",
        f"train.updates={TASKS[name].updates}", f"train.seed={seed}", "--out", str(folder / "base"),
    )  # fmt: skip
    return folder / "base"


def measured(
    home: Path, base: Path, name: str, seed: int, objective: str, length: str
) -> dict[str, Any]:
    """Train with rewards for a length such as "train.minutes=1", and return the figures.

    An objective such as "dapo+3" draws up to three times, until enough groups have unequal rewards.
    """
    task, folder = TASKS[name], base.parent
    advantage, _, draws = objective.partition("+")
    reward = str(folder / task.reward) if task.reward.endswith(":score") else task.reward
    found, _ = harness.command(
        home, "train", str(folder / "prompts.jsonl"), *COMMON[:2], f"model.init={base}", f"rl.reward={reward}",
        "rl.prompts=32", f"rl.max_new_tokens={task.most_tokens}", f"rl.advantage={advantage}", f"rl.draws={draws or 1}",
        "data.held_out=0.1",
        "data.sequence_length=32", f"optim.lr={task.rate}", "optim.schedule=constant", "optim.weight_decay=0",
        "train.compile=none", length, f"train.seed={seed}", "--out", str(folder / objective),
    )  # fmt: skip
    rows = [
        json.loads(line) for line in (folder / objective / "metrics.jsonl").read_text().splitlines()
    ]
    drawn = [row for row in rows if "reward" in row]
    held = [(row["update"], row["eval_pass_at_1"]) for row in rows if "eval_pass_at_1" in row]
    return {
        "task": name, "objective": objective, "seed": seed, "before": drawn[0]["pass_at_1"],
        "after": statistics.fmean(row["pass_at_1"] for row in drawn[-5:]), "unseen": held[-1][1],
        "updates": found["update"], "training_s": found["training_s"], "tokens_per_s": found["tokens_per_s"],
        "dead": statistics.fmean(row["dead"] for row in drawn[-max(1, len(drawn) // 10) :]),
        "apart": found["drawn_minus_scored_max"],
        "curve": [(row["wall_s"], row["pass_at_1"], row["entropy"], row["dead"]) for row in drawn],
    }  # fmt: skip


def main() -> None:
    """Train the chosen tasks, and print a table."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--objectives", default="dr_grpo")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--updates", type=int, help="of training with rewards; default: the task's own minutes"
    )
    options = parser.parse_args()
    if options.smoke:
        options.tasks, options.updates = "makes", 2
    settings = {key: getattr(options, key) for key in ("tasks", "objectives", "seeds", "updates")}
    found = harness.result("rewards", settings)
    harness.print_machine(found)
    with tempfile.TemporaryDirectory() as home:
        for name, seed in itertools.product(options.tasks.split(","), range(options.seeds)):
            length = (
                f"train.updates={options.updates}"
                if options.updates
                else f"train.minutes={TASKS[name].minutes}"
            )
            base = supervised(Path(home), name, seed)
            for objective in options.objectives.split(","):
                found["cases"].append(measured(Path(home), base, name, seed, objective, length))
    harness.print_table(
        ["task", "objective", "seed", "right before", "after", "unseen", "updates", "seconds", "dead", "apart"],
        [
            [
                case["task"], case["objective"], str(case["seed"]), f"{case['before']:.2f}", f"{case['after']:.2f}",
                f"{case['unseen']:.2f}", str(case["updates"]), f"{case['training_s']:.0f}", f"{case['dead']:.2f}",
                f"{case['apart']:.0e}",
            ]
            for case in found["cases"]
        ],
    )  # fmt: skip
    harness.write(options.out, found)


if __name__ == "__main__":
    main()
