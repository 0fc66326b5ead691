"""Train N members with one engine, whose step updates all of them at once.

Shapes: N members, R rows of a window.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from monograph import compat
from monograph.engine import Engine, require_member_axis
from monograph.ensemble.call import Members
from monograph.ensemble.knobs import Knobs
from monograph.ensemble.layers import Layers
from monograph.ensemble.optimizers import optimizers, require_read, seeds
from monograph.ensemble.stack import Stack
from monograph.ensemble.stacked import Stacked
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.graph import capture as graph
from monograph.graph.compilable import Scope
from monograph.graph.inspect import unwrap_
from monograph.graph.lora import kept_state
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.loop import EngineState
from monograph.loss import Batch, Loss, token_loss
from monograph.optim import AdamW, Optimizer
from monograph.schedule import Schedule, constant
from monograph.step import Clip, Step, Update
from monograph.step.retries import Retries

Reduce = Literal["stack", "mean", "vote", "variance"]


@final
class Ensemble(Engine):
    """N modules of one structure that run and train as one batched program, each as it would alone.

        member i after k windows  =  the same module, trained alone on its windows with its own
        rate, decay and seed

    It is an engine for `monograph.train`, and a callable: `ensemble(x)` gives the members' outputs
    with a leading member axis. The members stay ordinary modules whose tensors are views of the
    stack, so they can be saved, evaluated or exported at any time. A member that diverges has its
    updates skipped, and no other member is affected.

    Refused are members that differ in more than their numbers, and modules that one graph cannot
    hold: those that decide by a tensor's value or draw from torch's generator (dropout is exact:
        see `monograph.ensemble.layers`).

    Attributes:
        members: the modules.
        knobs: the values that were varied, one mapping for each member.
    """

    def __init__(
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
            knobs: one for each member, as `grid` returns them: `seed` is the seed of its dropout
                (by default the member's number), and `lr`, `betas`, `eps`, `weight_decay` and
                `momentum` replace the optimizer's.
            loss: `loss(model, batch) -> (sum, count)` of one member.
            optim: one optimizer or its class, or one optimizer for each member.
            schedule: factor of the learning rate for each update's index, or one schedule for each
                member.
            clip: largest gradient norm of a member.
            precision: the compute dtype.
            remat: the share of all layers' activations that a captured graph keeps for the backward
                pass; torch chooses what it computes again instead. A smaller share does not always
                take less memory: try 0.5.
            micro_batch: rows per micro-batch; None: the whole window at once.
            each: whether windows hold rows of its own for each member, [N, R, ...]; else all train
                on the same rows, [R, ...].

        Raises:
            UsageError: there are not as many knobs, optimizers or schedules as members, optimizers
                differ in a field that must be equal, or nothing reads a knob.
            InputRefused: the members differ in structure.
        """
        members, names = _built(build, knobs)
        self.knobs: tuple[Mapping[str, Any], ...] = tuple(names)
        self.members = tuple(members)
        self.stack = Stack(members)
        # Stacking moves nothing between devices: members train on the device that they are on.
        self._call = Members(self.stack, seeds(names, next(self.stack.module.parameters()).device))
        optims = optimizers(optim or AdamW(), names)
        # Whether knobs are read is known only if they are used by a builder alone: members,
        # optimizers, schedules and windows of the caller's may have been made from them.
        if callable(build) and not (
            each or isinstance(optim, list | tuple) or isinstance(schedule, Sequence)
        ):
            require_read(knobs or (), optims[0])
        schedules = _schedules(schedule, len(members))

        def made() -> Stacked:
            stacked = Stacked(
                self._call,
                optims=optims,
                schedules=schedules,
                precision=precision,
                remat=remat,
                each=each,
            )
            Step(
                self.model,
                loss=loss,
                optim=stacked.optim,
                clip=clip,
                precision=precision,
                parameters=stacked,
            )
            return stacked

        self._make_stacked = made
        # torch's checkpoint does not run inside of vmap, so blocks are never recomputed.
        own_rows = len(members) if each else None
        super().__init__(
            lambda: self.stacked.step, Retries(micro_batch, recomputes=False), members=own_rows
        )
        # This is an attribute, as `compile` replaces it by a compiled function.
        self._infer: Callable[..., Any] = self._inferred
        self._in_one_graph, self._begun = False, False
        # A window that one graph of the whole update takes at `update`.
        self._waiting: Batch | None = None

    @functools.cached_property
    def stacked(self) -> Stacked:
        """Return the parameters of the members and their step; it is made at first use, with
        gradients and moments.
        """
        stacked = self._make_stacked()
        self.stack.relink()
        return stacked

    @property
    def size(self) -> int:
        """Return N."""
        return self.stack.size

    @property
    def model(self) -> nn.Module:
        """Return a module like the members with stacked parameters and buffers, [N, ...]; all run
        in its mode.
        """
        return self.stack.module

    def __call__(
        self, *inputs: object, each: bool = False, reduce: Reduce = "stack", **named: object
    ) -> Any:
        """Return the members' outputs.

        Args:
            inputs: the arguments of a member's call.
            each: whether each member has inputs of its own, so that every tensor has a leading
                member axis; else all get the same.
            reduce: "stack": outputs [N, ...]; "mean" or "variance" (divided by N - 1) over the
                members; "vote": the class [...] that most members score highest, from outputs [N,
                ..., classes].
            named: the keyword arguments of a member's call.

        Raises:
            UsageError: a tensor has no member axis although `each` is true, or `reduce` is none of
                these.
        """
        if each:
            require_member_axis((inputs, named), self.size, "inputs")
        with self._call.context():
            out = self._infer(inputs, named, each)
        return out if reduce == "stack" else tree_map(functools.partial(_reduced, reduce), out)

    def compile(self, backend: graph.Backend = "inductor") -> Self:
        """Compile what `ensemble(x)` runs, in place, with a graph for each shape and mode, and
        return the ensemble.

        This does not concern training, which `capture` compiles.

        Raises:
            CaptureFailed: at a later call, torch cannot compile it; the message says what and
                where.
        """
        compat.allow_recurrent()
        self._infer = graph.compiled(self._inferred, backend)
        return self

    def layers(self, *inputs: object, each: bool = False, **named: object) -> Layers:
        """Return how each part of the members runs: batched, or looped over the members and why;
        `print` gives a table.

        The arguments are those of a call. The members run once, in their mode, and do not change.

        Raises:
            InputRefused: a part cannot run for all members at once; the message says which and why.
        """
        return self._call.layers(_run, inputs, named, each=each)

    def _inferred(self, inputs: tuple[Any, ...], named: dict[str, Any], each: bool) -> Any:
        return self._call(_run, inputs, named, each=each)

    def capture(
        self, window: Batch, backend: graph.Backend = "inductor", scope: Scope = "whole"
    ) -> str | None:
        """Compile the step in place; see `Engine.capture`.

        Raises:
            UsageError: the scope is not "whole".
        """
        if scope != "whole":
            raise UsageError(
                f"scope {scope!r}: an ensemble's step is one graph, whatever its depth: take 'whole'"
            )
        compat.allow_recurrent()
        # One graph of both passes cannot keep a share of activations between them. A GPU replays
        # micro-steps instead.
        whole = self._rows(window) <= (self.micro_batch or self._rows(window))
        self._in_one_graph = whole and self.stacked.kept_share == 1 and self.step.recorder is None
        reason = super().capture(window, backend, scope)
        # torch may be able to compile as two graphs what it cannot differentiate inside one.
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
            self.stacked.frozen.fill_(True)  # the update is made, but changes nothing
            self.stacked.update_whole(batch)
            step.index -= 1
        self._score(batch)

    def accumulate(self, window: Batch) -> None:
        """Add the window's exact gradients; where one graph makes a whole update, that is left to
        `update`.
        """
        # If gradient and update are one graph, the window waits for `update`. It must be one
        # micro-batch, as the graph keeps no gradient that another one could be added to. A second
        # window before `update` ends the wait, and both are accumulated in the usual way.
        fits = self._waiting is None and self._rows(window) <= (
            self.micro_batch or self._rows(window)
        )
        if self._in_one_graph and fits and not self._begun:
            # The caller may write to it.
            self._waiting = {name: tensor.clone() for name, tensor in window.items()}
            return
        parts = (self._waiting, window)
        self._waiting = None
        self._begun = True
        for part in parts:
            if part is not None:
                super().accumulate(part)

    def load_state(self, state: EngineState) -> None:
        """Copy a state as `Engine.load_state` does, and forget a waiting window."""
        super().load_state(state)
        self._waiting, self._begun = None, False

    def update(self) -> Update:
        """Apply the accumulated gradients.

        Raises:
            OutOfDeviceMemory: memory ran out in a graph of a whole update, which may have been made
                in part.
        """
        window = self._waiting
        self._waiting = None
        self._begun = False
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
        """Return each member's sum of losses and targets on the same batch, [N] each; see
        `Engine.evaluate`.
        """
        if self.stacked.each:
            batch = {
                name: tensor.expand(self.size, *tensor.shape).contiguous()
                for name, tensor in batch.items()
            }
        return self._score(batch)

    def freeze(self, members: Sequence[int]) -> None:
        """Stop updating these members, for good."""
        self.stacked.frozen[list(members)] = True

    def member_state(self, member: int) -> EngineState:
        """Return a copy of a member's state, as a `Resident` would return it that had trained this
        member alone.

        Args:
            member: the member's number.
        """
        # Tensors are copied, as a view of one member would keep the memory of all members alive.
        optimizer = {name: view[member].clone() for name, view in self._buffers().items()}
        model = {name: tensor.clone() for name, tensor in kept_state(self.members[member]).items()}
        counters = {
            name: counter.tolist() for name, counter in self.stacked.counters_of(member).items()
        }
        return EngineState(model, optimizer, {"index": self.index, **counters})


def _built(
    build: Sequence[nn.Module] | Callable[[Any], nn.Module], knobs: Sequence[Any] | None
) -> tuple[list[nn.Module], list[dict[str, Any]]]:
    """Return the members, and each one's knobs by name."""
    members = [build(own) for own in knobs or ()] if callable(build) else list(build)
    if odd := [member for member in members if not isinstance(member, nn.Module)]:
        raise UsageError(f"a member is a {type(odd[0]).__name__}: expected a torch.nn.Module")
    members = [unwrap_(member) for member in members]
    if knobs is None:
        return members, [{} for _ in members]
    if len(knobs) != len(members):
        raise UsageError(
            f"{len(knobs)} knobs for {len(members)} members: give one each, as `grid` does"
        )
    return members, [dict(vars(own)) if hasattr(own, "__dict__") else _plain(own) for own in knobs]


def _plain(knobs: Knobs | Mapping[str, Any]) -> dict[str, Any]:
    """Return knobs as a dict, without counting their values as read."""
    return dict(knobs.__getstate__() if isinstance(knobs, Knobs) else knobs)


def _schedules(schedule: Schedule | Sequence[Schedule] | None, members: int) -> list[Schedule]:
    schedules = (
        list(schedule) if isinstance(schedule, Sequence) else [schedule or constant()] * members
    )
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
