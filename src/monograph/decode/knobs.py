"""Chains and knobs.

A chain has the ordered stages that a set of requests needs. Each chain has its own graph. Knobs are
the numbers that the stages read: tensors with one entry per row. A request gets a row by writing
its values there. In a row that does not use a stage, the stage's knobs have the values at which it
is off.

Shapes: B rows, M listed ids of a row, padded with -1.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from monograph.decode.filters import FILTERS, kept_at_most
from monograph.decode.sampling import ORDERS, Sampling
from monograph.decode.stages import SamplerKnob, SamplerStage, options
from monograph.device import sent
from monograph.errors import UsageError

# With a top-k of at most MAX_FEW, the stages after it read only about 2 k tokens, but at least
# MIN_FEW.
MAX_FEW = 128
MIN_FEW = 64


def _has_window(sampling: Sampling) -> bool:
    """Return whether penalties see earlier tokens."""
    return sampling.penalty_last_n != 0


def _penalises_repetition(sampling: Sampling) -> bool:
    return _has_window(sampling) and sampling.repetition_penalty != 1


def _penalises_counts(sampling: Sampling) -> bool:
    has_penalty = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    return _has_window(sampling) and has_penalty


# The edits of the logits, in their order; the mask of an automaton follows min_tokens. Two of them
# change other stages: last_n is the window of the penalties, and min_keep the minimum number of
# tokens that a filter keeps. bias and min_tokens also have lists of ids as knobs, see `knobs_of`.
_EDITS = (
    SamplerStage("bias", lambda s: bool(s.logit_bias), {}, {"logit_bias": {0: 0.0}}),
    SamplerStage(
        "min_tokens", lambda s: s.min_tokens > 0, options("min_tokens"), {"min_tokens": 1}
    ),
    SamplerStage(
        "last_n",
        lambda s: s.penalty_last_n > 0 and (_penalises_repetition(s) or _penalises_counts(s)),
        options("penalty_last_n")
        | {"counts_prompt": SamplerKnob(lambda s: s.penalty_scope == "all", is_whole=True)},
        {"penalty_last_n": 8, "repetition_penalty": 1.1},
    ),
    SamplerStage(
        "repetition",
        _penalises_repetition,
        {
            "repetition_penalty": SamplerKnob(
                lambda s: s.repetition_penalty if _has_window(s) else 1.0
            )
        },
        {"repetition_penalty": 1.1},
    ),
    SamplerStage(
        "counted",
        _penalises_counts,
        {
            "frequency_penalty": SamplerKnob(
                lambda s: s.frequency_penalty if _has_window(s) else 0.0
            ),
            "presence_penalty": SamplerKnob(
                lambda s: s.presence_penalty if _has_window(s) else 0.0
            ),
        },
        {"frequency_penalty": 0.1, "presence_penalty": 0.1},
    ),
    SamplerStage(
        "dry",
        lambda s: s.dry_multiplier > 0 and s.dry_penalty_last_n != 0,
        {"dry_multiplier": SamplerKnob(lambda s: s.dry_multiplier if s.dry_penalty_last_n else 0.0)}
        | options("dry_base", "dry_allowed_length", "dry_penalty_last_n"),
        {"dry_multiplier": 0.1},
    ),
    SamplerStage(
        "min_keep",
        lambda s: s.temperature > 0 and s.min_keep > 1,
        options("min_keep"),
        {"min_keep": 2},
    ),
)
EDITS = tuple(stage.name for stage in _EDITS)
STAGES: Mapping[str, SamplerStage] = {stage.name: stage for stage in _EDITS} | FILTERS


@dataclass(frozen=True)
class Chain:
    """The stages of a graph, in order, and the sizes that are part of the graph.

    Attributes:
        stages: names of EDITS, then of FILTERS. Without a temperature every row takes its likeliest
            token.
        bias_ids: length of a row's list of biased ids; a power of two, or 0.
        stop_ids: length of a row's list of stop tokens that min_tokens forbids; a power of two, or
            0.
        logprobs: how many of the likeliest tokens are reported in addition to the sampled one;
            None: no report.
        likeliest_count: the number of likeliest tokens that top-k and the stages after it read. It
            is above the k of every row that samples, so these tokens include all that top-k keeps,
            unless many have equal logits. None: all tokens.
        processed: whether a report has the probabilities that are sampled from. Otherwise it repeats
            those of the raw logits, which are the same in rows without edits and filters at
            temperature 1.
    """

    stages: tuple[str, ...] = ()
    bias_ids: int = 0
    stop_ids: int = 0
    logprobs: int | None = None
    likeliest_count: int | None = None
    processed: bool = True

    @property
    def draws(self) -> bool:
        """Whether a row may sample at random."""
        return "temperature" in self.stages or "dynamic_temperature" in self.stages

    def has(self, *stages: str) -> bool:
        """Return whether the chain has one of these stages."""
        return any(stage in self.stages for stage in stages)

    def covers(self, other: Self) -> bool:
        """Return whether this chain serves every request that the other one serves.

        It needs the other's stages in the same order, and room for the other's lists and reports.
        """
        if "dynamic_temperature" in other.stages and "dynamic_temperature" not in self.stages:
            return False
        # A dynamic temperature with the range 0 is a fixed one.
        other_stages = [stage.removeprefix("dynamic_") for stage in other.stages]
        own_stages = [stage.removeprefix("dynamic_") for stage in self.stages]
        if [stage for stage in own_stages if stage in other_stages] != other_stages:
            return False
        if other.logprobs is not None and (self.logprobs is None or other.logprobs > self.logprobs):
            return False
        # A chain that reads few tokens could miss some of those that a larger k keeps.
        if (
            self.likeliest_count is not None
            and other.draws
            and (other.likeliest_count is None or other.likeliest_count > self.likeliest_count)
        ):
            return False
        return other.bias_ids <= self.bias_ids and other.stop_ids <= self.stop_ids


def chain_of(samplings: Sequence[Sampling], stop_ids: int = 0) -> Chain:
    """Return the smallest chain that serves all requests.

    Args:
        samplings: the options of the requests, at least one.
        stop_ids: the maximum number of stop tokens of a request, for min_tokens.

    Raises:
        UsageError: the requests do not have the same order, or the order lacks a stage that is on.
    """
    orders = sorted({sampling.order for sampling in samplings})
    if len({sampling.stages for sampling in samplings}) > 1:
        raise UsageError(
            f"order is {' and '.join(orders)} in one batch: expected one order, since its stages are one graph"
        )

    def needed(*names: str) -> tuple[str, ...]:
        return tuple(
            name
            for name in names
            if any(STAGES[name].is_needed(sampling) for sampling in samplings)
        )

    edits = needed(*EDITS)
    stages = needed(*samplings[0].stages)
    left_out = set(needed(*ORDERS["hf"])) - set(stages)
    if left_out:
        raise UsageError(
            f"order = {orders[0]!r} leaves out {min(left_out)}, which is on: name it, or turn it off"
        )
    if needed("dynamic_temperature"):
        stages = tuple(stage.replace("temperature", "dynamic_temperature") for stage in stages)
    # mirostat is last, since it depends on the distribution that is sampled from.
    return Chain(
        stages=edits + stages + needed("mirostat"),
        bias_ids=_list_length(max(len(sampling.logit_bias) for sampling in samplings)),
        stop_ids=_list_length(stop_ids) if "min_tokens" in edits else 0,
        logprobs=max(
            (sampling.logprobs for sampling in samplings if sampling.logprobs is not None),
            default=None,
        ),
        likeliest_count=_likeliest_count(samplings),
    )


def joint(chains: Collection[Chain], whole: Chain) -> Chain:
    """Return the smallest chain that covers all chains.

    It has the order, the lengths of lists and the report of `whole`.

    Args:
        chains: the chains, at least one.
        whole: a chain that covers all of them.
    """
    needed = {stage for chain in chains for stage in chain.stages}
    if "dynamic_temperature" in whole.stages and "dynamic_temperature" not in needed:
        whole = replace(
            whole, stages=tuple(stage.replace("dynamic_", "") for stage in whole.stages)
        )
    needed = {stage.replace("dynamic_", "") for stage in needed}
    counts = [chain.likeliest_count for chain in chains if chain.draws]
    likeliest_count = None
    if None not in counts:
        likeliest_count = max((count for count in counts if count is not None), default=None)
    return replace(
        whole,
        stages=tuple(stage for stage in whole.stages if stage.replace("dynamic_", "") in needed),
        bias_ids=whole.bias_ids if "bias" in needed else 0,
        stop_ids=whole.stop_ids if "min_tokens" in needed else 0,
        logprobs=None if all(chain.logprobs is None for chain in chains) else whole.logprobs,
        likeliest_count=likeliest_count,
    )


def _likeliest_count(samplings: Sequence[Sampling]) -> int | None:
    """Return `Chain.likeliest_count` of these requests; None if the stages must read all tokens."""
    kept = [kept_at_most(sampling) for sampling in samplings if sampling.temperature > 0]
    # 0 is a request without top-k, which keeps all tokens.
    if not kept or min(kept) == 0 or max(kept) > MAX_FEW:
        return None
    # Twice the largest k leaves room for equal logits, which are frequent in bf16.
    return max(MIN_FEW, _list_length(2 * max(kept)))


def _list_length(entries: int) -> int:
    """Return the smallest power of two with room for the entries; 0 for no entries.

    So a few more entries do not need another graph.
    """
    return 1 << (entries - 1).bit_length() if entries else 0


def knobs_of(sampling: Sampling, chain: Chain, stop_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Return a request's values for the knobs of a chain, by name.

    Args:
        sampling: the request's options.
        chain: a chain that covers the request's smallest chain.
        stop_ids: the request's stop tokens, which min_tokens forbids at first.
    """
    # For stages that the request does not use, the values turn the stage off and change no bit.
    values: dict[str, Any] = {}
    for name in chain.stages:
        if name == "bias":
            values["bias_ids"] = _padded(list(sampling.logit_bias), chain.bias_ids, -1)
            values["bias_values"] = _padded(list(sampling.logit_bias.values()), chain.bias_ids, 0.0)
        if name == "min_tokens":
            values["stop_ids"] = _padded(list(stop_ids)[: chain.stop_ids], chain.stop_ids, -1)
        values |= {knob: declared.value(sampling) for knob, declared in STAGES[name].knobs.items()}
    return values


_OFF = Sampling(temperature=1.0)
_INT_KNOBS = {
    name for stage in STAGES.values() for name, knob in stage.knobs.items() if knob.is_whole
}
_INT_KNOBS |= {"bias_ids", "stop_ids"}


def new_knobs(chain: Chain, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Return knobs that turn all stages off, at the temperature 1.

    Returns:
        by name, fp32 or int64 [B], and lists [B, M].
    """
    return {
        name: torch.tensor(
            [value] * rows,
            dtype=torch.int64 if name in _INT_KNOBS else torch.float32,
            device=device,
        )
        for name, value in knobs_of(_OFF, chain).items()
    }


def write_rows(
    columns: Mapping[str, Tensor], rows: Sequence[int], values: Sequence[Mapping[str, Any]]
) -> None:
    """Write the values of several requests, such as those of `knobs_of`, into their rows, in place.

    Args:
        columns: tensors by name, [B, ...] each; those that have no values do not change.
        rows: the row of each request.
        values: each request's values by name, with the same names for all requests.
    """
    for name in values[0]:
        column = columns[name]
        entries = sent([of_request[name] for of_request in values], column.device, column.dtype)
        column.index_copy_(0, sent(rows, column.device), entries)


def _padded(entries: list[Any], length: int, padding: float) -> list[Any]:
    return entries + [padding] * (length - len(entries))
