"""Prepare the first update: make a trial step, choose a kernel, capture the step, and fix the run's
length.

A *window* is the batch of one update; the engine cuts it into micro-batches. To *capture* a step is
to compile it, and on a GPU to record it for replaying (`graph.capture`). A *run by the clock* has a
time (`train.minutes`) instead of a number of updates.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from torch import nn

from monograph.device import clock, compiler_obstacle, describe, synchronize
from monograph.distributed.world import World
from monograph.engine import Engine
from monograph.errors import UsageError
from monograph.graph import capture as graph
from monograph.graph.compilable import Scope
from monograph.graph.lora import may_start_without_gradient
from monograph.graph.precision import Precision
from monograph.loss import Batch
from monograph.model.llama import Llama
from monograph.ops.attention import AttentionKernel
from monograph.ops.attention_kernels import compared, fastest, time_kernels
from monograph.planner import StreamCandidate, defaults
from monograph.planner.streaming import describe_tiers
from monograph.predict.footprint import Work
from monograph.predict.roofline import Calibration, peak_flops
from monograph.profiling.memory import LiveBytes, peak_memory_bytes
from monograph.report.quantities import count, counted, duration
from monograph.run import recorded_state
from monograph.run.progress import Progress
from monograph.session.brief import updates_given
from monograph.session.deadline import Deadline
from monograph.session.plan import Length
from monograph.session.resolve import resolve
from monograph.session.session import Session
from monograph.storage.cache_dir import calibration_file
from monograph.stream import Streamed

# With train.wall_minutes, scoring the points of the curve takes at most this share of training.
CURVE_SHARE = 0.125


def choose_kernel(session: Session, window: Batch, progress: Progress) -> None:
    """Time the kernels for the model's causal attention on the run's shapes, and use the fastest.

    A resumed run keeps the kernel that it was begun with, because another kernel rounds
    differently, unless this device cannot run it. Nothing is timed on a CPU, which has one kernel,
    nor for packed rows, for which another implementation masks other documents
    (`monograph.model.llama.attention_mask`).
    """
    engine, model = session.engine, session.engine.model
    if (
        engine.step.device.type != "cuda"
        or not isinstance(model, Llama)
        or not is_causal(model, window)
    ):
        return
    config, (rows, length) = model.config, window["tokens"].shape
    times = time_kernels(
        min(engine.micro_batch or rows, rows),
        (config.num_attention_heads, config.num_key_value_heads),
        length,
        config.head_dim,
        Precision(session.plan.training.precision).dtype,
        engine.step.device,
    )
    session.kernel = session.world.agreed(kept_or_fastest(times, session.kernel))
    assert session.kernel
    model.use_attention(model.attention, session.kernel)
    if times:
        progress.line("attention", compared(times, session.kernel))


def is_causal(model: Llama, window: Batch) -> bool:
    """Return whether some layer attends to all earlier positions of a row, without a mask."""
    length = window["tokens"].shape[1]
    layers = range(model.config.num_hidden_layers)
    unbounded = any((model.config.window(layer) or length) >= length for layer in layers)
    return "segments" not in window and model.attention in ("auto", "sdpa") and unbounded


def kept_or_fastest(
    times: dict[AttentionKernel, float], before: AttentionKernel | None
) -> AttentionKernel:
    """Return the kernel used before if it has a time, and so runs on this device; else the fastest.

    Args:
        times: seconds of each kernel that runs on this device.
        before: the kernel that the run was begun with; None in a new run.
    """
    return before if before in times else fastest(times)


# Timing updates takes about this share of the training time at most, if that is limited.
CALIBRATION_SHARE = 0.08
# Updates are timed for this long, so that short work of other programs changes the result little.
CALIBRATION_S = 3.0
MIN_TIMED = 3  # updates that are timed, if the time suffices
MAX_TIMED = 50


def calibrate(session: Session) -> float:
    """Return the seconds of an update of the session, including the sampling of answers.

    See `seconds_per_update`.
    """
    engine = session.engine
    batches = session.open_batches(0)
    updates_per_window = session.task.updates_per_window
    window = next(batches)
    time_s = session.left_s
    if not updates_given(session):
        time_s = min(time_s, 60 * session.plan.job.span.minutes)

    def make_updates() -> None:
        for _ in range(updates_per_window):
            # Windows that are prepared ahead cost nothing. Others, such as sampled answers, are
            # part of an update's time.
            engine.rehearse(window if session.task.is_ready else next(batches))

    with session.undisturbed():
        seconds = seconds_per_update(engine, make_updates, session.world, time_s)
    return float(session.world.agreed(seconds)) / updates_per_window


def seconds_per_update(
    engine: Engine,
    update: Callable[[], object],
    world: World | None = None,
    time_s: float = math.inf,
) -> float:
    """Return the seconds of an update: the lower quartile over a few updates that change nothing.

    The lower quartile rather than the median, because an estimate that is too low does less harm: a
    run planned too long cools down in time (`Reporter.keep_time`), and a run planned too short
    would waste time.

    Args:
        engine: the engine, whose counters are restored.
        update: makes an update that changes no weight (`Engine.rehearse`).
        world: the ranks that update together; rank 0 decides how many updates are timed.
        time_s: seconds of the run's training. The updates take about `CALIBRATION_SHARE` of them at
            most, but at least one is timed.
    """
    times: list[float] = []
    world = world or World()

    def needs_more() -> bool:
        if times and sum(times) > CALIBRATION_SHARE * time_s:
            return False
        if len(times) < MIN_TIMED:
            return True
        return sum(times) < CALIBRATION_S and len(times) < MAX_TIMED

    with engine.step.counters_kept():
        while world.agreed(needs_more()):
            synchronize(engine.step.device)
            began = clock()
            update()
            synchronize(engine.step.device)
            times.append(clock() - began)
    return sorted(times)[len(times) // 4]


def measure_memory(session: Session) -> None:
    """Measure the peak memory of an update on a CPU, where it is not counted during the run.

    This is called after the run, because the additional update could run out of memory. A failure
    then costs only this figure.
    """
    if session.engine.step.device.type != "cuda":
        with suppress(Exception):
            session.peak_bytes = peak_bytes(session)


def peak_bytes(session: Session) -> int:
    """Return the bytes of tensors at the peak of an update: weights, gradients, optimizer state,
    activations, window.

    On a GPU this is the peak of torch's allocator since the last reset. On a CPU the allocator's
    events are recorded during an update of two micro-batches that changes nothing. The process's
    memory would also count libraries and the compiler, hundreds of MB.
    """
    engine = session.engine
    if engine.step.device.type == "cuda":
        return peak_memory_bytes(engine.step.device)
    batches = session.open_batches(0)
    window = next(batches)
    batches.close()
    rows = 2 * (engine.micro_batch or session.batches.rows_per_window)
    with session.undisturbed(), engine.step.counters_kept(), LiveBytes() as live:
        engine.rehearse({name: tensor[:rows] for name, tensor in window.items()})
    if isinstance(engine, Streamed):
        return live.peak_bytes + sum(engine.ledger()["device"].values())
    # `live` counts only what was allocated during the update. What existed before is added.
    flat = [
        value
        for plane in engine.step.planes
        for value in (plane.param, plane.grad, *plane.state.values())
    ]
    frozen = [weight for weight in engine.model.parameters() if not weight.requires_grad]
    kept = [*frozen, *engine.model.buffers(), *flat, *window.values(), *session.task.held]
    return live.peak_bytes + sum(tensor.nbytes for tensor in kept)


def store_seconds(session: Session, seconds: float) -> None:
    """Store the measured seconds of an update in this machine's calibration, for later plans.

    Only updates that the planner can predict are stored: those of a `Llama` on text, on one device.
    """
    engine = session.engine
    if not (session.task.is_plain and session.task.is_foreseen and session.world.alone):
        return
    if not isinstance(engine.model, Llama) or isinstance(engine, Streamed):
        return
    machine = describe()
    rows = session.batches.rows_per_window
    assert isinstance(session.plan.training, Work)
    micro_batch = engine.micro_batch or rows
    work = replace(
        session.plan.training, rows=micro_batch, window_rows=rows, compile=engine.step.scope
    )
    rate = peak_flops(machine, (work.precision,))[work.precision]
    Calibration(calibration_file()).note(machine, work, seconds, rate)


_BATCH_STATISTICS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def mixing_rows(model: nn.Module) -> list[str]:
    """Return the names of the layers that normalise over the rows of a micro-batch."""
    return [name for name, module in model.named_modules() if isinstance(module, _BATCH_STATISTICS)]


def prepare(session: Session, progress: Progress) -> None:
    """Run one eager trial step, then compile the step.

    If compiling fails, the reason is printed, and the run trains eagerly.
    """
    compile_step(session, try_step(session, progress), progress)


def try_step(session: Session, progress: Progress) -> Batch:
    """Run one eager trial step (`graph.trial`), print what it finds, and choose the attention
    kernel.

    Returns:
        The window of the step.
    """
    with session.undisturbed():
        window = next(session.open_batches(0))
        _run_trial(session, window, progress)
    return window


def _run_trial(session: Session, window: Batch, progress: Progress) -> None:
    engine = session.engine
    with progress.stage("trial", "one eager step") as stage:
        trial = engine.trial(window)
        stage.result = session.task.trial_result(trial)
    # Some parameters of adapters have a zero gradient only at the start.
    without = [name for name in trial.without_gradient if not may_start_without_gradient(name)]
    if without and session.task.reaches_all:
        progress.line(
            "warning", f"no gradient reaches {', '.join(without[:3])}: its weights will not change"
        )
    if bf16_layers := engine.step.left_in_bf16:
        layers = counted(len(bf16_layers), "linear layer")
        progress.line(
            "note",
            f"{layers} in bf16, not fp8: the sides of {bf16_layers[0]} are not multiples of 16",
        )
    rows = session.batches.rows_per_window
    mixing = mixing_rows(engine.model)
    # Ranks bring the statistics of their micro-batches together.
    at_once = (engine.micro_batch or rows) * session.world.size
    if mixing and at_once < rows:
        progress.line(
            "note",
            f"{mixing[0]} normalises over micro-batches of {at_once} rows, not over the update's {rows}: "
            "its statistics, and so the gradient, depend on train.micro_batch",
        )
    choose_kernel(session, window, progress)


def compile_step(session: Session, window: Batch, progress: Progress) -> None:
    """Capture the step for windows like this one.

    If that fails, the reason is printed, and the run trains eagerly.
    """
    with session.undisturbed():
        _compile(session, window, progress)


def _compile(session: Session, window: Batch, progress: Progress) -> None:
    engine, scope = session.engine, session.plan.training.compile
    obstacle = compiler_obstacle() if engine.step.device.type == "cpu" else None
    if scope == "none":
        # The reason is known if the run itself decided not to compile.
        session.eager_reason = session.eager_reason or "train.compile = none"
    elif obstacle:
        session.eager_reason = obstacle
    else:
        about = "one block for all" if scope == "blocks" else "whole step"
        with progress.stage("compile", about) as stage:
            began = clock()
            session.eager_reason = capture(engine, window, scope, session.kernel)
            session.compile_s = clock() - began
            replayed = ", micro-steps replayed" if graph.is_replayed(engine.step) else ""
            stage.result = "not possible" if session.eager_reason else f"0 graph breaks{replayed}"
    if session.eager_reason:
        progress.line("eager", f"training without compiling: {session.eager_reason}")


def capture(
    engine: Engine, window: Batch, scope: Scope, kernel: AttentionKernel | None = None
) -> str | None:
    """Capture the step of an engine.

    Where flex attention is impossible or slow, a Llama changes to scaled_dot_product_attention,
    with dense masks for packed rows.

    Args:
        engine: the engine.
        window: a window of the shape to capture.
        scope: what one graph contains: the "whole" step, or a block.
        kernel: the kernel of attention without masks; None if none was chosen.

    Returns:
        Why the step stays eager; None if it was captured.
    """
    model = engine.model
    # Triton uses tensor cores from sm_80 on, where bf16 begins. Without them a T4 reaches 8 TFLOP/s
    # in flex attention, and 65 in sdpa.
    flex_is_slow = (
        isinstance(model, Llama)
        and engine.step.device.type == "cuda"
        and not describe(engine.step.device).has_bf16
    )
    reason: str | None
    if flex_is_slow:
        reason = "flex_attention on an old GPU"
    else:
        reason = engine.capture(window, scope=scope)
    if reason and "flex_attention" in reason and isinstance(model, Llama):
        # Flex attention's kernels may need more shared memory for large heads than this GPU has,
        # and torch has no such kernel for an ensemble.
        model.use_attention("sdpa", kernel or "torch")
        reason = engine.capture(window, scope=scope)
    return reason


def _budget_s(session: Session, updates: int, update_s: float, progress: Progress) -> float:
    """Return the seconds of training from now on that the settings allow.

    The default run may train for longer than `train.minutes` on a slow machine, which a line says.

    Args:
        session: the session.
        updates: the number of updates that the settings give; 0 if they give a time.
        update_s: seconds of an update.
        progress: the display.
    """
    span = session.plan.job.span
    left_s = session.left_s
    if updates:
        return left_s
    given_s = 60 * span.minutes
    is_given = span.is_timed or not session.task.is_plain or span.wall_minutes is not None
    wanted_s = given_s if is_given else defaults.default_seconds(span.minutes, update_s)
    if wanted_s > given_s:
        longer = f"{duration(wanted_s)} instead of {span.minutes:g} min"
        progress.line("time", f"{longer}: a good first model takes that long on this machine")
    return min(wanted_s, left_s)


def _curve_points(session: Session, update_s: float) -> tuple[int, float]:
    """Return how often a run with train.wall_minutes is scored for its curve, and the estimated
    seconds of that in all.

    Args:
        session: the session, whose `budget_s` is known.
        update_s: seconds of an update.
    """
    point_s = session.scoring_s(min(session.task.held_out_rows, defaults.CURVE_ROWS), update_s)
    if not point_s:
        return defaults.EVALUATIONS, 0.0
    affordable = int(CURVE_SHARE * (session.budget_s or 0.0) / point_s)
    points = max(1, min(defaults.EVALUATIONS, affordable))
    return points, points * point_s


def fix_length(session: Session, progress: Progress) -> None:
    """Decide and print the number of updates: the settings give it, or the epochs or the minutes
    determine it.

    Sets `session.budget_s`, and the session's plan and schedule.

    Raises:
        UsageError: train.epochs are too many.
    """
    plan = session.plan
    rows = session.batches.rows_per_window
    lasting = ""  # how long the training will take, as the line says it
    given = updates_given(session)
    if given > recorded_state.MOST:
        epochs = plan.job.span.epochs
        raise UsageError(
            f"train.epochs = {epochs}: they have {given:,} updates; give fewer, for at most 1e15"
        )
    updates = given
    evaluations = defaults.EVALUATIONS
    if not given or session.ends_s is not None:
        with progress.stage("calibrate", "timing a few updates (discarded)") as stage:
            seconds = calibrate(session)
            stage.result = f"{seconds * 1000:.0f} ms each"
        store_seconds(session, seconds)
        session.budget_s = _budget_s(session, given, seconds, progress)
        decay = plan.training.optim.weight_decay
        most = given or session.task.most_updates(rows, decay) or recorded_state.MOST
        # The rest is for evaluations, samples and checkpoints.
        training_s = defaults.UPDATES_SHARE * session.budget_s
        if session.ends_s is not None:
            evaluations, curve_s = _curve_points(session, seconds)
            # However long scoring takes, a quarter of the time is for updates.
            training_s = max(
                training_s / 4, training_s - curve_s - Deadline(session).end_s(seconds)
            )
        affordable = defaults.updates_for(training_s, seconds, most)
        # One update is always made, even if it takes longer than the budget.
        session.budget_s = max(session.budget_s, affordable * seconds)
        # `engine.index` eager updates came before the step was compiled (`session.eager_start`).
        updates = max(affordable, min(most, session.engine.index + affordable))
        more = " more" if session.engine.index else ""
        lasting = f", about {duration(session.budget_s)}{more}"
        if updates >= most:
            lasting = f", about {duration(seconds * updates)}"
            if not given:
                lasting = f", limited to {defaults.most_epochs(decay)} epochs (train.epochs=N for more){lasting}"
        session.budget_s += session.elapsed_s
    plan = resolve(plan, describe(), Length(updates, evaluations))
    session.complete(plan)
    adapters = (
        f" of which {count(session.adapter_params)} are trained" if session.recipe.lora else ""
    )
    amount = session.task.amount(rows, updates)
    progress.line(
        "plan",
        f"{count(session.params)} parameters{adapters}, {counted(updates, 'update')} of {amount}, "
        f"{plan.training.precision}{lasting}",
    )
    if isinstance(plan.expected, StreamCandidate):
        for label, tier in describe_tiers(plan.expected):
            progress.line(label, tier)
