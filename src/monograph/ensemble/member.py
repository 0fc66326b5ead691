"""The engine of one member of an ensemble. With it the member's run is saved, loaded and evaluated like any
other run.
"""

from typing import NoReturn, final

from torch import Tensor, nn

from monograph.engine import Engine
from monograph.ensemble.engine import Ensemble
from monograph.errors import UsageError
from monograph.graph.inspect import write_tensor
from monograph.graph.lora import checkpoint_state
from monograph.loop import EngineState
from monograph.loss import Batch, Loss

_REFUSAL = (
    "the members of an ensemble train together: call the ensemble's own accumulate and update"
)


@final
class MemberEngine(Engine):
    """The engine of one member. Its step is the ensemble's, which trains all members together, so a
    member cannot be trained by its own engine.
    """

    def __init__(self, ensemble: Ensemble, number: int):
        """Make the engine of a member.

        Args:
            ensemble: the ensemble.
            number: the member's number.
        """
        self._ensemble = ensemble
        self._number = number
        super().__init__(lambda: ensemble.step, ensemble.retries)

    @property
    def model(self) -> nn.Module:
        """Return the member as an ordinary module."""
        return self._ensemble.members[self._number]

    def gathered_model(self) -> nn.Module:
        """Return the member."""
        return self.model

    @property
    def loss(self) -> Loss:
        """Return the member's loss."""
        return self._ensemble.member_loss(self._number)

    @property
    def tokens(self) -> int:
        """Return the number of targets that the member was trained on so far."""
        return int(self.step.tokens[self._number])

    def accumulate(self, window: Batch) -> NoReturn:
        """Refuse to train a member alone.

        Raises:
            UsageError: always.
        """
        raise UsageError(_REFUSAL)

    def update(self) -> NoReturn:
        """Refuse to update a member alone.

        Raises:
            UsageError: always.
        """
        raise UsageError(_REFUSAL)

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
            InputRefused: the state does not fit the member. Then nothing was copied.
        """
        weights = checkpoint_state(self.model)
        moments = self._ensemble.member_buffers(self._number)
        counters = self._ensemble.stacked_parameters.member_counters(self._number)
        state.require_fit(EngineState(weights, moments, {"index": self.index, **counters}))
        new_counters = {name: state.counter(name, counter) for name, counter in counters.items()}
        # The first tensors of each pair are views of the ensemble's own, so writing to them loads them.
        pairs = [
            (weights, state.model),
            (moments, state.optimizer),
            (counters, new_counters),
        ]
        for tensors, new_tensors in pairs:
            for name, tensor in tensors.items():
                write_tensor(tensor.detach(), new_tensors[name])
