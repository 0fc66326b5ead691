"""A chain, the ordered stages that a set of requests needs, and its knobs, the numbers that the
stages read.

The chain is part of the graph: another chain is another graph. A knob is a tensor with one entry
per row, so a request is admitted by writing its row. In a row that does not use a stage, its knobs
have the values at which the stage is off.

Shapes: B rows, M ids that are listed for a row, padded with -1.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from monograph.decode.filters import FILTERS, kept_at_most
from monograph.decode.sampling import ORDERS, Sampling
from monograph.decode.stages import Knob, SamplerStage, options
from monograph.device import sent
from monograph.errors import UsageError

# The largest k of top-k after which the stages read 2 k tokens instead of all, and the fewest that
# they read then.
FEW, LEAST_FEW = 128, 64


def _sees(sampling: Sampling) -> bool:
    """Return whether penalties see any earlier token."""
    return sampling.penalty_last_n != 0


def _repeats(sampling: Sampling) -> bool:
    return _sees(sampling) and sampling.repetition_penalty != 1


def _counts(sampling: Sampling) -> bool:
    return _sees(sampling) and (sampling.frequency_penalty != 0 or sampling.presence_penalty != 0)


# The edits of the logits, in the order in which they are made (an automaton's mask comes after
# min_tokens), and two that change how other stages work: last_n, a window for the penalties, and
# min_keep, a least number for the filters. The knobs of bias and min_tokens that hold ids are
# lists, whose lengths the chain gives: see `knobs_of`.
_EDITS = (
    SamplerStage("bias", lambda s: bool(s.logit_bias), {}, {"logit_bias": {0: 0.0}}),
    SamplerStage(
        "min_tokens", lambda s: s.min_tokens > 0, options("min_tokens"), {"min_tokens": 1}
    ),
    SamplerStage(
        "last_n",
        lambda s: s.penalty_last_n > 0 and (_repeats(s) or _counts(s)),
        options("penalty_last_n")
        | {"counts_prompt": Knob(lambda s: s.penalty_scope == "all", is_whole=True)},
        {"penalty_last_n": 8, "repetition_penalty": 1.1},
    ),
    SamplerStage(
        "repetition",
        _repeats,
        {"repetition_penalty": Knob(lambda s: s.repetition_penalty if _sees(s) else 1.0)},
        {"repetition_penalty": 1.1},
    ),
    SamplerStage(
        "counted",
        _counts,
        {
            "frequency_penalty": Knob(lambda s: s.frequency_penalty if _sees(s) else 0.0),
            "presence_penalty": Knob(lambda s: s.presence_penalty if _sees(s) else 0.0),
        },
        {"frequency_penalty": 0.1, "presence_penalty": 0.1},
    ),
    SamplerStage(
        "dry",
        lambda s: s.dry_multiplier > 0 and s.dry_penalty_last_n != 0,
        {"dry_multiplier": Knob(lambda s: s.dry_multiplier if s.dry_penalty_last_n else 0.0)}
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
    """The stages of a graph, in order, and the sizes that are part of it.

    Attributes:
        stages: names from EDITS, then from FILTERS; without a temperature every row takes its
            likeliest token.
        bias_ids: length of a row's list of biased ids; a power of two, or 0.
        stop_ids: length of a row's list of stop tokens that min_tokens forbids; a power of two, or
            0.
        logprobs: how many of the likeliest tokens are reported in addition to the drawn one; None:
            no report.
        few: how many of the likeliest tokens include, ties apart, all that top-k keeps in every row
            that draws; None where a row may keep more than FEW tokens.
        processed: whether a report has the probabilities that were drawn from; if not, those of the
            raw logits stand in their place, which are the same in rows without edits and filters at
            temperature 1.
    """

    stages: tuple[str, ...] = ()
    bias_ids: int = 0
    stop_ids: int = 0
    logprobs: int | None = None
    few: int | None = None
    processed: bool = True

    @property
    def draws(self) -> bool:
        """Whether a row may draw at random."""
        return "temperature" in self.stages or "dynamic_temperature" in self.stages

    def has(self, *stages: str) -> bool:
        """Return whether it has one of these stages."""
        return any(stage in self.stages for stage in stages)

    def covers(self, least: Self) -> bool:
        """Return whether the chain has all stages of another, in its order, and room for its ids."""
        if "dynamic_temperature" in least.stages and "dynamic_temperature" not in self.stages:
            return False
        # A dynamic temperature whose range is 0 is a fixed one.
        wanted, here = (
            [stage.removeprefix("dynamic_") for stage in chain.stages] for chain in (least, self)
        )
        in_order = [stage for stage in here if stage in wanted] == wanted
        reported = least.logprobs is None or (
            self.logprobs is not None and least.logprobs <= self.logprobs
        )
        # A chain that reads few tokens could miss some of those that a larger k keeps.
        held = (
            self.few is None or not least.draws or (least.few is not None and least.few <= self.few)
        )
        return (
            in_order
            and reported
            and held
            and least.bias_ids <= self.bias_ids
            and least.stop_ids <= self.stop_ids
        )


def chain_of(samplings: Sequence[Sampling], stop_ids: int = 0) -> Chain:
    """Return the smallest chain that serves all requests.

    Args:
        samplings: the options of the requests, at least one.
        stop_ids: the most stop tokens that a request has, for min_tokens.

    Raises:
        UsageError: the requests do not have the same order, or it leaves out a stage that is on.
    """
    orders = sorted({sampling.order for sampling in samplings})
    if len({sampling.stages for sampling in samplings}) > 1:
        raise UsageError(
            f"order is {' and '.join(orders)} in one batch: expected one order, its stages are one graph"
        )

    def needed(*names: str) -> tuple[str, ...]:
        return tuple(
            name
            for name in names
            if any(STAGES[name].is_needed(sampling) for sampling in samplings)
        )

    edits = needed(*EDITS)
    stages = needed(*samplings[0].stages)
    if left_out := set(needed(*ORDERS["hf"])) - set(stages):
        raise UsageError(
            f"order = {orders[0]!r} leaves out {min(left_out)}, which is on: name it, or turn it off"
        )
    if needed("dynamic_temperature"):
        stages = tuple(stage.replace("temperature", "dynamic_temperature") for stage in stages)
    # mirostat is last, as it steers by the distribution that is drawn from.
    return Chain(
        edits + stages + needed("mirostat"),
        _room(max(len(sampling.logit_bias) for sampling in samplings)),
        _room(stop_ids) if "min_tokens" in edits else 0,
        max(
            (sampling.logprobs for sampling in samplings if sampling.logprobs is not None),
            default=None,
        ),
        _few(samplings),
    )


def joint(chains: Collection[Chain], whole: Chain) -> Chain:
    """Return the smallest chain that covers all of these, with the order, the lists' lengths and
    the report of `whole`.

    Args:
        chains: at least one.
        whole: a chain that covers all of them.
    """
    wanted = {stage for chain in chains for stage in chain.stages}
    if "dynamic_temperature" in whole.stages and "dynamic_temperature" not in wanted:
        whole = replace(
            whole, stages=tuple(stage.replace("dynamic_", "") for stage in whole.stages)
        )
    wanted = {stage.replace("dynamic_", "") for stage in wanted}
    few = [chain.few for chain in chains if chain.draws]
    return replace(
        whole,
        stages=tuple(stage for stage in whole.stages if stage.replace("dynamic_", "") in wanted),
        bias_ids=whole.bias_ids if "bias" in wanted else 0,
        stop_ids=whole.stop_ids if "min_tokens" in wanted else 0,
        logprobs=None if all(chain.logprobs is None for chain in chains) else whole.logprobs,
        few=None if None in few else max((each for each in few if each is not None), default=None),
    )


def _few(samplings: Sequence[Sampling]) -> int | None:
    """Return how many of the likeliest tokens include all that top-k keeps; None if the stages must
    read all tokens.
    """
    # Twice the largest k, as bf16 logits are often level, and a power of two, so that most other k
    # need no other graph.
    kept = [kept_at_most(sampling) for sampling in samplings if sampling.temperature > 0]
    return (
        max(LEAST_FEW, _room(2 * max(kept)))
        if kept and min(kept) != 0 and max(kept) <= FEW
        else None
    )


def _room(entries: int) -> int:
    """Return a power of two for the length of a list, so that a few more entries need no other
    graph; 0 for 0.
    """
    return 1 << (entries - 1).bit_length() if entries else 0


def knobs_of(sampling: Sampling, chain: Chain, stop_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Return a request's values for the knobs of a chain, by name.

    Args:
        sampling: the request's options.
        chain: a chain that serves the request, see `Chain.serves`.
        stop_ids: the request's stop tokens, which min_tokens forbids at first.
    """
    # A chain may have stages that this request does not use: the values of their knobs change no
    # bit.
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
_WHOLE = {name for stage in STAGES.values() for name, knob in stage.knobs.items() if knob.is_whole}
_WHOLE |= {"bias_ids", "stop_ids"}


def new_knobs(chain: Chain, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Return knobs that turn all stages off, with the temperature 1: fp32 or int64 [B], lists of
    ids [B, M].
    """
    return {
        name: torch.tensor(
            [value] * rows, dtype=torch.int64 if name in _WHOLE else torch.float32, device=device
        )
        for name, value in knobs_of(_OFF, chain).items()
    }


def write_rows(
    columns: Mapping[str, Tensor], rows: Sequence[int], values: Sequence[Mapping[str, Any]]
) -> None:
    """Write the values of several requests, such as those of `knobs_of`, into their rows, in place.

    Args:
        columns: by name, [B, ...] each; those that no request has a value for stay as they are.
        rows: the row of each request.
        values: by name, the same names for every request.
    """
    for name in values[0]:
        column = columns[name]
        entries = sent([of_request[name] for of_request in values], column.device, column.dtype)
        column.index_copy_(0, sent(rows, column.device), entries)


def _padded(entries: list[Any], length: int, padding: float) -> list[Any]:
    return entries + [padding] * (length - len(entries))
