"""How long an update takes on a device, from its datasheet and from how much of it real code reaches.

How updates on this machine differed from their prediction, in time and memory, is kept, so that the next plan is right
(`Calibration`).
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

# Bytes that an update reads and writes per parameter: gradient, weights and two moments in fp32, and the gradient
# zeroed, in one pass; eager every intermediate goes through memory.
UPDATE_BYTES = {True: 36, False: 132}
# The same on the host, where norm and zeros stay on the device: what is read and written, in one pass; eager as many
# bytes more as it took longer (docs/log.md).
HOST_UPDATE_BYTES = {True: 28, False: 1700}
# And where weights are two halves: how many times as long, as generated code has no vectors of 16-bit integers.
HOST_HALVES = 3.7
# Kernels of one block, forward and backward together, as a profiler counts them.
KERNELS = {True: 40, False: 160}
# The host's time for one call of a block's own graph, forward or backward (16 layers, a CPU, torch 2.13).
CALL_S = 0.13e-3
# And for a micro-step: guards, the window's rows, autograd, Inductor's wrappers (docs/log.md).
MICRO_STEP_S = 1e-3


@dataclass(frozen=True)
class Efficiency:
    """Which share of the datasheet code reaches.

    Attributes:
        products: of FLOP/s, in large matrix products.
        attention: of FLOP/s, in the fused kernels.
        traffic: of memory bytes/s, in elementwise code.
        launch_s: between the beginnings of two kernels that do nothing.
        saturating_tokens: of a micro-batch at which products reach half of their share.
        measured: on this very card; what is not is a guess from cards that were.
    """

    products: float = 0.75
    attention: float = 0.42
    traffic: float = 0.85
    launch_s: float = 5e-6
    saturating_tokens: int = 256
    measured: bool = False


# H200: products of 8192^3 at 788 of 989 TFLOP/s, a copy at 4.3 of 4.8 TB/s; the rest as for any card.
EFFICIENCIES = {"NVIDIA H200": Efficiency(products=0.797, traffic=0.896, measured=True)}
# Of a CPU, whose FLOP/s are measured ones and whose bandwidth nobody tells.
CPU = Efficiency(products=0.9, attention=0.4, traffic=0.7, launch_s=2e-6, saturating_tokens=64)
CPU_BYTES_PER_S = 20e9
# To and from the host where nobody tells (PCIe 4.0 with 16 lanes), and the share of a link that copies reach.
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
        transfer_s: blocks' inputs to the host and back, which goes on beside all that but the update.
        beside: whether the host launches beside the device's work; a CPU does both.
    """

    products_s: float
    attention_s: float
    traffic_s: float
    launch_s: float
    update_s: float
    transfer_s: float = 0.0
    beside: bool = True

    @property
    def total_s(self) -> float:
        """Their sum; launches and transfers hide behind work, whichever is longer."""
        work_s = self.products_s + self.attention_s + self.traffic_s
        if not self.beside:
            work_s += self.launch_s
        return max(work_s, self.launch_s, self.transfer_s) + self.update_s


def update_time(work: Work, device: Device, peak_flops: float) -> UpdateTime:
    """Seconds of an update of `work.window_rows` rows, cut into micro-batches of `work.rows`.

    products = (6 N_matmul + L recomputed FLOPs) tokens / (peak e m / (m + m_half)),   m tokens a micro-batch; beside
               adapters of A parameters 4 N_matmul + 6 A
    attention = L (6 d_attn T + recomputed FLOPs) tokens / (peak e_attn)
    traffic = 3 (numbers stored per token and layer) bytes / bandwidth,      once written, twice read; a third more of
              recomputed blocks, eagerly of any that recompute something; and in each pass of a micro-batch the weights
              that are made dense from fewer bits
    """
    config, captured, layers = work.config, work.compile != "none", work.config.num_hidden_layers
    again, attended_again = recomputed_flops(work)
    rate = EFFICIENCIES.get(device.name, CPU if device.type == "cpu" else Efficiency())
    bandwidth = (device.bandwidth_bytes_per_s or CPU_BYTES_PER_S) * rate.traffic
    tokens, micro = work.window_rows * work.length, work.rows * work.length
    adapters = trained_adapters(work)  # beside weights that have no gradient of their own
    flops = (4 if adapters else 6) * matmul_parameters(config) + 6 * adapters + layers * again
    width = config.num_attention_heads * config.head_dim
    attended = layers * (6 * width * work.length + attended_again)
    numbers = stored_numbers(work, "none")
    if work.remat not in (
        "none",
        "full",
        "offload",
    ):  # probabilities are made again from the scores where they are read
        numbers -= (SCORE_NUMBERS - 1) * score_numbers(work)
    if again if captured else work.remat != "none":
        numbers *= 4 / 3
    traffic = 3 * numbers * (4 if work.precision == "fp32" else 2) * layers
    steps = -(-work.window_rows // work.rows)
    passes = 2 + (work.remat in ("full", "offload"))
    calls_s = steps * (MICRO_STEP_S + (2 * layers * CALL_S if work.compile == "blocks" else 0.0))
    crossing = 2 * layers * config.hidden_size * (4 if work.precision == "fp32" else 2)
    link = device.link_bytes_per_s or LINK_BYTES_PER_S
    return UpdateTime(
        products_s=flops * tokens / (peak_flops * rate.products * micro / (micro + rate.saturating_tokens)),
        attention_s=attended * tokens / (peak_flops * rate.attention),
        traffic_s=(traffic * tokens + passes * steps * dense_bytes(work)) / bandwidth,
        launch_s=KERNELS[captured] * layers * steps * rate.launch_s * (1 if captured else 2) + calls_s,
        update_s=(adapters or config.parameter_count()) * UPDATE_BYTES[captured] / bandwidth,
        transfer_s=tokens * crossing / (LINK_SHARE * link) if work.remat == "offload" else 0.0,
        beside=device.type != "cpu",
    )


@dataclass(frozen=True)
class PassTimes:
    """Seconds of what a model in stages computes for one micro-batch.

    Attributes:
        first_s: the embedding.
        forward_s: one block's forward pass.
        again_s: its forward pass once more, and its backward pass.
        loss_s: the head and the loss, there and back.
        first_again_s: the embedding's gradient.
        number_s: the update of one number.
        host_number_s: the same on the host.
    """

    first_s: float
    forward_s: float
    again_s: float
    loss_s: float
    first_again_s: float
    number_s: float
    host_number_s: float


def pass_times(work: Work, device: Device, peak_flops: float, host_bytes_per_s: float = CPU_BYTES_PER_S) -> PassTimes:
    """The same roofline pass by pass, where every block is computed again from its input.

    With what `work.remat` computes a second time besides, inside of a stage. `host_bytes_per_s`: of the host's memory.
    """
    config, captured = work.config, work.compile != "none"
    rate = EFFICIENCIES.get(device.name, CPU if device.type == "cpu" else Efficiency())
    bandwidth = (device.bandwidth_bytes_per_s or CPU_BYTES_PER_S) * rate.traffic
    tokens, number = work.rows * work.length, 4 if work.precision == "fp32" else 2
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
        first_again_s=embedded_s + 12 * head / bandwidth,  # a gradient of zeros, filled, and added
        number_s=UPDATE_BYTES[captured] / bandwidth,
        host_number_s=HOST_UPDATE_BYTES[captured] * halves / (host_bytes_per_s * CPU.traffic),
    )


SCHEMA = "monograph.calibration/1"
MOST = 9  # of what was seen, the newest of a kind; their median counts
# What an allocator takes beyond a trace is partly the same for all steps and partly grows with them, and nobody knows
# how much of each: it tells of steps whose activations and workspace are as large within this factor.
ALIKE = 2.0
# What passes in a step is believed to be smaller than its trace by this share of it at most (law 12).
LEAST = 0.05


class Calibration:
    """Ratios of measured to predicted time, by device and precision, and bytes beyond a traced peak, by scope as well.

    The file is a convenience: one that cannot be read is none, what cannot be written is forgotten, and nothing fails.
    """

    def __init__(self, file: Path) -> None:
        """Of a file, which need not be there."""
        self._file = file
        self._seen: dict[str, list[float]] = {}
        self._beyond: dict[str, list[tuple[int, int]]] = {}  # bytes beyond the trace, and what passes of the trace
        self._unread = False
        with suppress(InputRefused, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError):
            try:
                found = parse_json(contents(file) or b"")
            except Unreadable:
                self._unread = True
                return
            if found.get("schema") == SCHEMA:
                self._seen = {str(kind): [float(ratio) for ratio in ratios] for kind, ratios in found["seen"].items()}
                for kind, beyond in found.get("beyond", {}).items():
                    self._beyond[kind] = [(int(more), int(passing)) for more, passing in beyond]

    def slowness(self, device: Device, precision: str) -> float | None:
        """The median ratio on this device in this precision; None if there was none."""
        seen = [ratio for ratio in self._seen.get(_kind(device, precision), ()) if 0 < ratio < float("inf")]
        return statistics.median(seen) if seen else None

    def note(self, device: Device, work: Work, seconds: float, peak_flops: float) -> None:
        """Keep what an update took."""
        seen = self._seen.setdefault(_kind(device, work.precision), [])
        seen.append(seconds / update_time(work, device, peak_flops).total_s)
        del seen[:-MOST]
        self._write()

    def residual(self, device: Device, work: Work, traced: Mapping[str, int]) -> int:
        """Bytes by which such a step's peak differs from its trace on this device: the median of those alike, else 0.

        Alike are steps of the same precision and scope that pass, within a factor of two, as many bytes: the traced
        activations, loss head and workspace. Negative by no more than the workspace and a twentieth of what passes.

        Args:
            device: where.
            work: the step.
            traced: its peak by origin.
        """
        passing = _passing(traced)
        seen = self._beyond.get(_kind(device, work.precision, work.compile), ())
        alike = [more for more, then in seen if then <= ALIKE * passing and passing <= ALIKE * then]
        least = min(int(LEAST * passing), traced.get("workspace", 0))
        return max(-least, int(statistics.median(alike))) if alike else 0

    def note_memory(self, device: Device, work: Work, traced: Mapping[str, int], measured_bytes: int) -> None:
        """Keep how far the measured peak of a step is from its trace; more than all that passes is something else's."""
        more, passing = measured_bytes - sum(traced.values()), _passing(traced)
        if abs(more) > passing:
            return
        seen = self._beyond.setdefault(_kind(device, work.precision, work.compile), [])
        seen.append((more, passing))
        del seen[:-MOST]
        self._write()

    def _write(self) -> None:
        if self._unread:  # it would lose what was seen before
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
    """Of times one for all ways to train in a precision: what was seen of one does not change their order."""
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return ", ".join((device.name + threads, *way))


def peak_flops(device: Device, precisions: tuple[str, ...]) -> Mapping[str, float]:
    """FLOP/s by precision: the datasheet's; where it says nothing what this machine's default device is measured at."""
    known = dict(device.peak_flops)
    if "bf16" in known:
        known.setdefault("fp16", known["bf16"])
    dtypes = {name: Precision(name).dtype for name in precisions if name not in known}
    return known | {name: measured_matmul_flops(default_device(), dtype, 0.1) for name, dtype in dtypes.items()}


def measured_memory_bytes_per_s(seconds: float = 0.1) -> float:
    """Bytes/s of the host's memory: two vectors of 64 MiB added to a third, measured for about `seconds` after a call.

    What this machine reaches now, other load included, with the threads that torch has.
    """
    one, other, out = (torch.zeros(2**24) for _ in range(3))
    torch.add(one, other, out=out)
    count, start = 0, clock()
    while count == 0 or clock() - start < seconds:
        torch.add(one, other, out=out)
        count += 1
    return count * 3 * one.nbytes / (clock() - start)
