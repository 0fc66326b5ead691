"""Train N members with one engine, whose step updates all of them at once.

There are two ways to make an update. Usually `accumulate` adds up gradients and `update` applies them.
If a window (the micro-batches of one update) is a single micro-batch, one captured graph may compute
gradient and update together. Then `accumulate` only keeps the window, and `update` runs the graph.

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
from monograph.ensemble.call import MemberCaller
from monograph.ensemble.knobs import Knobs
from monograph.ensemble.layers import Layers
from monograph.ensemble.member_losses import loss_of_member, with_member_axis
from monograph.ensemble.optimizers import dropout_seeds, member_optimizers, require_used_knobs
from monograph.ensemble.replayed_calls import ReplayedCalls
from monograph.ensemble.stack import Stack, member_view
from monograph.ensemble.stacked_parameters import StackedParameters
from monograph.errors import OutOfDeviceMemory, UsageError
from monograph.graph import capture as graph
from monograph.graph.compilable import Scope
from monograph.graph.inspect import unwrap_
from monograph.graph.lora import checkpoint_state
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.graph.replay import CudaGraphs, Recorder
from monograph.loop import EngineState
from monograph.loss import Batch, Loss, token_loss
from monograph.model.llama import Llama
from monograph.optim import AdamW, Optimizer
from monograph.schedule import Schedule, constant
from monograph.step import Clip, Step, Update
from monograph.step.on_device import can_fuse_gradients
from monograph.step.retries import Retries

Reduce = Literal["stack", "mean", "vote", "variance"]


@final
class Ensemble(Engine):
    """N modules of one structure that run and train as one batched program, each as if it were
    alone.

        member i after k windows  =  the same module, trained alone on the same windows with the
        member's learning rate, weight decay and seed

    It is an engine for `monograph.train`, and a callable: `ensemble(x)` gives the members' outputs
    with a leading member axis. The members stay ordinary modules whose tensors are views of the
    stack, so they can be saved, evaluated or exported at any time. A member that diverges has its
    updates skipped, and no other member is affected.

    Members are refused if one graph cannot compute all of them: if they differ in more than the numbers in
    their tensors, decide by a tensor's value, or use torch's random numbers. Dropout is supported and exact,
    see `monograph.ensemble.dropout`.

    Attributes:
        members: the modules.
        knobs: the values in which the members differ, one mapping for each member.
        stack: the members' tensors with a leading member axis.
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
        block_formats: Mapping[str, str] | None = None,
    ):
        """Stack the members. Gradients and moments are allocated when they are first trained.

        Args:
            build: the modules, on their device; or a function that builds one from its knobs.
            knobs: one for each member, as `grid` returns them. `seed` is the seed of its dropout
                (by default the member's number). `lr`, `betas`, `eps`, `weight_decay` and
                `momentum` replace those of the optimizer.
            loss: `loss(model, batch) -> (sum, count)` of one member. If it is a module with buffers, it
                stays as it is, and each member gets buffers of its own, see `member_loss`.
            optim: one optimizer or its class, or one optimizer for each member; None: AdamW.
            schedule: factor of the learning rate for each update's index, or one schedule for each
                member; None: a constant factor of 1.
            clip: largest gradient norm of a member; None: norms are not clipped.
            precision: the compute dtype; None: the parameters' own dtype.
            remat: the share of all layers' activations that a captured graph keeps for the backward
                pass. torch chooses which others it recomputes. A smaller share does not always
                take less memory: try 0.5.
            micro_batch: rows per micro-batch; None: the whole window at once.
            each: whether each member has its own rows in a window, [N, R, ...]. Otherwise all
                members train on the same rows, [R, ...].
            block_formats: the parameters that are rounded to a format of a GGUF file, by name; see
                `monograph.Step`.

        Raises:
            UsageError: the number of knobs, optimizers or schedules is not the number of members,
                optimizers differ in a field that must be equal, or nothing reads a knob.
            InputRefused: the members differ in structure.
        """
        members, member_knobs = _build_members(build, knobs)
        self.knobs: tuple[Mapping[str, Any], ...] = tuple(member_knobs)
        self.members = tuple(members)
        self.stack = Stack(members)
        # Members train on the device that they are on.
        device = next(self.stack.module.parameters()).device
        loss = with_member_axis(loss, len(members), device)
        self._caller = MemberCaller(self.stack, dropout_seeds(member_knobs, device), loss)
        optims = member_optimizers(optim or AdamW(), member_knobs)
        # A caller may have read a knob elsewhere to make something for each member: the members
        # themselves, their optimizers, schedules or windows. So a knob that nothing here reads is refused
        # only if the caller gives none of these.
        members_given = not callable(build)
        optims_given = isinstance(optim, list | tuple)
        schedules_given = isinstance(schedule, Sequence)
        windows_given = each
        if not (members_given or optims_given or schedules_given or windows_given):
            require_used_knobs(knobs or (), optims[0])
        schedules = _schedules(schedule, len(members))

        def make_stacked_parameters() -> StackedParameters:
            parameters = StackedParameters(
                self._caller,
                optims=optims,
                schedules=schedules,
                precision=precision,
                remat=remat,
                each=each,
            )
            # The step registers itself as `parameters.step`.
            Step(
                self.model,
                loss=loss,
                optim=parameters.optim,
                clip=clip,
                precision=precision,
                parameters=parameters,
                block_formats=block_formats,
            )
            return parameters

        self._make_stacked_parameters = make_stacked_parameters
        # If this is a number, the engine expects windows to have a member axis of this size.
        members_in_windows = len(members) if each else None
        # torch.utils.checkpoint does not run inside vmap, so the engine cannot recompute blocks
        # when memory runs out.
        retries = Retries(micro_batch, recomputes=False)
        super().__init__(lambda: self.stacked_parameters.step, retries, members=members_in_windows)
        # What runs a call of the members. `compile` puts a compiled function here.
        self._call: Callable[..., Any] = self._call_members
        # What `__call__` calls. `_call_in_context` calls `_call`. On a GPU, `compile` puts a function here
        # that replays `_call_in_context`.
        self._infer: Callable[..., Any] = self._call_in_context
        # Whether one captured graph computes gradient and update of a window.
        self._updates_in_one_graph = False
        # The window that this graph takes at the next `update`.
        self._waiting_window: Batch | None = None
        # Whether gradients were added up since the last update.
        self._has_gradients = False

    @functools.cached_property
    def stacked_parameters(self) -> StackedParameters:
        """Return the members' parameters as the step uses them.

        At first use, they and the step are made, and gradients and moments are allocated.
        """
        parameters = self._make_stacked_parameters()
        # The step has moved the stack's parameters into planes.
        self.stack.relink()
        return parameters

    @property
    def size(self) -> int:
        """Return N."""
        return self.stack.size

    @property
    def model(self) -> nn.Module:
        """Return a module of the members' structure whose parameters and buffers are [N, ...].

        All members run in its mode, training or evaluation.
        """
        return self.stack.module

    def __call__(
        self, *inputs: object, each: bool = False, reduce: Reduce = "stack", **named: object
    ) -> Any:
        """Return the members' outputs.

        Args:
            inputs: the arguments of a member's call.
            each: whether each member has its own inputs, so that every tensor has a leading member
                axis. Otherwise all members get the same inputs.
            reduce: "stack": outputs [N, ...]; "mean" or "variance" (divided by N - 1) over the
                members; "vote": the class [...] that most members score highest, from outputs [N,
                ..., classes].
            named: the keyword arguments of a member's call.

        Raises:
            UsageError: a tensor has no member axis although `each` is true, or `reduce` has another
                value.
        """
        if each:
            require_member_axis((inputs, named), self.size, "inputs")
        outputs = self._infer(inputs, named, each)
        if reduce == "stack":
            return outputs
        return tree_map(functools.partial(_reduce_members, reduce), outputs)

    def compile(self, backend: graph.Backend = "inductor") -> Self:
        """Compile in place what `ensemble(x)` runs, and return the ensemble.

        There is a graph for each shape and mode. On a GPU, calls without gradients are replayed as CUDA
        graphs from the third call of a shape on. Training is not affected: `capture` compiles it.

        Args:
            backend: the compiler.

        Raises:
            CaptureFailed: raised by a later call if torch cannot compile it; the message says what
                and where.
        """
        compat.allow_recurrent()
        self._call = graph.compiled(self._call_members, backend)
        device = self._caller.seeds.device
        if device.type == "cuda":
            self._replay_calls(CudaGraphs(device))
        return self

    def _replay_calls(self, recorder: Recorder) -> None:
        """Replay calls that the recorder captures."""
        # `announce` may be replaced later, so it is looked up for each line.
        self._infer = ReplayedCalls(
            self._call_in_context, self._caller, recorder, lambda line: self.announce(line)
        )

    def _call_in_context(self, inputs: tuple[Any, ...], named: dict[str, Any], each: bool) -> Any:
        with self._caller.context():
            return self._call(inputs, named, each)

    def layers(self, *inputs: object, each: bool = False, **named: object) -> Layers:
        """Return how each part of the members runs: batched, or looped over the members and why.

        `print` gives a table. The arguments are those of a call. The members run once, in their
        mode, and do not change.

        Raises:
            InputRefused: a part cannot run for all members at once; the message says which and why.
        """
        return self._caller.layers(_call_module, inputs, named, each=each)

    def _call_members(self, inputs: tuple[Any, ...], named: dict[str, Any], each: bool) -> Any:
        return self._caller(_call_module, inputs, named, each=each)

    def capture(
        self, window: Batch, backend: graph.Backend = "inductor", scope: Scope = "whole"
    ) -> str | None:
        """Compile the step in place; see `Engine.capture`.

        Raises:
            UsageError: the scope is not "whole".
        """
        if scope != "whole":
            raise UsageError(
                f"scope {scope!r}: an ensemble's step is one graph, for deep models too: take 'whole'"
            )
        compat.allow_recurrent()
        # In compiled code, adapters' products may add their gradients to the planes. Eager code uses the
        # products of `monograph.graph.member_products` instead.
        if can_fuse_gradients(self.step, self.step.device.type == "cuda"):
            self.stacked_parameters.fuse_gradients_of_adapters()
        # Gradient and update can be one graph if four things hold. The window is one micro-batch. All
        # activations are kept: which of them are kept can only be chosen if the forward and the backward
        # pass are two graphs. There is no recorder, with which a GPU replays micro-steps. And the members are
        # not language models of this package: for these, two graphs are faster (dev/log.md), and their memory
        # is planned for two.
        self._updates_in_one_graph = (
            self._is_one_micro_batch(window)
            and self.stacked_parameters.kept_share == 1
            and self.step.recorder is None
            and not isinstance(self.members[0], Llama)
        )
        reason = super().capture(window, backend, scope)
        # torch may be able to compile as two graphs what it cannot differentiate inside one.
        if reason and self._updates_in_one_graph:
            self._updates_in_one_graph = False
            self.announce(f"gradient and update are compiled as two graphs: {reason}")
            reason = super().capture(window, backend, scope)
        return reason

    def _is_one_micro_batch(self, window: Batch) -> bool:
        rows = self._row_count(window)
        return self.micro_batch is None or rows <= self.micro_batch

    def _warm(self, batch: Batch) -> None:
        """Run once what was captured, so that it is compiled. The state is the same afterwards."""
        if not self._updates_in_one_graph:
            super()._warm(batch)
            return
        step = self.step
        with step.counters_kept():
            # While all members are frozen, an update is computed, but changes nothing. `frozen` is one of
            # the counters that `counters_kept` restores.
            self.stacked_parameters.frozen.fill_(True)
            self.stacked_parameters.accumulate_and_update(batch)
            # The update has counted itself, and the index is not among the counters.
            step.index -= 1
        self._score(batch)

    def accumulate(self, window: Batch) -> None:
        """Add the window's exact gradients, or keep the window for `update` if one graph computes
        gradient and update.
        """
        # The graph does not store its gradient, so the gradient of a second window could not be added to it.
        # So a window is kept only if it is the first of its update.
        is_first = self._waiting_window is None and not self._has_gradients
        if is_first and self._is_one_micro_batch(window) and self._updates_in_one_graph:
            # The caller may write to its window before `update`.
            self._waiting_window = {name: tensor.clone() for name, tensor in window.items()}
            return
        # If a window was kept and this is a second one, both are accumulated the usual way.
        waiting_window = self._waiting_window
        self._waiting_window = None
        self._has_gradients = True
        if waiting_window is not None:
            super().accumulate(waiting_window)
        super().accumulate(window)

    def load_state(self, state: EngineState) -> None:
        """Load a state as `Engine.load_state` does, and drop a window that waits for `update`."""
        super().load_state(state)
        self._waiting_window = None
        self._has_gradients = False

    def update(self) -> Update:
        """Apply the accumulated gradients.

        Raises:
            OutOfDeviceMemory: memory ran out in a graph of gradient and update. Some parameters may
                have been updated, so the engine cannot try again.
        """
        window = self._waiting_window
        self._waiting_window = None
        self._has_gradients = False
        if window is None:
            return super().update()
        try:
            return self.stacked_parameters.accumulate_and_update(next(self._micro_batches(window)))
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"an update of {self.size} members no longer fits the device's memory, and some parameters may have "
                "been updated: resume from a checkpoint, with fewer members or a smaller micro_batch"
            ) from error

    def evaluate_each(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each member's sum of losses and number of targets on rows of its own, [N] each.

        Args:
            batch: the members' rows, [N, R, ...].
        """
        if not self.stacked_parameters.each:
            raise UsageError("members that have rows of their own need an ensemble with each=True")
        return self._score(batch)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each member's sum of losses and number of targets on the same batch, [N] each; see
        `Engine.evaluate`.
        """
        if self.stacked_parameters.each:
            batch = {
                name: tensor.expand(self.size, *tensor.shape).contiguous()
                for name, tensor in batch.items()
            }
        return self._score(batch)

    def freeze(self, members: Sequence[int]) -> None:
        """Never update these members again."""
        self.stacked_parameters.frozen[list(members)] = True

    def member_state(self, member: int) -> EngineState:
        """Return a copy of a member's state. It equals the state of a `Resident` that has trained
        this member alone.

        Args:
            member: the member's number.
        """
        # Tensors are copied, as a view of one member would keep the memory of all members alive.
        optimizer = {name: view.clone() for name, view in self.member_buffers(member).items()}
        model = {
            name: tensor.clone() for name, tensor in checkpoint_state(self.members[member]).items()
        }
        counters = {
            name: counter.tolist()
            for name, counter in self.stacked_parameters.member_counters(member).items()
        }
        return EngineState(model, optimizer, {"index": self.index, **counters})

    def member_loss(self, member: int) -> Loss:
        """Return a member's loss, whose buffers are views of those that the ensemble reads and writes.

        Args:
            member: the member's number.
        """
        return loss_of_member(self.step.loss, member)

    def member_views(self, member: int, params: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return one member's part of values that all trained parameters have, by parameter.

        Such values are, for example, an earlier copy of the weights. The result has views of them.

        Args:
            member: the member's number.
            params: for each plane, the values of its parameters, in the plane's shape [N, size].
        """
        shapes = {name: p.shape for name, p in self.members[member].named_parameters()}
        return {
            name: member_view(view, member, shapes[name])
            for plane, flat in zip(self.step.planes, params, strict=True)
            for name, view in plane.views(flat)
        }

    def member_buffers(self, member: int) -> dict[str, Tensor]:
        """Return views of a member's part of the optimizer's buffers, by "<buffer>.<parameter>"."""
        shapes = {name: p.shape for name, p in self.members[member].named_parameters()}
        return {
            f"{buffer}.{name}": member_view(view, member, shapes[name])
            for plane in self.step.planes
            for buffer, flat in plane.state.items()
            for name, view in plane.views(flat)
        }


def _build_members(
    build: Sequence[nn.Module] | Callable[[Any], nn.Module], knobs: Sequence[Any] | None
) -> tuple[list[nn.Module], list[dict[str, Any]]]:
    """Build the members if they are not given, and return them and each member's knobs by name."""
    if callable(build):
        members = [build(member_knobs) for member_knobs in knobs or ()]
    else:
        members = list(build)
    for member in members:
        if not isinstance(member, nn.Module):
            raise UsageError(f"a member is a {type(member).__name__}: expected a torch.nn.Module")
    members = [unwrap_(member) for member in members]
    if knobs is None:
        return members, [{} for _ in members]
    if len(knobs) != len(members):
        raise UsageError(
            f"{len(knobs)} knobs for {len(members)} members: give one each, as `grid` does"
        )
    return members, [_knobs_by_name(member_knobs) for member_knobs in knobs]


def _knobs_by_name(knobs: Any) -> dict[str, Any]:
    """Return one member's knobs as a dict.

    Args:
        knobs: `Knobs`, whose values this does not count as read; any other mapping; or any object,
            whose attributes are its knobs.
    """
    if hasattr(knobs, "__dict__"):
        return dict(vars(knobs))
    if isinstance(knobs, Knobs):
        return knobs.__getstate__()
    return dict(knobs)


def _schedules(schedule: Schedule | Sequence[Schedule] | None, members: int) -> list[Schedule]:
    """Return one schedule for each member."""
    if isinstance(schedule, Sequence):
        schedules = list(schedule)
    else:
        schedules = [schedule or constant()] * members
    if len(schedules) != members:
        raise UsageError(f"{len(schedules)} schedules for {members} members: pass one, or one each")
    return schedules


def _call_module(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return module(*inputs, **named)


def _reduce_members(reduce: Reduce, out: Tensor) -> Tensor:
    """Return outputs [N, ...] reduced over the members."""
    if reduce == "mean":
        return out.mean(0)
    if reduce == "variance":
        return out.var(0)
    if reduce == "vote":
        return out.argmax(-1).mode(0).values
    raise UsageError(f"reduce = {reduce!r}: expected stack, mean, vote or variance")
