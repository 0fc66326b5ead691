"""Run: pytest tests/decode/test_outbox.py"""

from __future__ import annotations

import torch

from monograph.decode.outbox import Outbox


def test_halves_in_turn_four_bytes_a_row_and_step() -> None:
    codes_RB, line_1 = torch.zeros(6, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    outbox, sent = Outbox([codes_RB]), []
    for block, steps in enumerate((3, 1, 2)):
        outbox.begin_block(line_1)
        for step in range(steps):
            codes_RB[int(line_1)] = torch.tensor([10 * block + step, -1])
            line_1 += 1
        sent.append((outbox.send(steps), steps))
        if block:  # the block before is read when the next one is under way
            half, before = sent[-2]
            assert outbox.read(half, before)[0].tolist() == [
                [10 * (block - 1) + step, -1] for step in range(before)
            ]
    assert outbox.bytes_out == 4 * 2 * 6
