"""Predict an update's time on a device, from the datasheet's rates and the shares of them that real
code reaches.

`Calibration` keeps how far updates on this machine were from their prediction, in time and memory,
to correct the next plan. `drawing_s` is the time of drawing answers, by the roofline of a decode
step.
"""

import functools
import json
import math
import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monograph.device import Device, clock, default_device, measured_matmul_flops
from monograph.errors import InputRefused, Unreadable
from monograph.graph.precision import Precision
from monograph.model.config import LlamaConfig
from monograph.model.parameters import multiplied
from monograph.predict import estimate
from monograph.predict.fake_memory import PASSING
from monograph.predict.footprint import Work
from monograph.storage.reading import contents, parse_json
from monograph.stream.clock import Costs


def matmul_parameters(config: LlamaConfig) -> int:
    """Count the parameters that every token is multiplied with: all matrices of the blocks and the
    head, tied or not.

        N_matmul = L · (2·d·d_q + 2·d·d_kv + 3·d·d_ff) + V·d,     d_q = heads · head_dim,   d_kv = kv_heads · head_dim

    A mixture of E experts counts with the k that compute a token, E·d + 3·k·d·d_expert in place of
    3·d·d_ff. The input embedding is a lookup, norms and biases are elementwise, so none is counted.
    Unit: parameters.
    """
    return sum(map(math.prod, multiplied(config))) + config.vocab_size * config.hidden_size


def training_flops(
    matmul_parameters: int, layers: int, attention_width: int, sequence_length: int
) -> int:
    """Count the FLOPs of a token's forward and backward pass in any decoder with causal attention
    over whole rows.

        6 · N_matmul + 6 · L · d_attn · T

    A multiply-add is 2 operations; the backward pass costs twice the forward pass, hence 6 per
    parameter (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Scores and mixing cost 4·d_attn
    per visible position forward, 12·d_attn with the backward pass (Chowdhery et al. 2022, arXiv
    2204.02311, appendix B), and causal attention sees T/2 on average. `attention_width` is heads ·
    head_dim. Left out: softmax, norms, rotary embedding, activation functions, loss and optimizer
    (elementwise), recomputation (it is not work of the model), and the shorter attention of packed
    documents. Non-causal counts, 12·L·d_attn·T, give a higher figure for the same run: compare only
    like with like.
    """
    return 6 * matmul_parameters + 6 * layers * attention_width * sequence_length


@functools.lru_cache(maxsize=256)  # a plan asks for each way to train the same model
def flops_per_token(config: LlamaConfig, sequence_length: int, adapter_parameters: int = 0) -> int:
    """Return `training_flops` of `config` on rows of `sequence_length` tokens. Unit: FLOPs per
    token.

    With adapters of A parameters next to frozen weights, 4 · N_matmul + 6 · A replaces 6 ·
    N_matmul: the gradient of a weight costs as much as the forward pass, and a frozen weight has
    none.

    A layer with an attention window w < T sees w · (1 - w / 2T) positions on average, as many as
    causal attention over rows of w · (2 - w / T) tokens. This length, rounded down, counts for the
    layer instead of T. A gated delta net reads, corrects and reads again a matrix of E key times V
    value channels for each head: 18·heads·E·V for the layer.
    """
    attending = [layer for layer in range(config.num_hidden_layers) if not config.is_linear(layer)]
    windows = [min(config.window(layer) or sequence_length, sequence_length) for layer in attending]
    # Over all layers.
    lengths = sum(w * (2 * sequence_length - w) // sequence_length for w in windows)
    width = config.num_attention_heads * config.head_dim
    matrices = matmul_parameters(config)
    not_computed = 2 * matrices - 6 * adapter_parameters if adapter_parameters else 0
    state = (
        config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    )
    of_states = 18 * (config.num_hidden_layers - len(attending)) * state
    return training_flops(matrices, 1, width, lengths) + of_states - not_computed


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Return the model FLOPs utilisation, tokens_per_s · flops_per_token / peak_flops: a fraction,
    not per cent.

    State which `peak_flops` was used: a datasheet's (`device.Device.peak_flops`) or a measured one
    (`device.measured_matmul_flops`). Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
    """
    return tokens_per_s * flops_per_token / peak_flops


# Bytes that an update reads and writes per parameter, by whether it is captured. Captured: one pass
# over gradient, weights and two moments in fp32, and the zeroed gradient. Eager: every intermediate
# goes through memory as well.
UPDATE_BYTES = {True: 36, False: 132}
# The same for an update on the host, without the norm and the zeros, which stay on the device. The
# eager value is the captured one times the measured slowdown (dev/log.md).
HOST_UPDATE_BYTES = {True: 28, False: 1700}
# How much longer the host takes where weights are kept in two halves, as generated code cannot
# vectorise 16-bit integers.
HOST_HALVES = 3.7
# Kernels of one block, forward and backward together, as a profiler counts them, by whether the
# block is captured.
KERNELS = {True: 40, False: 160}
# The host's time for one call of a block's separate graph, forward or backward (16 layers, a CPU,
# torch 2.13).
CALL_S = 0.13e-3
# The host's time for a micro-step: guards, the window's rows, autograd, Inductor's wrappers
# (dev/log.md).
MICRO_STEP_S = 1e-3


class Efficiency(NamedTuple):
    """The shares of a datasheet's rates that code reaches.

    Attributes:
        products: share of the FLOP/s that large matrix products reach.
        attention: share of the FLOP/s that fused attention kernels reach.
        traffic: share of the memory's bytes/s that elementwise code reaches.
        launch_s: seconds between the starts of two kernels that do nothing.
        saturating_tokens: tokens of a micro-batch at which products reach half of their share.
    """

    products: float = 0.75
    attention: float = 0.42
    traffic: float = 0.85
    launch_s: float = 5e-6
    saturating_tokens: int = 256


# H200: products of 8192^3 at 788 of 989 TFLOP/s, a copy at 4.3 of 4.8 TB/s; other values are the
# defaults.
EFFICIENCIES = {"NVIDIA H200": Efficiency(products=0.797, traffic=0.896)}
# A CPU's FLOP/s are measured, and no datasheet gives its bandwidth.
CPU = Efficiency(products=0.9, attention=0.4, traffic=0.7, launch_s=2e-6, saturating_tokens=64)
CPU_BYTES_PER_S = 20e9
# The bytes/s of a link of unknown rate (PCIe 4.0 with 16 lanes is assumed), and the share of a link
# that copies reach.
LINK_BYTES_PER_S, LINK_SHARE = 32e9, 0.8


class UpdateTime(NamedTuple):
    """The seconds of one update by what they are spent on, each as if nothing overlapped.

    Attributes:
        products_s: matrix products, recomputed ones included.
        attention_s: attention scores and mixing.
        traffic_s: elementwise code.
        launch_s: launching kernels.
        update_s: clipping and the optimizer.
        transfer_s: copying blocks' inputs to the host and back.
        launches_ahead: whether the host launches kernels while the device works; a CPU does one
            after the other.
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
        """Return the update's seconds: work, launches and transfers overlap, so the longest of them
        counts.
        """
        work_s = self.products_s + self.attention_s + self.traffic_s
        if not self.launches_ahead:
            work_s += self.launch_s
        return max(work_s, self.launch_s, self.transfer_s) + self.update_s


def reached(device: Device) -> tuple[Efficiency, float]:
    """Return the shares that code reaches on a device, and the bytes/s of its memory that
    elementwise code reaches.
    """
    rate = EFFICIENCIES.get(device.name, CPU if device.type == "cpu" else Efficiency())
    return rate, (device.bandwidth_bytes_per_s or CPU_BYTES_PER_S) * rate.traffic


def update_time(work: Work, device: Device, peak_flops: float) -> UpdateTime:
    """Return the seconds of an update of `work.window_rows` rows, cut into micro-batches of
    `work.rows`.

    products  = (6 N_matmul + L recomputed FLOPs) tokens / (peak e m / (m + m_half)) for
    micro-batches of m tokens; with
                adapters of A parameters 4 N_matmul + 6 A replaces 6 N_matmul
    attention = L (6 d_attn T + recomputed FLOPs) tokens / (peak e_attn)
    traffic   = 3 L (numbers stored per token and layer) tokens bytes / bandwidth, as each is written once and read
                twice; a third more where blocks recompute products, or in eager code anything; plus
                the dequantised weights in each pass of a micro-batch
    """
    config = work.config
    captured = work.compile != "none"
    layers = work.config.num_hidden_layers
    again, attended_again = estimate.recomputed_flops(work)
    rate, bandwidth = reached(device)
    tokens = work.window_rows * work.length
    micro = work.tokens
    # With adapters, the other weights have no gradients: 4 FLOPs instead of 6.
    adapters = estimate.trained_adapters(work)
    flops = (4 if adapters else 6) * matmul_parameters(config) + 6 * adapters + layers * again
    attended = layers * (
        6 * config.num_attention_heads * config.head_dim * work.length + attended_again
    )
    numbers = estimate.stored_numbers(work, "none")
    # Probabilities are recomputed where they are read.
    if work.remat not in ("none", "full", "offload"):
        numbers -= (estimate.SCORE_NUMBERS - 1) * estimate.score_numbers(work)
    if again if captured else work.remat != "none":
        numbers *= 4 / 3
    traffic = 3 * numbers * work.number_bytes * layers
    forwards = 1 + (work.remat in ("full", "offload"))
    steps = work.micro_batches
    passes = 1 + forwards + forwards * (work.lora is not None and work.lora.dora)
    calls_s = steps * (MICRO_STEP_S + (2 * layers * CALL_S if work.compile == "blocks" else 0.0))
    crossing = 2 * layers * config.hidden_size * work.number_bytes
    link = device.link_bytes_per_s or LINK_BYTES_PER_S
    return UpdateTime(
        products_s=flops
        * tokens
        / (peak_flops * rate.products * micro / (micro + rate.saturating_tokens)),
        attention_s=attended * tokens / (peak_flops * rate.attention),
        traffic_s=(traffic * tokens + passes * steps * estimate.dense_bytes(work)) / bandwidth,
        launch_s=KERNELS[captured] * layers * steps * rate.launch_s * (1 if captured else 2)
        + calls_s,
        update_s=estimate.trained_numbers(config, work.lora, work.precision)
        * UPDATE_BYTES[captured]
        / bandwidth,
        transfer_s=tokens * crossing / (LINK_SHARE * link) if work.remat == "offload" else 0.0,
        launches_ahead=device.type != "cpu",
    )


def pass_times(
    work: Work, device: Device, peak_flops: float, host_bytes_per_s: float = CPU_BYTES_PER_S
) -> Costs:
    """Return the times by the same roofline pass by pass, where every block is computed again from
    its input.

    They include what `work.remat` recomputes within a stage. `host_bytes_per_s` is the rate of the
    host's memory.
    """
    config = work.config
    captured = work.compile != "none"
    rate, bandwidth = reached(device)
    tokens, number = work.tokens, work.number_bytes
    products = peak_flops * rate.products * tokens / (tokens + rate.saturating_tokens)
    head = config.vocab_size * config.hidden_size
    layers = config.num_hidden_layers
    of_block = (matmul_parameters(config) - head) // layers
    attended = 2 * config.num_attention_heads * config.head_dim * work.length
    again, attended_again = estimate.recomputed_flops(work)
    kernels_s = KERNELS[captured] / 3 * rate.launch_s * (1 if captured else 2) + CALL_S * (
        work.compile == "blocks"
    )
    # One pass over a block's activations.
    crossing_s = estimate.stored_numbers(work, "none") * number * tokens / bandwidth

    def passed(flops: float, attention: float, crossings: float) -> float:
        work_s = (
            tokens * (flops / products + attention / (peak_flops * rate.attention))
            + crossings * crossing_s
        )
        launch_s = crossings * kernels_s
        return max(work_s, launch_s) if device.type != "cpu" else work_s + launch_s

    embedded_s = 2 * config.hidden_size * number * tokens / bandwidth
    halves = 1.0 if work.precision == "fp32" else HOST_HALVES
    return Costs(
        first_s=embedded_s,
        forward_s=passed(2 * of_block, attended, 1),
        again_s=passed(6 * of_block + again, 3 * attended + attended_again, 4 if again else 3),
        loss_s=6 * head * tokens / products + (0.0 if device.type != "cpu" else MICRO_STEP_S),
        first_again_s=embedded_s + 12 * head / bandwidth,  # a gradient of zeros, filled and added
        number_s=UPDATE_BYTES[captured] / bandwidth,
        host_number_s=HOST_UPDATE_BYTES[captured] * halves / (host_bytes_per_s * CPU.traffic),
    )


SCHEMA = "monograph.calibration/1"
MOST = 9  # the newest measurements of a kind are kept, and their median counts
# The memory that an allocator takes beyond a trace is partly the same for all steps and partly
# grows with them, in unknown shares. So it is applied only to steps whose activations and workspace
# are as large within this factor.
ALIKE = 2.0
# The memory that a step allocates and frees is corrected downwards by at most this share of its
# trace (law 12).
LEAST = 0.05


class Calibration:
    """What earlier runs measured: ratios of measured to predicted time, and bytes beyond a traced
    peak.

    Ratios are kept by device and precision, bytes by device, precision and scope. The file is a
    convenience: a damaged one counts as empty, one that cannot be read is not written over, and a
    failed write is ignored.
    """

    def __init__(self, file: Path) -> None:
        """Read a file, which need not exist."""
        self._file = file
        self._seen: dict[str, list[float]] = {}
        # (bytes beyond the trace, bytes that pass in it).
        self._beyond: dict[str, list[tuple[int, int]]] = {}
        self._unread = False
        with suppress(
            InputRefused,
            ValueError,
            LookupError,
            AttributeError,
            TypeError,
            OverflowError,
            RecursionError,
        ):
            try:
                saved = parse_json(contents(file) or b"")
            except Unreadable:
                self._unread = True
                return
            if saved.get("schema") == SCHEMA:
                self._seen = {
                    str(kind): [float(ratio) for ratio in ratios]
                    for kind, ratios in saved["seen"].items()
                }
                for kind, beyond in saved.get("beyond", {}).items():
                    self._beyond[kind] = [(int(more), int(passing)) for more, passing in beyond]

    def slowness(self, device: Device, kind: str) -> float | None:
        """Return the median ratio on this device of this kind, see `note_ratio`; None if nothing
        was measured.
        """
        seen = [
            ratio for ratio in self._seen.get(_kind(device, kind), ()) if 0 < ratio < float("inf")
        ]
        return statistics.median(seen) if seen else None

    def note(self, device: Device, work: Work, seconds: float, peak_flops: float) -> None:
        """Keep the ratio of an update's measured to its predicted time."""
        self.note_ratio(
            device, work.precision, seconds / update_time(work, device, peak_flops).total_s
        )

    def note_ratio(self, device: Device, kind: str, ratio: float) -> None:
        """Keep a ratio of measured to predicted time: of an update in a precision, or of drawing."""
        self._keep(self._seen.setdefault(_kind(device, kind), []), ratio)

    def residual(self, device: Device, work: Work, traced: Mapping[str, int]) -> int:
        """Return the median of the bytes by which peaks of like steps on this device differ from
        their traces, else 0.

        Steps are alike if they have the same precision and scope, and if their passing bytes
        (traced activations, loss head and workspace) agree within a factor of two. A negative
        median is cut to the smaller of the workspace and a twentieth of the passing bytes.

        Args:
            device: the device that the step runs on.
            work: the step.
            traced: the step's peak by origin.
        """
        passing = _passing(traced)
        seen = self._beyond.get(_kind(device, work.precision, work.compile), ())
        alike = [more for more, then in seen if then <= ALIKE * passing and passing <= ALIKE * then]
        least = min(int(LEAST * passing), traced.get("workspace", 0))
        return max(-least, int(statistics.median(alike))) if alike else 0

    def note_memory(
        self, device: Device, work: Work, traced: Mapping[str, int], measured_bytes: int
    ) -> None:
        """Keep how far a step's measured peak is from its trace; more than all that passes has
        another cause.
        """
        more = measured_bytes - sum(traced.values())
        passing = _passing(traced)
        if abs(more) <= passing:
            self._keep(
                self._beyond.setdefault(_kind(device, work.precision, work.compile), []),
                (more, passing),
            )

    def _keep(self, seen: list[Any], new: object) -> None:
        """Add a measurement to those of its kind, and write all."""
        seen.append(new)
        del seen[:-MOST]
        if self._unread:  # a write would lose the earlier measurements
            return
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(
                json.dumps({"schema": SCHEMA, "seen": self._seen, "beyond": self._beyond})
            )
            temporary.replace(self._file)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _passing(traced: Mapping[str, int]) -> int:
    return sum(traced.get(origin, 0) for origin in PASSING)


def _kind(device: Device, *way: str) -> str:
    """Return the key of measurements; times have one key for each precision, so that the order of
    ways stays.
    """
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return ", ".join((device.name + threads, *way))


def peak_flops(device: Device, precisions: tuple[str, ...]) -> Mapping[str, float]:
    """Return FLOP/s by precision: the datasheet's, else those of products measured on this
    machine's default device.
    """
    known = dict(device.peak_flops)
    if "bf16" in known:
        known.setdefault("fp16", known["bf16"])
    dtypes = {name: Precision(name).dtype for name in precisions if name not in known}
    threads = torch.get_num_threads()
    return known | {
        name: _measured_flops(default_device(), dtype, threads) for name, dtype in dtypes.items()
    }


@functools.cache
def _measured_flops(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Return the FLOP/s of products, measured once by each process; a run with rewards asks for
    them six times.
    """
    return measured_matmul_flops(device, dtype, 0.1)


def measured_memory_bytes_per_s() -> float:
    """Return the bytes/s of the host's memory, measured for about 0.1 s as the sum of two vectors
    of 64 MiB.

    It is the rate that this machine reaches now, under its other load, with torch's threads.
    """
    one, other, out = (torch.zeros(2**24) for _ in range(3))
    torch.add(one, other, out=out)
    count = 0
    start = clock()
    while count == 0 or clock() - start < 0.1:
        torch.add(one, other, out=out)
        count += 1
    return count * 3 * one.nbytes / (clock() - start)


class Drawing(NamedTuple):
    """Answers that are drawn for an update.

    Attributes:
        answers: their number.
        at_once: most rows of a decode step.
        prompt: tokens before an answer.
        tokens: tokens of each answer.
        number_bytes: bytes of a weight, key or value.
        captured: whether the decode step is captured.
    """

    answers: int
    at_once: int
    prompt: int
    tokens: int
    number_bytes: int
    captured: bool


def drawing_s(config: LlamaConfig, drawing: Drawing, device: Device, peak_flops: float) -> float:
    """Return the seconds of drawing answers, without those of reading their prompts.

    A step of R rows takes the longer of R (2 N_matmul / products + 4 L d_attn context / attention)
    and the time of reading weights, keys and values once, and its launches; the context is a prompt
    and half of an answer.
    """
    rate, bandwidth = reached(device)
    rows = min(drawing.answers, drawing.at_once)
    layers = config.num_hidden_layers
    context = drawing.prompt + drawing.tokens / 2
    matrices = matmul_parameters(config)
    attending = layers - sum(map(config.is_linear, range(layers)))
    attended = 4 * attending * config.num_attention_heads * config.head_dim * context
    products = peak_flops * rate.products * rows / (rows + rate.saturating_tokens)
    kept = 2 * attending * config.num_key_value_heads * config.head_dim * context
    work_s = rows * (2 * matrices / products + attended / (peak_flops * rate.attention))
    work_s = max(work_s, (matrices + rows * kept) * drawing.number_bytes / bandwidth)
    launch_s = (
        layers * KERNELS[drawing.captured] / 3 * rate.launch_s * (1 if drawing.captured else 2)
        + MICRO_STEP_S
    )
    step_s = work_s + launch_s if device.type == "cpu" else max(work_s, launch_s)
    return -(-drawing.answers // rows) * drawing.tokens * step_s
