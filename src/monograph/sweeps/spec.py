"""Which runs a sweep is: its settings and points, the members that they make, and the members of one graph."""

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
# Bjorck et al. 2024, "Scaling Optimal LR Across Token Horizons": the best rate falls with the tokens.
HORIZON = "arXiv 2409.19913"


@dataclass
class Member:
    """One run of a sweep.

    Attributes:
        index: its number, from 0.
        knobs: what was varied, by dotted key.
        settings: of its run.
        plan: what follows from them, once its group is opened.
    """

    index: int
    knobs: Point
    settings: Settings
    plan: Plan | None = None


@dataclass
class Group:
    """Members of one graph: they have the same shapes and length.

    Attributes:
        members: one or more.
        shared: the varied keys that they have in common, because no graph could hold more than one of their values.
        rounds: how many members train at once, round by round; empty until it was decided.
        why: in one line.
        update_s: seconds of an update of all members; compile_s: of what is still to be compiled; held_out_s: of their
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
        """The first member's."""
        plan = self.members[0].plan
        assert plan is not None
        return plan

    @property
    def name(self) -> str:
        """What sets it apart from other groups; empty for the only one."""
        return " ".join(f"{short(key)}={shown(value)}" for key, value in self.shared.items())

    def batches(self) -> list[list[Member]]:
        """Return the members, round by round."""
        ends = [sum(self.rounds[: index + 1]) for index in range(len(self.rounds))]
        return [self.members[end - size : end] for size, end in zip(self.rounds, ends, strict=True)]


def members_of(settings: Settings, points: Sequence[Point]) -> list[Member]:
    """Return one member for each point, in order.

    Raises:
        UsageError: a point that makes no settings, or two that make the same.
    """
    found = [Member(index, point, settings.resolve(point, ORIGIN)) for index, point in enumerate(points)]
    seen: dict[str, int] = {}
    for member in found:
        other = seen.setdefault(member.settings.fingerprint, member.index)
        if other != member.index:
            raise UsageError(f"members {other} and {member.index} are equal: {described(member.knobs)}")
    return found


def groups_of(members: Sequence[Member]) -> list[Group]:
    """Return the members, grouped by what cannot vary inside a graph, in the order in which they come."""
    groups: dict[str, Group] = {}
    for member in members:
        shared = {key: value for key, value in member.knobs.items() if key not in IN_ONE_GRAPH}
        groups.setdefault(repr(shared), Group([], shared)).members.append(member)
    return list(groups.values())


def spread(groups: Sequence[Group], ranks: int) -> None:
    """Cut rounds in two, the largest first, until every rank has one, as far as there are members."""
    while sum(len(group.rounds) for group in groups) < ranks:
        group = max(groups, key=lambda each: max(each.rounds))
        largest = max(group.rounds)
        if largest == 1:
            return
        at = group.rounds.index(largest)
        group.rounds[at : at + 1] = [largest - largest // 2, largest // 2]


def described(knobs: Point) -> str:
    """`lr=0.001 seed=0`."""
    return " ".join(f"{short(key)}={shown(value)}" for key, value in knobs.items()) or "nothing varied"


def short(key: str) -> str:
    """Return a key without its section, as people say it."""
    return key.rpartition(".")[2]


def shown(value: object) -> str:
    """Return a value in a table, at most four digits of a number."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


DEFAULT_MINUTES = 1.5  # of the whole sweep, where nothing at all is given
SEEDS = (0, 1)
# Factor-2 steps about the rate that is known: finer ones two seeds cannot tell apart (docs/sweep.md).
STEPS = range(-4, 4)
# What a sweep does not take over from a run: what it varies, how long the run was, and what followed from that.
_NOT_TAKEN = {
    *EXCLUSIVE[0], "optim.lr", SEED, "optim.warmup_updates", "train.eval_every", "train.save_every", "train.keep",
    "train.micro_batch", "train.compile", "train.remat", "train.parallel",
}  # fmt: skip


class SweepSpec(NamedTuple):
    """What a sweep is to do.

    Attributes:
        settings: what all members share.
        points: what each of them varies.
        target: the wide run that the rates are for, where the members are its narrow proxy; else None.
    """

    settings: Settings
    points: list[Point]
    target: Settings | None


def spec_of(arguments: Sequence[str], samples: int | None) -> SweepSpec:
    """Return the settings and points from the command line.

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
    settings, target = (load(toml, fixed | first), None) if arguments else (_of_newest_run(), None)
    require_text(settings)
    require_one_device(settings, "sweep")
    if settings.data.held_out == 0:
        raise UsageError("data.held_out = 0: members are compared on held-out text; give it a share, such as 0.05")
    if settings.optim.transfer != "none":
        settings, target = _proxy(settings)
    elif not arguments:
        with suppress(UsageError):  # the model itself, where it has no narrower shape
            settings, target = _proxy(settings.resolve({"optim.transfer": WIDTH}, ORIGIN))
    return SweepSpec(settings, points(axes or _usual_axes(settings), samples), target)


def _proxy(settings: Settings) -> tuple[Settings, Settings]:
    """(the narrow run on which the rates are found, the wide run that they are for, its base named).

    Raises:
        UsageError: no narrower shape keeps the model's ratios.
    """
    plan = resolve(settings.resolve({"optim.transfer": "none"}, ORIGIN), describe())
    shape = None if plan.recipe.init else plan.recipe.shape(vocab_size=1)
    wide = plan.settings.resolve({"optim.transfer": settings.optim.transfer}, ORIGIN)
    transfer = transfer_of(wide, shape)
    assert transfer is not None and shape is not None
    named = wide.resolve({"optim.transfer": f"{WIDTH}:{transfer.base.hidden_size}"}, ORIGIN)
    if settings.origins.get("train.minutes") == ORIGIN:  # which are the sweep's
        named = named.resolve({"train.minutes": DEFAULT_RUN_MINUTES}, ORIGIN)
    return narrow(wide, shape), named


def _usual_axes(settings: Settings) -> list[Axis]:
    """Learning rates about the one that is known for the model, and two seeds."""
    middle = resolve(settings, describe()).update_rule.lr
    return [Axis("optim.lr", tuple(float(f"{middle * 2.0**step:.4g}") for step in STEPS)), Axis(SEED, SEEDS)]


def _of_newest_run() -> Settings:
    """Return the newest run's model, text and optimizer, or the defaults where there is no run; short."""
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
    """Return whether the command line names a sweep that is there and nothing else."""
    return not arguments and samples is None and out is not None and is_file(out / SWEEP)


def narrow(settings: Settings, config: LlamaConfig) -> Settings:
    """The narrow run on which a wide one's rate is found: the same, tokens per update included, but for the width.

    Args:
        settings: of the wide run, transfer on; what depends on the model's size (tokenizer, tokens per update)
            fixed, or the narrow run would choose its own. The learning rate may be open.
        config: its model's shape.

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
    """What a person is told who carries the best knobs of a proxy to the wide model: what carries and what does not.

    Args:
        settings: of the wide run, tokens per update fixed.
        proxy: of the narrow one.
        updates: of the wide run.
        proxy_updates: of the narrow one.
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
