"""Defines the runs of a sweep: its settings and points, their members, and which members share a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from monograph.config import Settings, classify, load
from monograph.config.axes import IN_ONE_GRAPH, SEED, Axis, Point, axes_of, points
from monograph.config.keys import DEFAULT_MINUTES as DEFAULT_RUN_MINUTES
from monograph.config.settings import EXCLUSIVE
from monograph.device import describe
from monograph.errors import UsageError
from monograph.model.config import LlamaConfig
from monograph.report.quantities import counted
from monograph.run.folder import DEFAULT_ROOT, Run
from monograph.run.run_index import SWEEP, runs_in
from monograph.session.plan import Plan
from monograph.session.recorded import hold_to_its_run, require_text, run_settings
from monograph.session.requirements import require_one_device
from monograph.session.resolve import WIDTH, resolve, transfer_of
from monograph.storage.reading import is_file

ORIGIN = "sweep"
# Bjorck et al. 2024, "Scaling Optimal LR Across Token Horizons": the best rate falls as the number of tokens grows.
HORIZON = "arXiv 2409.19913"


@dataclass
class Member:
    """One run of a sweep.

    Attributes:
        index: its number, from 0.
        knobs: the varied values, by dotted key.
        settings: the settings of its run.
        plan: the plan that follows from them, once its group is opened.
    """

    index: int
    knobs: Point
    settings: Settings
    plan: Plan | None = None


@dataclass
class Group:
    """Members that one graph can hold: they have the same shapes and length.

    Attributes:
        members: one or more.
        shared: the varied keys that they have in common, because no graph could hold more than one of their values.
        rounds: how many members train at once, round by round; empty until it was decided.
        why: the reason for these rounds, in one line.
        update_s: seconds of an update of all members; compile_s: of compiling still to do; held_out_s: of their
            evaluations.
    """

    members: list[Member]
    shared: Point
    rounds: list[int] = field(default_factory=list)
    why: str = ""
    update_s: float = 0.0
    compile_s: float = 0.0
    held_out_s: float = 0.0

    @property
    def plan(self) -> Plan:
        """The plan of the first member."""
        plan = self.members[0].plan
        assert plan is not None
        return plan

    @property
    def name(self) -> str:
        """The values that set it apart from other groups; empty for the only one."""
        return " ".join(f"{short(key)}={shown(value)}" for key, value in self.shared.items())

    def batches(self) -> list[list[Member]]:
        """Return the members, round by round."""
        ends = [sum(self.rounds[: index + 1]) for index in range(len(self.rounds))]
        return [self.members[end - size : end] for size, end in zip(self.rounds, ends, strict=True)]


def members_of(settings: Settings, points: Sequence[Point]) -> list[Member]:
    """Return one member for each point, in order.

    Raises:
        UsageError: a point that gives no valid settings, or two that give the same.
    """
    members = [Member(index, point, settings.resolve(point, ORIGIN)) for index, point in enumerate(points)]
    seen: dict[str, int] = {}
    for member in members:
        other = seen.setdefault(member.settings.fingerprint, member.index)
        if other != member.index:
            raise UsageError(f"members {other} and {member.index} are equal: {described(member.knobs)}")
    return members


def groups_of(members: Sequence[Member]) -> list[Group]:
    """Return the members, grouped by what cannot vary inside a graph, in the order in which they come."""
    groups: dict[str, Group] = {}
    for member in members:
        shared = {key: value for key, value in member.knobs.items() if key not in IN_ONE_GRAPH}
        groups.setdefault(repr(shared), Group([], shared)).members.append(member)
    return list(groups.values())


def spread(groups: Sequence[Group], ranks: int) -> None:
    """Halve rounds, the largest first, until every rank has one or no round has two members."""
    while sum(len(group.rounds) for group in groups) < ranks:
        group = max(groups, key=lambda candidate: max(candidate.rounds))
        largest = max(group.rounds)
        if largest == 1:
            return
        at = group.rounds.index(largest)
        group.rounds[at : at + 1] = [largest - largest // 2, largest // 2]


def described(knobs: Point) -> str:
    """Return the knobs as text: `lr=0.001 seed=0`."""
    return " ".join(f"{short(key)}={shown(value)}" for key, value in knobs.items()) or "nothing varied"


def short(key: str) -> str:
    """Return a key without its section, as people say it."""
    return key.rpartition(".")[2]


def shown(value: object) -> str:
    """Return a value as tables show it, a number with at most four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


DEFAULT_MINUTES = 1.5  # the whole sweep's, where no arguments are given
SEEDS = (0, 1)
# Factor-2 steps around the known rate: two seeds cannot tell finer ones apart (docs/sweep.md).
STEPS = range(-4, 4)
# Settings that a sweep does not take over from a run: the varied ones, the run's length, and what followed from it.
_NOT_TAKEN = {
    *EXCLUSIVE[0], "optim.lr", SEED, "optim.warmup_updates", "train.eval_every", "train.save_every", "train.keep",
    "train.micro_batch", "train.compile", "train.remat", "train.parallel",
}  # fmt: skip


class SweepSpec(NamedTuple):
    """The task of a sweep.

    Attributes:
        settings: the settings that all members share.
        points: the values that each member varies.
        target: the wide run that the rates are for, where the members are its narrow proxy; else None.
    """

    settings: Settings
    points: list[Point]
    target: Settings | None


def spec_of(arguments: Sequence[str], samples: int | None) -> SweepSpec:
    """Return the settings and points from the command line.

    Without arguments, sweep eight learning rates and two seeds of the proxy of the newest run's model, or else of the
    default model's. With arguments but no axis, sweep the same rates and seeds of these settings. Where
    `optim.transfer` is on, the members are the proxy that it carries from.

    Raises:
        UsageError: an invalid key, value or axis; no held-out text to compare on; no proxy.
    """
    toml, overrides = classify(arguments)
    fixed, axes = axes_of(overrides)
    hold_to_its_run(toml, runs_code="model.init" not in overrides)
    first = {axis.key: axis.first for axis in axes}  # a shape needs a value for each of its sizes
    settings, target = (load(toml, fixed | first), None) if arguments else (_of_newest_run(), None)
    require_text(settings)
    require_one_device(settings, "sweep")
    if settings.data.held_out == 0:
        raise UsageError("data.held_out = 0: members are compared on held-out text; give it a share, such as 0.05")
    if settings.optim.transfer != "none":
        settings, target = _proxy(settings)
    elif not arguments:
        with suppress(UsageError):  # the model itself is swept where it has no narrower shape
            settings, target = _proxy(settings.resolve({"optim.transfer": WIDTH}, ORIGIN))
    return SweepSpec(settings, points(axes or _usual_axes(settings), samples), target)


def _proxy(settings: Settings) -> tuple[Settings, Settings]:
    """Return (the narrow run on which rates are found, the wide run that they are for, with its base named).

    Raises:
        UsageError: no narrower shape keeps the model's ratios.
    """
    plan = resolve(settings.resolve({"optim.transfer": "none"}, ORIGIN), describe())
    shape = None if plan.recipe.init else plan.recipe.shape(vocab_size=1)
    wide = plan.settings.resolve({"optim.transfer": settings.optim.transfer}, ORIGIN)
    transfer = transfer_of(wide, shape)
    assert transfer is not None and shape is not None
    named = wide.resolve({"optim.transfer": f"{WIDTH}:{transfer.base.hidden_size}"}, ORIGIN)
    if settings.origins.get("train.minutes") == ORIGIN:  # these minutes are the whole sweep's
        named = named.resolve({"train.minutes": DEFAULT_RUN_MINUTES}, ORIGIN)
    return narrow(wide, shape), named


def _usual_axes(settings: Settings) -> list[Axis]:
    """Return axes of learning rates around the model's known one, and of two seeds."""
    middle = resolve(settings, describe()).update_rule.lr
    return [Axis("optim.lr", tuple(float(f"{middle * 2.0**step:.4g}") for step in STEPS)), Axis(SEED, SEEDS)]


def _of_newest_run() -> Settings:
    """Return the newest run's model, text and optimizer, or the defaults where there is no run; shortened."""
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
    """Return whether the command line names an existing sweep and nothing else."""
    return not arguments and samples is None and out is not None and is_file(out / SWEEP)


def narrow(settings: Settings, config: LlamaConfig) -> Settings:
    """Return the narrow run on which a wide one's rate is found: only the width differs, not the tokens per update.

    Args:
        settings: those of the wide run, with transfer on; values that depend on the size (tokenizer, tokens per update)
            are fixed, or the narrow run would choose its own. The learning rate may be left open.
        config: the shape of its model.

    Raises:
        UsageError: see `transfer_of`.
    """
    transfer = transfer_of(settings, config)
    assert transfer is not None
    base = transfer.base
    sizes = {
        name: getattr(base, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    }
    narrow = {f"model.{name}": size for name, size in sizes.items()}
    return settings.resolve({**narrow, "optim.transfer": "none"}, f"the proxy of {config.hidden_size}")


def carried(settings: Settings, proxy: Settings, updates: int, proxy_updates: int) -> list[str]:
    """Return the notes for who carries a proxy's best knobs to the wide model: what carries over and what does not.

    Args:
        settings: those of the wide run, with tokens per update fixed.
        proxy: the settings of the narrow run.
        updates: the number of the wide run's updates.
        proxy_updates: the number of the narrow run's updates.
    """
    lines = [
        "carried: learning rate, betas, eps, warm-up in updates, and weight decay as lr * weight_decay per update",
        "not carried: tokens per update, number of updates, sequence length, depth, data, vocabulary, precision",
    ]
    size, proxy_size = int(settings.train.tokens_per_update), int(proxy.train.tokens_per_update)
    if size != proxy_size:
        factor = math.sqrt(size / proxy_size)
        lines.append(
            f"{size:,} tokens per update instead of {proxy_size:,}: the best rate goes with the square root of that, "
            f"about {factor:.2g} times the one found; not applied"
        )
    ratio = updates * size / (proxy_updates * proxy_size)
    if not math.isclose(ratio, 1.0, rel_tol=0.01):
        lines.append(
            f"{counted(updates, 'update')} instead of {proxy_updates:,}, {ratio:.2g} times the tokens: longer runs "
            f"want lower rates ({HORIZON}), and weight decay divided by {ratio:.2g}; not applied"
        )
    return lines
