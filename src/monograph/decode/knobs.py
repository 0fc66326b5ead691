"""A chain, the ordered stages that a set of requests needs, and its knobs, the numbers that the stages read.

The chain is part of the graph: another chain is another graph. A knob is a tensor with one entry per row, so a request
is admitted by writing its row. In a row that does not use a stage, its knobs have the values at which the stage is off.

Shapes: B rows, M ids that are listed for a row, padded with -1.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from monograph.decode.sampling import ORDERS, Sampling
from monograph.device import sent
from monograph.errors import UsageError

# The largest k of top-k after which the stages read 2 k tokens instead of all, and the fewest that they read then.
FEW, LEAST_FEW = 128, 64
# The edits of the logits, in the order in which they are made (an automaton's mask comes after min_tokens), and two
# that change how other stages work: last_n, a window for the penalties, and min_keep, a least number for the filters.
EDITS = ("bias", "min_tokens", "last_n", "repetition", "counted", "dry", "min_keep")
# Whether a request needs a stage. At temperature 0 the likeliest token is taken, so no filter is needed.
_NEEDED: dict[str, Callable[[Sampling], bool]] = {
    "bias": lambda s: bool(s.logit_bias),
    "min_tokens": lambda s: s.min_tokens > 0,
    "last_n": lambda s: s.penalty_last_n > 0 and (_NEEDED["repetition"](s) or _NEEDED["counted"](s)),
    "repetition": lambda s: s.penalty_last_n != 0 and s.repetition_penalty != 1,
    "counted": lambda s: s.penalty_last_n != 0 and (s.frequency_penalty != 0 or s.presence_penalty != 0),
    "dry": lambda s: s.dry_multiplier > 0 and s.dry_penalty_last_n != 0,
    "min_keep": lambda s: s.temperature > 0 and s.min_keep > 1,
    "temperature": lambda s: s.temperature > 0,
    "dynamic_temperature": lambda s: s.temperature > 0 and s.temperature_range > 0,
    "top_n_sigma": lambda s: s.temperature > 0 and s.top_n_sigma > 0,
    "top_k": lambda s: s.temperature > 0 and s.top_k > 0,
    "top_p": lambda s: s.temperature > 0 and s.top_p < 1,
    "min_p": lambda s: s.temperature > 0 and s.min_p > 0,
    "top_a": lambda s: s.temperature > 0 and s.top_a > 0,
    "typical": lambda s: s.temperature > 0 and s.typical_p < 1,
    "epsilon": lambda s: s.temperature > 0 and s.epsilon_cutoff > 0,
    "eta": lambda s: s.temperature > 0 and s.eta_cutoff > 0,
    "xtc": lambda s: s.temperature > 0 and s.xtc_probability > 0 and s.xtc_threshold <= 0.5,  # above, XTC is off
    "mirostat": lambda s: s.temperature > 0 and s.mirostat_tau > 0,
}


@dataclass(frozen=True)
class Chain:
    """The stages of a graph, in order, and the sizes that are part of it.

    Attributes:
        stages: names from EDITS, then from FILTERS; without a temperature every row takes its likeliest token.
        bias_ids: length of a row's list of biased ids; a power of two, or 0.
        stop_ids: length of a row's list of stop tokens that min_tokens forbids; a power of two, or 0.
        logprobs: how many of the likeliest tokens are reported in addition to the drawn one; None: no report.
        few: how many of the likeliest tokens include, ties apart, all that top-k keeps in every row that draws; None
            where a row may keep more than FEW tokens.
        processed: whether a report has the probabilities that were drawn from; if not, those of the raw logits stand in
            their place, which are the same in rows without edits and filters at temperature 1.
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
        wanted, here = ([stage.removeprefix("dynamic_") for stage in chain.stages] for chain in (least, self))
        in_order = [stage for stage in here if stage in wanted] == wanted
        reported = least.logprobs is None or (self.logprobs is not None and least.logprobs <= self.logprobs)
        # A chain that reads few tokens could miss some of those that a larger k keeps.
        held = self.few is None or not least.draws or (least.few is not None and least.few <= self.few)
        return in_order and reported and held and least.bias_ids <= self.bias_ids and least.stop_ids <= self.stop_ids


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
        raise UsageError(f"order is {' and '.join(orders)} in one batch: expected one order, its stages are one graph")

    def needed(*names: str) -> tuple[str, ...]:
        return tuple(name for name in names if any(_NEEDED[name](sampling) for sampling in samplings))

    edits, stages = needed(*EDITS), needed(*samplings[0].stages)
    if left_out := set(needed(*ORDERS["hf"])) - set(stages):
        raise UsageError(f"order = {orders[0]!r} leaves out {min(left_out)}, which is on: name it, or turn it off")
    if needed("dynamic_temperature"):
        stages = tuple(stage.replace("temperature", "dynamic_temperature") for stage in stages)
    # mirostat is last, as it steers by the distribution that is drawn from.
    return Chain(
        edits + stages + needed("mirostat"),
        _room(max(len(sampling.logit_bias) for sampling in samplings)),
        _room(stop_ids) if "min_tokens" in edits else 0,
        max((sampling.logprobs for sampling in samplings if sampling.logprobs is not None), default=None),
        _few(samplings),
    )


def joint(chains: Collection[Chain], whole: Chain) -> Chain:
    """Return the smallest chain that covers all of these, with the order, the lists' lengths and the report of `whole`.

    Args:
        chains: at least one.
        whole: a chain that covers all of them.
    """
    wanted = {stage for chain in chains for stage in chain.stages}
    if "dynamic_temperature" in whole.stages and "dynamic_temperature" not in wanted:
        whole = replace(whole, stages=tuple(stage.replace("dynamic_", "") for stage in whole.stages))
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
    """Return how many of the likeliest tokens include all that top-k keeps; None if the stages must read all tokens."""
    # Twice the largest k, as bf16 logits are often level, and a power of two, so that most other k need no other graph.
    kept = [_top_k(sampling) for sampling in samplings if sampling.temperature > 0]
    return max(LEAST_FEW, _room(2 * max(kept))) if kept and min(kept) != 0 and max(kept) <= FEW else None


def _top_k(sampling: Sampling) -> int:
    # The filters after top-k read only what it keeps, so it has to keep min_keep tokens.
    return max(sampling.top_k, sampling.min_keep) if sampling.top_k else 0


def _room(entries: int) -> int:
    """Return a power of two for the length of a list, so that a few more entries need no other graph; 0 for 0."""
    return 1 << (entries - 1).bit_length() if entries else 0


def knobs_of(sampling: Sampling, chain: Chain, stop_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Return a request's values for the knobs of a chain, by name.

    Args:
        sampling: the request's options.
        chain: a chain that serves the request, see `Chain.serves`.
        stop_ids: the request's stop tokens, which min_tokens forbids at first.
    """
    # A chain may have stages that this request does not use: the values of their knobs change no bit.
    seen = sampling.penalty_last_n != 0
    # A knob that is not listed here is the option of its name.
    values: dict[str, Any] = vars(sampling) | {
        "bias_ids": _padded(list(sampling.logit_bias), chain.bias_ids, -1),
        "bias_values": _padded(list(sampling.logit_bias.values()), chain.bias_ids, 0.0),
        "stop_ids": _padded(list(stop_ids)[: chain.stop_ids], chain.stop_ids, -1),
        "counts_prompt": sampling.penalty_scope == "all",
        "repetition_penalty": sampling.repetition_penalty if seen else 1.0,
        "frequency_penalty": sampling.frequency_penalty if seen else 0.0,
        "presence_penalty": sampling.presence_penalty if seen else 0.0,
        "dry_multiplier": sampling.dry_multiplier if sampling.dry_penalty_last_n else 0.0,
        "top_k": _top_k(sampling),
        "log_min_p": _log(sampling.min_p),
        "log_top_a": _log(sampling.top_a),
        "log_epsilon": _log(sampling.epsilon_cutoff),
        "log_eta": _log(sampling.eta_cutoff),
    }
    return {name: values[name] for stage in chain.stages for name in _KNOBS.get(stage, (stage,))}


# Stages that are not listed have one knob, of their name.
_KNOBS: dict[str, tuple[str, ...]] = {
    "bias": ("bias_ids", "bias_values"),
    "min_tokens": ("stop_ids", "min_tokens"),
    "last_n": ("penalty_last_n", "counts_prompt"),
    "repetition": ("repetition_penalty",),
    "counted": ("frequency_penalty", "presence_penalty"),
    "dry": ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    "dynamic_temperature": ("temperature", "temperature_range", "temperature_exponent"),
    "min_p": ("log_min_p",),
    "top_a": ("log_top_a",),
    "typical": ("typical_p",),
    "epsilon": ("log_epsilon",),
    "eta": ("log_eta",),
    "xtc": ("xtc_probability", "xtc_threshold"),
    "mirostat": ("mirostat_tau", "mirostat_eta"),
}
_OFF = Sampling(temperature=1.0)
_INT64 = {"bias_ids", "stop_ids", "min_tokens", "top_k", "min_keep"}
_INT64 |= {"penalty_last_n", "counts_prompt", "dry_allowed_length", "dry_penalty_last_n"}


def new_knobs(chain: Chain, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Return knobs that turn all stages off, with the temperature 1: fp32 or int64 [B], lists of ids [B, M]."""
    return {
        name: torch.tensor([value] * rows, dtype=torch.int64 if name in _INT64 else torch.float32, device=device)
        for name, value in knobs_of(_OFF, chain).items()
    }


def write_rows(columns: Mapping[str, Tensor], rows: Sequence[int], values: Sequence[Mapping[str, Any]]) -> None:
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


def _log(probability: float) -> float:
    # A filter whose least log-probability is -inf drops no token.
    return math.log(probability) if probability else -math.inf


def _padded(entries: list[Any], length: int, padding: float) -> list[Any]:
    return entries + [padding] * (length - len(entries))
