"""One member of an ensemble as an engine, so that its run is saved, loaded and scored like any
other.
"""

from typing import NoReturn, final

from torch import Tensor, nn

from monograph.engine import Engine
from monograph.ensemble.engine import Ensemble
from monograph.errors import UsageError
from monograph.graph.inspect import write
from monograph.graph.lora import kept_state
from monograph.loop import EngineState
from monograph.loss import Batch

TOGETHER = (
    "the members of an ensemble train together: call the ensemble's own accumulate and update"
)


@final
class MemberEngine(Engine):
    """The engine of one member, whose step is that of all members; they train together, by the
    ensemble alone.
    """

    def __init__(self, ensemble: Ensemble, number: int):
        """Take the ensemble and the member's number."""
        self._ensemble = ensemble
        self._number = number
        super().__init__(lambda: ensemble.step, ensemble.retries)

    @property
    def model(self) -> nn.Module:
        """Return the member as an ordinary module."""
        return self._ensemble.members[self._number]

    def accumulate(self, window: Batch) -> NoReturn:
        """Refuse to train a member alone.

        Raises:
            UsageError: always.
        """
        raise UsageError(TOGETHER)

    def update(self) -> NoReturn:
        """Refuse to update a member alone.

        Raises:
            UsageError: always.
        """
        raise UsageError(TOGETHER)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the member's sum of losses and number of targets."""
        losses, counts = self._ensemble.evaluate(batch)
        return losses[self._number], counts[self._number]

    def state(self) -> EngineState:
        """Return a copy of the state that an engine of this member alone would have."""
        return self._ensemble.member_state(self._number)

    def load_state(self, state: EngineState) -> None:
        """Replace the member's weights, optimizer state and counters.

        Raises:
            InputRefused: the state does not fit the member. Nothing was copied then.
        """
        weights = kept_state(self.model)
        buffers = {
            name: stacked[self._number]
            for name, stacked in self._ensemble.state().optimizer.items()
        }
        counters = self._ensemble.stacked.counters_of(self._number)
        state.require_fit(EngineState(weights, buffers, {"index": self.index, **counters}))
        values = {name: state.counter(name, counter) for name, counter in counters.items()}
        for mine, theirs in (
            (weights, state.model),
            (buffers, state.optimizer),
            (counters, values),
        ):
            for name, tensor in mine.items():
                write(tensor.detach(), theirs[name])
