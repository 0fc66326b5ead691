"""Compare episodes with TRL's GRPOTrainer and its environment_factory, from the same model and records.

The task is the calculator of `episodes.py`: three numbers are added with a tool that adds two, after a
little supervised training. Both sample 8 episodes of each of 16 records, of up to four answers, at
temperature 1, and make one update of each sample: dr_grpo, no KL term, AdamW with the same rate, warm-up
and clipping; fp32, eager, one thread. A round is a whole training of `--seconds`, as a person would start
it: `monograph train` with the class in a confined process, and GRPOTrainer in a process with its own Python
(`--peer-python`, of an environment with `pip install trl`), which calls the tool itself. Rounds are
interleaved, a seed each. TRL has one limit for the tokens of an answer and of all answers of an episode,
which is that of the episode here.

    episodes/s     sampled per second of sampling
    updates/s      per second of training, with all that happens between updates
    solved         share of solved episodes, in the last tenth of the seconds for which both trained; and in the
                   last five of as many updates as the slower one made

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
from episodes import COMMON, FOLDER, TASKS, prepared, supervise
from reward_peers import BETAS, CLIP, OURS, WARM_UP, PeerFailed, compare, figures, training_length

from monograph.device import clock

TASK, PROMPTS, GROUP = TASKS["calculator"], 16, 8
TRL = "trl"
# How TRL reads a call and an answer of the chat template in `episodes.py`.
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def base(home: Path, updates: int) -> Path:
    """Write the records and the supervised model; return their folder."""
    folder = prepared(home, "calculator", 0)
    supervise(home, folder, "calculator", 0, updates)
    prepare(folder)
    return folder


def prepare(folder: Path) -> None:
    """Write the folder `hf`, and the records with the prompts that TRL reads from them."""
    harness.called(folder, "export", "base", "--to", "hf")
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    asked = [record | {"prompt": TASK.environment().reset(record)} for record in records]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))


def monograph(folder: Path, options: Namespace, seed: int) -> dict[str, Any]:
    """Train once by the command line, and return figures."""
    out = folder / f"played-{seed}"
    _, whole_s = harness.command(
        folder, "train", "records.jsonl", *COMMON, "model.init=base",
        f"rl.environment={FOLDER / 'calculator.py'}:Calculator", f"rl.turns={TASK.turns}", f"rl.prompts={PROMPTS}",
        f"rl.group={GROUP}", f"rl.max_new_tokens={TASK.tokens}", "rl.advantage=dr_grpo", "rl.temperature=1",
        "data.held_out=0", f"data.sequence_length={TASK.length}", f"optim.lr={TASK.rate}",
        f"optim.betas={BETAS[0]},{BETAS[1]}", f"optim.warmup_updates={WARM_UP}", "optim.weight_decay=0",
        f"optim.grad_clip={CLIP}", "optim.skip_spikes=false", training_length(options), f"train.seed={seed}",
        "--out", str(out),
    )  # fmt: skip
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row]
    if len(rows) < 2:
        raise SystemExit(f"one update took {rows[0]['wall_s']:.0f} s: raise --seconds")
    ends_s, drawn_s, solved = (
        [row[name] for row in rows] for name in ("wall_s", "drawn_s", "pass_at_1")
    )
    return figures(ends_s, drawn_s, solved, PROMPTS * GROUP) | {
        "whole_s": whole_s,
        "drawn_minus_scored_max": max(row["drawn_minus_scored_max"] for row in rows),
    }


def trl(folder: Path, options: Namespace, seed: int) -> dict[str, Any]:
    """Train once with TRL, and return figures.

    Raises:
        PeerFailed: the process ended without an answer, or made one update in all the time.
    """
    order = {
        "seed": seed, "group": GROUP, "prompts": PROMPTS, "max_new_tokens": TASK.length, "lr": TASK.rate,
        "betas": BETAS, "clip": CLIP, "warmup": WARM_UP, "updates": options.updates, "seconds": options.seconds,
        "threads": torch.get_num_threads(), "model": "hf", "records": "asked.jsonl", "answer": "answer.json",
        "response_template": RESPONSE, "more": {"max_tool_calling_iterations": TASK.turns - 1},
    }  # fmt: skip
    (folder / "order.json").write_text(json.dumps(order))
    began = clock()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HOME": str(folder), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    script = Path(__file__).with_name("peer_trl_episodes.py")
    done = subprocess.run(
        [options.peer_python, "-P", str(script), "order.json"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise PeerFailed(done.stderr.strip().splitlines()[-1])
    found = json.loads((folder / "answer.json").read_text())
    if len(found["ends_s"]) < 2:
        raise PeerFailed(f"one update took {found['ends_s'][0]:.0f} s")
    solved = [statistics.fmean(scores) for scores in found["rewards"]]
    count = len(found["ends_s"])
    return figures(found["ends_s"], found["drawing_s"][:count], solved[:count], PROMPTS * GROUP) | {
        "whole_s": clock() - began,
        "versions": found["versions"],
    }


def measure(folder: Path, options: Namespace) -> list[dict[str, Any]]:
    """Run a round of each way for each seed, and return an entry for each way."""
    found: dict[str, dict[str, Any]] = {way: {"way": way, "rounds": []} for way in (OURS, TRL)}
    for number, way in enumerate(harness.turns(found, options.seeds)):
        entry, seed = found[way], number // len(found)
        if "error" in entry:
            continue
        try:
            if way == TRL:
                answer = trl(folder, options, seed)
            else:
                answer = monograph(folder, options, seed)
        except PeerFailed as error:
            entry["error"] = f"not measured: {error}"
            continue
        entry["rounds"].append({"seed": seed} | answer)
        print(f"seed {seed}: {way}, {answer['updates']} updates", file=sys.stderr, flush=True)
    compare(found)
    return list(found.values())


HEADERS = ["", "episodes/s", "Monograph is", "updates/s", "Monograph is", "solved", "same updates"]


def row(entry: dict[str, Any]) -> list[str]:
    """Return the table's line of one way."""
    if "error" in entry:
        return [entry["way"], entry["error"][:80], *[""] * (len(HEADERS) - 2)]
    ratios = {name: entry.get(f"{name}_ratio") for name in ("rollouts_per_s", "updates_per_s")}
    shown = {name: harness.shown(ratio) if ratio else "-" for name, ratio in ratios.items()}
    return [
        entry["way"],
        f"{entry['rollouts_per_s']['median']:,.0f}", shown["rollouts_per_s"],
        f"{entry['updates_per_s']['median']:.2f}", shown["updates_per_s"],
        harness.shown(entry["pass_at_1"]), harness.shown(entry["pass_at_1_same_updates"]),
    ]  # fmt: skip


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
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
        options.seeds, options.updates = 1, 2
    torch.set_num_threads(options.threads)
    names = ("seeds", "seconds", "updates", "threads", "smoke")
    settings = {name: getattr(options, name) for name in names}
    sizes = {"group": GROUP, "prompts": PROMPTS, "betas": BETAS, "clip": CLIP, "warm_up": WARM_UP}
    found = harness.result("episode-peers", settings | sizes)
    harness.print_machine(found)
    with tempfile.TemporaryDirectory() as home:
        folder = base(Path(home), 5 if options.smoke else TASK.updates)
        found["cases"] = measure(folder, options)
    harness.write(options.out, found)
    harness.print_table(HEADERS, [row(entry) for entry in found["cases"]])


if __name__ == "__main__":
    main()
