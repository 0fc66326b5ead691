"""Define the runs of a sweep: its settings and points, its members, and their groups.

A knob is a key whose value varies. A point has a value for each knob, and a member is the run with
the values of one point. A proxy is a narrow model whose best learning rate is transferred to a wide
one (`optim.transfer`). A group is the members that can share a graph.
"""

import itertools
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
from monograph.device import Device, describe
from monograph.errors import UsageError
from monograph.model.config import LlamaConfig
from monograph.report.knobs import knobs_text
from monograph.report.quantities import counted
from monograph.run.folder import DEFAULT_ROOT, Run
from monograph.run.run_index import SWEEP, runs_in
from monograph.session.door import WIDTH_TRANSFER, transfer_of
from monograph.session.objectives import objective_of, with_records
from monograph.session.plan import RunPlan
from monograph.session.recorded import command_line_settings, refuse_model_as_text, run_settings
from monograph.session.requirements import (
    require_one_device,
    require_swept,
    require_trained_model,
)
from monograph.session.resolve import resolve
from monograph.storage.code import digests
from monograph.storage.reading import is_file

ORIGIN = "sweep"
# "Scaling Optimal LR Across Token Horizons" (Bjorck et al. 2024): the best rate falls as the number
# of tokens grows.
HORIZON_PAPER = "arXiv 2409.19913"


@dataclass
class Member:
    """One run of a sweep.

    Attributes:
        index: the member's number, from 0.
        knobs: the varied values, by dotted key.
        settings: the settings of the run.
        plan: the plan made from the settings; None until the sweep is prepared.
    """

    index: int
    knobs: Point
    settings: Settings
    plan: RunPlan | None = None


@dataclass
class MemberGroup:
    """Members that one graph can hold, since they have the same shapes and length.

    Attributes:
        members: one or more members.
        shared: the values, equal in all members, of those knobs that one graph cannot vary.
        round_sizes: for each round, how many members train at once; empty until that is decided.
        why: the reason for these rounds, in one line.
        update_s: predicted seconds of an update of all members.
        compile_s: predicted seconds of compiling that is still to do.
        held_out_s: predicted seconds of all evaluations.
        one_by_one_update_s: predicted seconds of an update of all members, one after another.
        one_by_one_held_out_s: predicted seconds of all evaluations then.
    """

    members: list[Member]
    shared: Point
    round_sizes: list[int] = field(default_factory=list)
    why: str = ""
    update_s: float = 0.0
    compile_s: float = 0.0
    held_out_s: float = 0.0
    one_by_one_update_s: float = 0.0
    one_by_one_held_out_s: float = 0.0

    @property
    def plan(self) -> RunPlan:
        """The plan of the first member, which exists once the sweep is prepared."""
        plan = self.members[0].plan
        assert plan is not None
        return plan

    @property
    def name(self) -> str:
        """The values that distinguish the group from others, as text; "" for the only group."""
        return knobs_text(self.shared)

    def rounds(self) -> list[list[Member]]:
        """Return the members of each round; rounds take the members in their order."""
        remaining = iter(self.members)
        return [list(itertools.islice(remaining, size)) for size in self.round_sizes]


def plan_of_member(settings: Settings, machine: Device) -> RunPlan:
    """Return the plan of a member, from its settings alone.

    Args:
        settings: the member's settings.
        machine: the device that trains it.
    """
    plan = resolve(settings, machine)
    return plan.job.objective.plan_of_member(plan)


def members_of(settings: Settings, points: Sequence[Point]) -> list[Member]:
    """Return one member for each point, in order.

    Raises:
        UsageError: a point gives invalid settings, or two points give the same settings.
    """
    members = [
        Member(index, point, settings.resolve(point, ORIGIN)) for index, point in enumerate(points)
    ]
    first_index: dict[str, int] = {}  # by the settings' fingerprint
    for member in members:
        first = first_index.setdefault(member.settings.fingerprint, member.index)
        if first != member.index:
            raise UsageError(
                f"members {first} and {member.index} are equal: {describe_knobs(member.knobs)}"
            )
    return members


def groups_of(members: Sequence[Member]) -> list[MemberGroup]:
    """Return the members grouped by the values of the knobs that one graph cannot vary.

    The groups are in the order of their first members.
    """
    groups: dict[str, MemberGroup] = {}  # by their shared values, as text
    for member in members:
        shared = {key: value for key, value in member.knobs.items() if key not in IN_ONE_GRAPH}
        group = groups.setdefault(repr(shared), MemberGroup([], shared))
        group.members.append(member)
    return list(groups.values())


def have_own_rows(plans: Sequence[RunPlan]) -> bool:
    """Return whether members that train at once each have their own rows in a window.

    Members of different seeds read the rows in different orders.

    Args:
        plans: the members' plans.
    """
    if len(plans) == 1:
        return False
    seeds = {plan.job.seed for plan in plans}
    return len(seeds) > 1 or plans[0].job.objective.members_have_own_rows


def spread_rounds(groups: Sequence[MemberGroup], ranks: int) -> None:
    """Halve rounds of the groups, the largest first, until there is one for every rank.

    It ends earlier if every round has one member.
    """
    while sum(len(group.round_sizes) for group in groups) < ranks:
        group = max(groups, key=lambda candidate: max(candidate.round_sizes))
        largest = max(group.round_sizes)
        if largest == 1:
            return
        index = group.round_sizes.index(largest)
        halves = [largest - largest // 2, largest // 2]
        group.round_sizes[index : index + 1] = halves  # in place of the one round


def describe_knobs(knobs: Point) -> str:
    """Return the knobs as text: `lr=0.001 seed=0`."""
    return knobs_text(knobs) or "nothing varied"


DEFAULT_MINUTES = 1.5  # of the whole sweep, if no arguments are given
# Without an axis, a sweep varies the seed and the learning rate: the default rate times these
# powers of 2. Two seeds cannot distinguish finer steps (docs/sweep.md).
DEFAULT_SEEDS = (0, 1)
DEFAULT_EXPONENTS = range(-4, 4)
# Settings that a sweep without arguments does not take over from the newest run: those that belong to one
# run, the knobs, and those that suit the memory and the checkpoints of a single model.
_NOT_TAKEN_OVER = {
    *RUN_SPECIFIC_KEYS,
    "optim.lr",
    SEED,
    "train.keep",
    "train.micro_batch",
    "train.remat",
}
_WITHOUT_TRANSFER: Point = {"optim.transfer": "none", "optim.transfer_base": None}


class SweepSpec(NamedTuple):
    """What a sweep trains, as its command line says it.

    Attributes:
        settings: the settings that all members share.
        points: each member's values of the knobs.
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
    narrow proxy whose rate is transferred.

    Args:
        arguments: the command line's settings and axes.
        samples: how many points to choose at random; None: every combination of the axes' values.

    Raises:
        UsageError: a key, value or axis is invalid, there is no held-out text to compare on, or
            there is no narrower proxy.
    """
    settings, axes = _settings_and_axes(arguments)
    _require_comparable(settings)
    settings = with_records(settings)
    # If the members are proxies, `settings` become the proxy's, and `target` has those of the wide run.
    target: Settings | None = None
    if settings.optim.transfer != "none":
        settings, target = _proxy_and_target(settings)
    elif not arguments:
        # A model without a narrower shape is swept itself. `_proxy_and_target` refuses it.
        with suppress(UsageError):
            with_transfer = settings.resolve({"optim.transfer": WIDTH_TRANSFER}, ORIGIN)
            settings, target = _proxy_and_target(with_transfer)
    if not axes:
        axes = _default_axes(settings)
    return SweepSpec(settings, points(axes, samples), target)


def _settings_and_axes(arguments: Sequence[str]) -> tuple[Settings, list[Axis]]:
    """Return the settings of a command line, with the first value of each axis, and the axes.

    Raises:
        UsageError: a key, value or axis is invalid.
    """
    toml, overrides, faults = classify(arguments)
    fixed, axes, axis_faults = axes_and_faults(overrides)
    first_values = {axis.key: axis.first for axis in axes}
    try:
        if arguments:
            settings = command_line_settings(
                toml, fixed | first_values, runs_code=True, faults=[*faults, *axis_faults]
            )
        else:
            settings = _newest_run_settings()
    except UsageError:
        # If the file has several values for a key, as only the command line may, an error that says so
        # is better than one about a wrong value.
        if toml is not None:
            require_single_values(toml)
        raise
    # The user has typed these values, so the code that they name may run.
    programs = [value for axis in axes if axis.key in CODE_KEYS for value in axis.values]
    return settings.vouching(digests(programs)), axes


def _require_comparable(settings: Settings) -> None:
    """Refuse settings whose members cannot be compared.

    Raises:
        UsageError: see `spec_of`.
    """
    refuse_model_as_text(settings)
    require_swept(settings)
    require_trained_model(objective_of(with_records(settings)), settings.model.init)
    require_one_device(settings, "sweep")
    if settings.train.wall_minutes is not None:
        raise UsageError(
            f"{settings.quoted('train.wall_minutes')} is for `monograph train`; the members of a sweep share "
            "train.minutes: leave it out"
        )
    if settings.data.held_out == 0:
        with_objective = with_records(settings)
        records = objective_of(with_objective).records_noun(with_objective)
        raise UsageError(
            f"data.held_out = 0: members are compared on held-out {records}; give it a share, such as 0.05"
        )


def _proxy_and_target(settings: Settings) -> tuple[Settings, Settings]:
    """Return the settings of the narrow proxy, and those of the wide run.

    In the settings of the wide run, `optim.transfer_base` is the width of the proxy.

    Args:
        settings: the settings of the wide run, with transfer on.

    Raises:
        UsageError: no narrower shape keeps the model's ratios.
    """
    # Values that depend on the model are decided without transfer, which is set again afterwards.
    plan = resolve(settings.resolve(_WITHOUT_TRANSFER, ORIGIN), describe())
    shape = None
    if not plan.job.recipe.init:
        shape = plan.job.recipe.shape(vocab_size=1)  # the proxy's width does not depend on it
    transfer_values = {key: settings.values()[key] for key in _WITHOUT_TRANSFER}
    wide = plan.record.settings.resolve(transfer_values, ORIGIN)
    transfer = transfer_of(wide, shape)  # refuses a model without a shape
    assert transfer is not None and shape is not None
    target = wide.resolve({"optim.transfer_base": transfer.base.hidden_size}, ORIGIN)
    # Minutes that the sweep itself has set are meant for the whole sweep, not for the wide run.
    if settings.origins.get("train.minutes") == ORIGIN:
        target = target.resolve({"train.minutes": DEFAULT_RUN_MINUTES}, ORIGIN)
    return narrow_proxy(wide, shape), target


def _default_axes(settings: Settings) -> list[Axis]:
    """Return an axis of learning rates around the default rate, and an axis of two seeds."""
    default_rate = resolve(settings, describe()).training.optim.lr
    rates = tuple(float(f"{default_rate * 2.0**exponent:.4g}") for exponent in DEFAULT_EXPONENTS)
    return [Axis("optim.lr", rates), Axis(SEED, DEFAULT_SEEDS)]


def _newest_run_settings() -> Settings:
    """Return the settings of a short sweep with the newest run's model, text and optimizer.

    If there is no run, they are the defaults.
    """
    sweep_length = {"train.minutes": DEFAULT_MINUTES}
    runs = [folder for folder in runs_in(DEFAULT_ROOT) if not is_file(folder / SWEEP)]
    if not runs:
        return load(None, {}).resolve(sweep_length, ORIGIN)
    run = Run(runs[-1])
    settings_of_run = run_settings(run)
    kept = {
        key: value
        for key, value in settings_of_run.given_values().items()
        if key not in _NOT_TAKEN_OVER
    }
    if is_file(run.tokenizer):
        kept["data.tokenizer"] = str(run.tokenizer)
        # This key is for a tokenizer that is still to be trained.
        kept.pop("data.vocab_size", None)
    settings = load(None, {}).resolve(kept, str(run.config)).resolve(sweep_length, ORIGIN)
    return settings.vouching(settings_of_run.vouched)


def names_existing_sweep(out: Path | None, arguments: Sequence[str], samples: int | None) -> bool:
    """Return whether the command line names an existing sweep and nothing else."""
    return not arguments and samples is None and out is not None and is_file(out / SWEEP)


def narrow_proxy(settings: Settings, config: LlamaConfig) -> Settings:
    """Return the settings of the narrow proxy of a wide run, which differ only in the width.

    Args:
        settings: the settings of the wide run, with transfer on. Values that depend on the model's
            size (tokenizer, tokens per update) must be fixed, or the proxy would choose others. The
            learning rate may be left open.
        config: the shape of the wide model.

    Raises:
        UsageError: see `transfer_of`.
    """
    transfer = transfer_of(settings, config)
    assert transfer is not None
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {f"model.{name}": getattr(transfer.base, name) for name in names}
    return settings.resolve(sizes | _WITHOUT_TRANSFER, f"the proxy of {config.hidden_size}")


def transfer_notes(
    settings: Settings, proxy: Settings, updates: int, proxy_updates: int
) -> list[str]:
    """Return lines that say which of a proxy's best values are also best for the wide model.

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
    tokens_per_update = int(settings.train.tokens_per_update)
    proxy_tokens_per_update = int(proxy.train.tokens_per_update)
    if tokens_per_update != proxy_tokens_per_update:
        rate_factor = math.sqrt(tokens_per_update / proxy_tokens_per_update)
        lines.append(
            f"{tokens_per_update:,} tokens per update instead of {proxy_tokens_per_update:,}: the best rate goes with "
            f"the square root of that, about {rate_factor:.2g} times the one found; not applied"
        )
    token_ratio = updates * tokens_per_update / (proxy_updates * proxy_tokens_per_update)
    if not math.isclose(token_ratio, 1.0, rel_tol=0.01):
        lines.append(
            f"{counted(updates, 'update')} instead of {proxy_updates:,}, {token_ratio:.2g} times the tokens: longer "
            f"runs want lower rates ({HORIZON_PAPER}), and weight decay divided by {token_ratio:.2g}; not applied"
        )
    return lines
