"""What a sweep is asked to do: its settings and points from the command line, or the default for a first one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from monograph import planner
from monograph.config import Settings, classify, keys, load
from monograph.config.axes import SEED, Axis, Point, axes_of, points
from monograph.config.recorded import hold_to_its_run, require_text, run_settings
from monograph.config.settings import EXCLUSIVE
from monograph.errors import UsageError
from monograph.run.folder import DEFAULT_ROOT, Run
from monograph.run.recipe import Recipe
from monograph.run.register import SWEEP, runs_in
from monograph.session import choices
from monograph.session.adapting import usual_rate
from monograph.session.ranks import require_one_device
from monograph.session.width import WIDTH, proxy_of, transfer_of
from monograph.storage.reading import is_file
from monograph.sweeps.members import ORIGIN

DEFAULT_MINUTES = 1.5  # of the whole sweep, where nothing at all is given
SEEDS = (0, 1)
# Factor-2 steps about the rate that is known: finer ones two seeds cannot tell apart (docs/sweep.md).
STEPS = range(-4, 4)
# What a sweep does not take over from a run: what it varies, how long the run was, and what followed from that.
_NOT_TAKEN = {
    *EXCLUSIVE[0], "optim.lr", SEED, "optim.warmup_updates", "train.eval_every", "train.save_every", "train.keep",
    "train.micro_batch", "train.compile", "train.remat", "train.parallel",
}  # fmt: skip


class Asked(NamedTuple):
    """What a sweep is to do.

    Attributes:
        settings: what all members share.
        points: what each of them varies.
        target: the wide run that the rates are for, where the members are its narrow proxy; else None.
    """

    settings: Settings
    points: list[Point]
    target: Settings | None


def asked(arguments: Sequence[str], samples: int | None) -> Asked:
    """Settings and points from the command line.

    Without arguments: eight learning rates and two seeds of the proxy of the newest run's model, or else of the default
    model's. With some, but no axis: the same rates and seeds of what they say. Where `optim.transfer` is on, the
    members are the proxy from which it carries.

    Raises:
        UsageError: a key, a value or an axis that is none; no held-out text to compare on; no proxy.
    """
    toml, overrides = classify(arguments)
    fixed, axes = axes_of(overrides)
    hold_to_its_run(toml, runs_code="model.init" not in overrides)
    first = {axis.key: axis.first for axis in axes}  # a shape needs all its sizes, whatever varies
    settings, target = (load(toml, fixed | first), None) if arguments else (of_newest_run(), None)
    require_text(settings)
    require_one_device(settings, "sweep")
    if settings.data.held_out == 0:
        raise UsageError("data.held_out = 0: members are compared on held-out text; give it a share, such as 0.05")
    if settings.optim.transfer != "none":
        settings, target = proxy(settings)
    elif not arguments:
        with suppress(UsageError):  # the model itself, where it has no narrower shape
            settings, target = proxy(settings.resolve({"optim.transfer": WIDTH}, ORIGIN))
    return Asked(settings, points(axes or usual_axes(settings), samples), target)


def proxy(settings: Settings) -> tuple[Settings, Settings]:
    """(the narrow run on which the rates are found, the wide run that they are for, its base named).

    Raises:
        UsageError: no narrower shape keeps the model's ratios.
    """
    wide = choices.sized(settings.resolve({"optim.transfer": "none"}, ORIGIN))
    shape = None if wide.model.init else Recipe(None, wide.model.preset, wide.model.sizes(), 0).shape(vocab_size=1)
    wide = wide.resolve({"optim.transfer": settings.optim.transfer}, ORIGIN)
    transfer = transfer_of(wide, shape)
    assert transfer is not None and shape is not None
    named = wide.resolve({"optim.transfer": f"{WIDTH}:{transfer.base.hidden_size}"}, ORIGIN)
    if settings.origins.get("train.minutes") == ORIGIN:  # which are the sweep's
        named = named.resolve({"train.minutes": keys.DEFAULT_MINUTES}, ORIGIN)
    return proxy_of(wide, shape), named


def usual_axes(settings: Settings) -> list[Axis]:
    """Learning rates about the one that is known for the model, and two seeds."""
    fixed, name = choices.sized(settings), settings.optim.name
    rule = planner.optimizer(fresh=fixed.model.init is None) if name == "auto" else name.partition(":")[0]
    middle = usual_rate(fixed, rule) if settings.optim.lr == "auto" else settings.optim.lr
    return [Axis("optim.lr", tuple(float(f"{middle * 2.0**step:.4g}") for step in STEPS)), Axis(SEED, SEEDS)]


def of_newest_run() -> Settings:
    """The newest run's model, text and optimizer, or the defaults where there is no run; short."""
    runs = [folder for folder in runs_in(DEFAULT_ROOT) if not is_file(folder / SWEEP)]
    short = {"train.minutes": DEFAULT_MINUTES}
    if not runs:
        return load(None, {}).resolve(short, ORIGIN)
    run = Run(runs[-1])
    own = run_settings(run)
    kept = {key: value for key, value in own.pinned().items() if key not in _NOT_TAKEN}
    if is_file(run.tokenizer):
        kept["data.tokenizer"] = str(run.tokenizer)
    return load(None, {}).resolve(kept, str(run.config)).resolve(short, ORIGIN)


def continued(out: Path | None, arguments: Sequence[str], samples: int | None) -> bool:
    """Whether the command line names a sweep that is there and nothing else."""
    return not arguments and samples is None and out is not None and is_file(out / SWEEP)
