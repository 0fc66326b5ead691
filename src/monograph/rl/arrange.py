"""Arrange drawn answers in the rows of a window, read what is computed there back by answer, and
describe groups.

Shapes: R rows, T positions.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from monograph.data.pack import best_fit_decreasing
from monograph.decode.completion import Completion
from monograph.loss import IGNORE, Batch
from monograph.rl.advantages import ADVANTAGES, Weight
from monograph.rl.loss import Kl
from monograph.rl.prompts import Prompt


@dataclass(frozen=True)
class Options:
    """How answers are drawn and weighed.

    Attributes:
        prompts: prompts of an update.
        group: answers to each.
        max_new_tokens: most tokens of an answer.
        masks_truncated: whether answers that this limit cuts are left out, as if they had not been
            drawn.
        truncation_penalty: what the reward of an answer that is cut is lowered by.
        temperature: divides the logits, when drawing and in the loss.
        advantage: the name of what weighs each answer.
        draws: most times that an update draws, until it has enough groups that teach.
        updates: updates that are made of each draw.
        kl: the KL term; None without one.
        length: T, the positions of a row.
        packed: whether rows hold several answers, one after the other.
        exact: whether each answer has a row of its own, as long as decoding's, so that it is scored
            in the bits in which it was drawn (`monograph.ops.attention`, "cached"); for eager mode
            on a CPU.
        seed: of the order of the prompts and of all draws.
        epochs: passes over the prompts; None: without end.
    """

    prompts: int
    group: int
    max_new_tokens: int
    temperature: float
    advantage: str
    draws: int
    length: int
    packed: bool
    exact: bool
    seed: int
    epochs: int | None = None
    updates: int = 1
    kl: Kl | None = None
    masks_truncated: bool = False
    truncation_penalty: float = 0.0


class Rollout(NamedTuple):
    """An answer with its prompt.

    Attributes:
        prompt_ids: the prompt.
        token_ids: the answer.
        logprobs: the log-probability with which each of its tokens was drawn.
        reference: the reference's log-probability of each; empty without a KL term.
        is_cut: whether the answer did not end by itself.
        states: the state of the form's automaton before each token; empty if answers have any form.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reference: Sequence[float] = ()
    is_cut: bool = False
    states: Sequence[int] = ()


Rollouts = Sequence[Rollout]


def arranged(rollouts: Rollouts, weighed: Sequence[Weight], options: Options) -> Batch:
    """Return the window of these answers, as `PolicyLoss` reads it, [R, T] each.

    Answers that weigh 0 add nothing to the gradient but their share of the denominator, so they
    take no row, and the first row carries their shares.

    Args:
        rollouts: the answers; a prompt and its answer have at most T + 1 tokens.
        weighed: their weights.
        options: the form of the rows.
    """
    alive = [index for index, weight in enumerate(weighed) if weight.changes_gradient]
    inputs = np.array(
        [len(rollouts[i].prompt_ids) + len(rollouts[i].token_ids) - 1 for i in alive],
        dtype=np.int64,
    )
    length = options.length
    row_of = best_fit_decreasing(inputs, length) if options.packed else np.arange(len(alive))
    rows = int(row_of.max()) + 1 if alive else 1
    formed = ("states",) if any(rollout.states for rollout in rollouts) else ()
    whole = {
        name: np.zeros((rows, length), dtype=np.int64)
        for name in ("tokens", "segments", "positions", *formed)
    }
    whole["targets"] = np.full((rows, length), IGNORE, dtype=np.int64)
    names = (
        "factors",
        "shares",
        "drawn",
        *(("penalties", "reference") if any(r.reference for r in rollouts) else ()),
    )
    real = {name: np.zeros((rows, length), dtype=np.float64) for name in names}
    filled = np.zeros(rows, dtype=np.int64)
    documents = np.zeros(rows, dtype=np.int64)
    for index, row, size in zip(alive, row_of.tolist(), inputs.tolist(), strict=True):
        rollout = rollouts[index]
        weight = weighed[index]
        begin = int(filled[row])
        ids = [*rollout.prompt_ids, *rollout.token_ids]
        end = begin + size
        answer = begin + len(rollout.prompt_ids) - 1
        documents[row] += 1
        whole["tokens"][row, begin:end], whole["segments"][row, begin:end] = (
            ids[:-1],
            documents[row],
        )
        whole["positions"][row, begin:end] = np.arange(size)
        whole["targets"][row, answer:end] = rollout.token_ids
        real["factors"][row, answer:end], real["drawn"][row, answer:end] = (
            weight.factor,
            rollout.logprobs,
        )
        real["shares"][row, answer] = weight.share
        if rollout.states:
            whole["states"][row, answer:end] = rollout.states
        if rollout.reference:
            real["penalties"][row, answer:end], real["reference"][row, answer:end] = (
                weight.penalty,
                rollout.reference,
            )
        filled[row] = end
    real["shares"][0, -1] += sum(weight.share for weight in weighed if not weight.changes_gradient)
    # All are left out, and an update needs something to divide by.
    if not any(weight.share for weight in weighed):
        real["shares"][0, -1] = 1
    if not options.packed:
        del whole["segments"], whole["positions"]
    return {name: torch.from_numpy(values) for name, values in (whole | real).items()}


def judged(
    rollouts: Rollouts, rewards: Sequence[float], options: Options
) -> tuple[list[Rollout], list[float]]:
    """Return the answers of a group that count, and their rewards less what being cut costs."""
    kept = list[Rollout]()
    lowered = list[float]()
    for one, reward in zip(rollouts, rewards, strict=True):
        if one.is_cut and options.masks_truncated:
            continue
        kept.append(one)
        lowered.append(reward - options.truncation_penalty if one.is_cut else reward)
    return kept, lowered


def weighted(rollouts: Rollouts, rewards: Sequence[float], options: Options) -> list[Weight]:
    """Return the weights of one group's answers, with the KL term; answers that are left out weigh
    nothing.
    """
    kept, rewards = judged(rollouts, rewards, options)
    weighed = iter(_compared(kept, rewards, options) if kept else ())
    return [
        Weight(0.0, 0.0) if one.is_cut and options.masks_truncated else next(weighed)
        for one in rollouts
    ]


def _compared(rollouts: Rollouts, rewards: Sequence[float], options: Options) -> list[Weight]:
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    kl = options.kl
    if kl is not None and kl.estimator == "k1":
        far = [sum(rollout.logprobs) - sum(rollout.reference) for rollout in rollouts]
        rewards = [reward - kl.strength * each for reward, each in zip(rewards, far, strict=True)]
    times = 2 if len(rollouts) == 1 else 1  # all others are left out: it is compared with itself
    advantage = ADVANTAGES[options.advantage]
    weighed = advantage.weights([*rewards] * times, lengths * times, options.max_new_tokens)[
        : len(rollouts)
    ]
    if kl is None or kl.estimator == "k1":
        return weighed
    # Where tokens of long answers weigh less, so does their KL term.
    penalties = [
        kl.strength / length if advantage.divides_by_length else kl.strength for length in lengths
    ]
    return [
        weight._replace(penalty=penalty) for weight, penalty in zip(weighed, penalties, strict=True)
    ]


def by_answer(
    compute: Callable[[Batch], Tensor], rollouts: Rollouts, options: Options, rows: int
) -> list[list[float]]:
    """Return what `compute` gives for the positions of each answer's tokens.

    Args:
        compute: from a batch of at most `rows` rows to [R T].
        rollouts: the answers.
        options: the form of the rows.
        rows: rows that are computed at once.
    """
    # Each answer's factor is its number, from 1, by which its positions are found again.
    window = arranged(
        rollouts, [Weight(number, 1) for number in range(1, len(rollouts) + 1)], options
    )
    starts = range(0, len(window["tokens"]), rows)
    parts = ({name: tensor[at : at + rows] for name, tensor in window.items()} for at in starts)
    values = torch.cat([compute(part).double().cpu() for part in parts])
    order = torch.argsort(window["factors"].flatten(), stable=True)
    lengths = [len(one.token_ids) for one in rollouts]
    return [part.tolist() for part in values[order][len(order) - sum(lengths) :].split(lengths)]


class Group(NamedTuple):
    """The answers to one prompt."""

    prompt: Prompt
    completions: Sequence[Completion]
    rollouts: Sequence[Rollout]
    rewards: Sequence[float]
    weights: Sequence[Weight]
    teaches: bool  # whether the rewards say anything, whatever a KL term does


def described(groups: Sequence[Group]) -> dict[str, float]:
    """Return figures on the answers of an update.

    Returns:
        dead: the share of groups that teach nothing; entropy: the mean of -log-probability of the
        drawn tokens, which estimates the entropy a token; length: mean tokens of an answer; cut:
        the share of answers that did not end by themselves; longest: tokens of the longest;
        drawn_tokens: of all answers.
    """
    completions = [completion for group in groups for completion in group.completions]
    logprobs = [
        one.processed_drawn for completion in completions for one in completion.logprobs or ()
    ]
    return {
        "dead": statistics.fmean(not group.teaches for group in groups),
        "entropy": -statistics.fmean(logprobs),
        "length": statistics.fmean(len(completion.token_ids) for completion in completions),
        "longest": max(len(completion.token_ids) for completion in completions),
        "cut": statistics.fmean(completion.finish_reason == "length" for completion in completions),
        "drawn_tokens": sum(len(completion.token_ids) for completion in completions),
    }
