"""The engine of N members, whose step trains all of them at once.

Shapes: N members, R rows of a window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from monograph import compat
from monograph.engine import Engine, require_member_axis
from monograph.ensemble.call import Members
from monograph.ensemble.knobs import Knobs
from monograph.ensemble.layers import Layers
from monograph.ensemble.numbers import optimizers, require_read, seeds
from monograph.ensemble.stack import Stack
from monograph.ensemble.step import Stacked
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.graph import capture as graph
from monograph.graph.inspect import unwrap_
from monograph.graph.lora import kept_state
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.loop import EngineState
from monograph.loss import Batch, Loss, token_loss
from monograph.optim import AdamW, Optimizer
from monograph.schedule import Schedule, constant
from monograph.step import Clip, Update

Reduce = Literal["stack", "mean", "vote", "variance"]


@final
class Ensemble(Engine):
    """N modules of one structure that run and train as one batched program, each as it would alone.

        member i after k windows  =  the same module, trained alone on its windows with its own rate, decay and seed

    It is an engine for `monograph.train`, and a callable: `ensemble(x)` gives the members' outputs with a leading
    member axis. The members stay ordinary modules whose tensors are views of the stack, so that what was trained can be
    saved, evaluated or exported at any time. A member that diverges has its updates skipped and affects no other.

    Members that one graph cannot compute are refused: those that differ in more than their numbers, and modules that
    branch on a tensor's value or draw from torch's generator (dropout is exact: see `monograph.ensemble.dropout`).

    Attributes:
        members: the modules.
        knobs: the values that were varied, one mapping for each member.
    """

    def __init__(  # noqa: PLR0913 - the arguments of Resident, and those for members
        self,
        build: Sequence[nn.Module] | Callable[[Any], nn.Module],
        knobs: Sequence[Any] | None = None,
        *,
        loss: Loss = token_loss,
        optim: Optimizer | type[Optimizer] | Sequence[Optimizer] | None = None,
        schedule: Schedule | Sequence[Schedule] | None = None,
        clip: float | Clip | None = None,
        precision: Precision | None = None,
        remat: Remat.Budget = Remat.Budget(1.0),  # noqa: B008 - it never changes
        micro_batch: int | None = None,
        each: bool = False,
    ):
        """Stack the members; gradients and moments are made when they are first trained.

        Args:
            build: the modules, on their device; or a function that builds one from its knobs.
            knobs: the members' values, as `grid` returns them: `seed` is the seed of dropout (default: the member's
                number), and `lr`, `betas`, `eps`, `weight_decay` and `momentum` replace the optimizer's.
            loss: `loss(model, batch) -> (sum, count)` of one member.
            optim: one optimizer or its class, or one optimizer for each member.
            schedule: factor of the learning rate for each update's index, or one schedule for each member.
            clip: largest gradient norm of a member.
            precision: the compute dtype.
            remat: the share of all layers' activations that a captured graph keeps for the backward pass; torch chooses
                which, and the rest is recomputed. A smaller share does not always take less memory: try 0.5.
            micro_batch: rows per micro-batch; None: the whole window at once.
            each: the windows hold different rows for each member, [N, R, ...]; else all train on the same, [R, ...].

        Raises:
            UsageError: there are not as many knobs, optimizers or schedules as members, they differ in a field in which
                they cannot, or nothing reads a knob.
            InputRefused: the members differ in structure.
        """
        members, names = _built(build, knobs)
        self.knobs: tuple[Mapping[str, Any], ...] = tuple(names)
        self.members = tuple(members)
        self.stack = Stack(members)
        # Stacking moves nothing between devices: the members train on the device that they are on.
        device = next(self.stack.module.parameters()).device
        self._call = Members(self.stack, seeds(names, device))
        optims = optimizers(optim or AdamW(), names)
        # The caller may have used the knobs of members that it built itself for anything, so only a builder is watched.
        if callable(build) and not (each or isinstance(optim, list | tuple) or isinstance(schedule, Sequence)):
            require_read(knobs or (), optims[0])  # otherwise members or windows may have been made from them
        self._make_stacked = functools.partial(
            Stacked, self._call, loss=loss, optims=optims, schedules=_schedules(schedule, len(members)), clip=clip,
            precision=precision, remat=remat, each=each,
        )  # fmt: skip
        # torch's checkpoint does not run inside of vmap, so blocks are never recomputed.
        own_rows = len(members) if each else None
        super().__init__(lambda: self.stacked.step, micro_batch, members=own_rows, recomputes=False)
        # An attribute, since `compile` puts a compiled function in its place.
        self._infer: Callable[..., Any] = self._inferred
        self._in_one_graph, self._begun = False, False
        self._waiting: Batch | None = None  # a window for the graph of a whole update

    @functools.cached_property
    def stacked(self) -> Stacked:
        """Return the step of all members; made at first use, with gradients and moments."""
        stacked = self._make_stacked()
        self.stack.relink()
        return stacked

    @property
    def size(self) -> int:
        """Return N."""
        return self.stack.size

    @property
    def model(self) -> nn.Module:
        """Return a module like the members, with parameters and buffers stacked [N, ...] and the members' mode."""
        return self.stack.module

    def __call__(self, *inputs: Any, each: bool = False, reduce: Reduce = "stack", **named: Any) -> Any:
        """Return the members' outputs.

        Args:
            inputs: the arguments of one member's call.
            each: whether every tensor in the inputs has a leading member axis; else all members get the same.
            reduce: "stack": outputs [N, ...]; "mean" or "variance" (of N - 1) over the members; "vote": the class [...]
                that most members score highest, of outputs [N, ..., classes].
            named: keyword arguments of the call.

        Raises:
            UsageError: `each`, and a tensor has no member axis; or `reduce` is none of those.
        """
        if each:
            require_member_axis((inputs, named), self.size, "inputs")
        with self._call.context():
            out = self._infer(inputs, named, each)
        return out if reduce == "stack" else tree_map(functools.partial(_reduced, reduce), out)

    def compile(self, backend: graph.Backend = "inductor") -> Ensemble:
        """Compile `ensemble(x)` in place, one graph for each shape and mode, and return the ensemble.

        Training is not affected: `capture` compiles that.

        Raises:
            CaptureFailed: at a call, torch cannot compile it; the message says which part and why.
        """
        compat.allow_recurrent()
        self._infer = graph.compiled(self._inferred, backend)
        return self

    def layers(self, *inputs: Any, each: bool = False, **named: Any) -> Layers:
        """Return how each part of the members runs: batched, or looped over members, and why. Printed, it is a table.

        The arguments are those of a call; the members run once, in their mode, and stay as they are.

        Raises:
            InputRefused: a part cannot run for all members at once; the message says which and why.
        """
        return self._call.layers(_run, inputs, named, each=each)

    def _inferred(self, inputs: tuple[Any, ...], named: dict[str, Any], each: bool) -> Any:
        return self._call(_run, inputs, named, each=each)

    def capture(self, window: Batch, backend: graph.Backend = "inductor", scope: graph.Scope = "whole") -> str | None:
        """Compile the step in place; see `Engine.capture`.

        Raises:
            UsageError: the scope is not "whole".
        """
        if scope != "whole":
            raise UsageError(f"scope {scope!r}: an ensemble's step is one graph, whatever its depth: take 'whole'")
        compat.allow_recurrent()
        # In one graph of forward and backward pass no budget decides what is kept; a GPU replays micro-steps.
        whole = self._rows(window) <= (self.micro_batch or self._rows(window))
        self._in_one_graph = whole and self.stacked.kept_share == 1 and self.step.recorder is None
        reason = super().capture(window, backend, scope)
        # If torch cannot differentiate inside of one graph, it may still compile two.
        if reason and self._in_one_graph:
            self._in_one_graph = False
            reason = super().capture(window, backend, scope)
        return reason

    def _warm(self, batch: Batch) -> None:
        if not self._in_one_graph:
            super()._warm(batch)
            return
        step = self.step
        with step.counters_kept():
            self.stacked.frozen.fill_(True)  # so that the update runs and changes nothing
            self.stacked.update_whole(batch)
            step.index -= 1
        self._scored(batch)

    def accumulate(self, window: Batch) -> None:
        """Add the window's exact gradients; if one graph makes a whole update, `update` does that."""
        # A graph of a whole update takes its window at `update`. If a second window comes before that, both are
        # accumulated in the usual way.
        # Only for a single micro-batch, because this graph keeps no gradient to which another could be added.
        fits = self._waiting is None and self._rows(window) <= (self.micro_batch or self._rows(window))
        if self._in_one_graph and fits and not self._begun:
            self._waiting = {name: tensor.clone() for name, tensor in window.items()}  # the owner may write to its own
            return
        parts, self._waiting, self._begun = (self._waiting, window), None, True
        for part in parts:
            if part is not None:
                super().accumulate(part)

    def load_state(self, state: EngineState) -> None:
        """Copy a state as `Engine.load_state` does; a window that waits is forgotten, too."""
        super().load_state(state)
        self._waiting, self._begun = None, False

    def update(self) -> Update:
        """Apply the accumulated gradients.

        Raises:
            OutOfDeviceMemory: in the graph of a whole update, which may have been made in part.
        """
        window, self._waiting, self._begun = self._waiting, None, False
        if window is None:
            return super().update()
        try:
            return self.stacked.update_whole(next(self._micro_batches(window)))
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"an update of {self.size} members does not fit the device's memory any more, and may have been made "
                "in part: go on from a checkpoint, with fewer members or a smaller micro_batch"
            ) from error

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (sums of losses, targets) of all members on the same batch, [N] each; see `Engine.evaluate`."""
        if self.stacked.each:
            batch = {name: tensor.expand(self.size, *tensor.shape).contiguous() for name, tensor in batch.items()}
        return self._scored(batch)

    def freeze(self, members: Sequence[int]) -> None:
        """Stop updating these members, for good."""
        self.stacked.frozen[list(members)] = True

    def member_state(self, member: int) -> EngineState:
        """Return a copy of a member's state, as a `Resident` that had trained it alone would.

        Args:
            member: the member's number.
        """
        step = self.step
        optimizer = {
            f"{buffer}.{name}": view[member].clone()
            for plane in step.planes
            for buffer, flat in plane.state.items()
            for name, view in plane.views(flat)
        }
        # Copies, since a view of one member would keep the memory of all alive.
        model = {name: tensor.clone() for name, tensor in kept_state(self.members[member]).items()}
        counters = {name: counter.tolist() for name, counter in self.stacked.counters(member).items()}
        return EngineState(model, optimizer, {"index": step.index, **counters})


def _built(
    build: Sequence[nn.Module] | Callable[[Any], nn.Module], knobs: Sequence[Any] | None
) -> tuple[list[nn.Module], list[dict[str, Any]]]:
    """Return the members, and the varied values of each by name."""
    members = [build(of) for of in knobs or ()] if callable(build) else list(build)
    if odd := [member for member in members if not isinstance(member, nn.Module)]:
        raise UsageError(f"a member is a {type(odd[0]).__name__}: expected a torch.nn.Module")
    members = [unwrap_(member) for member in members]
    if knobs is None:
        return members, [{} for _ in members]
    if len(knobs) != len(members):
        raise UsageError(f"{len(knobs)} knobs for {len(members)} members: give one each, as `grid` does")
    return members, [dict(vars(of)) if hasattr(of, "__dict__") else _plain(of) for of in knobs]


def _plain(knobs: Any) -> dict[str, Any]:
    """Return the knobs as a dict, without marking them as read."""
    return dict(knobs.__getstate__() if isinstance(knobs, Knobs) else knobs)


def _schedules(schedule: Schedule | Sequence[Schedule] | None, members: int) -> list[Schedule]:
    schedules = list(schedule) if isinstance(schedule, Sequence) else [schedule or constant()] * members
    if len(schedules) != members:
        raise UsageError(f"{len(schedules)} schedules for {members} members: pass one, or one each")
    return schedules


def _run(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return module(*inputs, **named)


def _reduced(reduce: Reduce, out: Tensor) -> Tensor:
    if reduce == "mean":
        return out.mean(0)
    if reduce == "variance":
        return out.var(0)
    if reduce == "vote":
        return out.argmax(-1).mode(0).values
    raise UsageError(f"reduce = {reduce!r}: expected stack, mean, vote or variance")
