"""Define the runs of a sweep: its settings and points, their members, and which members share a
graph.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from monograph.config import Settings, classify, load
from monograph.config.axes import (
    IN_ONE_GRAPH,
    SEED,
    Axis,
    Point,
    axes_and_faults,
    points,
    require_single_values,
)
from monograph.config.keys import DEFAULT_MINUTES as DEFAULT_RUN_MINUTES
from monograph.config.settings import CODE_KEYS, RUN_SPECIFIC_KEYS
from monograph.device import describe
from monograph.errors import UsageError
from monograph.model.config import LlamaConfig
from monograph.report.quantities import counted
from monograph.run.folder import DEFAULT_ROOT, Run
from monograph.run.run_index import SWEEP, runs_in
from monograph.session.door import WIDTH, transfer_of
from monograph.session.plan import Plan
from monograph.session.recorded import require_text, run_settings, settings_given
from monograph.session.requirements import require_one_device, require_texts
from monograph.session.resolve import resolve
from monograph.storage.code import digests
from monograph.storage.reading import is_file

ORIGIN = "sweep"
# Bjorck et al. 2024, "Scaling Optimal LR Across Token Horizons": the best rate falls as the number
# of tokens grows.
HORIZON = "arXiv 2409.19913"


@dataclass
class Member:
    """One run of a sweep.

    Attributes:
        index: the member's number, from 0.
        knobs: the varied values, by dotted key.
        settings: the settings of the run.
        plan: the plan made from them, once the sweep is prepared.
    """

    index: int
    knobs: Point
    settings: Settings
    plan: Plan | None = None


@dataclass
class Group:
    """Members that one graph can hold, since they have the same shapes and length.

    Attributes:
        members: one or more members.
        shared: the values of those varied keys that cannot differ inside one graph.
        rounds: how many members train at once, round by round; empty until that is decided.
        why: the reason for these rounds, in one line.
        update_s: seconds of an update of all members.
        compile_s: seconds of compiling that is still to do.
        held_out_s: seconds of all evaluations.
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
        """Return the plan of the first member."""
        plan = self.members[0].plan
        assert plan is not None
        return plan

    @property
    def name(self) -> str:
        """Return the values that distinguish this group from the others; empty for the only group."""
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
    members = [
        Member(index, point, settings.resolve(point, ORIGIN)) for index, point in enumerate(points)
    ]
    seen: dict[str, int] = {}
    for member in members:
        other = seen.setdefault(member.settings.fingerprint, member.index)
        if other != member.index:
            raise UsageError(
                f"members {other} and {member.index} are equal: {described(member.knobs)}"
            )
    return members


def groups_of(members: Sequence[Member]) -> list[Group]:
    """Return the members grouped by the values that cannot vary inside a graph, in the members'
    order.
    """
    groups: dict[str, Group] = {}
    for member in members:
        shared = {key: value for key, value in member.knobs.items() if key not in IN_ONE_GRAPH}
        groups.setdefault(repr(shared), Group([], shared)).members.append(member)
    return list(groups.values())


def spread(groups: Sequence[Group], ranks: int) -> None:
    """Halve rounds in place, the largest first, until there is one for every rank or no round has
    two members.
    """
    while sum(len(group.rounds) for group in groups) < ranks:
        group = max(groups, key=lambda candidate: max(candidate.rounds))
        largest = max(group.rounds)
        if largest == 1:
            return
        at = group.rounds.index(largest)
        group.rounds[at : at + 1] = [largest - largest // 2, largest // 2]


def described(knobs: Point) -> str:
    """Return the knobs as text: `lr=0.001 seed=0`."""
    return (
        " ".join(f"{short(key)}={shown(value)}" for key, value in knobs.items()) or "nothing varied"
    )


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


DEFAULT_MINUTES = 1.5  # of the whole sweep, if no arguments are given
SEEDS = (0, 1)
# Powers of 2 times the known rate, since two seeds cannot distinguish finer steps (docs/sweep.md).
STEPS = range(-4, 4)
# Settings that a sweep does not take over from a run: those of one run, the varied ones, and those
# of one model's memory and checkpoints.
_NOT_TAKEN = {
    *RUN_SPECIFIC_KEYS,
    "optim.lr",
    SEED,
    "train.keep",
    "train.micro_batch",
    "train.remat",
}
_NO_TRANSFER: Point = {"optim.transfer": "none", "optim.transfer_base": None}


class SweepSpec(NamedTuple):
    """The task of a sweep.

    Attributes:
        settings: the settings that all members share.
        points: the values that each member varies.
        target: the settings of the wide run whose narrow proxies the members are; None if they are
            not proxies.
    """

    settings: Settings
    points: list[Point]
    target: Settings | None


def spec_of(arguments: Sequence[str], samples: int | None) -> SweepSpec:
    """Return the settings and points from the command line.

    Without arguments, sweep eight learning rates and two seeds on the narrow proxy of the newest
    run's model, or of the default model if there is no run. With arguments but no axis, sweep the
    same rates and seeds with the given settings. If `optim.transfer` is on, the members are the
    narrow proxy from which it carries the rate over.

    Raises:
        UsageError: an invalid key, value or axis; no held-out text to compare on; no proxy.
    """
    toml, overrides, faults = classify(arguments)
    fixed, axes, wrong = axes_and_faults(overrides)
    # A shape is checked with a value for each of its sizes.
    first = {axis.key: axis.first for axis in axes}
    try:
        if arguments:
            settings = settings_given(toml, fixed | first, runs_code=True, faults=[*faults, *wrong])
        else:
            settings = _of_newest_run()
    except UsageError:
        # Several values of a key in a file are answered better than by what is wrong with them as
        # one value. The file of a run that was damaged has been refused before this.
        if toml is not None:
            require_single_values(toml)
        raise
    target: Settings | None = None
    settings = settings.vouching(
        digests(value for axis in axes if axis.key in CODE_KEYS for value in axis.values)
    )
    require_text(settings)
    require_texts(settings, "sweep")
    require_one_device(settings, "sweep")
    if settings.train.wall_minutes is not None:
        only = "is for `monograph train`; the members of a sweep share train.minutes: leave it out"
        raise UsageError(f"{settings.said('train.wall_minutes')} {only}")
    if settings.data.held_out == 0:
        raise UsageError(
            "data.held_out = 0: members are compared on held-out text; give it a share, such as 0.05"
        )
    if settings.optim.transfer != "none":
        settings, target = _proxy(settings)
    elif not arguments:
        with suppress(UsageError):  # a model without a narrower shape is swept itself
            settings, target = _proxy(settings.resolve({"optim.transfer": WIDTH}, ORIGIN))
    return SweepSpec(settings, points(axes or _usual_axes(settings), samples), target)


def _proxy(settings: Settings) -> tuple[Settings, Settings]:
    """Return the settings of the narrow proxy and of the wide run, which then names its base width.

    Raises:
        UsageError: no narrower shape keeps the model's ratios.
    """
    plan = resolve(settings.resolve(_NO_TRANSFER, ORIGIN), describe())
    shape = None if plan.job.recipe.init else plan.job.recipe.shape(vocab_size=1)
    asked = {key: settings.values()[key] for key in _NO_TRANSFER}
    wide = plan.record.settings.resolve(asked, ORIGIN)
    transfer = transfer_of(wide, shape)
    assert transfer is not None and shape is not None
    named = wide.resolve({"optim.transfer_base": transfer.base.hidden_size}, ORIGIN)
    # These minutes are for the whole sweep, not for this run.
    if settings.origins.get("train.minutes") == ORIGIN:
        named = named.resolve({"train.minutes": DEFAULT_RUN_MINUTES}, ORIGIN)
    return narrow(wide, shape), named


def _usual_axes(settings: Settings) -> list[Axis]:
    """Return an axis of learning rates around the model's default rate, and an axis of two seeds."""
    middle = resolve(settings, describe()).training.optim.lr
    rates = tuple(float(f"{middle * 2.0**step:.4g}") for step in STEPS)
    return [Axis("optim.lr", rates), Axis(SEED, SEEDS)]


def _of_newest_run() -> Settings:
    """Return the settings of the newest run's model, text and optimizer, or the defaults; both for
    a short sweep.
    """
    runs = [folder for folder in runs_in(DEFAULT_ROOT) if not is_file(folder / SWEEP)]
    short = {"train.minutes": DEFAULT_MINUTES}
    if not runs:
        return load(None, {}).resolve(short, ORIGIN)
    run = Run(runs[-1])
    own = run_settings(run)
    kept = {key: value for key, value in own.pinned().items() if key not in _NOT_TAKEN}
    if is_file(run.tokenizer):
        kept["data.tokenizer"] = str(run.tokenizer)
        kept.pop("data.vocab_size", None)  # it is of a tokenizer that is trained
    return (
        load(None, {}).resolve(kept, str(run.config)).resolve(short, ORIGIN).vouching(own.vouched)
    )


def continued(out: Path | None, arguments: Sequence[str], samples: int | None) -> bool:
    """Return whether the command line names an existing sweep and nothing else."""
    return not arguments and samples is None and out is not None and is_file(out / SWEEP)


def narrow(settings: Settings, config: LlamaConfig) -> Settings:
    """Return the settings of the narrow proxy of a wide run: only the width differs, not the tokens
    per update.

    Args:
        settings: the settings of the wide run, with transfer on. Values that depend on the model's
            size (tokenizer, tokens per update) are fixed, or the proxy would choose its own. The
            learning rate may be left open.
        config: the shape of the wide model.

    Raises:
        UsageError: see `transfer_of`.
    """
    transfer = transfer_of(settings, config)
    assert transfer is not None
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {f"model.{name}": getattr(transfer.base, name) for name in names}
    return settings.resolve(sizes | _NO_TRANSFER, f"the proxy of {config.hidden_size}")


def carried(settings: Settings, proxy: Settings, updates: int, proxy_updates: int) -> list[str]:
    """Return lines that say which of a proxy's best knobs carry over to the wide model and which do
    not.

    Args:
        settings: the settings of the wide run, with tokens per update fixed.
        proxy: the settings of the narrow run.
        updates: the number of updates of the wide run.
        proxy_updates: the number of updates of the narrow run.
    """
    lines = [
        "carried: learning rate, betas, eps, warm-up in updates, and weight decay as lr * weight_decay per update",
        "not carried: tokens per update, number of updates, sequence length, depth, data, vocabulary, precision",
    ]
    size = int(settings.train.tokens_per_update)
    proxy_size = int(proxy.train.tokens_per_update)
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
