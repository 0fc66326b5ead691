"""Run: pytest tests/decode/test_step.py"""

from __future__ import annotations

from typing import Any

import torch

from monograph.decode.chain import OK, LogProbabilities, SampledTokens
from monograph.decode.knobs import chain_of
from monograph.decode.sampling import Sampling
from monograph.decode.step import DecodeStep, State, Status


def test_mirostat_moves_each_running_row_by_its_own_rate() -> None:
    """mu' = mu - eta (surprise in bits - tau); a row that does not run keeps its mu."""
    chain = chain_of([Sampling(mirostat_tau=3.0)])
    state = State.allocate(3, 8, 16, 2, chain, torch.device("cpu"))
    state.limit_B.fill_(5)
    state.status_B.copy_(torch.tensor([Status.RUNNING, Status.RUNNING, Status.STOP]))
    state.mu_B.copy_(torch.tensor([6.0, 5.0, 4.0]))
    knobs = {
        "mirostat_eta": torch.tensor([0.5, 0.125, 1.0]),
        "mirostat_tau": torch.tensor([3.0, 2.0, 1.0]),
    }
    nothing: Any = None
    step = DecodeStep(nothing, state, nothing, chain, knobs, nothing, 16)
    chosen_B = torch.log(torch.tensor([0.5, 0.0625, 0.25]))  # surprises of 1, 4 and 2 bits
    empty = torch.zeros(3, 0)
    drawn = SampledTokens(
        torch.tensor([3, 4, 5]),
        torch.full((3,), OK),
        LogProbabilities(chosen_B, empty.long(), empty),
    )
    step._update_state(drawn, follow_automata=False)
    torch.testing.assert_close(state.mu_B, torch.tensor([7.0, 4.75, 4.0]))
