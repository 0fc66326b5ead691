"""Predict an update's time on a device, from the datasheet's rates and the shares of them that real
code reaches.

`Calibration` keeps how far updates on this machine were from their prediction, in time and memory,
to correct the next plan. `sampling_s` predicts the time of sampling answers.
"""

import functools
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monograph.data.piece_lengths import PieceLengths
from monograph.device import Device, clock, default_device, measured_matmul_flops
from monograph.errors import InputRefused, Unreadable
from monograph.graph.precision import Precision
from monograph.model.config import LlamaConfig
from monograph.model.mixer import mixer_of
from monograph.model.parameters import active_matrix_shapes
from monograph.predict import estimate
from monograph.predict.fake_memory import TRANSIENT
from monograph.predict.footprint import Work
from monograph.storage.reading import contents, parse_json
from monograph.stream.clock import Costs


def matmul_parameters(config: LlamaConfig) -> int:
    """Count the parameters that every token is multiplied with: all matrices of the blocks and the
    head, tied or not.

        N_matmul = L · (2·d·d_q + 2·d·d_kv + 3·d·d_ff) + V·d,     d_q = heads · head_dim,   d_kv = kv_heads · head_dim

    Of a mixture of E experts, only the k that compute a token are counted: E·d + 3·k·d·d_expert in
    place of 3·d·d_ff. The input embedding is not counted, as it is a lookup. Norms and biases are
    not counted, as they are elementwise. The projection that gives layers their own inputs
    (`monograph.model.layer_inputs`) counts, too. Unit: parameters.
    """
    head = config.vocab_size * config.hidden_size
    layer_inputs = (
        config.num_hidden_layers * config.hidden_size_per_layer_input * config.hidden_size
    )
    return sum(map(math.prod, active_matrix_shapes(config))) + head + layer_inputs


def mtp_matmul_parameters(config: LlamaConfig) -> int:
    """Count the parameters with which a head for multi-token prediction multiplies a token; 0 without one.

    These are the matrices of its block, its projection of 2·d numbers to d, and the model's head, which
    it uses a second time. Unit: parameters.
    """
    if not config.mtp_num_hidden_layers:
        return 0
    return matmul_parameters(config.of_mtp_layer()) + 2 * config.hidden_size**2


def training_flops(
    matmul_parameters: int, attention_width: int, visible_positions: Iterable[float]
) -> float:
    """Count the FLOPs of a token's forward and backward pass in any decoder with causal attention.

        6 · N_matmul + 12 · d_attn · sum over layers of P_layer

    A multiply-add is 2 operations, and the backward pass costs twice the forward pass, hence 6 per
    parameter (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Scores and mixing cost 4·d_attn
    per pair of a token and a position that it attends to, 12·d_attn with the backward pass
    (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). P is the mean number of these positions:
    (T + 1) / 2 in a row of T tokens of one document, and fewer if rows hold several documents or
    if the layer has an attention window.

    Not counted: softmax, norms, rotary embedding, activation functions, loss and optimizer (they
    are elementwise), recomputation (it is not work of the model), and what a kernel computes of
    pairs that are masked. Other tools count attention over whole rows of one document, 6·L·d_attn·T,
    or as if it were not causal, 12·L·d_attn·T, which gives a higher figure for the same run.

    Args:
        matmul_parameters: N_matmul, see the function of that name.
        attention_width: d_attn, heads · head_dim.
        visible_positions: P of each layer with attention.
    """
    return 6 * matmul_parameters + 12 * attention_width * sum(visible_positions)


@functools.lru_cache(maxsize=256)  # a plan compares many ways to train the same model
def flops_per_token(
    config: LlamaConfig, documents: int | PieceLengths, adapter_parameters: int = 0
) -> float:
    """Return `training_flops` of `config` on documents of these lengths. Unit: FLOPs per token.

    The MFU of runs, plans and benchmarks is computed from this number.

    With adapters of A parameters next to frozen weights, 4 · N_matmul + 6 · A replaces 6 ·
    N_matmul: the gradient of a weight costs as much as the forward pass, and a frozen weight has
    no gradient. Each layer's mixer (attention, or what takes its place) counts its own FLOPs
    (`Mixer.training_flops`).

    Args:
        config: the model's shape.
        documents: the lengths of the documents in the rows; a number is the length of all of them.
        adapter_parameters: A; 0 if the model itself is trained.
    """
    lengths = documents
    if isinstance(lengths, int):
        lengths = PieceLengths.of_whole_rows(lengths)
    matrices = matmul_parameters(config) + mtp_matmul_parameters(config)
    saved_flops = 0
    if adapter_parameters:
        # The gradients of frozen weights are not computed, but the products with adapters are.
        saved_flops = 2 * matrices - 6 * adapter_parameters
    flops_of_mixers = sum(
        mixer_of(config, layer).training_flops(config, layer, lengths.visible_positions)
        for layer in range(config.num_hidden_layers)
    )
    if config.mtp_num_hidden_layers:
        of_head = config.of_mtp_layer()
        mixer = mixer_of(of_head, 0)
        flops_of_mixers += mixer.training_flops(of_head, 0, lengths.visible_positions)
    return 6 * matrices + flops_of_mixers - saved_flops


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Return the model FLOPs utilisation, tokens_per_s · flops_per_token / peak_flops: a fraction,
    not per cent.

    Where an MFU is shown, say which `peak_flops` was used: that of a datasheet
    (`device.Device.peak_flops`) or a measured one (`device.measured_matmul_flops`). Source:
    Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
    """
    return tokens_per_s * flops_per_token / peak_flops


# Bytes that an optimizer's update reads and writes per parameter, by whether the update is captured. A
# captured update passes once over gradient, weights and two moments in fp32, and zeros the gradient. In
# an eager one every intermediate goes through memory as well.
UPDATE_TRAFFIC_BYTES = {True: 36, False: 132}
# The same for rounding weights to blocks after the update. A captured one reads the weights twice, for the
# scales and for the integers, and writes the rounded ones.
ROUNDING_TRAFFIC_BYTES = {True: 12, False: 68}
# The same for an update on the host. The device computes the norm and zeros the gradient, so the host
# moves fewer bytes. The eager value is the captured one times the measured slowdown (dev/log.md).
HOST_UPDATE_TRAFFIC_BYTES = {True: 28, False: 1700}
# How many times as long the host takes if weights are kept in two halves of 16 bits, as generated
# code cannot vectorise 16-bit integers.
HOST_HALVES_SLOWDOWN = 3.7
# Kernels of one block, forward and backward together, as a profiler counts them, by whether the
# block is captured.
BLOCK_KERNELS = {True: 40, False: 160}
# The time to launch a kernel, in multiples of the time in captured code, by whether the code is captured.
LAUNCH_FACTOR = {True: 1, False: 2}
# The host's time for one call of a graph, if each block has its own: a forward or a backward pass
# (measured on a CPU with 16 layers and torch 2.13).
CALL_S = 0.13e-3
# The host's time for a micro-step (the passes of one micro-batch) apart from launches and calls: guards,
# the window's rows, autograd, Inductor's wrappers (dev/log.md).
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
CPU_EFFICIENCY = Efficiency(
    products=0.9, attention=0.4, traffic=0.7, launch_s=2e-6, saturating_tokens=64
)
CPU_BYTES_PER_S = 20e9
LINK_BYTES_PER_S = 32e9  # of a link of unknown rate: PCIe 4.0 with 16 lanes is assumed
LINK_SHARE = 0.8  # of a link's rate that copies reach


class UpdateTime(NamedTuple):
    """The seconds of one update by what they are spent on. Each is the time that this work would take
    alone.

    Attributes:
        products_s: matrix products, recomputed ones included.
        attention_s: attention scores and mixing.
        traffic_s: elementwise code.
        launch_s: launching kernels.
        update_s: clipping and the optimizer.
        transfer_s: copying blocks' inputs to the host and back.
        launches_ahead: whether the host launches kernels while the device works. A CPU launches
            and works one after the other.
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
        """Return the update's seconds.

        In the passes, the device's work, launches and transfers overlap, so only the longest of them
        counts. The optimizer's update follows.
        """
        work_s = self.products_s + self.attention_s + self.traffic_s
        if not self.launches_ahead:
            work_s += self.launch_s
        return max(work_s, self.launch_s, self.transfer_s) + self.update_s


def efficiency(device: Device) -> tuple[Efficiency, float]:
    """Return the shares that code reaches on a device, and the bytes/s of its memory that
    elementwise code reaches.
    """
    default = CPU_EFFICIENCY if device.type == "cpu" else Efficiency()
    shares = EFFICIENCIES.get(device.name, default)
    return shares, (device.bandwidth_bytes_per_s or CPU_BYTES_PER_S) * shares.traffic


def update_time(work: Work, device: Device, peak_flops: float) -> UpdateTime:
    """Return the seconds of an update of `work.window_rows` rows, cut into micro-batches of
    `work.rows`.

        products  = (6 N_matmul + L recomputed FLOPs) tokens / (peak e m / (m + m_half))
        attention = L (6 d_attn T + recomputed FLOPs) tokens / (peak e_attn)
        traffic   = (3 L (numbers stored per token and layer) tokens bytes + dequantised weights) / bandwidth

    N_matmul and d_attn are those of `training_flops`, L is the number of layers, T the length of a row.
    Here "tokens" are those of the update. A share e of the FLOP/s is reached by large products. A
    micro-batch has m tokens, and with m_half tokens, products would reach half of that share. With
    adapters of A parameters 4 N_matmul + 6 A replaces 6 N_matmul. With a head in fp8 two of its
    three products take the time of the datasheet's rate of fp8. A stored number is written once and
    read twice, hence the 3; if blocks recompute products, or eager code recomputes anything, the
    traffic of numbers is a third more. Weights are dequantised in each pass of a micro-batch.
    """
    config = work.config
    captured = work.compile != "none"
    # A head for multi-token prediction has one more block.
    layers = config.num_hidden_layers + config.mtp_num_hidden_layers
    recomputed_linear_flops, recomputed_attention_flops = estimate.recomputed_flops(work)
    shares, bandwidth = efficiency(device)
    window_tokens = work.tokens_per_update
    micro_batch_tokens = work.tokens
    micro_batches = work.micro_batches

    # Frozen weights have no gradients: 4 FLOPs per token instead of 6.
    adapter_parameters = estimate.active_adapter_parameters(work)
    flops_per_weight = 4 if adapter_parameters else 6
    product_flops: float = (
        flops_per_weight * (matmul_parameters(config) + mtp_matmul_parameters(config))
        + 6 * adapter_parameters
        + layers * recomputed_linear_flops
    )
    attention_flops = layers * (
        6 * estimate.query_width(config) * work.length + recomputed_attention_flops
    )

    numbers = estimate.stored_numbers(work, "none")
    # With these policies attention's probabilities are not stored, but recomputed where they are
    # read. Each score is then one number in memory instead of SCORE_NUMBERS.
    if work.remat not in ("none", "full", "offload"):
        numbers -= (estimate.SCORE_NUMBERS - 1) * estimate.score_numbers(work)
    # Captured code fuses what it recomputes into its readers, except products.
    if captured:
        writes_recomputed = recomputed_linear_flops > 0
    else:
        writes_recomputed = work.remat != "none"
    if writes_recomputed:
        numbers *= 4 / 3
    token_traffic_bytes = 3 * numbers * work.number_bytes * layers
    forward_passes = 2 if work.remat in ("full", "offload") else 1
    dequantising_passes = 1 + forward_passes
    # DoRA reads the dense weights a second time in each forward pass.
    if work.lora is not None and work.lora.dora:
        dequantising_passes += forward_passes

    host_s = MICRO_STEP_S
    if work.compile == "blocks":
        host_s += 2 * layers * CALL_S
    link_bytes_per_s = device.link_bytes_per_s or LINK_BYTES_PER_S
    product_rate = (
        peak_flops
        * shares.products
        * micro_batch_tokens
        / (micro_batch_tokens + shares.saturating_tokens)
    )
    if work.precision == "fp8_head":
        # The head's logits, and the gradient of the hidden states, are products in fp8. They take as
        # long as fewer FLOPs in bf16 would.
        head_flops = 4 * config.vocab_size * config.hidden_size
        rates = device.peak_flops
        speedup = rates["fp8"] / rates["bf16"] if {"fp8", "bf16"} <= rates.keys() else 1.0
        product_flops -= head_flops * (1 - 1 / speedup)
    dequantising_bytes = dequantising_passes * micro_batches * estimate.dequantising_bytes(work)
    kernels = BLOCK_KERNELS[captured] * layers * micro_batches
    trained_numbers = estimate.trained_numbers(config, work.lora, work.precision)
    update_traffic_bytes = UPDATE_TRAFFIC_BYTES[captured]
    if work.quantize != "none":
        update_traffic_bytes += ROUNDING_TRAFFIC_BYTES[captured]
    transfer_s = 0.0
    if work.remat == "offload":
        # Each block's input goes to the host and comes back.
        offloaded_token_bytes = 2 * layers * config.hidden_size * work.number_bytes
        transfer_s = window_tokens * offloaded_token_bytes / (LINK_SHARE * link_bytes_per_s)
    return UpdateTime(
        products_s=product_flops * window_tokens / product_rate,
        attention_s=attention_flops * window_tokens / (peak_flops * shares.attention),
        traffic_s=(token_traffic_bytes * window_tokens + dequantising_bytes) / bandwidth,
        launch_s=kernels * shares.launch_s * LAUNCH_FACTOR[captured] + micro_batches * host_s,
        update_s=trained_numbers * update_traffic_bytes / bandwidth,
        transfer_s=transfer_s,
        launches_ahead=device.type != "cpu",
    )


def pass_times(
    work: Work, device: Device, peak_flops: float, host_bytes_per_s: float = CPU_BYTES_PER_S
) -> Costs:
    """Return the seconds that the passes of a streamed model take for one micro-batch.

    The rates are those of `update_time`. The backward pass recomputes each stage from its input, and
    within a stage recomputes again what `work.remat` says.

    Args:
        work: the step.
        device: the device.
        peak_flops: its FLOP/s in the precision of `work`.
        host_bytes_per_s: the rate of the host's memory.
    """
    config = work.config
    captured = work.compile != "none"
    shares, bandwidth = efficiency(device)
    tokens = work.tokens
    number_bytes = work.number_bytes
    product_rate = peak_flops * shares.products * tokens / (tokens + shares.saturating_tokens)
    head_parameters = config.vocab_size * config.hidden_size
    block_parameters = (matmul_parameters(config) - head_parameters) // config.num_hidden_layers
    adapter_parameters = estimate.active_adapter_parameters(work) / config.num_hidden_layers
    # The recomputed forward pass, the gradient of the input, and that of the weight unless it is frozen.
    backward_flops_per_weight = 4 if work.lora else 6
    dequantising_s = (
        estimate.dequantising_bytes(work) / config.num_hidden_layers / bandwidth
    )  # of a block
    forward_attention_flops = 2 * estimate.query_width(config) * work.length
    recomputed_linear_flops, recomputed_attention_flops = estimate.recomputed_flops(work)
    # A forward pass launches a third of a block's kernels, and a backward pass two thirds. This is the
    # time for one third.
    forward_launch_s = BLOCK_KERNELS[captured] / 3 * shares.launch_s * LAUNCH_FACTOR[captured]
    if work.compile == "blocks":
        forward_launch_s += CALL_S
    activations_s = estimate.stored_numbers(work, "none") * number_bytes * tokens / bandwidth

    def block_seconds(linear_flops: float, attention_flops: float, passes: float) -> float:
        """Return the seconds of work on one block.

        Args:
            linear_flops: FLOPs per token of its linear layers.
            attention_flops: FLOPs per token of attention.
            passes: its launches and its traffic through memory, in multiples of a forward pass's.
        """
        work_s = (
            tokens
            * (linear_flops / product_rate + attention_flops / (peak_flops * shares.attention))
            + passes * activations_s
        )
        launch_s = passes * forward_launch_s
        # A CPU does not launch kernels ahead.
        if device.type == "cpu":
            return work_s + launch_s
        return max(work_s, launch_s)

    embedding_s = 2 * config.hidden_size * number_bytes * tokens / bandwidth
    # On a GPU the host's part of a micro-step is hidden behind the device's work.
    micro_step_s = MICRO_STEP_S if device.type == "cpu" else 0.0
    # In the recomputed forward pass, in the backward pass, and where blocks recompute products once more.
    dequantising_passes = 3 if recomputed_linear_flops else 2
    halves_slowdown = 1.0 if work.precision == "fp32" else HOST_HALVES_SLOWDOWN
    host_update_bytes = HOST_UPDATE_TRAFFIC_BYTES[captured]
    return Costs(
        first_s=embedding_s,
        forward_s=dequantising_s
        + block_seconds(
            2 * (block_parameters + adapter_parameters), forward_attention_flops, passes=1
        ),
        recompute_backward_s=dequantising_passes * dequantising_s
        + block_seconds(
            backward_flops_per_weight * block_parameters
            + 6 * adapter_parameters
            + recomputed_linear_flops,
            3 * forward_attention_flops + recomputed_attention_flops,
            passes=4 if recomputed_linear_flops else 3,
        ),
        loss_s=(4 if work.lora else 6) * head_parameters * tokens / product_rate + micro_step_s,
        # The embedding's gradient is filled with zeros, and added to the plane: 12 bytes per number.
        first_backward_s=0.0 if work.lora else embedding_s + 12 * head_parameters / bandwidth,
        weight_update_s=UPDATE_TRAFFIC_BYTES[captured] / bandwidth,
        host_weight_update_s=host_update_bytes
        * halves_slowdown
        / (host_bytes_per_s * CPU_EFFICIENCY.traffic),
    )


# The file has the ratios under "seen", and the memory excesses under "beyond".
SCHEMA = "monograph.calibration/1"
MAX_MEASUREMENTS = 9  # of a kind: the newest are kept, and their median counts
# An allocator takes more memory than a trace predicts. A part of this excess is the same for all steps,
# and a part grows with the step, in unknown shares. So a measurement is applied only to steps whose
# transient bytes (which are allocated and freed within an update) are as large within this factor.
MAX_SIZE_RATIO = 2.0
# The memory that a step allocates and frees is corrected downwards by at most this share of its
# trace (law 12).
MAX_REDUCTION = 0.05


class MemoryExcess(NamedTuple):
    """A measurement of how much more memory a step took than its trace says.

    Attributes:
        excess_bytes: bytes at the measured peak beyond the traced peak; negative if there were fewer.
        transient_bytes: the transient bytes of the trace.
    """

    excess_bytes: int
    transient_bytes: int


class Calibration:
    """What earlier runs measured: ratios of measured to predicted time, and by how many bytes a peak
    exceeded its trace.

    Ratios are kept by device and precision; bytes by device, precision and scope (what one graph of
    a capture has). A run does not need the file. So a damaged file counts as empty, a file that
    cannot be read is not written over, and a failed write is ignored.
    """

    def __init__(self, file: Path) -> None:
        """Read a file, which need not exist."""
        self._file = file
        self._ratios: dict[str, list[float]] = {}
        self._excesses: dict[str, list[MemoryExcess]] = {}
        self._is_unreadable = False
        # These are all errors that a damaged file may raise.
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
                self._is_unreadable = True
                return
            if saved.get("schema") == SCHEMA:
                self._ratios = {
                    str(key): [float(ratio) for ratio in ratios]
                    for key, ratios in saved["seen"].items()
                }
                for key, pairs in saved.get("beyond", {}).items():
                    self._excesses[key] = [
                        MemoryExcess(int(excess), int(transient)) for excess, transient in pairs
                    ]

    def slowness(self, device: Device, kind: str) -> float | None:
        """Return the median of the noted ratios of measured to predicted time; None if there are none.

        Args:
            device: the device.
            kind: what was measured, see `note_ratio`.
        """
        ratios = self._ratios.get(_key(device, kind), ())
        sound_ratios = [ratio for ratio in ratios if 0 < ratio < float("inf")]
        return statistics.median(sound_ratios) if sound_ratios else None

    def note_time(self, device: Device, work: Work, seconds: float, peak_flops: float) -> None:
        """Keep the ratio of an update's measured to its predicted time."""
        predicted_s = update_time(work, device, peak_flops).total_s
        self.note_ratio(device, work.precision, seconds / predicted_s)

    def note_ratio(self, device: Device, kind: str, ratio: float) -> None:
        """Keep a ratio of measured to predicted time.

        Args:
            device: the device.
            kind: what was measured: the precision of an update, or a name for sampling.
            ratio: the ratio.
        """
        self._keep(self._ratios.setdefault(_key(device, kind), []), ratio)

    def residual(self, device: Device, work: Work, traced: Mapping[str, int]) -> int:
        """Return by how many bytes the peaks of similar steps on this device exceeded their traces: the
        median, or 0 if there were no similar steps.

        Steps are similar if they have the same precision and scope, and if their transient bytes
        (traced activations, loss head and workspace) agree within a factor of two. A negative
        result is limited to the smaller of the workspace and a twentieth of the transient bytes.

        Args:
            device: the device that the step runs on.
            work: the step.
            traced: the step's peak by origin.
        """
        transient = _transient_bytes(traced)
        measurements = self._excesses.get(_key(device, work.precision, work.compile), ())
        excesses_of_similar = [
            measured.excess_bytes
            for measured in measurements
            if measured.transient_bytes <= MAX_SIZE_RATIO * transient
            and transient <= MAX_SIZE_RATIO * measured.transient_bytes
        ]
        if not excesses_of_similar:
            return 0
        max_reduction = min(int(MAX_REDUCTION * transient), traced.get("workspace", 0))
        return max(-max_reduction, int(statistics.median(excesses_of_similar)))

    def note_memory(
        self, device: Device, work: Work, traced: Mapping[str, int], measured_bytes: int
    ) -> None:
        """Keep how many bytes more than its trace a step took at its peak.

        Args:
            device: the device.
            work: the step.
            traced: its traced peak by origin.
            measured_bytes: its measured peak.
        """
        excess = MemoryExcess(measured_bytes - sum(traced.values()), _transient_bytes(traced))
        # If the difference is larger than all that the step allocates, the step is not its cause.
        if abs(excess.excess_bytes) <= excess.transient_bytes:
            measurements = self._excesses.setdefault(_key(device, work.precision, work.compile), [])
            self._keep(measurements, excess)

    def _keep(self, measurements: list[Any], new: object) -> None:
        """Add a measurement to those of its kind, and write all."""
        measurements.append(new)
        del measurements[:-MAX_MEASUREMENTS]
        if self._is_unreadable:  # a write would lose the earlier measurements
            return
        content = {"schema": SCHEMA, "seen": self._ratios, "beyond": self._excesses}
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content))
            temporary.replace(self._file)
        # The temporary file still exists if writing failed.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _transient_bytes(traced: Mapping[str, int]) -> int:
    """Return the bytes of a peak that a step allocates and frees again."""
    return sum(traced.get(origin, 0) for origin in TRANSIENT)


def _key(device: Device, *kind: str) -> str:
    """Return the key of measurements of a kind on a device.

    The kind of a time is only its precision. So all ways to train in a precision get the same
    correction, and a plan ranks them in the same order as without it.
    """
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return ", ".join((device.name + threads, *kind))


def peak_flops(device: Device, precisions: tuple[str, ...]) -> Mapping[str, float]:
    """Return FLOP/s by precision: those of the datasheet. For precisions that it does not list,
    products are measured on this machine's default device.
    """
    rates = dict(device.peak_flops)
    if "bf16" in rates:
        rates.setdefault("fp16", rates["bf16"])
        rates.setdefault("fp8_head", rates["bf16"])  # of all products but the head's
    threads = torch.get_num_threads()
    for name in precisions:
        if name not in rates:
            rates[name] = _measured_flops(default_device(), Precision(name).dtype, threads)
    return rates


@functools.cache
def _measured_flops(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Return the FLOP/s of products.

    They are measured once per process, because a run with rewards needs them six times. `threads` is
    not read: it makes the cache measure again after torch's number of threads has changed.
    """
    return measured_matmul_flops(device, dtype, 0.1)


def measured_memory_bytes_per_s() -> float:
    """Measure the host's memory for about 0.1 s by sums of two vectors of 64 MiB, and return its
    bytes/s.

    It is the rate that this machine reaches now, under its other load, with torch's threads.
    """
    one, other, out = (torch.zeros(2**24) for _ in range(3))
    torch.add(one, other, out=out)  # a warm-up, which is not timed
    count = 0
    start = clock()
    while count == 0 or clock() - start < 0.1:
        torch.add(one, other, out=out)
        count += 1
    bytes_per_sum = 3 * one.nbytes
    return count * bytes_per_sum / (clock() - start)


class AnswersToSample(NamedTuple):
    """The answers that are sampled for an update.

    Attributes:
        answers: the number of answers.
        max_rows: the largest number of rows of a decode step. A row writes one answer.
        prompt_tokens: tokens before an answer.
        answer_tokens: tokens of each answer.
        number_bytes: bytes of a weight of the head, a key or a value.
        block_weight_bytes: bytes that a product in a block moves for each weight.
        captured: whether the decode step is captured.
    """

    answers: int
    max_rows: int
    prompt_tokens: int
    answer_tokens: int
    number_bytes: int
    block_weight_bytes: float
    captured: bool


def sampling_s(
    config: LlamaConfig, sampled: AnswersToSample, device: Device, peak_flops: float
) -> float:
    """Return the seconds of sampling answers, without the seconds of reading their prompts.

    A decode step of R rows takes as long as the longest of three: to compute R (2 N_matmul + 4 L d_attn
    context) FLOPs, to read weights, keys and values once, and to launch its kernels. On a CPU the
    launches are added instead. The context is a prompt and half of an answer, which is the mean over
    an answer's steps.
    """
    shares, bandwidth = efficiency(device)
    rows = min(sampled.answers, sampled.max_rows)
    layers = config.num_hidden_layers
    context = sampled.prompt_tokens + sampled.answer_tokens / 2
    matrices = matmul_parameters(config)
    mixers = [mixer_of(config, layer) for layer in range(layers)]
    of_layers = [config.of_layer(layer) for layer in range(layers)]
    attention_flops = sum(
        mixer.decode_flops(of_layer, context)
        for mixer, of_layer in zip(mixers, of_layers, strict=True)
    )
    product_rate = peak_flops * shares.products * rows / (rows + shares.saturating_tokens)
    compute_s = rows * (
        2 * matrices / product_rate + attention_flops / (peak_flops * shares.attention)
    )
    cached_widths = [
        mixer.key_value_heads(of_layer) * of_layer.head_dim
        for mixer, of_layer in zip(mixers, of_layers, strict=True)
    ]
    cached_numbers = 2 * sum(cached_widths) * context
    head_parameters = config.vocab_size * config.hidden_size
    head_and_cache_bytes = (head_parameters + rows * cached_numbers) * sampled.number_bytes
    block_bytes = (matrices - head_parameters) * sampled.block_weight_bytes
    read_s = (head_and_cache_bytes + block_bytes) / bandwidth
    work_s = max(compute_s, read_s)
    # A third of a block's kernels are those of its forward pass.
    captured = sampled.captured
    launch_s = (
        layers * BLOCK_KERNELS[captured] / 3 * shares.launch_s * LAUNCH_FACTOR[captured]
        + MICRO_STEP_S
    )
    step_s = work_s + launch_s if device.type == "cpu" else max(work_s, launch_s)
    rounds = math.ceil(sampled.answers / rows)
    return rounds * sampled.answer_tokens * step_s
