"""What pairs of its own answers, and a teacher, make of the small model of `rewards.py`.

The task is "makes" of that script: "57=" -> any "aa+bb" that adds up to it, after a little
supervised training. The model then writes 64 answers to each prompt, and right ones are paired with
wrong ones, or, for kto, labelled. The installed command line does all of it: `train`, `generate`,
`train` on the pairs by each loss from the same weights, and for comparison `train` on the chosen
texts alone, with as many updates. The teacher is the model that `rl.reward` makes of the same
weights; the student learns from it by its own answers (`rl.reward=teacher rl.teacher=RUN`). Figures
are shares of right answers, 16 to each prompt at temperature 1.

    right     to the prompts of the pairs
    unseen    to prompts that were in no pair
    ahead     held-out pairs whose chosen answer is ahead at the end, or held-out answers on the side of their label
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from rewards import COMMON, TASKS, supervised

# The loss, and what it is given.
LOSSES = {
    "dpo": ["prefer.beta=1", "optim.lr=1e-4"],
    "robust": ["prefer.beta=1", "prefer.label_smoothing=0.1", "optim.lr=1e-4"],
    "ipo": ["prefer.beta=1", "optim.lr=1e-4"],
    "simpo": ["prefer.beta=2", "prefer.gamma=1", "optim.lr=1e-4"],
    "orpo": ["prefer.beta=1", "optim.lr=2e-4"],
    "kto": ["prefer.beta=1", "optim.lr=1e-4"],
}
TEXTS, TEACHER = "chosen texts", "teacher"
SAMPLES, JUDGED = 64, 16  # answers to each prompt, to make pairs of and to count
EXACT = [
    "optim.schedule=constant",
    "optim.weight_decay=0",
    "train.compile=none",
    "data.sequence_length=32",
]


def is_right(prompt: str, answer: str) -> bool:
    """Return whether "aa+bb" makes the number of "57="."""
    found = re.fullmatch(r"([0-9]{2})[+]([0-9]{2})", answer)
    return bool(found) and int(found[1]) + int(found[2]) == int(prompt[:2])


def answers(
    home: Path, model: Path, prompts: Sequence[str], n: int, seed: int
) -> list[tuple[str, str]]:
    """Return n answers to each prompt, with it."""
    asked = model.parent / "asked.jsonl"
    asked.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    found, _ = harness.command(
        home, "generate", str(model), "--prompts", str(asked), "--n", str(n), "--temperature", "1", "--max-tokens", "7",
        "--seed", str(seed),
    )  # fmt: skip
    texts = [completion["text"] for completion in found["completions"]]
    return [(prompts[index // n], text) for index, text in enumerate(texts)]


def share(found: Sequence[tuple[str, str]]) -> float:
    """Return the share of right answers."""
    return sum(is_right(*each) for each in found) / len(found)


def main() -> None:
    """Train every way from the same weights, and print a table."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    if options.smoke:
        options.losses, options.updates = "dpo", 2
    found = harness.result(
        "preferences", {key: getattr(options, key) for key in ("losses", "updates", "seeds")}
    )
    harness.print_machine(found)
    with tempfile.TemporaryDirectory() as home:
        for seed in range(options.seeds):
            found["cases"] += measured(Path(home), seed, options.losses.split(","), options.updates)
    harness.print_table(
        ["way", "seed", "right", "unseen", "ahead", "seconds"],
        [
            [
                case["way"], str(case["seed"]), f"{case['right']:.2f}", f"{case['unseen']:.2f}",
                "" if case["ahead"] is None else f"{case['ahead']:.2f}", f"{case['training_s']:.0f}",
            ]
            for case in found["cases"]
        ],
    )  # fmt: skip
    harness.write(options.out, found)


def measured(home: Path, seed: int, losses: Sequence[str], updates: int) -> list[dict[str, Any]]:
    """Return the figures of every way from one base."""
    base = supervised(home, "makes", seed)
    folder = base.parent
    every = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    asked, unseen = (
        [record["prompt"] for record in every[:-15]],
        [record["prompt"] for record in every[-15:]],
    )
    written = answers(home, base, asked, SAMPLES, seed)
    pairs = []
    for prompt in asked:
        own = [text for each, text in written if each == prompt and text]
        right = [text for text in own if is_right(prompt, text)]
        wrong = [text for text in own if not is_right(prompt, text)]
        pairs += [
            {"prompt": prompt, "chosen": a, "rejected": b}
            for a, b in zip(right, wrong, strict=False)
        ]
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs))
    labelled = [
        json.dumps(
            {"prompt": pair["prompt"], "completion": pair[which], "label": which == "chosen"}
        )
        for pair in pairs
        for which in ("chosen", "rejected")
    ]
    (folder / "labelled.jsonl").write_text("\n".join(labelled))
    texts = [json.dumps({"text": pair["prompt"] + pair["chosen"]}) for pair in pairs]
    (folder / "chosen.jsonl").write_text("\n".join(texts))
    (folder / "asked-of-it.jsonl").write_text(
        "\n".join(json.dumps(record) for record in every[:-15])
    )
    long = [f"train.updates={updates}", "train.tokens_per_update=2048"]
    ways: dict[str, list[str]] = {
        TEXTS: [str(folder / "chosen.jsonl"), "optim.lr=2e-4", *long],
        **{
            loss: [
                str(folder / ("labelled.jsonl" if loss == "kto" else "pairs.jsonl")),
                f"prefer.loss={loss}",
                *LOSSES[loss],
                *long,
            ]
            for loss in losses
        },
    }
    cases = [
        {
            "way": "before",
            "seed": seed,
            **_counted(home, base, asked, unseen),
            "ahead": None,
            "training_s": 0.0,
        }
    ]
    for way, typed in ways.items():
        cases.append({"way": way, "seed": seed, **_trained(home, base, way, typed, asked, unseen)})
    drawing = [
        str(folder / "asked-of-it.jsonl"), "rl.prompts=32", f"rl.max_new_tokens={TASKS['makes'].most_tokens}",
        "optim.lr=5e-4", f"train.updates={updates}",
    ]  # fmt: skip
    better = [*drawing, f"rl.reward={folder / 'makes.py'}:score"]
    cases.append(
        {"way": "rl.reward", "seed": seed, **_trained(home, base, "better", better, asked, unseen)}
    )
    taught = [*drawing, "rl.reward=teacher", f"rl.teacher={folder / 'better'}"]
    cases.append(
        {"way": TEACHER, "seed": seed, **_trained(home, base, "taught", taught, asked, unseen)}
    )
    return cases


def _trained(
    home: Path,
    base: Path,
    way: str,
    typed: Sequence[str],
    asked: Sequence[str],
    unseen: Sequence[str],
) -> dict[str, Any]:
    out = base.parent / way.replace(" ", "-")
    found, _ = harness.command(
        home, "train", *typed, *COMMON[:2], *EXACT, f"model.init={base}", "--out", str(out)
    )
    return {
        **_counted(home, out, asked, unseen), "ahead": found.get("eval_accuracy"), "training_s": found["training_s"],
    }  # fmt: skip


def _counted(
    home: Path, model: Path, asked: Sequence[str], unseen: Sequence[str]
) -> dict[str, float]:
    return {
        name: share(answers(home, model, of, JUDGED, 99))
        for name, of in (("right", asked), ("unseen", unseen))
    }


if __name__ == "__main__":
    main()
