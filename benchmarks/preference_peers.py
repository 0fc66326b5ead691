"""Compare learning from pairs on a CPU with TRL's DPOTrainer, from the same model and the same
pairs.

The task is "makes" of `rewards.py`: "57=" -> any "aa+bb" that adds up to it, after a little
supervised training. The model writes 64 answers to each prompt, and right ones are paired with
wrong ones, as in `preferences.py`. Both sides make as many updates of 64 pairs each: DPO with the
same number, AdamW with the same constant rate, no decay, the same clipping; fp32, eager, one
thread. Every way trains in a process of its own that stays, TRL in that of its own Python
(`--peer-python`, of an environment with `pip install trl`), and is asked for rounds of updates in
turns, so that what else the machine does disturbs all alike. `monograph train` runs whole, with all
that it does between updates.

Monograph's rows are as long as the longest pair needs, so each has one pair, and TRL pads to a
batch's longest answer: both compute nearly the same positions. TRL's saving, logging and gradient
checkpointing are off, and so are Monograph's evaluations and checkpoints; its rows of metrics and
two samples stay, and TRL's metrics, which it computes in each update. TRL's `padding_free` is
switched off by TRL itself in 1.16.

    pairs/s, updates/s    after `WARM_UP` updates, of a round's wall time; and the ratio by CPU time of all threads
    reference             seconds of CPU to score the pairs with the first weights, before the first update
    ahead                 pairs whose chosen answer gained more than the rejected one, at the end: of those trained on,
                          and of those to prompts that no pair of training has
    first loss            less ln 2, which it is by the equation
    error                 relative distance of the first update's gradient from the one in float64, each answer alone
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
from preferences import SAMPLES, answers, is_right
from rewards import COMMON, TASKS, supervised
from rounds import Child, ChildFailed, FirstGradient, Orders, distance
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import logsigmoid

from monograph.cli import main as command_line
from monograph.engine import Engine
from monograph.model.hub import load_model
from monograph.model.llama import Llama
from monograph.session.objectives.preferences import PreferenceTask
from monograph.text.tokenizer import Tokenizer

BETA, PAIRS, LR, BETAS, CLIP, WARM_UP = 0.5, 64, 1e-4, (0.9, 0.999), 1.0, 6
UNSEEN = 15  # prompts that no pair of training has
# Each of TRL's ways, and what it changes of the settings in `peer_trl_dpo.py`.
TRL: dict[str, dict[str, Any]] = {"trl": {}, "trl, precomputed": {"precompute_ref_log_probs": True}}
OURS = "monograph"
COMPILED = "monograph, compiled"  # not what TRL is compared with: it does not compile either
Triple = list[list[int]]  # the tokens of a prompt, its chosen and its rejected answer


# ── Monograph's own process ───────────────────────────────────────────────────────────────────────


def serve(path: str) -> None:
    """Run the command that an order names, and make updates whenever the standard input asks for
    them.
    """
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the command prints; stdout is for answers
    order = json.loads(Path(path).read_text())
    torch.set_num_threads(order["threads"])
    seen: dict[str, Any] = {"reference": None, "updates": 0}
    first = FirstGradient(lambda: seen["model"])
    accumulate, update = Engine.accumulate, Engine.update
    score = PreferenceTask.prepare_reference_scores

    def ready() -> dict[str, Any]:
        save_file({name: value.float() for name, value in first.gradients.items()}, order["first"])
        return {"first_pairs": pairs_of(seen["window"]), "reference": seen["reference"]}

    orders = Orders(reply, order["warm_up"], lambda: seen["updates"], ready)

    def accumulated(engine: Engine, window: dict[str, Tensor]) -> None:
        if not seen["updates"]:
            seen["window"], seen["model"] = window, engine.model
        accumulate(engine, window)

    def updated(engine: Engine) -> Any:
        found = update(engine)
        seen["updates"] += 1
        orders.updated()
        return found

    def scored(task: PreferenceTask, *arguments: Any) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        score(task, *arguments)
        seen["reference"] = {
            "wall_s": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu,
        }
        orders.began, orders.cpu = time.perf_counter(), time.process_time()

    with ExitStack() as patches, first:
        patches.enter_context(mock.patch.object(Engine, "accumulate", accumulated))
        patches.enter_context(mock.patch.object(Engine, "update", updated))
        patches.enter_context(mock.patch.object(PreferenceTask, "prepare_reference_scores", scored))
        command_line(order["arguments"])


def pairs_of(window: Mapping[str, Any]) -> list[Triple]:
    """Return the tokens of each pair's prompt, chosen answer and rejected answer, from rows of
    pairs.
    """
    found: list[list[list[int]]] = []
    for tokens, targets, segments in zip(
        *(window[name] for name in ("tokens", "targets", "segments")), strict=True
    ):
        for segment in range(1, int(segments.max()) + 1):
            places = [i for i, own in enumerate(segments.tolist()) if own == segment]
            scored = [i for i in places if int(targets[i]) >= 0]
            found.append(
                [
                    [int(tokens[i]) for i in places if i <= scored[0]],
                    [int(targets[i]) for i in scored],
                ],
            )
    pairs = zip(found[::2], found[1::2], strict=True)
    return [[prompt, chosen, rejected] for (prompt, chosen), (_, rejected) in pairs]


# ── what both are compared with ───────────────────────────────────────────────────────────────────


def exact(model: Llama, pairs: Iterable[Triple]) -> dict[str, Tensor]:
    """Return the gradient of DPO's loss at its reference in the model's dtype, each answer alone,
    from dense logits.
    """
    there = list(pairs)
    for prompt, *both in there:
        chosen, rejected = (log_probabilities(model, [(prompt, answer)])[0] for answer in both)
        gains = (chosen - chosen.detach()) - (rejected - rejected.detach())
        (-logsigmoid(BETA * gains) / len(there)).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def log_probabilities(model: Llama, texts: list[tuple[list[int], list[int]]]) -> Tensor:
    """Return the log-probability of each (prompt, answer), all of the same lengths."""
    ids = torch.tensor([prompt + answer for prompt, answer in texts])
    start = len(texts[0][0])
    log_BTV = model.logits(model(ids[:, :-1]))[:, start - 1 :].log_softmax(-1)
    return log_BTV.gather(-1, ids[:, start:, None]).sum((1, 2))


def ahead(model: Llama, base: Llama, pairs: list[Triple]) -> float:
    """Return the share of pairs whose chosen answer gained more than the rejected one."""
    texts = [(prompt, answer) for prompt, *both in pairs for answer in both]
    order = sorted(range(len(texts)), key=lambda i: [*map(len, texts[i])])
    gains = torch.zeros(len(texts), dtype=torch.float64)
    for _, group in itertools.groupby(order, key=lambda i: [*map(len, texts[i])]):
        places = list(group)
        same = [texts[i] for i in places]
        with torch.no_grad():
            gains[places] = log_probabilities(model, same) - log_probabilities(base, same)
    return float((gains[::2] > gains[1::2]).double().mean())


# ── a seed ────────────────────────────────────────────────────────────────────────────────────────


def prepare(home: Path, seed: int, smoke: bool) -> Path:
    """Write the supervised model, as a run `base` and as a folder `hf`, and pairs of its own
    answers.
    """
    if smoke:
        TASKS["makes"] = TASKS["makes"]._replace(updates=2)
    base = supervised(home, "makes", seed)
    folder = base.parent
    harness.called(home, "export", str(base), "--to", str(folder / "hf"))
    asked = [
        json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()
    ]
    pairs: dict[str, list[tuple[str, str]]] = {prompt: [] for prompt in asked}
    if smoke:  # so little training makes no right answer
        pairs = {prompt: [(f"{int(prompt[:2]):02}+00", "00+99")] for prompt in asked}
    else:
        written = answers(home, base, asked, SAMPLES, seed)
        for prompt in asked:
            own = [text for each, text in written if each == prompt and text]
            right = [text for text in own if is_right(prompt, text)]
            wrong = [text for text in own if not is_right(prompt, text)]
            pairs[prompt] = list(zip(right, wrong, strict=False))
    seen = [(prompt, *both) for prompt in asked[:-UNSEEN] for both in pairs[prompt]]
    unseen = [(prompt, *both) for prompt in asked[-UNSEEN:] for both in pairs[prompt]]
    # Each update of each epoch has as many pairs, as TRL's last batch of an epoch would be smaller.
    for name, chosen in (("pairs", seen[: len(seen) // PAIRS * PAIRS]), ("unseen", unseen)):
        lines = [
            json.dumps(dict(zip(("prompt", "chosen", "rejected"), each, strict=True)))
            for each in chosen
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def tokens_of(path: Path) -> list[Triple]:
    """Return the tokens of pairs in a file: bytes between the tokenizer's own first and last one."""
    tokenizer = Tokenizer.bytes()
    found = []
    for record in map(json.loads, path.read_text().splitlines()):
        prompt, *both = (
            tokenizer.encode(record[name]) for name in ("prompt", "chosen", "rejected")
        )
        found.append(
            [[tokenizer.bos_id, *prompt], *([*answer, tokenizer.eos_id] for answer in both)]
        )
    return found


def start(folder: Path, options: Namespace, way: str, seed: int, length: int) -> tuple[Child, Path]:
    """Start a way's process; return it, and where it leaves its gradient and its weights."""
    own = folder / way.replace(",", "").replace(" ", "-")
    own.mkdir()
    updates = WARM_UP + options.rounds * options.updates
    order: dict[str, Any] = {
        "warm_up": WARM_UP, "threads": options.threads, "first": str(own / "first.safetensors"), "out": str(own / "hf"),
        "seed": seed, "updates": updates, "pairs": PAIRS, "beta": BETA, "lr": LR, "betas": BETAS, "clip": CLIP,
        "records": str(folder / "pairs.jsonl"), "model": str(folder / "hf"), "more": TRL.get(way),
    }  # fmt: skip
    order["arguments"] = [
        "train", order["records"], *COMMON[:2], f"model.init={folder / 'base'}",
        "prefer.loss=dpo", f"prefer.beta={BETA}",
        "data.held_out=0", f"data.sequence_length={length}", f"train.tokens_per_update={PAIRS * length}",
        f"optim.lr={LR}", f"optim.betas={BETAS[0]},{BETAS[1]}", "optim.schedule=constant", "optim.warmup_updates=0",
        "optim.weight_decay=0", f"optim.grad_clip={CLIP}", "optim.skip_spikes=false",
        f"train.compile={'auto' if way == COMPILED else 'none'}",
        f"train.updates={updates}", f"train.save_every={updates}", f"train.seed={seed}", "--out", str(own / "run"),
    ]  # fmt: skip
    (own / "order.json").write_text(json.dumps(order))
    here, surroundings = Path(__file__), {"HOME": str(folder)}
    if way in TRL:
        command = ["-P", str(here.with_name("peer_trl_dpo.py")), str(own / "order.json")]
        return Child(
            command, options.threads, surroundings | {"PYTHONPATH": ""}, options.peer_python
        ), own
    command = [str(here), "--serve", str(own / "order.json")]
    return Child(command, options.threads, surroundings), own


def measured(home: Path, options: Namespace, seed: int) -> dict[str, dict[str, Any]]:
    """Train every way from one base, in turns, and return the figures of each."""
    folder = prepare(home, seed, options.smoke)
    pairs, unseen = (tokens_of(folder / f"{name}.jsonl") for name in ("pairs", "unseen"))
    length = (
        max(2 * len(prompt) + len(chosen) + len(rejected) for prompt, chosen, rejected in pairs) - 1
    )
    found: dict[str, dict[str, Any]] = {}
    children: dict[str, tuple[Child, Path]] = {}
    for way in options.ways:
        child, own = start(folder, options, way, seed, length)
        try:
            found[way] = {"seed": seed, "pairs": len(pairs), "length": length} | child.answer()
            children[way] = child, own
        except ChildFailed as error:
            found[way] = {"error": f"not measured: {error.args[0]}", "stderr": error.args[1]}
        print(f"seed {seed}: {way} is ready", file=sys.stderr, flush=True)
    first = {way: found[way].pop("first_pairs") for way in children}
    assert all(
        len(each) == PAIRS and all(pair in pairs for pair in each) for each in first.values()
    ), "other pairs"
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in children}
    for way in harness.turns(children, options.rounds):
        rounds[way].append(children[way][0].ask(updates=options.updates))
    base = load_model(folder / "hf").double()
    for way, (child, own) in children.items():
        child.go_on()
        child.end()
        entry = found[way]
        if way not in TRL:
            rows = map(json.loads, (own / "run" / "metrics.jsonl").read_text().splitlines())
            entry["first_loss"] = next(row["train_loss"] for row in rows if "train_loss" in row)
            harness.called(folder, "export", str(own / "run"), "--to", str(own / "hf"))
        gradient = {
            name: value.double() for name, value in load_file(own / "first.safetensors").items()
        }
        expected = exact(load_model(folder / "hf").double(), first[way])
        model = load_model(own / "hf").double()
        entry |= {
            "first_loss_less_ln_2": entry.pop("first_loss") - math.log(2),
            "gradient_error": distance(gradient, expected),
            "ahead": ahead(model, base, pairs), "ahead_unseen": ahead(model, base, unseen), "rounds": rounds[way],
        }  # fmt: skip
    return found


# ── all seeds ─────────────────────────────────────────────────────────────────────────────────────


def summed(options: Namespace, seeds: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return an entry for each way: medians and spreads over seeds and rounds, and our rates
    divided by its own.
    """
    cases = []
    for way in options.ways:
        entry: dict[str, Any] = {"way": way, "seeds": [each[way] for each in seeds]}
        cases.append(entry)
        if failed := [each[way] for each in seeds if "error" in each[way]]:
            entry["error"] = failed[0]["error"]
            continue
        rounds = [each for seed in entry["seeds"] for each in seed["rounds"]]
        for clock in ("wall", "cpu"):
            rates = [options.updates / each[f"{clock}_s"] for each in rounds]
            entry[f"updates_per_{clock}_s"] = harness.spread(rates)
            entry[f"pairs_per_{clock}_s"] = harness.spread([PAIRS * rate for rate in rates])
            if OURS in options.ways:
                ours = [each for seed in seeds for each in seed[OURS]["rounds"]]
                entry[f"ratio_{clock}"] = harness.spread(
                    [
                        their[f"{clock}_s"] / our[f"{clock}_s"]
                        for our, their in zip(ours, rounds, strict=True)
                    ]
                )
        for name in ("ahead", "ahead_unseen", "gradient_error", "first_loss_less_ln_2"):
            entry[name] = harness.spread([seed[name] for seed in entry["seeds"]])
        if entry["seeds"][0]["reference"]:
            entry["reference_cpu_s"] = harness.spread(
                [seed["reference"]["cpu_s"] for seed in entry["seeds"]]
            )
    return cases


HEADERS = [
    "", "pairs/s", "updates/s", "Monograph is, wall", "CPU", "reference", "ahead", "unseen", "first loss", "error",
]  # fmt: skip


def row(entry: dict[str, Any]) -> list[str]:
    """Return the table's line of one way."""
    if "error" in entry:
        return [entry["way"], entry["error"][:80], *[""] * (len(HEADERS) - 2)]
    ratios = [
        harness.shown(entry[f"ratio_{clock}"]) if f"ratio_{clock}" in entry else "-"
        for clock in ("wall", "cpu")
    ]
    reference = entry.get("reference_cpu_s")
    return [
        entry["way"],
        f"{entry['pairs_per_wall_s']['median']:,.0f}", f"{entry['updates_per_wall_s']['median']:.2f}", *ratios,
        f"{reference['median']:.1f} s" if reference else "-",
        harness.shown(entry["ahead"]), harness.shown(entry["ahead_unseen"]),
        f"{entry['first_loss_less_ln_2']['median']:.0e}", f"{entry['gradient_error']['median']:.1e}",
    ]  # fmt: skip


def main() -> None:
    """Measure and print; see `--help`."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--ways", nargs="+", choices=[OURS, COMPILED, *TRL], default=[OURS, *TRL])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=12, help="of each round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--peer-python", default=sys.executable, metavar="PYTHON", help="of an environment with trl"
    )
    parser.add_argument(
        "--serve", metavar="ORDER", help="be Monograph's process; the script calls itself so"
    )
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    if options.smoke:
        options.ways, options.seeds, options.rounds, options.updates = [OURS, "trl"], 1, 2, 1
    torch.set_num_threads(options.threads)
    settings = {
        name: getattr(options, name)
        for name in ("ways", "seeds", "rounds", "updates", "threads", "smoke")
    }
    sizes = {
        "beta": BETA,
        "pairs": PAIRS,
        "lr": LR,
        "betas": BETAS,
        "clip": CLIP,
        "warm_up": WARM_UP,
    }
    found = harness.result("preference-peers", settings | sizes | {"trl": TRL})
    harness.print_machine(found)
    with tempfile.TemporaryDirectory() as home:
        seeds = []
        for seed in range(options.seeds):
            seeds.append(measured(Path(home), options, seed))
            found["cases"] = summed(options, seeds)
            harness.write(options.out, found)
    harness.print_table(HEADERS, [row(entry) for entry in found["cases"]])


if __name__ == "__main__":
    main()
