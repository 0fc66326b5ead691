"""Run: make gpu-less ARGS=tests/pretended_gpu/test_waits.py (the host waits for no copy)

A copy from or to memory that is not page-locked is made while the host waits, so nothing would
overlap with it: what is streamed, offloaded or sampled would be right, and slow. Only what lies in
files is copied like that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from batches import packed, tiny_llama
from monograph.decode.outbox import Outbox
from monograph.engine import Engine
from monograph.graph.remat import Remat
from monograph.resident import Resident
from monograph.stream import Streamed
from pretended_gpu import card
from streamed import EVERY, MICRO_BATCH, arguments

CARD = torch.device("cuda", 0)


def copies(work: Callable[[], object]) -> list[card.Copy]:
    """The copies between host and card that the work makes."""
    with card.logged() as log:
        work()
    return [copy for copy in log.of(card.Copy) if "pageable" in copy.kind or "pinned" in copy.kind]


def updated(engine: Engine) -> Callable[[], object]:
    """A second update, when all is allocated; its window is page-locked, as those of a run are."""
    window = {name: tensor.pin_memory() for name, tensor in packed(2 * MICRO_BATCH).items()}
    engine.accumulate(window)
    engine.update()
    torch.cuda.synchronize()

    def update() -> None:
        engine.accumulate(window)
        engine.update()

    return update


@pytest.mark.parametrize(
    "place", ["next forward, offloaded", "backward", "some stages on the device"]
)
def test_a_streamed_update_waits_for_no_copy(place: str) -> None:
    placement = replace(EVERY[place], device=CARD)
    changes: dict[str, Any] = {"clip": None} if placement.when == "backward" else {}
    engine = Streamed(tiny_llama(num_hidden_layers=6), placement=placement, **arguments(**changes))
    made = copies(updated(engine))
    assert len(made) > 20 and not [copy for copy in made if copy.waits]


def test_an_offloaded_input_is_waited_for_by_no_host() -> None:
    engine = Resident(tiny_llama().to(CARD), **arguments(remat=Remat.Offload()))
    made = copies(updated(engine))
    assert len(made) > 4 and not [copy for copy in made if copy.waits]


def test_lines_of_sampled_tokens_are_on_their_way_while_the_host_goes_on() -> None:
    outbox = Outbox([torch.zeros(8, 2, dtype=torch.int32, device=CARD)])
    made = copies(lambda: outbox.send(4))
    assert len(made) == 1 and not made[0].waits
