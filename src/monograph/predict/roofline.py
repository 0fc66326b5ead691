"""How long an update takes on a device, from its datasheet and from how much of it real code reaches."""

from __future__ import annotations

from dataclasses import dataclass

from monograph.device import Device
from monograph.predict.estimate import (
    SCORE_NUMBERS,
    dense_bytes,
    recomputed_flops,
    score_numbers,
    stored_numbers,
    trained_adapters,
)
from monograph.predict.flops import matmul_parameters
from monograph.predict.footprint import Work

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
