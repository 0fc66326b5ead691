"""What a model learns from rewards when its answers are drawn and scored in different arithmetic.

A small model that has seen solved sums ("37+8=45") learns from rl.reward = number, from the same
weights, prompts and seeds for the same number of updates in each way:

    fp32                  drawn and scored in fp32
    bf16 same             drawn and scored in bf16 by one arithmetic, as in eager mode on a CPU
    bf16                  drawn and scored in bf16 by two: decoding's, and packed rows (with --compile: compiled ones)
    bf16 truncated        the same, and each token weighs min(rho, 2) times as much, where rho is its scored probability
                          divided by that with which it was drawn (truncated importance sampling)
    bf16 from fp32        scored in bf16, and drawn in fp32
    bf16 from fp32 trunc  the same, with min(rho, 2)

    apart, most           |log-probability scored - drawn| of a token in nats: the mean, and the largest of all updates
    before, after         share of right answers of the first ten updates, and of the last ten
    unseen                share of right answers at the end to prompts that were never trained on, drawn in fp32
    - first way           less the first way's from the same weights and seed; over: of all updates

Shares have their mean over the seeds, and its standard error.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import harness
import torch

import monograph as mono
from monograph.graph import capture
from monograph.graph.inspect import modes_kept
from monograph.graph.precision import Precision
from monograph.loss import IGNORE
from monograph.rl.advantages import NO_RATIO, RatioUse
from monograph.rl.loss import PolicyLoss
from monograph.rl.rollouts import Drawer
from monograph.step.clip import Clip
from monograph.text.tokenizer import Tokenizer

TRUNCATED = RatioUse("truncate", 0.0, 2.0)
RATE, PROMPTS, GROUP, MOST_TOKENS, LENGTH = 3e-4, 16, 8, 4, 32
UNSEEN = 60  # problems that are never trained on
WARMUP = 10  # updates
SHOWN = 10  # updates of the first and last means


class Way(NamedTuple):
    """A way to train: the precision of the step, whether it scores as it draws, what draws, and the
    use of rho.
    """

    precision: str
    same: bool
    drawn_in_fp32: bool
    ratio: RatioUse


WAYS = {
    "fp32": Way("fp32", True, False, NO_RATIO),
    "bf16 same": Way("bf16", True, False, NO_RATIO),
    "bf16": Way("bf16", False, False, NO_RATIO),
    "bf16 truncated": Way("bf16", False, False, TRUNCATED),
    "bf16 from fp32": Way("bf16", False, True, NO_RATIO),
    "bf16 from fp32 trunc": Way("bf16", False, True, TRUNCATED),
}


class Fp32Drawer(Drawer):
    """Draws in fp32, whatever the step computes in."""

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        step = self.engine.step
        with modes_kept(step.model), capture.set_aside(step), torch.no_grad():
            step.model.eval()
            yield


def sums(draws: random.Random) -> list[dict[str, str]]:
    """Return all sums of a number below 50 and one below 10 in some order, with their answers."""
    pairs = [(one, other) for one in range(50) for other in range(10)]
    draws.shuffle(pairs)
    return [{"prompt": f"{one}+{other}=", "answer": str(one + other)} for one, other in pairs]


def taught(
    seed: int, layers: int, width: int, updates: int, records: Sequence[dict[str, str]]
) -> mono.Llama:
    """Return a model that has seen solved problems."""
    tokenizer, draws = Tokenizer.bytes(), random.Random(seed)
    config = mono.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = mono.Llama(config, seed=seed)
    engine = mono.Resident(model, optim=mono.AdamW(lr=3e-3, weight_decay=0.0))
    for _ in range(updates):
        rows = torch.full((64, 10), IGNORE)
        for row, record in zip(rows, draws.choices(records, k=len(rows)), strict=True):
            ids = [
                tokenizer.bos_id,
                *tokenizer.encode(record["prompt"] + record["answer"]),
                tokenizer.eos_id,
            ]
            row[: len(ids)] = torch.tensor(ids)
        engine.accumulate({"tokens": rows[:, :-1].clamp_min(0), "targets": rows[:, 1:]})
        engine.update()
    return model


class Trainer:
    """Trains in one way from any weights, with one graph for all of them."""

    def __init__(self, way: Way, model: mono.Llama, compiled: bool) -> None:
        self.way, self.compiled = way, compiled and not way.same
        self.model = mono.Llama(model.config, seed=0)
        loss = PolicyLoss(ratio=way.ratio)
        self.engine = mono.Resident(
            self.model, loss=loss, optim=mono.AdamW(lr=RATE, weight_decay=0.0), clip=Clip(1.0, skip_spikes=False),
            schedule=mono.warmup_cosine(WARMUP, 10**6), precision=Precision(way.precision),
            micro_batch=16 if self.compiled else None,
        )  # fmt: skip
        self.fresh = self.engine.state()
        self.is_captured = False

    def trained(
        self, model: mono.Llama, records: list[dict[str, str]], seed: int, updates: int
    ) -> dict[str, Any]:
        """Train from a model's weights, and return what came of it."""
        engine, loss = self.engine, cast(PolicyLoss, self.engine.step.loss)
        engine.load_state(self.fresh)
        self.model.load_state_dict(model.state_dict())
        answers = mono.rollouts(
            engine,
            Tokenizer.bytes(),
            records[UNSEEN:],
            "number",
            prompts=PROMPTS,
            group=GROUP,
            max_new_tokens=MOST_TOKENS,
            seed=seed,
        )
        drawer = answers.drawer
        if not self.way.same:  # as `train` does with a step that it compiles
            self.model.use_attention("auto")
            drawer.options = replace(drawer.options, length=LENGTH, packed=True, exact=False)
        if self.way.drawn_in_fp32:
            answers.drawer = drawer = Fp32Drawer(
                engine, drawer.prompts, drawer.reward, drawer.options, drawer.updates
            )
        shares, means, ratios, most = list[float](), list[float](), list[float](), 0.0
        for _ in range(updates):
            window = next(answers)
            if self.compiled and not self.is_captured:
                reason = engine.capture(window)
                assert reason is None, reason
                self.is_captured = True
            loss.take_figures()
            engine.accumulate(window)
            engine.update()
            figures = loss.take_figures()
            shares.append(answers.numbers["pass_at_1"])
            means.append(figures["drawn_minus_scored"])
            most = max(most, figures["drawn_minus_scored_max"])
            ratios.append(figures["ratio"])
        return {
            "apart": statistics.fmean(means), "most": most, "ratio": statistics.fmean(ratios),
            "before": statistics.fmean(shares[:SHOWN]), "after": statistics.fmean(shares[-SHOWN:]),
            "over": statistics.fmean(shares), "unseen": self.unseen(records[:UNSEEN]), "curve": shares,
        }  # fmt: skip

    def unseen(self, asked: list[dict[str, str]]) -> float:
        """Return the share of right answers to problems that were never trained on, drawn in fp32."""
        model = mono.Llama(self.model.config, seed=0)
        model.load_state_dict(self.model.state_dict())
        engine = mono.Resident(model, loss=PolicyLoss(), optim=mono.AdamW(lr=RATE))
        judged = mono.rollouts(
            engine,
            Tokenizer.bytes(),
            asked,
            "number",
            prompts=len(asked),
            group=8,
            max_new_tokens=MOST_TOKENS,
        )
        next(judged)
        return judged.numbers["pass_at_1"]


def mean(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"


def print_summary(cases: Sequence[dict[str, Any]]) -> None:
    """Print what came of each way, beside the first one with the same seeds."""
    ways = list(dict.fromkeys(case["way"] for case in cases))
    of = {(case["way"], case["seed"]): case for case in cases}
    seeds = [case["seed"] for case in cases if case["way"] == ways[-1]]
    rows = []
    for name in ways:
        own, first = ([of[way, seed] for seed in seeds] for way in (name, ways[0]))
        apart = f"{statistics.fmean(case['apart'] for case in own):.1e}"
        shares = [mean([case[key] for case in own]) for key in ("before", "after", "unseen")]
        less = [
            mean([one[key] - other[key] for one, other in zip(own, first, strict=True)])
            for key in ("after", "over", "unseen")
        ]
        rows.append([name, apart, f"{max(case['most'] for case in own):.1e}", *shares, *less])
    headers = ["after - first way", "over - first way", "unseen - first way"]
    harness.print_table(["way", "apart", "most", "before", "after", "unseen", *headers], rows)


def main() -> None:
    """Train in each way from the same weights, and print a table."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--supervised", type=int, default=250, help="updates on solved sums before")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument(
        "--compile", action="store_true", help="the steps that score in another way than they draw"
    )
    options = parser.parse_args()
    if options.smoke:
        options.ways, options.seeds, options.updates, options.supervised = (
            "bf16 same,bf16 from fp32",
            1,
            2,
            2,
        )
        options.layers, options.width = 1, 32
    settings = {
        key: getattr(options, key)
        for key in ("ways", "seeds", "updates", "supervised", "layers", "width", "compile")
    }
    found = harness.result("reward-precision", settings)
    harness.print_machine(found)
    ways, trainers = options.ways.split(","), dict[str, Trainer]()
    for seed in range(options.seeds):
        records = sums(random.Random(seed))
        model = taught(seed, options.layers, options.width, options.supervised, records)
        for name in ways:
            trainer = trainers.setdefault(name, Trainer(WAYS[name], model, options.compile))
            case = {"way": name, "seed": seed} | trainer.trained(
                model, records, seed, options.updates
            )
            found["cases"].append(case)
            print(
                f"{name}, seed {seed}: {case['before']:.3f} to {case['after']:.3f}, {case['most']:.1e} apart",
                flush=True,
            )
            harness.write(options.out, found)
    print_summary(found["cases"])


if __name__ == "__main__":
    main()
