"""Which kernel computes a run's attention on a GPU: measured once, said in one line, and kept by a resume."""

from __future__ import annotations

from monograph.graph.precision import Precision
from monograph.loss import Batch
from monograph.model.llama import Llama
from monograph.ops.attention import Kernel
from monograph.ops.attention_kernels import compared, fastest, time_kernels
from monograph.run.progress import Progress
from monograph.session.session import Session


def choose_kernel(session: Session, window: Batch, progress: Progress) -> None:
    """Let the model's causal attention be computed by the kernel that is fastest on the run's shapes.

    A run that is taken up keeps the kernel that it was begun with, as another one rounds otherwise, unless this device
    cannot run it. Nothing is measured on a CPU, where there is one kernel, nor for packed rows, whose borders another
    implementation reads (`monograph.model.masks.attention_mask`).
    """
    engine, model = session.engine, session.engine.model
    if engine.step.device.type != "cuda" or not isinstance(model, Llama) or not is_causal(model, window):
        return
    config, (rows, length) = model.config, window["tokens"].shape
    times = time_kernels(
        min(engine.micro_batch or rows, rows),
        (config.num_attention_heads, config.num_key_value_heads),
        length,
        config.head_dim,
        Precision(session.settings.train.precision).dtype,
        engine.step.device,
    )
    session.kernel = session.world.agreed(chosen(times, session.kernel))
    assert session.kernel
    model.use_attention(model.attention, session.kernel)
    if times:
        progress.line("attention", compared(times, session.kernel))


def is_causal(model: Llama, window: Batch) -> bool:
    """Whether a layer attends to all earlier positions of a row, without a mask."""
    length, layers = window["tokens"].shape[1], range(model.config.num_hidden_layers)
    unbounded = any((model.config.window(layer) or length) >= length for layer in layers)
    return "segments" not in window and model.attention in ("auto", "sdpa") and unbounded


def chosen(times: dict[Kernel, float], before: Kernel | None) -> Kernel:
    """The one of before if it can be run, else the fastest."""
    return before if before in times else fastest(times)
