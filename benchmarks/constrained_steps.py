"""What constraints cost a decode step: strict tools while no call is open, a schema that the graph
follows, and the same schema when llguidance follows it on the host.

Two decoders of one model write texts that do not end, one with the constraint and one without. Their
steps take turns in one process, and which of them is first changes from pair to pair, so that other
work of the machine hits both. Figures are medians over pairs.

    ratio        a step's seconds with the constraint, divided by those of the step beside it
    CPU ratio    the same of this thread's CPU time; torch runs on one thread
    mask         microseconds that llguidance takes to say which tokens a text may have next
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import torch

import automata
from monograph.automata import Automaton, constraint
from monograph.automata.on_host import HostConstraint, HostVocabulary, has_llguidance, lark_of
from monograph.decode.generator import Generator, Mode
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.decode.sampling import Sampling
from monograph.device import default_device
from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama

PROMPT = 16
# A text is as long as its row.
SLOTS = 512
TEXTS = {"type": "array", "items": {"type": "string", "maxLength": 30000}, "maxItems": 30000}


class Shape(NamedTuple):
    """A model's sizes."""

    hidden: int
    layers: int
    vocabulary: int


SHAPES = {
    "small": Shape(256, 4, 8_192),
    "wide": Shape(512, 8, 32_000),
    "many tokens": Shape(256, 4, 128_256),
}


def model_of(shape: Shape) -> Llama:
    """Return a model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        max_position_embeddings=SLOTS,
    )
    return Llama(config).to(default_device()).eval()


def constraints(pieces: list[bytes]) -> dict[str, Callable[[], Automaton | HostConstraint]]:
    """Return what makes each constraint that is measured."""
    found: dict[str, Callable[[], Automaton | HostConstraint]] = {
        "strict tools, no call open": lambda: automata.tools(2, pieces),
        "schema, in the graph": lambda: constraint("json_schema", TEXTS, pieces, [automata.END]),
    }
    if has_llguidance():
        found["schema, llguidance"] = lambda: HostConstraint(
            lark_of("json_schema", TEXTS),
            HostVocabulary(pieces, [automata.END]),
            InputRefused("the automaton"),
        )
    return found


class Writer:
    """A decoder whose rows write texts without an end, one step at a time."""

    def __init__(
        self, model: Llama, rows: int, mode: Mode, found: Automaton | HostConstraint | None
    ) -> None:
        """Begin the texts."""
        followed = found if isinstance(found, HostConstraint) else None
        automaton = found if isinstance(found, Automaton) else None
        needed = [automaton] if automaton else []
        if followed is not None:
            needed = [followed.begin()] * rows
        # An end would be a text less.
        bias = {automata.END: -100.0}
        sampling = Sampling(temperature=1.0, top_k=40, logit_bias=bias)
        self.generator = Generator(
            model,
            chain_of([sampling]),
            rows=rows,
            slots=SLOTS,
            vocabulary=model.config.vocab_size,
            automata=needed,
            pace=1,
            mode=mode,
        )
        self._request = Request(
            tuple(range(300, 300 + PROMPT)),
            sampling,
            SLOTS,
            constraint=automaton,
            host_constraint=followed,
        )
        self._seed = 0
        self._rows = rows
        self.begin()

    def begin(self) -> None:
        """Replace the texts that have ended, and pass over their first steps."""
        while self.generator.running < self._rows:
            self._seed += 1
            self.generator.submit(self._request._replace(seed=self._seed))
            self.generator.advance()

    def step(self) -> tuple[float, float]:
        """Write a token in each row; return the seconds, and the seconds of this thread's CPU time."""
        wall, cpu = time.perf_counter(), time.thread_time()
        self.generator.advance()
        return time.perf_counter() - wall, time.thread_time() - cpu


def measured(
    model: Llama, rows: int, mode: Mode, pairs: int, make: Callable[[], Automaton | HostConstraint]
) -> dict[str, Any]:
    """Return the figures of one constraint."""
    free, bound = Writer(model, rows, mode, None), Writer(model, rows, mode, make())
    times: dict[Writer, list[tuple[float, float]]] = {free: [], bound: []}
    for number in range(pairs + 20):
        order = (free, bound) if number % 2 else (bound, free)
        for writer in order:
            writer.begin()
        for writer in order:
            times[writer].append(writer.step())
    taken = {writer: steps[20:] for writer, steps in times.items()}
    both = list(zip(taken[bound], taken[free], strict=True))
    masks = bound.generator.masks
    return {
        "rows": rows,
        "pairs": len(both),
        "ratio": harness.spread([one[0] / other[0] for one, other in both]),
        "cpu_ratio": harness.spread([one[1] / other[1] for one, other in both]),
        "tokens_per_s": rows / statistics.median(one[0] for one, _ in both),
        "free_tokens_per_s": rows / statistics.median(other[0] for _, other in both),
        "mask_us": bound.generator.masks_s / masks * 1e6 if masks else None,
    }


def table(cases: list[dict[str, Any]]) -> str:
    """Return the page's table."""
    lines = [
        "| tokens of the vocabulary | rows | constraint | CPU time of a step, with ÷ without | a mask, µs |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        size = SHAPES[case["shape"]].vocabulary
        ratio = case["cpu_ratio"]["median"]
        mask = "" if case["mask_us"] is None else f"{case['mask_us']:.0f}"
        lines.append(f"| {size:,} | {case['rows']} | {case['constraint']} | {ratio:.2f} | {mask} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all constraints with all shapes, and print a table."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument("--only", default="", help="constraints whose names have this text")
    options = parser.parse_args()
    if options.smoke:
        options.shapes, options.rows, options.pairs = "small", "2", 5
    torch.set_num_threads(1)
    settings = {key: getattr(options, key) for key in ("shapes", "rows", "pairs", "mode")}
    found = harness.result("constrained-steps", settings)
    harness.print_machine(found)
    for name in options.shapes.split(","):
        model = model_of(SHAPES[name])
        pieces = automata.vocabulary(SHAPES[name].vocabulary)
        for title, make in constraints(pieces).items():
            if options.only not in title:
                continue
            for rows in map(int, options.rows.split(",")):
                case = measured(model, rows, options.mode, options.pairs, make)
                found["cases"].append({"shape": name, "constraint": title, **case})
                harness.write(options.out, found)
    harness.print_table(
        ["shape", "constraint", "rows", "ratio", "CPU ratio", "tok/s", "without", "mask µs"],
        [
            [
                case["shape"], case["constraint"], str(case["rows"]),
                f"{case['ratio']['median']:.3f}", f"{case['cpu_ratio']['median']:.3f}",
                f"{case['tokens_per_s']:.0f}", f"{case['free_tokens_per_s']:.0f}",
                "" if case["mask_us"] is None else f"{case['mask_us']:.0f}",
            ]
            for case in found["cases"]
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
