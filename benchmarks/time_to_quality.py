"""Compare held-out bits per byte after a fixed time: Monograph's defaults, and each peer at its
best learning rate.

Python's standard library, the same split and tokenizer. Every system trains the default model
(`micro`, the same initial weights), in bf16 if the processor has it, in one process with
`--threads` threads. Monograph is `monograph train --minutes M`, with its evaluations, samples and
checkpoints inside the time. All are compiled before. In M minutes the peers make updates of 1,024
tokens, with which AdamW learns the most here (dev/log.md), on rows cut from the concatenated
documents, with warm-up and a cosine to a twentieth that follow the clock, so that each ends its
schedule just in time. The weights of all are scored by the same code on all held-out text. A peer
tries every rate with the first seed and repeats the best one with the others. The systems take
turns, so a noisy machine shows only in the seeds' deviation. With `--before FOLDER` another tree of
Monograph's sources takes part, too.

Every finished training is a line of `--journal`, from which the same command continues.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from threading import Lock, current_thread
from typing import Any, NamedTuple

import harness
import torch
from contestants import HOW_TO_INSTALL, SYSTEMS
from peer_litgpt import from_litgpt
from peers import Finished, Task, after_each_step
from systems import Shape

from monograph.data.corpus import Corpus, corpus
from monograph.device import clock, describe
from monograph.evaluation import evaluate
from monograph.graph.precision import Precision
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.planner import defaults
from monograph.resident import Resident
from monograph.schedule import warmup_cosine
from monograph.session.door import DEFAULT_MIN_LR_RATIO

# This tree's and the other's; each decides on its rate, so every seed is trained at once.
OWN = ("monograph", "before")
PEERS = ("plain loop", "trainer", "lightning", "litgpt")
LENGTH = 256
WARM_UP = 5  # updates before a peer's clock starts: it compiles
TICKS = 1000  # steps of the schedule over the whole time
TOKENS = 1024  # tokens of a peer's update


class Training(NamedTuple):
    """One training run; Monograph chooses its learning rate itself."""

    system: str
    lr: float | None
    seed: int


# ── one training, in a process of its own ─────────────────────────────────────────────────────────


class Timer:
    """Ends a peer's training when its time is over, and sets its learning rate by the clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.updates, self.began = seconds, 0, 0.0
        self._factor = warmup_cosine(TICKS // 20, TICKS, DEFAULT_MIN_LR_RATIO)

    def updated(self) -> None:
        """Count an update; to be called after each one.

        Raises:
            Finished: the time is over.
        """
        self.updates += 1
        if self.updates == WARM_UP:
            self.began = clock()
        if self.updates > WARM_UP and clock() - self.began >= self.seconds:
            raise Finished

    def factor(self, index: int) -> float:
        """Return the schedule's factor now, whatever the update's index."""
        share = (clock() - self.began) / self.seconds if self.updates >= WARM_UP else 0.0
        return self._factor(int(TICKS * min(1.0, share)))


def peer(training: Training, minutes: float) -> dict[str, Any]:
    """Train a peer; return its weights, under Hugging Face's names, scored by `evaluate`."""
    text = corpus(
        "stdlib", tokenizer="bpe", vocab_size=defaults.DEFAULT.vocabulary, sequence_length=LENGTH
    )
    sizes = {"vocab_size": text.vocab_size, "max_position_embeddings": LENGTH}
    config = LlamaConfig.preset(defaults.DEFAULT.preset, **sizes)
    shape = Shape(config, LENGTH, micro_batch=TOKENS // LENGTH, micro_batches=1)
    precision, timer = defaults.precision(describe()), Timer(60 * minutes)
    task = Task(
        shape, blocks(text, training.seed), text.train, ragged=False, compiled=True, updated=timer.updated,
        lr=training.lr or 0.0, schedule=timer.factor, precision=precision, seed=training.seed,
    )  # fmt: skip
    with after_each_step(task), suppress(Finished):
        SYSTEMS[training.system].fit(task)
    seconds, model = clock() - timer.began, Llama(shape.config)
    assert task.model is not None
    weights = {
        name.replace("_orig_mod.", ""): tensor for name, tensor in task.model.state_dict().items()
    }
    model.load_state_dict(
        from_litgpt(weights, shape.config) if training.system == "litgpt" else weights
    )
    found = evaluate(Resident(model, precision=Precision(precision)), text.held_out)
    tokens = timer.updates * TOKENS
    return {"bits_per_byte": found.bits_per_byte, "tokens": tokens, "seconds": seconds}


def blocks(text: Corpus, seed: int) -> list[torch.Tensor]:
    """Return shuffled rows of T + 1 tokens cut from the concatenated training documents, as most
    scripts do.
    """
    stream = torch.from_numpy(text.train._side.tokens.astype("int64"))
    rows = stream[: len(stream) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return list(rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))])


def ours(training: Training, minutes: float, tree: Path) -> dict[str, Any]:
    """Run `monograph train` of a tree as a user would, after a run of a second that leaves the step
    compiled.
    """
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    with tempfile.TemporaryDirectory() as folder:
        for given in (0.02, minutes):
            command = [
                sys.executable,
                "-m",
                "monograph",
                "train",
                "--minutes",
                str(given),
                "--json",
            ]
            command += [f"train.seed={training.seed}", "--out", str(Path(folder, f"run-{given}"))]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, env=environment
            )
    told = json.loads(done.stdout.splitlines()[-1])
    return {
        "bits_per_byte": told["eval_bits_per_byte"],
        "tokens": told["tokens"],
        "seconds": told["training_s"],
    }


# ── all of them ───────────────────────────────────────────────────────────────────────────────────


class Journal:
    """The finished trainings of earlier calls and this one."""

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.minutes, self._lock = path, minutes, Lock()
        lines = path.read_text().splitlines() if path.exists() else []
        self.entries = [entry for entry in map(json.loads, lines) if entry["minutes"] == minutes]

    def find(self, training: Training) -> dict[str, Any] | None:
        """Return a training's line, if there is one."""
        wanted = training._asdict()
        return next((entry for entry in self.entries if wanted.items() <= entry.items()), None)

    def add(self, entry: dict[str, Any]) -> None:
        """Append a line."""
        with self._lock, self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            self.entries.append(entry)

    def best_rate(self, system: str, seed: int) -> float:
        """Return the learning rate with which a system's first seed had the best score."""
        tried = [
            e
            for e in self.entries
            if e["system"] == system and e["seed"] == seed and "error" not in e
        ]
        return float(min(tried, key=lambda entry: entry["bits_per_byte"])["lr"])


def train_all(args: Namespace, journal: Journal, trainings: list[Training]) -> None:
    """Run the trainings that are not in the journal yet, `--jobs` at once."""

    def one(training: Training) -> None:
        command = [
            sys.executable,
            __file__,
            "--minutes",
            str(args.minutes),
            "--threads",
            str(args.threads),
        ]
        command += ["--before", str(args.before)] if args.before else []
        # Two processes that compile the same kernel at once can read each other's half-written
        # files.
        cache = Path(tempfile.gettempdir(), f"time-to-quality-{current_thread().name}")
        environment = os.environ | {
            "OMP_NUM_THREADS": str(args.threads),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
        }
        done = subprocess.run(
            [*command, "--train", json.dumps(training)],
            capture_output=True,
            text=True,
            env=environment,
        )
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        if done.returncode:
            print(
                f"{training}: {lines[-1] if lines else done.returncode}",
                file=sys.stderr,
                flush=True,
            )
            return  # without a line, so that the next call tries again
        entry = (
            training._asdict()
            | {"minutes": args.minutes}
            | json.loads(done.stdout.splitlines()[-1])
        )
        journal.add(entry)
        print(f"{training}: {entry['bits_per_byte']:.4f}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(args.jobs, "job") as pool:
        list(pool.map(one, [each for each in trainings if journal.find(each) is None]))


def first_round(args: Namespace, systems: list[str]) -> Iterator[Training]:
    """Yield Monograph's trees with every seed, and every peer with every rate and the first seed,
    in turns.
    """
    of_ours = (
        [Training(system, None, seed) for seed in args.seeds] for system in systems if system in OWN
    )
    of_peers = (
        [Training(system, lr, args.seeds[0]) for lr in args.lrs]
        for system in systems
        if system not in OWN
    )
    for turn in zip_longest(*of_ours, *of_peers):
        yield from (training for training in turn if training is not None)


def second_round(args: Namespace, systems: list[str], journal: Journal) -> Iterator[Training]:
    """Yield every peer's best rate with the other seeds, in turns."""
    there = [s for s in systems if s not in OWN and any(e["system"] == s for e in journal.entries)]
    rates = {system: journal.best_rate(system, args.seeds[0]) for system in there}
    for seed in args.seeds[1:]:
        yield from (Training(system, rate, seed) for system, rate in rates.items())


def summary(args: Namespace, system: str, journal: Journal) -> dict[str, Any] | None:
    """Return a system's trainings at its best rate; None if there are none."""
    there = [e for e in journal.entries if e["system"] == system and e["seed"] in args.seeds]
    there.sort(key=lambda entry: args.seeds.index(entry["seed"]))
    if not there:
        return None
    rate = None if system in OWN else journal.best_rate(system, args.seeds[0])
    chosen = [entry for entry in there if entry["lr"] == rate]
    bits = [entry["bits_per_byte"] for entry in chosen]
    tokens = statistics.median(entry["tokens"] for entry in chosen)
    deviation = statistics.stdev(bits) if len(bits) > 1 else None
    return {"system": system, "lr": rate, "mean": statistics.mean(bits), "deviation": deviation, "tokens": tokens} | {
        "bits_per_byte": bits, "rates": {str(e["lr"]): e["bits_per_byte"] for e in there if e["seed"] == args.seeds[0]}
    }  # fmt: skip


def verdict(cases: list[dict[str, Any]]) -> str:
    """Compare Monograph with the best peer; a difference below twice its standard error counts as
    none.
    """
    own = next((case for case in cases if case["system"] == "monograph"), None)
    peers = [case for case in cases if case["system"] not in OWN]
    if own is None or not peers:
        return "no verdict: Monograph and a peer are needed"
    best = min(peers, key=lambda case: case["mean"])
    gap = best["mean"] - own["mean"]
    if own["deviation"] is None or best["deviation"] is None:
        pair = f"Monograph {own['mean']:.4f}, best peer {best['system']} {best['mean']:.4f}"
        return f"{pair}: two seeds are needed to judge"
    error = sum(c["deviation"] ** 2 / len(c["bits_per_byte"]) for c in (own, best)) ** 0.5
    word = (
        "no difference"
        if abs(gap) < 2 * error
        else "Monograph is ahead"
        if gap > 0
        else "Monograph is behind"
    )
    return f"{word}: {gap:+.4f} bits per byte against {best['system']}, standard error {error:.4f}"


def since_before(cases: list[dict[str, Any]]) -> str:
    """Say how this tree's scores differ from the other's, seed by seed, with the standard error; ""
    without both.
    """
    scores = {case["system"]: case["bits_per_byte"] for case in cases if case["system"] in OWN}
    if len(scores) < len(OWN) or len(scores["before"]) < 2:
        return ""
    pairs = [
        now - before for now, before in zip(scores["monograph"], scores["before"], strict=True)
    ]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5
    return f"since before: {statistics.mean(pairs):+.4f} bits per byte, standard error {error:.4f}"


def print_summary(cases: list[dict[str, Any]]) -> None:
    """Print the table and the verdict."""
    rows = []
    for case in sorted(cases, key=lambda each: each["mean"]):
        spread = "-" if case["deviation"] is None else f"{case['deviation']:.4f}"
        rate = "its own" if case["lr"] is None else f"{case['lr']:g}"
        row = [case["system"], f"{case['mean']:.4f}", spread, str(len(case["bits_per_byte"])), rate]
        rows.append([*row, f"{case['tokens'] / 1e6:.2f}"])
    harness.print_table(["", "bits/byte", "deviation", "seeds", "lr", "M tokens"], rows)
    print(verdict(cases))
    print(since_before(cases))


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    everybody = ("monograph", *PEERS)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each training")
    parser.add_argument(
        "--only", nargs="+", choices=everybody, default=list(everybody), metavar="SYSTEM"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--lrs", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="that a peer tries"
    )
    parser.add_argument("--jobs", type=int, default=2, help="trainings at once")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument(
        "--journal", type=Path, default=Path("time_to_quality.jsonl"), help="finished trainings"
    )
    parser.add_argument(
        "--before", type=Path, metavar="FOLDER", help="another tree of Monograph's sources"
    )
    parser.add_argument("--train", metavar="JSON", help="one training, in this process")
    args = parser.parse_args()
    if args.smoke:
        args.minutes, args.seeds, args.lrs = 0.05, args.seeds[:1], args.lrs[1:2]
    if args.train:
        training = Training(*json.loads(args.train))
        torch.set_num_threads(args.threads)
        reply = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # systems may print; stdout is for answers
        trees = {"monograph": harness.ROOT, "before": args.before}
        tree = trees.get(training.system)
        print(
            json.dumps(
                ours(training, args.minutes, tree) if tree else peer(training, args.minutes)
            ),
            file=reply,
        )
        return
    found = harness.result(
        "time-to-quality", {"minutes": args.minutes, "seeds": args.seeds, "lrs": args.lrs}
    )
    harness.print_machine(found)
    systems = [
        *(["before"] if args.before else []),
        *(name for name in args.only if not SYSTEMS[name].missing),
    ]
    if missing := sorted({package for name in args.only for package in SYSTEMS[name].missing}):
        print(f"missing: {', '.join(missing)}. {HOW_TO_INSTALL}")
    journal = Journal(args.journal, args.minutes)
    train_all(args, journal, list(first_round(args, systems)))
    train_all(args, journal, list(second_round(args, systems, journal)))
    found["cases"] = [each for name in systems if (each := summary(args, name, journal))]
    harness.write(args.out, found)
    print_summary(found["cases"])


if __name__ == "__main__":
    main()
