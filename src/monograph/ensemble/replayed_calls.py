"""Replay the compiled calls of an ensemble on a GPU. For small members, launching the kernels takes the host
longer than computing them takes the device.
"""

import threading
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from monograph import compat
from monograph.ensemble.call import MemberCaller
from monograph.graph.replay import HostState, Recorder, StaticInputs

# The maximum number of combinations of modes, settings of torch and memory layouts that are captured.
MAX_SETTINGS = 8
ONE_BY_ONE = "the kernels of a call are launched one by one"


class ReplayedCalls:
    """A replacement for `call(inputs, named, each)` that calls it at first and then replays it.

    A call gives the same bits as `call`, in tensors that the caller may keep. Weights may be written in
    place between calls. If their addresses change, as when the first update moves them, all calls are
    captured again.

    A call is not replayed if autograd may record it, if it is inside another capture, or if it is on
    another stream than the first call.
    """

    def __init__(
        self,
        call: Callable[[tuple[Any, ...], dict[str, Any], bool], Any],
        caller: MemberCaller,
        recorder: Recorder,
        announce: Callable[[str], None],
    ):
        """Take a function; nothing is allocated before the first call.

        Args:
            call: the compiled function.
            caller: has the members' tensors.
            recorder: captures the function.
            announce: gets each reason for calling instead of replaying, once.
        """
        self._call = call
        self._caller = caller
        self._recorder = recorder
        self._announce = announce
        self._device = caller.seeds.device
        self._replays: dict[Hashable, StaticInputs] = {}
        self._addresses: list[int] = []
        self._stream: int | None = None
        # The input buffers of a call that has written to its inputs. After such a call, nothing is
        # replayed any more.
        self._written_buffers: list[Tensor] | None = None
        # Calls from two threads would write their inputs to the same memory.
        self._lock = threading.Lock()

    @property
    def graph_count(self) -> int:
        """Return how many calls are captured."""
        return sum(replays.graph_count for replays in self._replays.values())

    def __call__(self, inputs: tuple[Any, ...], named: dict[str, Any], each: bool) -> Any:
        """Return the members' outputs."""
        tensors = _tensors((inputs, named))
        layouts = [_layout(tensor) for tensor in tensors]
        if None in layouts or not self._may_replay():
            return self._call(inputs, named, each)
        # A tensor that is made in inference mode cannot be written outside of it. The buffers of a replay are
        # written in later calls, which may be outside of it, so they are made outside, too.
        normal_mode = (
            torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        )
        with self._lock, normal_mode, torch.no_grad():
            addresses = self._caller.addresses()
            if addresses != self._addresses:
                self._replays.clear()
                self._addresses = addresses
            settings = (*layouts, self._caller.stack.module.training, *self._settings())
            replays = self._replays.get(settings)
            if replays is None and len(self._replays) < MAX_SETTINGS:
                replays = self._replays[settings] = self._static_inputs()
            if replays is not None:
                outputs = replays((inputs, named, each))
                if self._written_buffers is not None:
                    # A replay would write to the buffers alone, and not to the caller's tensors.
                    for tensor, buffer in zip(tensors, self._written_buffers, strict=True):
                        tensor.copy_(buffer)
                    self._replays.clear()
                    self._announce(f"{ONE_BY_ONE}: a member writes to its inputs")
                return outputs
        return self._call(inputs, named, each)

    def _may_replay(self) -> bool:
        """Return whether this is a place where a graph can be replayed."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or compat.makes_fake_tensors():
            return False
        if self._written_buffers is not None:
            return False
        if self._device.type != "cuda":
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        # Graphs share scratch memory, so they must run one after another.
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if self._stream is None:
            self._stream = stream
        return stream == self._stream

    def _settings(self) -> tuple[Hashable, ...]:
        """Return the settings of torch on which the compiled function depends."""
        kind = self._device.type
        return (
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def _static_inputs(self) -> StaticInputs:
        return StaticInputs(
            self._call_and_watch,
            self._recorder,
            self._device,
            lambda: HostState(self._caller.stack.module),
            lambda reason: self._announce(f"{ONE_BY_ONE}: {reason}"),
        )

    def _call_and_watch(self, batch: Any) -> Any:
        """Call the function on buffers, and notice if it writes to them."""
        buffers = _tensors(batch)
        versions = [buffer._version for buffer in buffers]
        outputs = self._call(*batch)
        if versions != [buffer._version for buffer in buffers]:
            self._written_buffers = buffers
        return outputs


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _layout(tensor: Tensor) -> str | None:
    """Return the name of a tensor's memory layout.

    The result is None for a layout that is neither of the two below: a buffer made for such a tensor
    might have another layout than the tensor.
    """
    if tensor.layout != torch.strided:
        return None
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    return None
