"""Prepare the first update: make a trial step, choose a kernel, capture the step, and decide the
run's length.

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
from monograph.ops.attention_kernels import describe_speeds, fastest, time_kernels
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

# ── the attention kernel ────────────────────────────────────────────────────────────────────────


def choose_kernel(session: Session, window: Batch, progress: Progress) -> None:
    """Time the kernels for the model's causal attention on the run's shapes, and use the fastest.

    A resumed run keeps the kernel that it was begun with, because another kernel rounds
    differently, unless this device cannot run it. Nothing is timed on a CPU, which has one kernel.
    Nothing is timed either for packed rows: they need an implementation that masks other documents
    (`monograph.model.llama.attention_mask`).
    """
    engine = session.engine
    model = engine.model
    if engine.step.device.type != "cuda" or not isinstance(model, Llama):
        return
    if not has_unmasked_layer(model, window):
        return
    config = model.config
    rows, length = window["tokens"].shape
    times = time_kernels(
        min(engine.micro_batch or rows, rows),
        (config.num_attention_heads, config.num_key_value_heads),
        length,
        config.head_dim,
        Precision(session.plan.training.precision).dtype,
        engine.step.device,
    )
    session.kernel = session.world.broadcast(kept_or_fastest(times, session.kernel))
    assert session.kernel
    model.use_attention(model.attention, session.kernel)
    if times:
        progress.line("attention", describe_speeds(times, session.kernel))


def has_unmasked_layer(model: Llama, window: Batch) -> bool:
    """Return whether some layer attends to all earlier positions of a row, without a mask."""
    is_packed = "segments" in window
    if is_packed or model.attention not in ("auto", "sdpa"):
        return False
    length = window["tokens"].shape[1]
    # A layer with a sliding window shorter than a row needs a mask.
    sliding_windows = [
        model.config.window(layer) for layer in range(model.config.num_hidden_layers)
    ]
    return any((sliding_window or length) >= length for sliding_window in sliding_windows)


def kept_or_fastest(
    times: dict[AttentionKernel, float], before: AttentionKernel | None
) -> AttentionKernel:
    """Return the kernel used before if it has a time, and so runs on this device; else the fastest.

    Args:
        times: seconds of each kernel that runs on this device.
        before: the kernel that the run was begun with; None in a new run.
    """
    return before if before in times else fastest(times)


# ── the time and the memory of an update ────────────────────────────────────────────────────────

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
            # Windows that are prepared in the background cost no time. Others, such as windows of
            # sampled answers, are part of an update's time.
            engine.rehearse(window if session.task.prepares_windows else next(batches))

    with session.undisturbed():
        seconds = seconds_per_update(engine, make_updates, session.world, time_s)
    return float(session.world.broadcast(seconds)) / updates_per_window


def seconds_per_update(
    engine: Engine,
    update: Callable[[], object],
    world: World | None = None,
    time_s: float = math.inf,
) -> float:
    """Return the seconds of an update: the lower quartile over a few updates that change nothing.

    It is the lower quartile, not the median, because an estimate that is too low does less harm. A
    run that was planned too long cools down in time (`Reporter.keep_time`), but a run that was
    planned too short would waste time.

    Args:
        engine: the engine, whose counters are restored.
        update: makes an update that changes no weight (`Engine.rehearse`).
        world: the ranks that update together; rank 0 decides how many updates are timed.
        time_s: seconds of the run's training. The updates take at most about `CALIBRATION_SHARE` of
            them, but at least one is timed.
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
        while world.broadcast(needs_more()):
            synchronize(engine.step.device)
            began = clock()
            update()
            synchronize(engine.step.device)
            times.append(clock() - began)
    return sorted(times)[len(times) // 4]


def measure_memory(session: Session) -> None:
    """Measure the peak memory of an update on a CPU, where it is not counted during the run.

    This is called after the run, because the additional update could run out of memory. After the
    run, such a failure loses nothing but this number.
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
    trained = [
        tensor
        for plane in engine.step.planes
        for tensor in (plane.param, plane.grad, *plane.state.values())
    ]
    frozen = [weight for weight in engine.model.parameters() if not weight.requires_grad]
    existing = [
        *trained,
        *frozen,
        *engine.model.buffers(),
        *window.values(),
        *session.task.extra_tensors,
    ]
    return live.peak_bytes + sum(tensor.nbytes for tensor in existing)


def store_seconds(session: Session, seconds: float) -> None:
    """Store the measured seconds of an update in this machine's calibration, for later plans.

    Only updates that the planner can predict are stored: those of a `Llama` on text, on one device.
    """
    engine = session.engine
    if not (
        session.task.has_plain_updates and session.task.is_fully_planned and session.world.alone
    ):
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
    Calibration(calibration_file()).note_time(machine, work, seconds, rate)


# ── the trial step, and capturing ───────────────────────────────────────────────────────────────

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def batch_norm_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that normalise over the rows of a micro-batch."""
    return [name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)]


def prepare(session: Session, progress: Progress) -> None:
    """Run one eager trial step, then compile the step.

    If compiling fails, the reason is printed, and the run trains eagerly.
    """
    compile_step(session, try_step(session, progress), progress)


def try_step(session: Session, progress: Progress) -> Batch:
    """Run one eager trial step (`graph.trial`), print its result, and choose the attention kernel.

    Returns:
        The window of the step.
    """
    with session.undisturbed():
        window = next(session.open_batches(0))
        _run_trial(session, window, progress)
    return window


def _run_trial(session: Session, window: Batch, progress: Progress) -> None:
    """Run one eager trial step, and print its result and notes on the model; choose the kernel."""
    engine = session.engine
    with progress.stage("trial", "one eager step") as stage:
        trial = engine.trial(window)
        stage.result = session.task.describe_trial(trial)
    # Some parameters of adapters have a zero gradient at the start, but not later.
    unreached = [name for name in trial.without_gradient if not may_start_without_gradient(name)]
    if unreached and session.task.reaches_all_parameters:
        progress.line(
            "warning",
            f"no gradient reaches {', '.join(unreached[:3])}: its weights will not change",
        )
    if bf16_layers := engine.step.left_in_bf16:
        layers = counted(len(bf16_layers), "linear layer")
        progress.line(
            "note",
            f"{layers} in bf16, not fp8: the sides of {bf16_layers[0]} are not multiples of 16",
        )
    rows = session.batches.rows_per_window
    batch_norms = batch_norm_layers(engine.model)
    # Ranks compute the statistics over their micro-batches together.
    rows_at_once = (engine.micro_batch or rows) * session.world.size
    if batch_norms and rows_at_once < rows:
        progress.line(
            "note",
            f"{batch_norms[0]} normalises over micro-batches of {rows_at_once} rows, not over the update's {rows}: "
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
    """Capture the step, or say in `session.eager_reason` why it stays eager."""
    engine = session.engine
    scope = session.plan.training.compile
    obstacle = compiler_obstacle() if engine.step.device.type == "cpu" else None
    if scope == "none":
        # If the program decided not to compile, `eager_reason` already says why.
        session.eager_reason = session.eager_reason or "train.compile = none"
    elif obstacle:
        session.eager_reason = obstacle
    else:
        compiled = "one block for all" if scope == "blocks" else "whole step"
        with progress.stage("compile", compiled) as stage:
            began = clock()
            session.eager_reason = capture_engine(engine, window, scope, session.kernel)
            session.compile_s = clock() - began
            replayed = ", micro-steps replayed" if graph.is_replayed(engine.step) else ""
            stage.result = "not possible" if session.eager_reason else f"0 graph breaks{replayed}"
    if session.eager_reason:
        progress.line("eager", f"training without compiling: {session.eager_reason}")


def capture_engine(
    engine: Engine, window: Batch, scope: Scope, kernel: AttentionKernel | None = None
) -> str | None:
    """Capture the step of an engine.

    If flex attention is impossible or slow, a Llama uses scaled_dot_product_attention from now on,
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


# ── the run's length ────────────────────────────────────────────────────────────────────────────

# With train.wall_minutes, scoring the points of the curve takes at most this share of training.
CURVE_SHARE = 0.125


def _budget_s(session: Session, updates: int, update_s: float, progress: Progress) -> float:
    """Return the seconds of training from now on that the settings allow.

    If the user gave no time, the default run trains for longer than its usual time on a slow
    machine, and a line says so.

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
    training_s = 60 * span.minutes
    has_time_limit = span.is_timed or span.wall_minutes is not None
    if session.task.has_plain_updates and not has_time_limit:
        usual_s = training_s
        training_s = defaults.default_seconds(span.minutes, update_s)
        if training_s > usual_s:
            longer = f"{duration(training_s)} instead of {span.minutes:g} min"
            progress.line("time", f"{longer}: a good first model takes that long on this machine")
    return min(training_s, left_s)


def _curve_points(session: Session, update_s: float) -> tuple[int, float]:
    """Return how often a run with train.wall_minutes is scored for its curve, and the estimated
    seconds of all these evaluations.

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
    """Decide and print the number of updates, which the settings give as updates, epochs or time.

    Sets `session.budget_s`, and the session's plan and schedule.

    Raises:
        UsageError: train.epochs are too many.
    """
    plan = session.plan
    rows = session.batches.rows_per_window
    time_text = ""  # on how long the training will take
    given = updates_given(session)
    if given > recorded_state.MAX_COUNT:
        epochs = plan.job.span.epochs
        raise UsageError(
            f"train.epochs = {epochs}: they have {given:,} updates; give fewer, for at most 1e15"
        )
    updates = given
    evaluations = defaults.EVALUATIONS
    if not given or session.deadline_s is not None:
        with progress.stage("calibrate", "timing a few updates (discarded)") as stage:
            seconds = calibrate(session)
            stage.result = f"{seconds * 1000:.0f} ms each"
        store_seconds(session, seconds)
        session.budget_s = _budget_s(session, given, seconds, progress)
        decay = plan.training.optim.weight_decay
        max_updates = given or session.task.max_updates(rows, decay) or recorded_state.MAX_COUNT
        # The rest of the budget is for evaluations, samples and checkpoints.
        updates_s = defaults.UPDATES_SHARE * session.budget_s
        if session.deadline_s is not None:
            evaluations, curve_s = _curve_points(session, seconds)
            closing_s = Deadline(session).closing_s(seconds)
            # However long scoring takes, a quarter of the time is for updates.
            updates_s = max(updates_s / 4, updates_s - curve_s - closing_s)
        affordable = defaults.updates_in_time(updates_s, seconds, max_updates)
        # One update is always made, even if it takes longer than the budget.
        session.budget_s = max(session.budget_s, affordable * seconds)
        # Eager updates may have been made before the step was compiled (`session.eager_start`).
        eager_updates = session.engine.index
        updates = max(affordable, min(max_updates, eager_updates + affordable))
        more = " more" if eager_updates else ""
        time_text = f", about {duration(session.budget_s)}{more}"
        if updates >= max_updates:
            time_text = f", about {duration(seconds * updates)}"
            if not given:
                epochs = defaults.most_epochs(decay)
                time_text = f", limited to {epochs} epochs (train.epochs=N for more){time_text}"
        session.budget_s += session.elapsed_s
    plan = resolve(plan, describe(), Length(updates, evaluations))
    session.set_plan(plan)
    trained = ""
    if session.recipe.lora:
        trained = f" of which {count(session.adapter_params)} are trained"
    amount = session.task.describe_amount(rows, updates)
    progress.line(
        "plan",
        f"{count(session.params)} parameters{trained}, {counted(updates, 'update')} of {amount}, "
        f"{plan.training.precision}{time_text}",
    )
    if isinstance(plan.expected, StreamCandidate):
        for label, tier in describe_tiers(plan.expected):
            progress.line(label, tier)
