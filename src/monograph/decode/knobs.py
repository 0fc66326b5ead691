"""Chains and knobs.

A chain is the ordered list of the sampler's stages that a set of requests needs. Each chain has its
own graph. Knobs are the numbers that the stages read: tensors with one entry per row. When a request
begins in a row, its values are written to the row's entries. If the request does not need a stage of the
chain, they are values that turn the stage off.

Shapes: B rows, M listed ids of a row, padded with -1.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from monograph.decode.filters import FILTERS, top_k_of
from monograph.decode.sampling import ORDERS, Sampling
from monograph.decode.stages import SamplerKnob, SamplerStage, options
from monograph.device import tensor_on
from monograph.errors import UsageError

# If every top-k of a chain is at most MAX_SMALL_TOP_K, top-k and the stages after it read only about
# 2 k tokens (`Chain.likeliest_count`), but at least MIN_LIKELIEST_COUNT.
MAX_SMALL_TOP_K = 128
MIN_LIKELIEST_COUNT = 64


def _has_window(sampling: Sampling) -> bool:
    """Return whether the penalties see any earlier tokens."""
    return sampling.penalty_last_n != 0


def _penalises_repetition(sampling: Sampling) -> bool:
    return _has_window(sampling) and sampling.repetition_penalty != 1


def _penalises_counts(sampling: Sampling) -> bool:
    has_penalty = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    return _has_window(sampling) and has_penalty


# The stages before the temperature and the filters, in their order. They edit the logits, except for
# two that change other stages: last_n is the window of the penalties, and min_keep the minimum number
# of tokens that a filter keeps. The mask of an automaton is applied after min_tokens. bias and
# min_tokens also have lists of ids as knobs, see `knobs_of`. The arguments are those of `SamplerStage`:
# the name, whether a request needs the stage, its knobs, and an example of options that need it.
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
        "frequency_presence",
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
        stages: names of EDITS, then of FILTERS, which include the temperature. Without a temperature
            every row takes its likeliest token.
        bias_length: length of each row's list of biased ids; a power of two, or 0.
        stop_length: length of each row's list of stop ids that min_tokens forbids; a power of two,
            or 0.
        logprobs: how many of the likeliest tokens are reported in addition to the sampled one;
            None: no report.
        likeliest_count: the number of likeliest tokens that top-k and the stages after it read. It
            is at least twice the k of every row that samples at random, so these tokens include all
            that top-k keeps, unless many have equal logits. None: all tokens.
        reports_processed: whether a report has the log-probabilities under the distribution that is
            sampled from. Otherwise those under the raw logits take their place, which are the same in
            rows without edits and filters at temperature 1.
    """

    stages: tuple[str, ...] = ()
    bias_length: int = 0
    stop_length: int = 0
    logprobs: int | None = None
    likeliest_count: int | None = None
    reports_processed: bool = True

    @property
    def samples_at_random(self) -> bool:
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
        # A dynamic temperature with the range 0 is a fixed one, so either serves as "temperature" here.
        other_stages = [stage.removeprefix("dynamic_") for stage in other.stages]
        own_stages = [stage.removeprefix("dynamic_") for stage in self.stages]
        common_stages = [stage for stage in own_stages if stage in other_stages]
        if common_stages != other_stages:
            return False
        if other.logprobs is not None and (self.logprobs is None or other.logprobs > self.logprobs):
            return False
        # A chain that reads only the likeliest tokens could miss tokens that a larger k keeps.
        if self.likeliest_count is not None and other.samples_at_random:
            if other.likeliest_count is None or other.likeliest_count > self.likeliest_count:
                return False
        return other.bias_length <= self.bias_length and other.stop_length <= self.stop_length


def chain_of(samplings: Sequence[Sampling], stop_ids: int = 0) -> Chain:
    """Return the smallest chain that serves all requests.

    Args:
        samplings: the options of the requests, at least one.
        stop_ids: the maximum number of stop ids of a request, for min_tokens.

    Raises:
        UsageError: the requests do not have the same order, or the order lacks a stage that a request
            needs.
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
    # The order "hf" has all stages.
    left_out = set(needed(*ORDERS["hf"])) - set(stages)
    if left_out:
        raise UsageError(
            f"order = {orders[0]!r} leaves out {min(left_out)}, which is on: name it, or turn it off"
        )
    # An order has only the name "temperature". It stands for the dynamic one if a request needs that.
    if needed("dynamic_temperature"):
        stages = tuple(stage.replace("temperature", "dynamic_temperature") for stage in stages)
    # mirostat is last, since it depends on the distribution that is sampled from.
    return Chain(
        stages=edits + stages + needed("mirostat"),
        bias_length=_list_length(max(len(sampling.logit_bias) for sampling in samplings)),
        stop_length=_list_length(stop_ids) if "min_tokens" in edits else 0,
        logprobs=max(
            (sampling.logprobs for sampling in samplings if sampling.logprobs is not None),
            default=None,
        ),
        likeliest_count=_likeliest_count(samplings),
    )


def join_chains(chains: Collection[Chain], largest: Chain) -> Chain:
    """Return a chain that covers all chains and has only their stages.

    It has the order, the lengths of lists and the report of the largest chain.

    Args:
        chains: the chains, at least one.
        largest: a chain that covers all of them.
    """
    needed = {stage for chain in chains for stage in chain.stages}
    order = largest.stages
    # A dynamic temperature serves rows with a fixed one, too. If no row needs it, the fixed one is used.
    if "dynamic_temperature" not in needed:
        order = tuple(stage.removeprefix("dynamic_") for stage in order)
    counts = [chain.likeliest_count for chain in chains if chain.samples_at_random]
    known_counts = [count for count in counts if count is not None]
    likeliest_count = None
    # If one of the chains reads all tokens, so does the joined one.
    if known_counts and len(known_counts) == len(counts):
        likeliest_count = max(known_counts)
    return replace(
        largest,
        stages=tuple(stage for stage in order if stage in needed),
        bias_length=largest.bias_length if "bias" in needed else 0,
        stop_length=largest.stop_length if "min_tokens" in needed else 0,
        logprobs=None if all(chain.logprobs is None for chain in chains) else largest.logprobs,
        likeliest_count=likeliest_count,
    )


def _likeliest_count(samplings: Sequence[Sampling]) -> int | None:
    """Return `Chain.likeliest_count` of these requests; None if the stages must read all tokens."""
    top_ks = [top_k_of(sampling) for sampling in samplings if sampling.temperature > 0]
    # 0 is a request without top-k, for which all tokens are read.
    if not top_ks or min(top_ks) == 0 or max(top_ks) > MAX_SMALL_TOP_K:
        return None
    # Twice the largest k leaves room for equal logits, which are frequent in bf16.
    return max(MIN_LIKELIEST_COUNT, _list_length(2 * max(top_ks)))


def _list_length(entries: int) -> int:
    """Return the smallest power of two that is at least the number of entries; 0 for no entries.

    Powers of two leave room for a few more entries, so that not every length needs a graph of its own.
    """
    if entries == 0:
        return 0
    return 1 << (entries - 1).bit_length()


def knobs_of(sampling: Sampling, chain: Chain, stop_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Return a request's values for the knobs of a chain, by name.

    Args:
        sampling: the request's options.
        chain: a chain that covers the request's smallest chain.
        stop_ids: the request's stop ids, which min_tokens forbids at first.
    """
    # If the request does not use a stage of the chain, the values turn the stage off: it changes no bit.
    values: dict[str, Any] = {}
    for name in chain.stages:
        if name == "bias":
            values["bias_ids"] = _padded(list(sampling.logit_bias), chain.bias_length, -1)
            values["bias_values"] = _padded(
                list(sampling.logit_bias.values()), chain.bias_length, 0.0
            )
        if name == "min_tokens":
            values["stop_ids"] = _padded(list(stop_ids)[: chain.stop_length], chain.stop_length, -1)
        values |= {
            knob_name: knob.value(sampling) for knob_name, knob in STAGES[name].knobs.items()
        }
    return values


# Options that turn all stages off, except for the temperature, which is 1.
_OFF = Sampling(temperature=1.0)
# The knobs that are int64.
_INT_KNOBS = {
    name for stage in STAGES.values() for name, knob in stage.knobs.items() if knob.is_whole
}
_INT_KNOBS |= {"bias_ids", "stop_ids"}


def new_knobs(chain: Chain, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Return the knobs of a chain by name, with values that turn all stages off, at temperature 1.

    Returns:
        numbers, fp32 or int64 [B], and lists [B, M].
    """
    knobs: dict[str, Tensor] = {}
    for name, value in knobs_of(_OFF, chain).items():
        dtype = torch.int64 if name in _INT_KNOBS else torch.float32
        knobs[name] = torch.tensor([value] * rows, dtype=dtype, device=device)
    return knobs


def write_rows(
    columns: Mapping[str, Tensor], rows: Sequence[int], values: Sequence[Mapping[str, Any]]
) -> None:
    """Write the values of several requests, such as those of `knobs_of`, into their rows, in place.

    Args:
        columns: tensors by name, [B, ...] each. Those without values do not change.
        rows: the row of each request.
        values: each request's values by name, with the same names for all requests.
    """
    for name in values[0]:
        column = columns[name]
        entries = [values_of_request[name] for values_of_request in values]
        entries_on_device = tensor_on(entries, column.device, column.dtype)
        column.index_copy_(0, tensor_on(rows, column.device), entries_on_device)


def _padded(entries: list[Any], length: int, padding: float) -> list[Any]:
    """Return a list of this length, with padding after the entries."""
    return entries + [padding] * (length - len(entries))
