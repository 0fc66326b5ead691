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
from typing import NamedTuple

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
from monograph.model.llama import Llama, is_never_trained
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
    differently. It takes another one only if this device cannot run that kernel.

    Nothing is timed on a CPU, which has only one kernel. Nothing is timed for packed rows either:
    they need a mask that separates documents (`monograph.model.llama.attention_mask`), and the
    kernels that are timed here take no such mask.
    """
    engine = session.engine
    model = engine.model
    if engine.step.device.type != "cuda" or not isinstance(model, Llama):
        return
    if not has_unmasked_layer(model, window):
        return
    config = model.config
    rows, length = window["tokens"].shape
    heads = (config.num_attention_heads, config.num_key_value_heads)
    times = time_kernels(
        min(engine.micro_batch or rows, rows),
        heads,
        length,
        config.head_dim,
        Precision(session.plan.training.precision).dtype,
        engine.step.device,
    )
    # Each rank has timed the kernels, but all must use the same one: rank 0 decides.
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
    # A layer with a sliding window shorter than a row needs a mask. None means that a layer has no
    # sliding window.
    layers = range(model.config.num_hidden_layers)
    sliding_windows = [model.config.window(layer) for layer in layers]
    return any(not size or size >= length for size in sliding_windows)


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

# If the training time is limited, timing updates takes about this share of it at most.
CALIBRATION_SHARE = 0.08
# Updates are timed for this long, so that short work of other programs changes the result little.
CALIBRATION_S = 3.0
MIN_TIMED = 3  # at least this many updates are timed, if CALIBRATION_SHARE allows it
MAX_TIMED = 50


def time_update(session: Session) -> float:
    """Time a few updates of a session, and return the seconds of one, including its share of the
    time to sample answers; see `seconds_per_call`.

    Neither the model nor the session is changed.
    """
    engine = session.engine
    batches = session.open_batches(0)
    updates_per_window = session.task.updates_per_window
    first_window = next(batches)
    training_s = session.left_s
    if not updates_given(session):
        training_s = min(training_s, 60 * session.plan.job.span.minutes)

    def make_updates() -> None:
        """Make all updates from one window, without changing the weights."""
        for _ in range(updates_per_window):
            # Windows that are prepared in the background cost no time, so one of them is enough.
            # Making another one, such as a window of sampled answers, is part of an update's time.
            window = first_window if session.task.prepares_windows else next(batches)
            engine.rehearse(window)

    with session.undisturbed():
        window_s = seconds_per_call(engine, make_updates, session.world, training_s)
    return float(session.world.broadcast(window_s)) / updates_per_window


def seconds_per_call(
    engine: Engine,
    work: Callable[[], object],
    world: World | None = None,
    training_s: float = math.inf,
    max_timed: int = MAX_TIMED,
) -> float:
    """Return the seconds of a call of some work, such as an update: the lower quartile over a few calls.

    It is the lower quartile, not the median, because an estimate that is too low does less harm than
    one that is too high. If a run was planned too long, `Reporter.shorten_if_late` lets it cool down
    in time. If it was planned too short, the rest of its time is lost.

    Args:
        engine: the engine, whose counters are restored.
        work: what is timed. An update must change no weight (`Engine.rehearse`).
        world: the ranks that work together; rank 0 decides how many calls are timed.
        training_s: seconds of the run's training. The calls take at most about `CALIBRATION_SHARE` of
            them, but at least one is timed.
        max_timed: the most calls that are timed.
    """
    times: list[float] = []
    world = world or World()

    def needs_more() -> bool:
        """Return whether another call should be timed."""
        if times and sum(times) > CALIBRATION_SHARE * training_s:
            return False
        if len(times) >= max_timed:
            return False
        return len(times) < MIN_TIMED or sum(times) < CALIBRATION_S

    with engine.step.counters_kept():
        while world.broadcast(needs_more()):
            synchronize(engine.step.device)
            began = clock()
            work()
            synchronize(engine.step.device)
            times.append(clock() - began)
    return sorted(times)[len(times) // 4]


def measure_memory(session: Session) -> None:
    """Measure the peak memory of an update on a CPU, where it is not counted during the run.

    This is called after the run, because the additional update could run out of memory. After the
    run, such a failure loses nothing but this number, so any error is ignored.
    """
    if session.engine.step.device.type != "cuda":
        with suppress(Exception):
            session.peak_bytes = measure_peak_bytes(session)


def measure_peak_bytes(session: Session) -> int:
    """Measure the bytes of tensors at the peak of an update: weights, gradients, optimizer state,
    activations, window.

    On a GPU this is the peak of torch's allocator since the last reset. On a CPU the allocator's
    events are recorded during an update that changes nothing. The memory of the process would not
    do: it contains hundreds of MB of libraries and of the compiler.
    """
    engine = session.engine
    if engine.step.device.type == "cuda":
        return peak_memory_bytes(engine.step.device)
    batches = session.open_batches(0)
    window = next(batches)
    batches.close()
    # Two micro-batches are enough: from the second on, each has the same peak.
    rows = 2 * (engine.micro_batch or session.batches.rows_per_window)
    with session.undisturbed(), engine.step.counters_kept(), LiveBytes() as live:
        engine.rehearse({name: tensor[:rows] for name, tensor in window.items()})
    # `live` counts only what was allocated during the update. What existed before is added.
    if isinstance(engine, Streamed):
        return live.peak_bytes + sum(engine.ledger()["device"].values())
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
    window_rows = session.batches.rows_per_window
    assert isinstance(session.plan.training, Work)
    # The step may have become another one than was planned, e.g. if memory ran out or compiling
    # failed.
    work = replace(
        session.plan.training,
        rows=engine.micro_batch or window_rows,
        window_rows=window_rows,
        compile=engine.step.scope,
    )
    flops_per_s = peak_flops(machine, (work.precision,))[work.precision]
    Calibration(calibration_file()).note_time(machine, work, seconds, flops_per_s)


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
    """Run one eager trial step (`monograph.graph.trial`), which computes gradients but changes
    nothing; print its result, and choose the attention kernel.

    Returns:
        The window of the step.
    """
    with session.undisturbed():
        window = next(session.open_batches(0))
        _run_trial(session, window, progress)
    return window


def _run_trial(session: Session, window: Batch, progress: Progress) -> None:
    """Do what `try_step` does, for a given window."""
    engine = session.engine
    with progress.stage("trial", "one eager step") as stage:
        trial = engine.trial(window)
        stage.result = session.task.describe_trial(trial)
    # Some parameters of adapters have a zero gradient at the start, but not later. A layer's factor has
    # none by design.
    never_reached = [
        name
        for name in trial.without_gradient
        if not may_start_without_gradient(name) and not is_never_trained(name)
    ]
    if never_reached and session.task.reaches_all_parameters:
        progress.line(
            "warning",
            f"no gradient reaches {', '.join(never_reached[:3])}: its weights will not change",
        )
    if bf16_layers := engine.step.left_in_bf16:
        layers = counted(len(bf16_layers), "linear layer")
        progress.line(
            "note",
            f"{layers} in bf16, not fp8: the sides of {bf16_layers[0]} are not multiples of 16",
        )
    rows = session.batches.rows_per_window
    batch_norms = batch_norm_layers(engine.model)
    # Batch norms compute their statistics over the micro-batches of all ranks together.
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
        # If the program itself decided not to compile, `eager_reason` already says why.
        if session.eager_reason is None:
            session.eager_reason = "train.compile = none"
    elif obstacle:
        session.eager_reason = obstacle
    else:
        # With "blocks", one graph is compiled, which all blocks use.
        compiled_part = "one block for all" if scope == "blocks" else "whole step"
        with progress.stage("compile", compiled_part) as stage:
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
        scope: what one graph contains: the "whole" step, or with "blocks" a block.
        kernel: the kernel of attention without masks; None if none was chosen.

    Returns:
        Why the step stays eager; None if it was captured.
    """
    model = engine.model
    # Flex attention is compiled by Triton, which uses tensor cores only on GPUs that have bf16
    # (compute capability 8.0 and above). An older one, a T4, reaches 8 TFLOP/s in flex attention,
    # but 65 in scaled_dot_product_attention.
    flex_is_slow = (
        isinstance(model, Llama)
        and engine.step.device.type == "cuda"
        and not describe(engine.step.device).has_bf16
    )
    eager_reason = None if flex_is_slow else engine.capture(window, scope=scope)
    # Capturing fails in flex attention in two cases: if its kernels need more shared memory for
    # large heads than this GPU has, and for an ensemble, for which torch has no flex kernel.
    flex_is_impossible = eager_reason is not None and "flex_attention" in eager_reason
    if isinstance(model, Llama) and (flex_is_slow or flex_is_impossible):
        model.use_attention("sdpa", kernel or "torch")
        eager_reason = engine.capture(window, scope=scope)
    return eager_reason


# ── the run's length ────────────────────────────────────────────────────────────────────────────

# With train.wall_minutes, scoring the points of the curve takes at most this share of training.
CURVE_SHARE = 0.125


def _budget_s(session: Session, given_updates: int, update_s: float, progress: Progress) -> float:
    """Return the seconds of training from now on that the settings allow.

    On a slow machine, a run whose length the user did not give trains for longer than the default
    time, and a line says so.

    Args:
        session: the session.
        given_updates: the number of updates that the settings give; 0 if they give a time.
        update_s: seconds of an update.
        progress: the display.
    """
    span = session.plan.job.span
    if given_updates:
        return session.left_s
    training_s = 60 * span.minutes
    has_time_limit = span.is_timed or span.wall_minutes is not None
    if session.task.has_plain_updates and not has_time_limit:
        default_s = training_s
        training_s = defaults.default_seconds(span.minutes, update_s)
        if training_s > default_s:
            longer = f"{duration(training_s)} instead of {span.minutes:g} min"
            progress.line("time", f"{longer}: a good first model takes that long on this machine")
    return min(training_s, session.left_s)


class _Curve(NamedTuple):
    """The evaluations for the curve of held-out scores during training.

    Attributes:
        evaluations: the number of evaluations, each of which gives a point.
        seconds: the estimated seconds of all of them.
    """

    evaluations: int
    seconds: float


def _affordable_curve(session: Session, update_s: float) -> _Curve:
    """Return the curve for which a run with train.wall_minutes has time.

    Args:
        session: the session, whose `budget_s` is known.
        update_s: seconds of an update.
    """
    point_s = session.scoring_s(min(session.task.held_out_rows, defaults.CURVE_ROWS), update_s)
    if not point_s:
        return _Curve(defaults.EVALUATIONS, 0.0)
    affordable = int(CURVE_SHARE * (session.budget_s or 0.0) / point_s)
    evaluations = max(1, min(defaults.EVALUATIONS, affordable))
    return _Curve(evaluations, evaluations * point_s)


def fix_length(session: Session, progress: Progress) -> None:
    """Decide and print the number of updates, which the settings give as updates, epochs or time.

    Sets `session.budget_s` if the length depends on a time, and the session's plan and schedule.

    Raises:
        UsageError: train.epochs are too many.
    """
    plan = session.plan
    given_updates = updates_given(session)  # 0 if the settings give a time
    if given_updates > recorded_state.MAX_COUNT:
        epochs = plan.job.span.epochs
        raise UsageError(
            f"train.epochs = {epochs}: they have {given_updates:,} updates; give fewer, for at most 1e15"
        )
    if given_updates and session.deadline_s is None:
        length = Length(given_updates)
        time_text = ""
    else:
        length, time_text = _length_in_time(session, given_updates, progress)
    plan = resolve(plan, describe(), length)
    session.set_plan(plan)
    trained = ""
    if session.recipe.lora:
        trained = f" of which {count(session.adapter_params)} are trained"
    amount = session.task.describe_amount(session.batches.rows_per_window, length.updates)
    progress.line(
        "plan",
        f"{count(session.params)} parameters{trained}, {counted(length.updates, 'update')} of {amount}, "
        f"{plan.training.precision}{time_text}",
    )
    if isinstance(plan.expected, StreamCandidate):
        for label, tier in describe_tiers(plan.expected):
            progress.line(label, tier)


def _length_in_time(session: Session, given_updates: int, progress: Progress) -> tuple[Length, str]:
    """Time a few updates, set `session.budget_s`, and decide how many updates there is time for.

    Args:
        session: the session.
        given_updates: the number of updates that the settings give; 0 if they give a time.
        progress: the display.

    Returns:
        The length, and a text on how long the training will take.
    """
    with progress.stage("calibrate", "timing a few updates (discarded)") as stage:
        update_s = time_update(session)
        stage.result = f"{update_s * 1000:.0f} ms each"
    store_seconds(session, update_s)
    session.budget_s = _budget_s(session, given_updates, update_s, progress)
    decay = session.plan.training.optim.weight_decay
    rows = session.batches.rows_per_window
    max_updates = given_updates or session.task.max_updates(rows, decay)
    if not max_updates:  # the settings and the records set no limit
        max_updates = recorded_state.MAX_COUNT
    # The rest of the budget is for evaluations, samples and checkpoints.
    updates_s = defaults.UPDATES_SHARE * session.budget_s
    evaluations = defaults.EVALUATIONS
    if session.deadline_s is not None:
        evaluations, curve_s = _affordable_curve(session, update_s)
        closing_s = Deadline(session).closing_s(update_s)
        # However long scoring takes, a quarter of the time is for updates.
        updates_s = max(updates_s / 4, updates_s - curve_s - closing_s)
    affordable = defaults.updates_in_time(updates_s, update_s, max_updates)
    # One update is always made, even if it takes longer than the budget.
    session.budget_s = max(session.budget_s, affordable * update_s)
    # Eager updates may have been made before the step was compiled (`session.eager_start`).
    eager_updates = session.engine.index
    updates = min(max_updates, eager_updates + affordable)
    more = " more" if eager_updates else ""
    time_text = f", about {duration(session.budget_s)}{more}"
    if updates >= max_updates:
        time_text = f", about {duration(update_s * updates)}"
        if not given_updates:
            epochs = defaults.most_epochs(decay)
            time_text = f", limited to {epochs} epochs (train.epochs=N for more){time_text}"
    # Until here `budget_s` was the time from now on. Checkpoints record the time of the whole run.
    session.budget_s += session.elapsed_s
    return Length(updates, evaluations), time_text
