"""Arrange sampled answers in the rows of a window, split values of the window by answer, and
describe groups of answers.

A *window* is the rows of one update. A *group* is the answers to one prompt. It *teaches* if its
rewards give a gradient. Most advantages compare the answers of a group, so that it teaches only if
their rewards differ.

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
from monograph.rl.advantages import ADVANTAGES, AnswerWeight
from monograph.rl.loss import Kl
from monograph.rl.prompts import Prompt
from monograph.rl.rewards import AnswerScore


@dataclass(frozen=True)
class RolloutOptions:
    """How answers are sampled and weighed.

    Attributes:
        prompts: number of prompts of an update.
        group: number of answers to each prompt.
        max_new_tokens: maximum number of tokens of an answer.
        temperature: divides the logits, in sampling and in the loss.
        advantage: a name of `ADVANTAGES`.
        draws: the maximum number of times that answers are sampled for one update. They are sampled
            again as long as fewer than `prompts` groups teach.
        length: T, the positions of a row.
        packed: whether a row holds several answers, one after the other.
        exact: whether log-probabilities are computed exactly as in decoding, so that an answer gets the
            same bits when it is scored as when it was sampled (`monograph.ops.attention`, "cached").
            Each answer then has its own row, which is as long as a row of decoding. Only eager mode on
            a CPU can do this.
        seed: the seed of the order of prompts and of all sampling.
        epochs: passes over the prompts; None: endless.
        updates: the number of updates that use each sample.
        kl: the KL term; None: no such term.
        masks_truncated: whether answers that are cut at max_new_tokens are left out, as if they had
            not been sampled.
        truncation_penalty: the number that is subtracted from the reward of an answer that is cut.
        turns: the maximum number of answers of an episode (`monograph.rl.episodes`); 1 without an
            environment.
        discount: the discount of an episode's rewards by turn.
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
    turns: int = 1
    discount: float = 1.0

    @property
    def max_answer_tokens(self) -> int:
        """Return the maximum number of tokens that are sampled for a rollout."""
        if self.turns == 1:
            return self.max_new_tokens
        return min(self.turns * self.max_new_tokens, self.length)


class Rollout(NamedTuple):
    """An answer with its prompt; or an episode, which has several answers and one reward.

    Attributes:
        prompt_ids: the prompt.
        token_ids: the answer; in an episode, the answers and what the environment said after each.
        logprobs: the log-probability with which each token was sampled; in an episode, only of the
            tokens of answers.
        reference: the reference's log-probability of each token; empty without a KL term.
        is_cut: whether the answer was cut at the maximum number of tokens.
        states: if answers must have a form, such as a regular expression, the state of the form's
            automaton before each token (`monograph.rl.form`); else empty.
        is_sampled: for each of `token_ids`, whether the model sampled it. The environment said the
            others, which have neither a gradient nor a log-probability. Empty: all were sampled.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reference: Sequence[float] = ()
    is_cut: bool = False
    states: Sequence[int] = ()
    is_sampled: Sequence[bool] = ()

    @property
    def length(self) -> int:
        """Return the number of tokens that were sampled."""
        return sum(self.is_sampled) if self.is_sampled else len(self.token_ids)


def arrange_window(
    rollouts: Sequence[Rollout], weights: Sequence[AnswerWeight], options: RolloutOptions
) -> Batch:
    """Return a window with the answers, as `PolicyLoss` reads it; each of its tensors is [R, T].

    The loss is divided by the sum of the answers' shares (`monograph.rl.advantages`). An answer that
    does not change the gradient is needed only for this sum. So it gets no place in a row, and its
    share is added to the last position of the first row.

    Args:
        rollouts: the answers; a prompt and its answer have at most T + 1 tokens.
        weights: the weights of the answers.
        options: the length of rows, and whether they are packed.
    """
    # The indices of the answers that get a place, and how many inputs each of them has: all tokens but
    # the last one, which is only a target.
    placed = [index for index, weight in enumerate(weights) if weight.changes_gradient]
    input_counts = np.array(
        [len(rollouts[i].prompt_ids) + len(rollouts[i].token_ids) - 1 for i in placed],
        dtype=np.int64,
    )
    length = options.length
    # The row of each of these answers.
    row_of = np.arange(len(placed))
    if options.packed:
        row_of = best_fit_decreasing(input_counts, length)
    rows = int(row_of.max()) + 1 if placed else 1
    int_names = ["tokens", "segments", "positions"]
    if any(rollout.states for rollout in rollouts):
        int_names.append("states")
    ints = {name: np.zeros((rows, length), dtype=np.int64) for name in int_names}
    ints["targets"] = np.full((rows, length), IGNORE, dtype=np.int64)
    float_names = ["factors", "shares", "drawn"]
    if any(rollout.reference for rollout in rollouts):
        float_names += ["penalties", "reference"]
    floats = {name: np.zeros((rows, length), dtype=np.float64) for name in float_names}
    filled = np.zeros(rows, dtype=np.int64)  # positions of each row that are filled
    segments = np.zeros(rows, dtype=np.int64)  # answers of each row so far
    for index, row, input_count in zip(placed, row_of.tolist(), input_counts.tolist(), strict=True):
        rollout = rollouts[index]
        weight = weights[index]
        ids = [*rollout.prompt_ids, *rollout.token_ids]
        begin = int(filled[row])
        end = begin + input_count
        # The last position of the prompt predicts the first token of the answer.
        first_target = begin + len(rollout.prompt_ids) - 1
        token_ids = np.array(rollout.token_ids)
        targets = np.arange(first_target, end)
        if rollout.is_sampled:
            is_sampled = np.array(rollout.is_sampled)
            token_ids = token_ids[is_sampled]
            targets = targets[is_sampled]
        segments[row] += 1
        ints["tokens"][row, begin:end] = ids[:-1]
        ints["segments"][row, begin:end] = segments[row]
        ints["positions"][row, begin:end] = np.arange(input_count)
        ints["targets"][row, targets] = token_ids
        floats["factors"][row, targets] = weight.factor
        floats["drawn"][row, targets] = rollout.logprobs
        # The shares are summed over all positions, so an answer has its share at one of them.
        floats["shares"][row, first_target] = weight.share
        if rollout.states:
            ints["states"][row, targets] = rollout.states
        if rollout.reference:
            floats["penalties"][row, targets] = weight.penalty
            floats["reference"][row, targets] = rollout.reference
        filled[row] = end
    floats["shares"][0, -1] += sum(
        weight.share for weight in weights if not weight.changes_gradient
    )
    # The loss is divided by the sum of the shares, which would be 0 if all answers are left out.
    if not any(weight.share for weight in weights):
        floats["shares"][0, -1] = 1
    if not options.packed:
        del ints["segments"], ints["positions"]
    return {name: torch.from_numpy(values) for name, values in (ints | floats).items()}


def keep_and_penalise(
    rollouts: Sequence[Rollout], rewards: Sequence[float], options: RolloutOptions
) -> tuple[list[Rollout], list[float]]:
    """Return the answers of a group that are not left out, and their rewards minus the penalties of
    those that were cut.
    """
    kept = list[Rollout]()
    kept_rewards = list[float]()
    for rollout, reward in zip(rollouts, rewards, strict=True):
        if rollout.is_cut and options.masks_truncated:
            continue
        penalty = options.truncation_penalty if rollout.is_cut else 0.0
        kept.append(rollout)
        kept_rewards.append(reward - penalty)
    return kept, kept_rewards


def answer_weights(
    rollouts: Sequence[Rollout], rewards: Sequence[float], options: RolloutOptions
) -> list[AnswerWeight]:
    """Return the weights of one group's answers, with the KL term.

    The weight of an answer that is left out is 0.
    """
    kept, kept_rewards = keep_and_penalise(rollouts, rewards, options)
    kept_weights = list[AnswerWeight]()
    if kept:
        kept_weights = _kept_weights(kept, kept_rewards, options)
    remaining = iter(kept_weights)
    weights = list[AnswerWeight]()
    for rollout in rollouts:
        if rollout.is_cut and options.masks_truncated:
            weights.append(AnswerWeight(0.0, 0.0))
        else:
            weights.append(next(remaining))
    return weights


def _kept_weights(
    rollouts: Sequence[Rollout], rewards: Sequence[float], options: RolloutOptions
) -> list[AnswerWeight]:
    """Return the weights of the answers of a group that are not left out. There is at least one."""
    lengths = [rollout.length for rollout in rollouts]
    kl = options.kl
    if kl is not None and kl.estimator == "k1":
        log_ratios = [sum(rollout.logprobs) - sum(rollout.reference) for rollout in rollouts]
        rewards = [
            reward - kl.strength * log_ratio
            for reward, log_ratio in zip(rewards, log_ratios, strict=True)
        ]
    # An advantage needs the rewards of at least two answers. If only one answer is left, it is given
    # twice, so that it is compared with itself. The second of the two weights is dropped.
    copies = 2 if len(rollouts) == 1 else 1
    advantage = ADVANTAGES[options.advantage]
    weights = advantage.weights([*rewards] * copies, lengths * copies, options.max_answer_tokens)
    weights = weights[: len(rollouts)]
    if kl is None or kl.estimator == "k1":
        return weights
    penalties = [kl.strength] * len(lengths)
    if advantage.divides_by_length:
        penalties = [kl.strength / length for length in lengths]
    return [
        weight._replace(penalty=penalty) for weight, penalty in zip(weights, penalties, strict=True)
    ]


def split_by_answer(
    compute: Callable[[Batch], Tensor],
    rollouts: Sequence[Rollout],
    options: RolloutOptions,
    rows: int,
) -> list[list[float]]:
    """Return the values that `compute` returns at the positions of each answer's tokens.

    Args:
        compute: a function of a batch of at most `rows` rows, which returns a value for each of its
            positions as one dimension, [R T].
        rollouts: the answers.
        options: the length of rows, and whether they are packed.
        rows: the number of rows that are computed at the same time.
    """
    # To find the positions of each answer, a window is arranged in which the factor of an answer is its
    # number, counted from 1. Positions without a sampled token have the factor 0. If the positions are
    # sorted by their factor, these come first, and then the positions of one answer after another. A
    # stable sort keeps the positions of an answer in order.
    numbers = [AnswerWeight(number, 1) for number in range(1, len(rollouts) + 1)]
    window = arrange_window(rollouts, numbers, options)
    values = list[Tensor]()
    for first in range(0, len(window["tokens"]), rows):
        batch = {name: tensor[first : first + rows] for name, tensor in window.items()}
        values.append(compute(batch).double().cpu())
    order = torch.argsort(window["factors"].flatten(), stable=True)
    lengths = [rollout.length for rollout in rollouts]
    others = len(order) - sum(lengths)  # the positions without a sampled token
    answer_values = torch.cat(values)[order][others:]
    return [part.tolist() for part in answer_values.split(lengths)]


class AnswerGroup(NamedTuple):
    """The answers to one prompt.

    Attributes:
        prompt: the prompt.
        completions: the answers as they were decoded.
        rollouts: the answers with their log-probabilities.
        scores: the answers' scores, before penalties.
        weights: the answers' weights.
        teaches: whether the rewards give a gradient, apart from that of a KL term.
    """

    prompt: Prompt
    completions: Sequence[Completion]
    rollouts: Sequence[Rollout]
    scores: Sequence[AnswerScore]
    weights: Sequence[AnswerWeight]
    teaches: bool


def group_figures(groups: Sequence[AnswerGroup]) -> dict[str, float]:
    """Return figures on the answers of an update.

    Returns:
        dead: the share of groups that teach nothing.
        entropy: the mean of -log-probability of the sampled tokens, which estimates the entropy per
            token.
        length: the mean number of tokens of an answer.
        longest: the number of tokens of the longest answer.
        cut: the share of answers that were cut.
        drawn_tokens: the number of tokens of all answers.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    logprobs = [
        token.processed_drawn for completion in completions for token in completion.logprobs or ()
    ]
    return {
        "dead": statistics.fmean(not group.teaches for group in groups),
        "entropy": -statistics.fmean(logprobs),
        "length": statistics.fmean(lengths),
        "longest": max(lengths),
        "cut": statistics.fmean(completion.finish_reason == "length" for completion in completions),
        "drawn_tokens": sum(lengths),
    }
