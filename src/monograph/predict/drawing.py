"""Predict how long drawing answers takes, by the roofline of a decode step."""

from typing import NamedTuple

from monograph.device import Device
from monograph.model.config import LlamaConfig
from monograph.predict.roofline import KERNELS, MICRO_STEP_S, matmul_parameters, reached


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

    A step of R rows takes the longer of R (2 N_matmul / products + 4 L d_attn context / attention) and the time of
    reading weights, keys and values once, and its launches; the context is a prompt and half of an answer.
    """
    rate, bandwidth = reached(device)
    rows, layers = min(drawing.answers, drawing.at_once), config.num_hidden_layers
    context, matrices = drawing.prompt + drawing.tokens / 2, matmul_parameters(config)
    attending = layers - sum(map(config.is_linear, range(layers)))
    attended = 4 * attending * config.num_attention_heads * config.head_dim * context
    products = peak_flops * rate.products * rows / (rows + rate.saturating_tokens)
    kept = 2 * attending * config.num_key_value_heads * config.head_dim * context
    work_s = rows * (2 * matrices / products + attended / (peak_flops * rate.attention))
    work_s = max(work_s, (matrices + rows * kept) * drawing.number_bytes / bandwidth)
    launch_s = layers * KERNELS[drawing.captured] / 3 * rate.launch_s * (1 if drawing.captured else 2) + MICRO_STEP_S
    step_s = work_s + launch_s if device.type == "cpu" else max(work_s, launch_s)
    return -(-drawing.answers // rows) * drawing.tokens * step_s
