"""Prepare the first update: make a trial step, choose a kernel, capture the step, and fix the run's
length.
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
from monograph.ops.attention import Kernel
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

# Of the training of a run whose whole time is limited, which the points of its curve take.
CURVE_SHARE = 0.125


def choose_kernel(session: Session, window: Batch, progress: Progress) -> None:
    """Measure the kernels for the model's causal attention on the run's shapes, and choose the
    fastest.

    A resumed run keeps the kernel that it was begun with, since another one rounds differently,
    unless this device cannot run it. Nothing is measured on a CPU, which has one kernel, nor for
    packed rows, whose borders another implementation handles
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
    session.kernel = session.world.agreed(chosen(times, session.kernel))
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


def chosen(times: dict[Kernel, float], before: Kernel | None) -> Kernel:
    """Return the kernel used before if it was timed, and so runs on this device; else the fastest
    one.
    """
    return before if before in times else fastest(times)


CALIBRATION_SHARE = 0.08  # of the time that there is for training, if that is limited
# Long enough that a moment of other work on the machine changes the result little.
CALIBRATION_S = 3.0


def calibrate(session: Session) -> float:
    """Return the seconds of an update of the session, answers included; see `seconds_per_update`."""
    engine = session.engine
    batches = session.open_batches(0)
    each = session.task.updates_per_window
    window = next(batches)
    time_s = session.left_s
    if not updates_given(session):
        time_s = min(time_s, 60 * session.plan.job.span.minutes)

    def update() -> None:
        for _ in range(each):
            engine.rehearse(window if session.task.is_ready else next(batches))

    with session.undisturbed():
        return (
            float(session.world.agreed(seconds_per_update(engine, update, session.world, time_s)))
            / each
        )


def seconds_per_update(
    engine: Engine,
    update: Callable[[], object],
    world: World | None = None,
    time_s: float = math.inf,
) -> float:
    """Return the seconds of an undisturbed update: the lower quartile over a few updates that are
    thrown away.

    The quartile is low because a run that is planned too long cools down in time
    (`Reporter.keep_time`), while one that is planned too short would waste time.

    Args:
        engine: the engine, whose counters are restored.
        update: makes an update that changes no weight, such as one without targets, which is
            computed in full and then not applied.
        world: the ranks that update together; rank 0 decides how often.
        time_s: seconds of the run's training; the measurement takes a small share of them, or one
            update.
    """
    times: list[float] = []
    world = world or World()

    def goes_on() -> bool:
        if times and sum(times) > CALIBRATION_SHARE * time_s:
            return False
        return len(times) < 3 or (sum(times) < CALIBRATION_S and len(times) < 50)

    with engine.step.counters_kept():
        while world.agreed(goes_on()):
            synchronize(engine.step.device)
            began = clock()
            update()
            synchronize(engine.step.device)
            times.append(clock() - began)
    return sorted(times)[len(times) // 4]


def measure_memory(session: Session) -> None:
    """Measure the memory of an update on a CPU, where it is not counted during the run.

    This is called after the run, since an additional update before could run out of memory. A
    failure here costs only this figure.
    """
    if session.engine.step.device.type != "cuda":
        with suppress(Exception):
            session.peak_bytes = peak_bytes(session)


def peak_bytes(session: Session) -> int:
    """Return the bytes of tensors at the peak of an update: weights, gradients, optimizer state,
    activations, window.

    On a GPU torch's allocator has counted them since the last reset. On a CPU its events are
    recorded during an update of two micro-batches, which is thrown away. The process's memory is
    not read instead, since libraries and the compiler take hundreds of MB of it.
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
    flat = [
        value
        for plane in engine.step.planes
        for value in (plane.param, plane.grad, *plane.state.values())
    ]
    frozen = [weight for weight in engine.model.parameters() if not weight.requires_grad]
    kept = [*frozen, *engine.model.buffers(), *flat, *window.values()]
    return live.peak_bytes + sum(tensor.nbytes for tensor in (*kept, *session.task.held))


def remember(session: Session, seconds: float) -> None:
    """Store the measured seconds of an update on this machine for later plans."""
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
    """Run one eager trial step, then compile the step; if that fails, print the reason and train
    eagerly.
    """
    compile_step(session, try_step(session, progress), progress)


def try_step(session: Session, progress: Progress) -> Batch:
    """Run one eager trial step, print what it finds, and choose the attention kernel; return the
    step's window.
    """
    with session.undisturbed():
        window = next(session.open_batches(0))
        _try(session, window, progress)
    return window


def _try(session: Session, window: Batch, progress: Progress) -> None:
    engine = session.engine
    with progress.stage("trial", "one eager step") as stage:
        trial = engine.trial(window)
        stage.result = session.task.trial_result(trial)
    without = [name for name in trial.without_gradient if not may_start_without_gradient(name)]
    if without and session.task.reaches_all:
        progress.line(
            "warning", f"no gradient reaches {', '.join(without[:3])}: its weights will not change"
        )
    if left := engine.step.left_in_bf16:
        layers = counted(len(left), "linear layer")
        progress.line(
            "note", f"{layers} in bf16, not fp8: the sides of {left[0]} are no multiples of 16"
        )
    rows = session.batches.rows_per_window
    mixing = mixing_rows(engine.model)
    at_once = (engine.micro_batch or rows) * session.world.size
    if mixing and at_once < rows:
        progress.line(
            "note",
            f"{mixing[0]} normalises over micro-batches of {at_once} rows, not over the update's {rows}: "
            "its statistics, and so the gradient, depend on train.micro_batch",
        )
    choose_kernel(session, window, progress)


def compile_step(session: Session, window: Batch, progress: Progress) -> None:
    """Capture the step for windows like this one; if that fails, print the reason and train
    eagerly.
    """
    with session.undisturbed():
        _compile(session, window, progress)


def _compile(session: Session, window: Batch, progress: Progress) -> None:
    engine, scope = session.engine, session.plan.training.compile
    if scope == "none":
        session.eager_reason = session.eager_reason or "train.compile = none"
    elif engine.step.device.type == "cpu" and (obstacle := compiler_obstacle()):
        session.eager_reason = obstacle
    else:
        with progress.stage(
            "compile", "one block for all" if scope == "blocks" else "whole step"
        ) as stage:
            began = clock()
            session.eager_reason = capture(
                engine, window, "blocks" if scope == "blocks" else "whole", session.kernel
            )
            session.compile_s = clock() - began
            replayed = ", micro-steps replayed" if graph.is_replayed(engine.step) else ""
            stage.result = "not possible" if session.eager_reason else f"0 graph breaks{replayed}"
    if session.eager_reason:
        progress.line("eager", f"training without compiling: {session.eager_reason}")


def capture(
    engine: Engine, window: Batch, scope: Scope, kernel: Kernel | None = None
) -> str | None:
    """Capture the step of an engine; return why it stays eager, or None.

    Where flex attention is impossible or slow, packed rows have dense masks, and the rest `kernel`,
    if one was chosen.
    """
    model = engine.model
    # Triton uses tensor cores from sm_80 on. Without them a T4 has 8 TFLOP/s for flex attention,
    # and 65 for sdpa's.
    old = (
        isinstance(model, Llama)
        and engine.step.device.type == "cuda"
        and not describe(engine.step.device).has_bf16
    )
    reason = "flex_attention on an old GPU" if old else engine.capture(window, scope=scope)
    if reason and "flex_attention" in reason and isinstance(model, Llama):
        # Its kernels may need more shared memory for large heads than this GPU has, and torch has
        # none for an ensemble.
        model.use_attention("sdpa", kernel or "torch")
        reason = engine.capture(window, scope=scope)
    return reason


def _budget_s(session: Session, updates: int, update_s: float, progress: Progress) -> float:
    """Return the seconds of training from now on that the settings allow; print a line if they are
    others than given.

    Args:
        session: the session.
        updates: the number of updates that the settings give; 0: they give a time.
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
    """Return how often a run of limited time is scored for its curve, and about how many seconds
    that takes in all.
    """
    point_s = session.scoring_s(min(session.task.held_out_rows, defaults.CURVE_ROWS), update_s)
    if not point_s:
        return defaults.EVALUATIONS, 0.0
    affordable = int(CURVE_SHARE * (session.budget_s or 0.0) / point_s)
    points = max(1, min(defaults.EVALUATIONS, affordable))
    return points, points * point_s


def fix_length(session: Session, progress: Progress) -> None:
    """Decide and print the number of updates: as given, as the epochs contain, or as the minutes
    allow.
    """
    plan = session.plan
    rows = session.batches.rows_per_window
    lasting = ""
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
        remember(session, seconds)
        session.budget_s = _budget_s(session, given, seconds, progress)
        decay = plan.training.optim.weight_decay
        most = given or session.task.most_updates(rows, decay) or recorded_state.MOST
        training_s = defaults.UPDATES_SHARE * session.budget_s
        if session.ends_s is not None:
            evaluations, curve_s = _curve_points(session, seconds)
            training_s = max(
                training_s / 4, training_s - curve_s - Deadline(session).end_s(seconds)
            )
        left = defaults.updates_for(training_s, seconds, most)
        session.budget_s = max(session.budget_s, left * seconds)  # of one update, at least
        # Some were made before the step was compiled.
        updates = max(left, min(most, session.engine.index + left))
        lasting = f", about {duration(session.budget_s)}" + (
            " more" if session.engine.index else ""
        )
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
