"""Compare two predictions of the time of a streamed update: the closed form, which the planner
searches with, and the clock, with which it times the best few ways.

Nothing is computed, so no GPU is needed: the clock runs the engine's own walk on tensors without
data. Models of 1B and 8B with rows of 4,096 tokens, AdamW and bf16 products, on cards of
`monograph plan` with a host of 512 GiB. A case has all ways to stream that fit, each in its fastest
micro-batch; its times are those of one update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import harness

from monograph import planner
from monograph.device import Device, card_device
from monograph.errors import OutOfDeviceMemory
from monograph.model.config import LlamaConfig
from monograph.optim import AdamW
from monograph.planner import Limits, PlanRequest, streaming
from monograph.planner.streaming import StreamCandidate, stream_candidates
from monograph.predict.footprint import Work
from monograph.predict.roofline import LINK_BYTES_PER_S, LINK_SHARE
from monograph.stream.clock import Link

SHAPES, CARDS, WINDOWS, LENGTH = ("1b", "8b"), ("4090", "H100"), (4, 8, 16, 32), 4096
HOST_BYTES, DISK_BYTES = 512 * 2**30, 2 * 2**40
LONGER = 1.05  # times that differ by less are called equal
SMOKE = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=64,
)  # fmt: skip


def main() -> None:
    """Predict both ways, print what differs, and write it as JSON if asked to."""
    given = harness.arguments(__doc__).parse_args()
    settings: dict[str, Any] = {
        "length": 32 if given.smoke else LENGTH,
        "windows": [4] if given.smoke else list(WINDOWS),
        "host_bytes": HOST_BYTES,
    }
    found = harness.result("stream_clock", settings)
    harness.print_machine(found)
    shapes = (
        {"smoke": SMOKE} if given.smoke else {name: LlamaConfig.preset(name) for name in SHAPES}
    )
    for model, shape in shapes.items():
        for card in CARDS:
            for window_rows in settings["windows"]:
                work = Work(
                    shape,
                    rows=window_rows,
                    length=settings["length"],
                    optim=AdamW(),
                    window_rows=window_rows,
                )
                ways = compared(work, card_device(card))
                if ways:
                    case = {"model": model, "card": card, "window_rows": window_rows, "ways": ways}
                    found["cases"].append(case)
                    print(line(case), flush=True)
                    harness.write(given.out, found)
    print(sentence(found["cases"]))


def compared(work: Work, device: Device) -> list[dict[str, Any]]:
    """Return both times of each way that fits, best by the closed form first; none if none fits."""
    try:
        by_closed_form = ranked(work, device, times_all=False)
    except OutOfDeviceMemory:
        return []
    by_clock = {name(each): each.update_s for each in ranked(work, device, times_all=True)}
    return [
        {
            "way": name(each),
            "closed_form_s": each.update_s,
            "clock_s": by_clock[name(each)],
        }
        for each in by_closed_form
    ]


def ranked(work: Work, device: Device, *, times_all: bool) -> list[StreamCandidate]:
    """Return the ways that fit, best first: by the clock if it times all of them, otherwise by the
    closed form.
    """
    request = PlanRequest(work, precisions=("bf16",), scopes=("blocks",), remats=("none",))
    rate = LINK_SHARE * (device.link_bytes_per_s or LINK_BYTES_PER_S)
    limits = Limits(
        planner.budget(device),
        int(streaming.HOST_SHARE * HOST_BYTES),
        DISK_BYTES,
        Link(rate, rate, streaming.DISK_BYTES_PER_S),
    )
    with ways_timed_by_the_clock(1000 if times_all else 0):
        return stream_candidates(request, device, limits, device.peak_flops)


@contextmanager
def ways_timed_by_the_clock(count: int) -> Iterator[None]:
    """Let the planner time as many ways by the clock, where it usually times a few."""
    before = streaming.MAX_TIMED
    streaming.MAX_TIMED = count
    try:
        yield
    finally:
        streaming.MAX_TIMED = before


def name(candidate: StreamCandidate) -> str:
    """Return a way to stream in words."""
    placement = candidate.placement
    blocks = f"{placement.blocks_per_stage} blocks"
    inputs = "offloaded" if placement.offload else "kept"
    return f"{blocks}, {placement.when} on the {placement.where}, inputs {inputs}"


def first_over_best(case: Mapping[str, Any]) -> float:
    """Return how much longer than the fastest way the one takes that the closed form ranks first."""
    by_clock = [way["clock_s"] for way in case["ways"]]
    return float(by_clock[0] / min(by_clock))


def line(case: Mapping[str, Any]) -> str:
    """Return a finished case as a line of text."""
    worst = max(way["clock_s"] / way["closed_form_s"] for way in case["ways"])
    longer = first_over_best(case)
    return (
        f"{case['model']} on a {case['card']}, {case['window_rows']} rows an update: {len(case['ways'])} ways, "
        f"by the clock at most {percent(worst)} longer; the first takes {percent(longer)} longer than the best"
    )


def sentence(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return what docs/reasons.md says of all cases."""
    ratios = [way["clock_s"] / way["closed_form_s"] for case in cases for way in case["ways"]]
    short = sum(ratio > LONGER for ratio in ratios)
    longer = [first_over_best(case) for case in cases]
    slow = [ratio for ratio in longer if ratio > LONGER]
    return (
        f"in {percent(1 + short / len(ratios))} of {len(ratios)} ways the clock's time is more than {percent(LONGER)} "
        f"longer than the closed form's, at worst {percent(max(ratios))}, and in {len(slow)} of {len(cases)} cases the "
        f"way that the closed form ranks first takes more than {percent(LONGER)} longer than the fastest, at worst "
        f"{percent(max(longer))}"
    )


def percent(ratio: float) -> str:
    """Return how much above 1 a ratio is."""
    return f"{100 * (ratio - 1):.0f} %"


if __name__ == "__main__":
    main()
