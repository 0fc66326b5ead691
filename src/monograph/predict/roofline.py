"""Predict an update's time on a device, from its datasheet and from how much of it real code reaches.

`Calibration` keeps how updates on this machine differed from their prediction, in time and memory, so that the next
plan is right.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from monograph.device import Device, clock, default_device, measured_matmul_flops
from monograph.errors import InputRefused, Unreadable
from monograph.graph.precision import Precision
from monograph.predict.estimate import (
    SCORE_NUMBERS,
    dense_bytes,
    recomputed_flops,
    score_numbers,
    stored_numbers,
    trained_adapters,
)
from monograph.predict.fake_memory import PASSING
from monograph.predict.flops import matmul_parameters
from monograph.predict.footprint import Work
from monograph.storage.reading import contents, parse_json

# Bytes that an update reads and writes per parameter. Captured, one pass over gradient, weights and two moments in
# fp32, and the zeroed gradient; eager, every intermediate goes through memory.
UPDATE_BYTES = {True: 36, False: 132}
# The same on the host, without norm and zeros, which stay on the device. Captured, one pass; eager, as many bytes more
# as it took longer (docs/log.md).
HOST_UPDATE_BYTES = {True: 28, False: 1700}
# The factor where weights are two halves, as generated code has no vectors of 16-bit integers.
HOST_HALVES = 3.7
# Kernels of one block, forward and backward together, as a profiler counts them.
KERNELS = {True: 40, False: 160}
# The host's time for one call of a block's separate graph, forward or backward (16 layers, a CPU, torch 2.13).
CALL_S = 0.13e-3
# The host's time for a micro-step: guards, the window's rows, autograd, Inductor's wrappers (docs/log.md).
MICRO_STEP_S = 1e-3


@dataclass(frozen=True)
class Efficiency:
    """The shares of the datasheet's rates that code reaches.

    Attributes:
        products: share of FLOP/s in large matrix products.
        attention: share of FLOP/s in the fused kernels.
        traffic: share of memory bytes/s in elementwise code.
        launch_s: seconds between the beginnings of two kernels that do nothing.
        saturating_tokens: tokens of a micro-batch at which products reach half of their share.
        measured: whether it was measured on this very card; otherwise it is a guess from other cards.
    """

    products: float = 0.75
    attention: float = 0.42
    traffic: float = 0.85
    launch_s: float = 5e-6
    saturating_tokens: int = 256
    measured: bool = False


# H200: products of 8192^3 at 788 of 989 TFLOP/s, a copy at 4.3 of 4.8 TB/s; other values are the defaults.
EFFICIENCIES = {"NVIDIA H200": Efficiency(products=0.797, traffic=0.896, measured=True)}
# For a CPU, whose FLOP/s are measured ones and whose bandwidth no datasheet gives.
CPU = Efficiency(products=0.9, attention=0.4, traffic=0.7, launch_s=2e-6, saturating_tokens=64)
CPU_BYTES_PER_S = 20e9
# The host's link where its rate is unknown (PCIe 4.0 with 16 lanes), and the share of a link that copies reach.
LINK_BYTES_PER_S, LINK_SHARE = 32e9, 0.8


@dataclass(frozen=True)
class UpdateTime:
    """Seconds of one update, by what they are spent on; nothing overlaps.

    Attributes:
        products_s: matrix products, recomputed ones included.
        attention_s: scores and mixing.
        traffic_s: elementwise code.
        launch_s: starting kernels, where that takes longer than running them.
        update_s: clipping and the optimizer.
        transfer_s: blocks' inputs to the host and back, which overlaps with everything except the update.
        launches_ahead: whether the host launches while the device works; a CPU does both.
    """

    products_s: float
    attention_s: float
    traffic_s: float
    launch_s: float
    update_s: float
    transfer_s: float = 0.0
    launches_ahead: bool = True

    @property
    def total_s(self) -> float:
        """Return the sum; launches and transfers overlap with work, whichever is longer."""
        work_s = self.products_s + self.attention_s + self.traffic_s
        if not self.launches_ahead:
            work_s += self.launch_s
        return max(work_s, self.launch_s, self.transfer_s) + self.update_s


def _reached(device: Device) -> tuple[Efficiency, float]:
    """Return the shares that code reaches on a device, and the bytes/s of its memory that elementwise code reaches."""
    rate = EFFICIENCIES.get(device.name, CPU if device.type == "cpu" else Efficiency())
    return rate, (device.bandwidth_bytes_per_s or CPU_BYTES_PER_S) * rate.traffic


def update_time(work: Work, device: Device, peak_flops: float) -> UpdateTime:
    """Return the seconds of an update of `work.window_rows` rows, cut into micro-batches of `work.rows`.

    products = (6 N_matmul + L recomputed FLOPs) tokens / (peak e m / (m + m_half)),   m tokens a micro-batch; with
               adapters of A parameters 4 N_matmul + 6 A
    attention = L (6 d_attn T + recomputed FLOPs) tokens / (peak e_attn)
    traffic = 3 (numbers stored per token and layer) bytes / bandwidth,      written once, read twice; a third more for
              recomputed blocks, or eagerly for any that recompute something; plus, in each pass of a micro-batch, the
              weights that are made dense from fewer bits
    """
    config, captured, layers = work.config, work.compile != "none", work.config.num_hidden_layers
    again, attended_again = recomputed_flops(work)
    rate, bandwidth = _reached(device)
    tokens, micro = work.window_rows * work.length, work.tokens
    adapters = trained_adapters(work)  # next to weights without gradients
    flops = (4 if adapters else 6) * matmul_parameters(config) + 6 * adapters + layers * again
    width = config.num_attention_heads * config.head_dim
    attended = layers * (6 * width * work.length + attended_again)
    numbers = stored_numbers(work, "none")
    if work.remat not in ("none", "full", "offload"):  # probabilities are recomputed where they are read
        numbers -= (SCORE_NUMBERS - 1) * score_numbers(work)
    if again if captured else work.remat != "none":
        numbers *= 4 / 3
    traffic = 3 * numbers * work.number_bytes * layers
    steps = -(-work.window_rows // work.rows)
    passes = 2 + (work.remat in ("full", "offload"))
    calls_s = steps * (MICRO_STEP_S + (2 * layers * CALL_S if work.compile == "blocks" else 0.0))
    crossing = 2 * layers * config.hidden_size * work.number_bytes
    link = device.link_bytes_per_s or LINK_BYTES_PER_S
    return UpdateTime(
        products_s=flops * tokens / (peak_flops * rate.products * micro / (micro + rate.saturating_tokens)),
        attention_s=attended * tokens / (peak_flops * rate.attention),
        traffic_s=(traffic * tokens + passes * steps * dense_bytes(work)) / bandwidth,
        launch_s=KERNELS[captured] * layers * steps * rate.launch_s * (1 if captured else 2) + calls_s,
        update_s=(adapters or config.parameter_count()) * UPDATE_BYTES[captured] / bandwidth,
        transfer_s=tokens * crossing / (LINK_SHARE * link) if work.remat == "offload" else 0.0,
        launches_ahead=device.type != "cpu",
    )


@dataclass(frozen=True)
class PassTimes:
    """Seconds that a model in stages takes for one micro-batch, pass by pass.

    Attributes:
        first_s: the embedding.
        forward_s: one block's forward pass.
        again_s: one block's forward pass once more, and its backward pass.
        loss_s: the head and the loss, forward and backward.
        first_again_s: the embedding's gradient.
        number_s: the update of one number.
        host_number_s: the update of one number on the host.
    """

    first_s: float
    forward_s: float
    again_s: float
    loss_s: float
    first_again_s: float
    number_s: float
    host_number_s: float


def pass_times(work: Work, device: Device, peak_flops: float, host_bytes_per_s: float = CPU_BYTES_PER_S) -> PassTimes:
    """Apply the same roofline pass by pass, where every block is computed again from its input.

    Included is what `work.remat` recomputes within a stage. `host_bytes_per_s` is the rate of the host's memory.
    """
    config, captured = work.config, work.compile != "none"
    rate, bandwidth = _reached(device)
    tokens, number = work.tokens, work.number_bytes
    products = peak_flops * rate.products * tokens / (tokens + rate.saturating_tokens)
    head, layers = config.vocab_size * config.hidden_size, config.num_hidden_layers
    of_block = (matmul_parameters(config) - head) // layers
    attended = 2 * config.num_attention_heads * config.head_dim * work.length
    again, attended_again = recomputed_flops(work)
    kernels_s = KERNELS[captured] / 3 * rate.launch_s * (1 if captured else 2) + CALL_S * (work.compile == "blocks")
    crossing_s = stored_numbers(work, "none") * number * tokens / bandwidth  # of the whole block, once

    def passed(flops: float, attention: float, crossings: float) -> float:
        work_s = tokens * (flops / products + attention / (peak_flops * rate.attention)) + crossings * crossing_s
        launch_s = crossings * kernels_s
        return max(work_s, launch_s) if device.type != "cpu" else work_s + launch_s

    embedded_s = 2 * config.hidden_size * number * tokens / bandwidth
    halves = 1.0 if work.precision == "fp32" else HOST_HALVES
    return PassTimes(
        first_s=embedded_s,
        forward_s=passed(2 * of_block, attended, 1),
        again_s=passed(6 * of_block + again, 3 * attended + attended_again, 4 if again else 3),
        loss_s=6 * head * tokens / products + (0.0 if device.type != "cpu" else MICRO_STEP_S),
        first_again_s=embedded_s + 12 * head / bandwidth,  # a gradient of zeros, filled and added
        number_s=UPDATE_BYTES[captured] / bandwidth,
        host_number_s=HOST_UPDATE_BYTES[captured] * halves / (host_bytes_per_s * CPU.traffic),
    )


SCHEMA = "monograph.calibration/1"
MOST = 9  # measurements kept of a kind, the newest; their median counts
# An allocator's memory beyond a trace is partly the same for all steps and partly grows with them, in unknown shares:
# it is applied to steps whose activations and workspace are as large within this factor.
ALIKE = 2.0
# What a step allocates and frees is corrected downwards by at most this share of its trace (law 12).
LEAST = 0.05


class Calibration:
    """Ratios of measured to predicted time, by device and precision, and bytes beyond a traced peak, by scope as well.

    The file is a convenience: an unreadable one counts as empty, a failed write is forgotten, and nothing fails.
    """

    def __init__(self, file: Path) -> None:
        """Read a file, which need not exist."""
        self._file = file
        self._seen: dict[str, list[float]] = {}
        self._beyond: dict[str, list[tuple[int, int]]] = {}  # bytes beyond the trace, and those that pass in it
        self._unread = False
        with suppress(InputRefused, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError):
            try:
                saved = parse_json(contents(file) or b"")
            except Unreadable:
                self._unread = True
                return
            if saved.get("schema") == SCHEMA:
                self._seen = {str(kind): [float(ratio) for ratio in ratios] for kind, ratios in saved["seen"].items()}
                for kind, beyond in saved.get("beyond", {}).items():
                    self._beyond[kind] = [(int(more), int(passing)) for more, passing in beyond]

    def slowness(self, device: Device, precision: str) -> float | None:
        """Return the median ratio on this device in this precision; None if there was none."""
        seen = [ratio for ratio in self._seen.get(_kind(device, precision), ()) if 0 < ratio < float("inf")]
        return statistics.median(seen) if seen else None

    def note(self, device: Device, work: Work, seconds: float, peak_flops: float) -> None:
        """Keep the time of an update."""
        seen = self._seen.setdefault(_kind(device, work.precision), [])
        seen.append(seconds / update_time(work, device, peak_flops).total_s)
        del seen[:-MOST]
        self._write()

    def residual(self, device: Device, work: Work, traced: Mapping[str, int]) -> int:
        """Return by how many bytes the peaks of like steps differ from their traces on this device: the median, else 0.

        Steps are alike if they have the same precision and scope, and within a factor of two as many bytes that pass:
        the traced activations, loss head and workspace. A negative value is at most the workspace and a twentieth of
        what passes.

        Args:
            device: the device that it runs on.
            work: the step.
            traced: the step's peak by origin.
        """
        passing = _passing(traced)
        seen = self._beyond.get(_kind(device, work.precision, work.compile), ())
        alike = [more for more, then in seen if then <= ALIKE * passing and passing <= ALIKE * then]
        least = min(int(LEAST * passing), traced.get("workspace", 0))
        return max(-least, int(statistics.median(alike))) if alike else 0

    def note_memory(self, device: Device, work: Work, traced: Mapping[str, int], measured_bytes: int) -> None:
        """Keep how far a step's measured peak is from its trace; more than all that passes has another cause."""
        more, passing = measured_bytes - sum(traced.values()), _passing(traced)
        if abs(more) > passing:
            return
        seen = self._beyond.setdefault(_kind(device, work.precision, work.compile), [])
        seen.append((more, passing))
        del seen[:-MOST]
        self._write()

    def _write(self) -> None:
        if self._unread:  # a write would lose what was seen before
            return
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"schema": SCHEMA, "seen": self._seen, "beyond": self._beyond}))
            temporary.replace(self._file)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _passing(traced: Mapping[str, int]) -> int:
    return sum(traced.get(origin, 0) for origin in PASSING)


def _kind(device: Device, *way: str) -> str:
    """Return the key of measurements; times share one for all ways in a precision, so that their order stays."""
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return ", ".join((device.name + threads, *way))


def peak_flops(device: Device, precisions: tuple[str, ...]) -> Mapping[str, float]:
    """Return FLOP/s by precision: the datasheet's, or what this machine's default device was measured at."""
    known = dict(device.peak_flops)
    if "bf16" in known:
        known.setdefault("fp16", known["bf16"])
    dtypes = {name: Precision(name).dtype for name in precisions if name not in known}
    return known | {name: measured_matmul_flops(default_device(), dtype, 0.1) for name, dtype in dtypes.items()}


def measured_memory_bytes_per_s(seconds: float = 0.1) -> float:
    """Return the bytes/s of the host's memory: two vectors of 64 MiB are added to a third for about `seconds`.

    It is what this machine reaches now, other load included, with the threads that torch has.
    """
    one, other, out = (torch.zeros(2**24) for _ in range(3))
    torch.add(one, other, out=out)
    count, start = 0, clock()
    while count == 0 or clock() - start < seconds:
        torch.add(one, other, out=out)
        count += 1
    return count * 3 * one.nbytes / (clock() - start)
