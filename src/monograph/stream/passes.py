"""Run a stage's passes for one micro-batch: forward, and later forward again with the backward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.optim import Plane, unlinked
from monograph.step import Step
from monograph.stream.store import Stage, staged


class _Called(Exception):
    """Raised in place of the model's forward pass, with the arguments that the loss called the model with."""


class Passes:
    """The passes of a model in stages, with the step's loss and in the step's context.

    A pass runs while the model's parameters are those of the stage on the device, whose planes there are `planes`.
    """

    def __init__(self, step: Step):
        """Take the step's module and loss, and run nothing."""
        self.step, self.model = step, staged(step.model)

    def begin(self, batch: Any) -> tuple[Tensor, Any]:
        """Return the first block's input, and the other arguments of blocks, from the loss's call of the model."""

        def called(*args: Any, **kwargs: Any) -> None:
            # An exception keeps the loss from going on after the call, as the model has no output yet.
            raise _Called(args, kwargs)

        try:
            with self._forward(called):
                self.step.loss(self.step.model, batch)
        except _Called as stopped:
            args, kwargs = stopped.args
        else:
            raise UsageError("memory = stream: the loss did not call its model, which it must do once")
        return self.model.begin(*args, **kwargs)

    def forward(self, stage: Stage, state: Tensor, further: Any) -> Tensor:
        """Return the output of a stage of blocks."""
        with torch.no_grad(), self.step.context(), self._repeatable([block for _, block in stage.blocks]):
            return self._blocks(stage, state, further)

    def first(self, batch: Any) -> tuple[Tensor, Any]:
        """Return the first stage's output, and the other arguments of blocks."""
        with torch.no_grad(), self.step.context(), self._repeatable(self.model.parts_before):
            return self.begin(batch)

    def score(self, state: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and the number of targets, from the last stage's input."""
        with self.step.context(), self._resumed(state):
            return self.step.evaluate(batch)  # type: ignore[no-any-return]

    def loss(self, planes: Sequence[Plane], state: Tensor, batch: Any) -> Tensor:
        """Add the loss and the last stage's gradient; return the gradient of its input."""
        state = state.detach().requires_grad_()
        with self._tracing(planes), self._resumed(state):
            loss, loss_sum, count = self.step.forward(batch, self.step.loss_factor)
        self.step.differentiate(loss, loss_sum, count)
        return _gradient_of(state)

    def again(self, planes: Sequence[Plane], state: Tensor, *, stage: Stage, further: Any, gradient: Tensor) -> Tensor:
        """Add a stage's gradient; return the gradient of its input."""
        state = state.detach().requires_grad_()
        with self._tracing(planes):
            out = self._blocks(stage, state, further)
        # Autograd's graph of a stage ends at its input, whose gradient is passed to the stage before as a tensor.
        out.backward(gradient)
        return _gradient_of(state)

    def first_again(self, planes: Sequence[Plane], batch: Any, gradient: Tensor) -> None:
        """Add the first stage's gradient."""
        with self._tracing(planes):
            state, _ = self.begin(batch)
        if state.requires_grad:
            state.backward(gradient)

    def _blocks(self, stage: Stage, hidden: Tensor, further: Any) -> Tensor:
        for at, block in stage.blocks:
            hidden = block(hidden, *further[at])
        return hidden

    @contextmanager
    def _tracing(self, planes: Sequence[Plane]) -> Iterator[None]:
        """In the block a forward pass can run whose gradient is computed afterwards."""
        with torch.enable_grad(), unlinked(planes), self.step.context():
            yield

    @contextmanager
    def _repeatable(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """In the block modules run that will run again for their gradient and must compute the same then.

        Raises:
            UsageError: a module drew a random number or wrote a buffer.
        """
        # States are compared instead of refusing such modules, as a dropout may have rate 0 and a buffer may only be
        # read.
        draws, buffers = self._draws(), _written(modules)
        yield
        for before, after in zip(draws, self._draws(), strict=True):
            if not torch.equal(before, after):
                raise UsageError(
                    f"memory = stream runs {type(modules[0]).__name__} a second time for its gradient, and it draws "
                    "random numbers (dropout?), which would be others then: set that to 0, or use memory = device"
                )
        for name, now in _written(modules).items():
            if now != buffers.get(name):
                raise UsageError(
                    f"memory = stream runs {type(modules[0]).__name__} a second time for its gradient, and it writes "
                    f"its buffer {name}, which would be written twice: use memory = device"
                )

    def _draws(self) -> list[Tensor]:
        """Return the states of torch's random generators."""
        device = self.step.device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    @contextmanager
    def _forward(self, instead: Callable[..., Any]) -> Iterator[None]:
        """In the block a call of the model runs `instead`."""
        model = self.step.model
        model.forward = instead
        try:
            yield
        finally:
            del model.forward

    @contextmanager
    def _resumed(self, hidden: Tensor) -> Iterator[None]:
        """In the block a call of the model returns its output from the last block's output `hidden`."""
        calls = 0

        def ended(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            # A captured loss runs this once, when it is traced, not at each call.
            if not torch.compiler.is_compiling():
                calls += 1
            return self.model.end(hidden)

        with self._forward(ended):
            yield
        if calls > 1:
            raise UsageError(
                f"memory = stream: the loss calls its model {calls} times, and the blocks run once: call it once, on "
                "all rows, or use memory = device"
            )


def _written(modules: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
    """Return each buffer's identity and version; one of them changes if the buffer is replaced or written in place."""
    named = (entry for module in modules for entry in module.named_buffers())
    return {name: (id(buffer), buffer._version) for name, buffer in named}


def _gradient_of(state: Tensor) -> Tensor:
    # A micro-batch without targets gives no gradient, but the stage before expects one.
    return torch.zeros_like(state) if state.grad is None else state.grad
