"""Compare reinforcement learning with TRL's GRPOTrainer, from the same model, prompts and reward.

The task is "makes" of `rewards.py`: "57=" -> any "aa+bb" that adds up to it, after a little
supervised training. Both draw 8 answers to each of 32 prompts, at temperature 1, and make one
update of each draw: dr_grpo, no KL term, AdamW with the same rate, warm-up and clipping; fp32,
eager, one thread, on the GPU where there is one. A round is a whole training of `--seconds`, as a
person would start it: `monograph train`, and GRPOTrainer on transformers' LlamaForCausalLM in a
process with its own Python (`--peer-python`, of an environment with `pip install trl`). Rounds are
interleaved, a seed each. TRL's defaults that cost time here are off; `--ways` has settings of TRL
that could be faster.

    rollouts/s    answers drawn per second of drawing
    updates/s     per second of training, with all that happens between updates
    pass@1        share of right answers, in the last tenth of the seconds for which all ways trained; and in the last
                  five of as many updates as the slowest way made
    error         relative distance of the gradient of TRL's first answers from the one in float64, each answer alone

The first update is left out of the rates.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import harness
import torch
from rewards import COMMON, SHAPE, TASKS, write
from rounds import distance
from safetensors.torch import load_file
from torch import Tensor

from monograph.device import clock
from monograph.model.hub import load_model
from monograph.model.llama import Llama
from monograph.rl.advantages import AnswerWeight
from monograph.rl.arrange import Rollout, RolloutOptions, arrange_window
from monograph.rl.loss import PolicyLoss

TASK, GROUP, PROMPTS, LENGTH = TASKS["makes"], 8, 32, 32
LR, BETAS, CLIP, WARM_UP = 5e-4, (0.9, 0.999), 1.0, 10
# Each of TRL's ways, and what it changes of the settings in `peer_trl.py`.
TRL: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl, static cache": {"cache_implementation": "static"},
    "trl, micro-batches of 64": {
        "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 4,
    },
    "trl, bf16": {"bf16": True},
    "trl, continuous batching": {"use_transformers_continuous_batching": True},
}
OURS = "monograph"
COMPILED = "monograph, compiled"  # not what TRL is compared with: it does not compile either


# ── a round ───────────────────────────────────────────────────────────────────────────────────────


def base(home: Path, updates: int) -> None:
    """Write the task, and the supervised model as a run `base` and as a Hugging Face folder `hf`."""
    write(home, TASK, 40_000, 2000)
    harness.command(
        home, "train", "solved.jsonl", *COMMON, *SHAPE, f"data.sequence_length={LENGTH}", "optim.lr=1e-3",
        "optim.schedule=constant", "train.compile=none", "train.tokens_per_update=2048", f"train.updates={updates}",
        "--out", "base",
    )  # fmt: skip
    harness.called(home, "export", "base", "--to", "hf")


def training_length(options: Namespace) -> str:
    """Return the setting that ends a training with rewards."""
    if options.updates is None:
        return f"train.minutes={options.seconds / 60}"
    return f"train.updates={options.updates}"


def monograph(home: Path, options: Namespace, compiled: bool, seed: int) -> dict[str, Any]:
    """Train once by the command line, and return figures."""
    out, scope = f"rewarded-{seed}{'-compiled' * compiled}", "auto" if compiled else "none"
    _, whole_s = harness.command(
        home, "train", "prompts.jsonl", *COMMON[:2], "model.init=base", "rl.reward=makes.py:score",
        f"rl.prompts={PROMPTS}", f"rl.group={GROUP}", f"rl.max_new_tokens={TASK.most_tokens}", "rl.advantage=dr_grpo",
        "rl.temperature=1", "data.held_out=0", f"data.sequence_length={LENGTH}", f"optim.lr={LR}",
        f"optim.betas={BETAS[0]},{BETAS[1]}", "optim.schedule=constant", f"optim.warmup_updates={WARM_UP}",
        "optim.weight_decay=0", f"optim.grad_clip={CLIP}", "optim.skip_spikes=false", f"train.compile={scope}",
        training_length(options), f"train.seed={seed}", "--out", out,
    )  # fmt: skip
    rows = [json.loads(line) for line in (home / out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    columns = {name: [row[name] for row in rows] for name in ("wall_s", "drawn_s", "pass_at_1")}
    return figures(columns["wall_s"], columns["drawn_s"], columns["pass_at_1"]) | {
        "whole_s": whole_s,
        "drawn_minus_scored_max": max(row["drawn_minus_scored_max"] for row in rows),
    }


def trl(home: Path, options: Namespace, way: str, seed: int) -> dict[str, Any]:
    """Train once with TRL, and return figures; its first update is left in `first.safetensors`.

    Raises:
        PeerFailed: the process ended without an answer, or made one update in all the time.
    """
    order = {
        "seed": seed, "group": GROUP, "prompts": PROMPTS, "max_new_tokens": TASK.most_tokens, "lr": LR, "betas": BETAS,
        "clip": CLIP, "warmup": WARM_UP, "updates": options.updates, "seconds": options.seconds,
        "threads": torch.get_num_threads(), "model": "hf", "records": "prompts.jsonl", "reads": "number",
        "reward": "makes.py", "first": "first.safetensors", "answer": "answer.json", "more": TRL[way],
    }  # fmt: skip
    (home / "order.json").write_text(json.dumps(order))
    began = clock()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [options.peer_python, "-P", str(Path(__file__).with_name("peer_trl.py")), "order.json"],
        cwd=home, env=environment | {"HOME": str(home), "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise PeerFailed(done.stderr.strip().splitlines()[-1])
    found = json.loads((home / "answer.json").read_text())
    if len(found["ends_s"]) < 2:
        raise PeerFailed(f"one update took {found['ends_s'][0]:.0f} s")
    right = [statistics.fmean(score >= 1 for score in scores) for scores in found["rewards"]]
    return figures(found["ends_s"], found["drawing_s"], right) | {
        "whole_s": clock() - began,
        "versions": found["versions"],
    }


class PeerFailed(Exception):
    """TRL cannot be measured; has the last words of its process, or what else is wrong."""


def figures(
    ends_s: list[float], drawing_s: list[float], right: list[float], answers: int = PROMPTS * GROUP
) -> dict[str, Any]:
    """Return the rates, and the curve of right answers, of one training.

    Args:
        ends_s: when each update ended, in seconds of training.
        drawing_s: how long its answers took to draw.
        right: the share of them that were right.
        answers: the number of answers of an update.
    """
    return {
        "updates": len(ends_s),
        "rollouts_per_s": answers * (len(drawing_s) - 1) / sum(drawing_s[1:]),
        "updates_per_s": (len(ends_s) - 1) / (ends_s[-1] - ends_s[0]),
        "drawing_share": sum(drawing_s[1:]) / (ends_s[-1] - ends_s[0]),
        "curve": list(zip(ends_s, right, strict=True)),
    }


# ── the gradient of the same answers ──────────────────────────────────────────────────────────────


def gradient_errors(home: Path) -> dict[str, float]:
    """Return the relative errors of both gradients of the answers in `first.safetensors`; none if
    it is zero.
    """
    first = load_file(home / "first.safetensors")
    if not first["advantages"].any():
        return {}
    rollouts, weighed = [], []
    for index, advantage in enumerate(first["advantages"].tolist()):
        prompt, answer = (
            first[f"{part}_ids"][index][first[f"{part}_mask"][index].bool()].tolist()
            for part in ("prompt", "completion")
        )
        rollouts.append(Rollout(prompt, answer, [0.0] * len(answer)))
        weighed.append(AnswerWeight(advantage, TASK.most_tokens))
    expected = exact(load_model(home / "hf").double(), rollouts, weighed)
    model = load_model(home / "hf")
    # As an eager run on a CPU does (monograph.session.objectives.rewards).
    model.use_attention("cached")
    total, count = PolicyLoss()(model, arrange_window(rollouts, weighed, _options()))
    (total / count).backward()
    theirs = {
        name.removeprefix("gradient."): value
        for name, value in first.items()
        if name.startswith("gradient.")
    }
    return {
        OURS: distance(_gradients(model), expected),
        "trl": distance({name: value.double() for name, value in theirs.items()}, expected),
    }


def exact(model: Llama, rollouts: list[Rollout], weighed: list[AnswerWeight]) -> dict[str, Tensor]:
    """Return the gradient of dr_grpo's loss in the model's dtype, each answer alone, from dense
    logits.
    """
    count = sum(weight.share for weight in weighed)
    for rollout, weight in zip(rollouts, weighed, strict=True):
        ids = torch.tensor([*rollout.prompt_ids, *rollout.token_ids])
        log_TV = model.logits(model(ids[None, :-1]))[0, len(rollout.prompt_ids) - 1 :].log_softmax(
            -1
        )
        drawn_T = log_TV.gather(-1, torch.tensor(rollout.token_ids)[:, None])
        (-weight.factor * drawn_T.sum() / count).backward()
    return _gradients(model)


def _gradients(model: Llama) -> dict[str, Tensor]:
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def _options() -> RolloutOptions:
    return RolloutOptions(
        PROMPTS,
        GROUP,
        TASK.most_tokens,
        1.0,
        "dr_grpo",
        1,
        LENGTH,
        packed=False,
        exact=True,
        seed=0,
    )


# ── all rounds ────────────────────────────────────────────────────────────────────────────────────


def measure(home: Path, options: Namespace) -> list[dict[str, Any]]:
    """Run a round of every way for each seed, and return an entry for each way."""
    found: dict[str, dict[str, Any]] = {way: {"way": way, "rounds": []} for way in options.ways}
    for number, way in enumerate(harness.turns(options.ways, options.seeds)):
        entry, seed = found[way], number // len(options.ways)
        if "error" in entry:
            continue
        try:
            if way in TRL:
                answer = trl(home, options, way, seed)
            else:
                answer = monograph(home, options, way == COMPILED, seed)
        except PeerFailed as error:
            entry["error"] = f"not measured: {error}"
            continue
        if way == "trl":
            answer["gradient_error"] = gradient_errors(home)
        entry["rounds"].append({"seed": seed} | answer)
        print(f"seed {seed}: {way}, {answer['updates']} updates", file=sys.stderr, flush=True)
    compare(found)
    return list(found.values())


def compare(found: dict[str, dict[str, Any]]) -> None:
    """Add medians and spreads to each entry, and our rates divided by its own, seed by seed."""
    there = {way: entry["rounds"] for way, entry in found.items() if "error" not in entry}
    for rounds in zip(*there.values(), strict=True):  # those of a seed
        # `monograph train` fixes the number of its updates before the first one, and may end sooner
        # than it was asked.
        end_s = min(each["curve"][-1][0] for each in rounds)
        updates = min(each["updates"] for each in rounds)
        for each in rounds:
            last = [right for at_s, right in each["curve"] if 0.9 * end_s <= at_s <= end_s]
            each["pass_at_1"] = statistics.fmean(last or [each["curve"][0][1]])
            each["pass_at_1_same_updates"] = statistics.fmean(
                r for _, r in each["curve"][:updates][-5:]
            )
            each["compared_at"] = {"seconds": end_s, "updates": updates}
    for way, rounds in there.items():
        for name in ("rollouts_per_s", "updates_per_s", "pass_at_1", "pass_at_1_same_updates"):
            found[way][name] = harness.spread([each[name] for each in rounds])
        for name in ("rollouts_per_s", "updates_per_s") if OURS in there else ():
            pairs = zip(there[OURS], rounds, strict=True)
            found[way][f"{name}_ratio"] = harness.spread(
                [ours[name] / each[name] for ours, each in pairs]
            )
    for way in {OURS, "trl"} & there.keys():
        if errors := [
            each["gradient_error"][way]
            for each in there.get("trl", ())
            if each.get("gradient_error")
        ]:
            found[way]["gradient_error"] = harness.spread(errors)


HEADERS = [
    "",
    "rollouts/s",
    "Monograph is",
    "updates/s",
    "Monograph is",
    "pass@1",
    "same updates",
    "error",
]


def row(entry: dict[str, Any]) -> list[str]:
    """Return the table's line of one way."""
    if "error" in entry:
        return [entry["way"], entry["error"][:80], *[""] * (len(HEADERS) - 2)]
    ratios = {name: entry.get(f"{name}_ratio") for name in ("rollouts_per_s", "updates_per_s")}
    shown = {name: harness.shown(ratio) if ratio else "-" for name, ratio in ratios.items()}
    error = entry.get("gradient_error")
    return [
        entry["way"],
        f"{entry['rollouts_per_s']['median']:,.0f}", shown["rollouts_per_s"],
        f"{entry['updates_per_s']['median']:.2f}", shown["updates_per_s"],
        harness.shown(entry["pass_at_1"]), harness.shown(entry["pass_at_1_same_updates"]),
        f"{error['median']:.1e}" if error else "-",
    ]  # fmt: skip


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=[OURS, COMPILED, *TRL],
        default=[OURS, "trl", "trl, static cache"],
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each training with rewards")
    parser.add_argument("--updates", type=int, help="of each training, instead of its seconds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--peer-python", default=sys.executable, metavar="PYTHON", help="of an environment with trl"
    )
    options = parser.parse_args()
    if options.smoke:
        # Two updates, whose rate is that of the second, however busy the machine is.
        options.ways, options.seeds, options.updates = [OURS, "trl"], 1, 2
    torch.set_num_threads(options.threads)
    names = ("ways", "seeds", "seconds", "updates", "threads", "smoke")
    settings = {name: getattr(options, name) for name in names}
    sizes = {
        "group": GROUP,
        "prompts": PROMPTS,
        "lr": LR,
        "betas": BETAS,
        "clip": CLIP,
        "warm_up": WARM_UP,
    }
    found = harness.result("reward-peers", settings | sizes | {"trl": TRL})
    harness.print_machine(found)
    with tempfile.TemporaryDirectory() as home:
        base(Path(home), 5 if options.smoke else TASK.updates)
        found["cases"] = measure(Path(home), options)
    harness.write(options.out, found)
    harness.print_table(HEADERS, [row(entry) for entry in found["cases"]])


if __name__ == "__main__":
    main()
