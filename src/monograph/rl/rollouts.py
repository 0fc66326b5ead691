"""Sample answers from the weights in training, score them, and arrange them as the window of one
update.

An update's answers are sampled just before the update, from the tensors that the previous update
has changed. Nothing is kept from one sample to the next. An answer is a function of the weights, the
prompt, the options and a seed, which is made from the run's seed, the prompt's position in the order
and the answer's number in its group. The answer does not depend on what else is sampled at the same
time. So a run that was killed while it sampled samples the same answers again.

Shapes: R rows, T positions.
"""

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from monograph.data.rows import rows_at
from monograph.decode.cache import CacheSizes
from monograph.decode.completion import Completion, Generation, mode_for, rows_that_fit
from monograph.decode.generator import Generator, Mode
from monograph.decode.knobs import chain_of
from monograph.decode.reproducible import rollout_seeds
from monograph.decode.request import LogProbability, Request
from monograph.decode.sampling import Sampling
from monograph.device import clock
from monograph.engine import Engine
from monograph.errors import Diverged, InputRefused
from monograph.graph import capture
from monograph.graph.inspect import modes_kept
from monograph.loss import Batch
from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama
from monograph.ops.attention import block_of
from monograph.ops.filled import padded_count, unpadded_count
from monograph.optim import temporary_params
from monograph.rl.advantages import ADVANTAGES, ROUNDING, AnswerWeight, rewards_are_equal
from monograph.rl.arrange import (
    AnswerGroup,
    Rollout,
    RolloutOptions,
    answer_weights,
    arrange_window,
    group_figures,
    keep_and_penalise,
    split_by_answer,
)
from monograph.rl.form import AnswerForm
from monograph.rl.loss import PolicyLoss
from monograph.rl.prompts import Prompt, Prompts
from monograph.rl.rewards import Answer, Reward

# Answers that are decoded at the same time.
MOST_ROWS = 256
# Prompts that are read at the same time.
MOST_PROMPTS = 32
# How many steps are decoded between two times that the host reads which answers have ended. A read
# costs as much as a step of a small model.
STEPS = 16
# The smallest reward of a right answer. It is below 1, since 0.7 + 0.2 + 0.1 is below 1 in floats.
SOLVED = 1.0 - ROUNDING
# The position of the first held-out prompt, beyond all positions that a run trains on.
HELD_OUT = 1 << 62


def decoded_rows(answers: int) -> int:
    """Return the number of rows in which this number of answers is decoded at the same time."""
    return min(padded_count(answers), MOST_ROWS)


def slots_of(options: RolloutOptions, config: LlamaConfig, tokens: int) -> int:
    """Return the positions of a row for a prompt and its answer of `tokens` tokens together.

    For exact scoring it is padded as `monograph.ops.filled` says. The number of positions of several
    rows is then padded, too.
    """
    if not options.exact:
        return tokens
    return min(padded_count(tokens), config.max_position_embeddings)


@dataclass(frozen=True)
class Sharing:
    """How ranks share the work of sampling; the defaults are for one process.

    Attributes:
        ranks: the number of ranks.
        share: returns work(items), a JSON value for each item. Each rank computes a part of them.
        once: calls a function on one rank, and returns the result on all ranks.
    """

    ranks: int = 1
    share: Callable[[Callable[[Sequence[Any]], list[Any]], Sequence[Any]], list[Any]] = (
        lambda work, items: work(items)
    )
    once: Callable[[Callable[[], list[float]]], list[float]] = lambda work: work()


class Drawer:
    """Samples answers from an engine's weights, and scores them.

    Attributes:
        sharing: how ranks share the work.
        engine: the engine, whose loss is a `PolicyLoss`.
        prompts: the prompts of the run.
        reward: scores the answers.
        options: how answers are sampled and weighed.
        updates: returns the number of updates of the run; 0 as long as the number is unknown.
        model: the model that is sampled from: the one in training, or a copy with gathered weights
            if each rank trains only a part of every tensor.
        ends: the tokens that end an answer.
        reference: the planes of the weights that the run begins from; None without a KL term.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        reward: Reward,
        options: RolloutOptions,
        updates: Callable[[], int],
        sharing: Sharing | None = None,
    ):
        """Take the attributes of these names; `sharing` is None for one process."""
        self.sharing = sharing or Sharing()
        self.engine = engine
        self.prompts = prompts
        self.reward = reward
        self.options = options
        self.updates = updates
        self.model = cast(Llama, engine.model)
        self.ends = prompts.ends(self.model.config)
        self.reference: list[Tensor] | None = None
        self._made: tuple[Mode, Generator] | None = None

    def take(self, options: RolloutOptions) -> None:
        """Sample and weigh by other options from now on."""
        self.options = options
        # The rows of the present generator have the shape of the former options.
        self._made = None

    @property
    def form(self) -> AnswerForm | None:
        """Return the form of the answers; None: they may have any form."""
        return cast(PolicyLoss, self.engine.step.loss).form

    @property
    def _is_raw(self) -> bool:
        """Return whether answers are sampled from the softmax of the model's own logits."""
        return self.options.temperature == 1 and self.form is None

    @property
    def slots(self) -> int:
        """Return the positions of a row of decoding; a row of exact scoring has the same number."""
        return slots_of(
            self.options, self.model.config, self.prompts.longest + self.options.max_new_tokens
        )

    @property
    def generator(self) -> Generator:
        """Return the decoder, in the mode that suits the number of steps of the whole run.

        Raises:
            OutOfDeviceMemory: the keys and values of one answer take more than half of the free
                memory.
        """
        options = self.options
        model = self.model
        prompts = self.prompts
        step = self.engine.step
        answers = options.prompts * options.group
        weight = model.lm_head.weight
        batches = math.ceil(answers / MOST_ROWS)
        # A run that compiles nothing must not compile its decoder: 0 steps are never worth it.
        decode_steps = 0
        if step.scope != "none":
            decode_steps = self.updates() // options.updates * batches * options.max_new_tokens
        mode = mode_for(decode_steps, weight.device.type, casts=step.precision.name != "fp32")
        if self._made and self._made[0] == mode:
            return self._made[1]
        prompts_at_once = min(options.prompts, MOST_PROMPTS)
        slots = CacheSizes(
            self.slots, block_of(self.slots), prompts_at_once, options.exact, prompts.longest
        )
        answers_of_rank = math.ceil(answers / self.sharing.ranks)
        # Memory may hold fewer rows than there are answers.
        rows = unpadded_count(
            rows_that_fit(model, slots, decoded_rows(answers_of_rank), "lower rl.max_new_tokens")
        )
        chain = chain_of([Sampling(temperature=options.temperature, logprobs=0)], len(self.ends))
        chain = replace(chain, processed=not self._is_raw)
        with modes_kept(model):
            generator = Generator(
                model,
                chain,
                rows=rows,
                slots=slots,
                vocabulary=prompts.vocab_size,
                block=min(STEPS, options.max_new_tokens),
                mode=mode,
                automata=[self.form.automaton] if self.form else (),
            )
        self._made = mode, generator
        return generator

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Compute in the block without gradients, in the step's precision."""
        step = self.engine.step
        # Answers are in no cycles of references, but their number would start many collections.
        collects_garbage = gc.isenabled()
        gc.disable()
        try:
            # The captured graphs of blocks are for training, so they are set aside.
            with modes_kept(step.model), capture.set_aside(step), step.context(), torch.no_grad():
                step.model.eval()
                yield
        finally:
            if collects_garbage:
                gc.enable()

    def draw(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Completion]:
        """Sample an answer to each prompt, and return them with their log-probabilities.

        Ranks share the work.

        Args:
            prompts: the prompts.
            seeds: the seed of each answer.

        Raises:
            Diverged: the model's logits are not finite.
        """

        def json_answers(part: Sequence[tuple[Prompt, int]]) -> list[Any]:
            return [
                (answer.text, answer.token_ids, answer.finish_reason, answer.logprobs)
                for answer in self._draw(*zip(*part, strict=True))
            ]

        self._gather()
        answers = self.sharing.share(json_answers, list(zip(prompts, seeds, strict=True)))
        return [
            Completion(text, token_ids, finish, [LogProbability(*one) for one in logprobs])
            for text, token_ids, finish, logprobs in answers
        ]

    def _gather(self) -> None:
        self.model = cast(Llama, self.engine.step.parameters.gathered())

    def _draw(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Completion]:
        sampling = Sampling(temperature=self.options.temperature, logprobs=0)
        max_tokens = self.options.max_new_tokens
        automaton = self.form.automaton if self.form else None
        requests = [
            Request(prompt.ids, sampling, max_tokens, self.ends, automaton, seed=seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        # The generator depends on whether the step is captured, and `_decoding` sets that aside.
        generator = self.generator
        with self._decoding():
            generator.forget()
            completions = list(Generation(generator, requests, self.prompts.tokenizer, ()))
        for prompt, completion in zip(prompts, completions, strict=True):
            if completion.finish_reason == "not_finite":
                raise Diverged(
                    f"{prompt.where}: the model's logits for an answer are not finite: lower optim.lr"
                )
        return completions

    @property
    def held(self) -> list[Tensor]:
        """Return the tensors that are held in addition to the step's.

        They are keys and values, the reference, the teacher's weights and the copy of the weights.
        """
        held = list[Tensor]()
        if self._made:
            _, generator = self._made
            for cache in (generator.cache, generator.reader.cache):
                held += [*cache.keys, *cache.values]
        held += self.reference or ()
        if self.reward.teacher:
            held += self.reward.teacher.parameters()
        if self.model is not self.engine.model:
            held += self.model.parameters()
        return held

    @property
    def arrangement(self) -> RolloutOptions:
        """Return the options, with the rows in which answers are scored."""
        if not self.options.exact:
            return self.options
        return replace(self.options, length=self.slots, packed=False)

    def rollouts(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[Rollout]:
        """Return the answers with the log-probabilities of their tokens.

        With a KL term they also have the reference's log-probabilities.
        """
        # The log-probabilities of the model's own softmax are computed as the loss computes them. Of
        # another distribution there are only those that the sampler computes in its own way.
        logprobs_of_answers = [
            [
                one.drawn if self._is_raw else one.processed_drawn
                for one in completion.logprobs or ()
            ]
            for completion in completions
        ]
        made = [
            Rollout(
                prompt.ids,
                completion.token_ids,
                logprobs,
                is_cut=completion.finish_reason == "length",
                states=self.form.states(completion.token_ids) if self.form else (),
            )
            for prompt, completion, logprobs in zip(
                prompts, completions, logprobs_of_answers, strict=True
            )
        ]
        if self.options.kl is None:
            return made
        if not self.options.kl.needs_reference:
            return [rollout._replace(reference=[0.0] * len(rollout.token_ids)) for rollout in made]
        with temporary_params(self.engine.step.planes, self.reference or ()):
            self._gather()
            references = self.scored(made, self.model)
        return [
            rollout._replace(reference=reference)
            for rollout, reference in zip(made, references, strict=True)
        ]

    def scored(self, rollouts: Sequence[Rollout], model: Llama) -> list[list[float]]:
        """Return a model's log-probabilities of each answer's tokens.

        They are computed as the loss computes them, but without captured graphs.
        """
        loss = cast(PolicyLoss, self.engine.step.loss)
        device = self.engine.step.device

        def log_probabilities(batch: Batch) -> Tensor:
            on_device = {name: each.to(device) for name, each in batch.items()}
            return loss.log_probabilities(model, on_device)

        def logprobs_of(part: Sequence[Rollout]) -> list[list[float]]:
            with self._decoding():
                return split_by_answer(
                    log_probabilities, part, self.arrangement, self.engine.micro_batch or len(part)
                )

        return self.sharing.share(logprobs_of, rollouts)

    def advantages(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> list[list[float]] | None:
        """Return teacher's log-probability - student's for each token of each answer.

        It is None without a teacher.
        """
        teacher = self.reward.teacher
        if teacher is None:
            return None
        of_teacher = [
            rollout._replace(prompt_ids=prompt.teacher_ids or prompt.ids)
            for prompt, rollout in zip(prompts, rollouts, strict=True)
        ]
        return [
            [theirs - ours for theirs, ours in zip(logprobs, rollout.logprobs, strict=True)]
            for logprobs, rollout in zip(self.scored(of_teacher, teacher), rollouts, strict=True)
        ]

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        """Return the rewards of these answers, see `Reward.score`.

        With a teacher a reward is the mean of the answer's `advantages`.
        """
        if self.reward.teacher is not None:
            advantages = self.advantages(prompts, self.rollouts(prompts, completions)) or []
            return [statistics.fmean(each) for each in advantages]
        answers = [
            Answer(prompt.text, completion.text, prompt.record, prompt.where)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        scores = self.sharing.once(lambda: self.reward.score(answers))
        if len(scores) != len(prompts) or not all(map(math.isfinite, scores)):
            raise InputRefused(
                f"{prompts[0].where}: the reward gave {scores!r:.60} for {len(prompts)} answers"
            )
        return scores

    def sample(self) -> tuple[str, str, float]:
        """Sample an answer to the first prompt by a fixed seed; return prompt, answer and reward."""
        first = self.prompts.train[:1]
        [answer] = self.draw(first, rollout_seeds(self.options.seed, [HELD_OUT - 1], 1))
        [reward] = self.score(first, [answer])
        # The parts of this reward belong to no update, so they are discarded.
        self.reward.parts()
        return first[0].text, answer.text, reward

    def reward_figures(self, rewards: Sequence[float]) -> dict[str, float]:
        """Return figures on the rewards of groups of answers.

        Returns:
            reward: the mean.
            pass_at_1: the share of right answers; missing with a teacher, who calls none right.
            pass_at_k: the share of groups with a right answer; missing with a teacher.
        """
        mean = statistics.fmean(rewards)
        if self.reward.teacher is not None:
            return {"reward": mean}
        group = self.options.group
        best = [max(rewards[first : first + group]) for first in range(0, len(rewards), group)]
        return {
            "reward": mean,
            "pass_at_1": statistics.fmean(reward >= SOLVED for reward in rewards),
            "pass_at_k": statistics.fmean(reward >= SOLVED for reward in best),
        }

    def measure(self) -> dict[str, float]:
        """Sample a group of answers to each of the first held-out prompts; return figures on them.

        It uses as many prompts as an update.

        Returns:
            eval_reward, eval_pass_at_1, eval_pass_at_k: the figures of `reward_figures`.
            eval_reward.NAME: the mean of each part of the reward.
            eval_prompts: the number of prompts.
        """
        group = self.options.group
        held_out = self.prompts.held_out[: self.options.prompts]
        prompts = [prompt for prompt in held_out for _ in range(group)]
        # The seeds are the same each time, so that less of a change is due to chance.
        positions = range(HELD_OUT, HELD_OUT + len(held_out))
        answers = self.draw(prompts, rollout_seeds(self.options.seed, positions, group))
        figures = self.reward_figures(self.score(prompts, answers))
        figures |= {f"reward.{name}": mean for name, mean in self.reward.parts().items()}
        figures["prompts"] = len(held_out)
        return {f"eval_{name}": value for name, value in figures.items()}


class Rollouts(Iterator[Batch]):
    """An iterator over the windows of a run; a window's answers are sampled when it is asked for.

    Window k has the answers to the prompts at positions start + k P .. start + (k + 1) P - 1 of the
    endless order that the seed gives (`monograph.data.rows.rows_at`). The interface is that of
    `monograph.data.batches.Batches`, with prompts instead of rows.

    Attributes:
        drawer: samples and scores the answers.
        rows_per_window: P, the prompts of an update.
        rows_consumed: the position after the last prompt that was answered.
        skip: (begin, end) of the positions that are skipped.
        numbers: figures on the window that was returned last, for the metrics.
        is_fresh: whether the last window has new answers, and not those of the window before.
    """

    def __init__(self, drawer: Drawer, start: int = 0, skip: Sequence[Sequence[int]] = ()) -> None:
        """Begin at the position `start`; see the class."""
        self.drawer, self.rows_consumed = drawer, start
        self.rows_per_window = drawer.options.prompts
        self.skip = tuple((int(begin), int(end)) for begin, end in skip)
        self.numbers: dict[str, float] = {}
        self._window: Batch = {}
        # How often the present window will be returned again, for further updates of one sample.
        self._repeats_left = 0
        self.is_fresh = True

    def __next__(self) -> Batch:
        """Sample, score and weigh the answers of the next window, or return the last one again.

        `arrange_window` describes the window.
        """
        if self._repeats_left:
            self._repeats_left -= 1
            self.is_fresh = False
            return self._window
        wanted = self.rows_per_window
        groups = list[AnswerGroup]()
        drawn_s = 0.0
        scored_s = 0.0
        for _ in range(self.drawer.options.draws):
            positions = self._next_positions()
            if not positions:
                break
            began = clock()
            prompts, completions = self._drawn(positions)
            drawn_s = drawn_s + clock() - began
            began = clock()
            groups += self._weighed(prompts, completions)
            scored_s += clock() - began
            self.rows_consumed = positions[-1] + 1
            if sum(group.teaches for group in groups) >= wanted:
                break
        if not groups:
            raise StopIteration
        rewards = [reward for group in groups for reward in group.rewards]
        parts = {f"reward.{name}": mean for name, mean in self.drawer.reward.parts().items()}
        seconds = {"drawn_s": drawn_s, "scored_s": scored_s}
        self.numbers = {
            **self.drawer.reward_figures(rewards),
            **parts,
            **group_figures(groups),
            **seconds,
        }
        # With several draws, an update uses only groups that teach, unless there are none.
        teaching = [group for group in groups if group.teaches]
        use_teaching_only = self.drawer.options.draws > 1 and bool(teaching)
        used = (teaching if use_teaching_only else groups)[:wanted]
        rollouts = [rollout for group in used for rollout in group.rollouts]
        weighed = [weight for group in used for weight in group.weights]
        self._window = arrange_window(rollouts, weighed, self.drawer.arrangement)
        self._repeats_left = self.drawer.options.updates - 1
        self.is_fresh = True
        return self._window

    @property
    def is_between_draws(self) -> bool:
        """Return whether the next window is sampled anew, so that a run can resume from `state`."""
        return not self._repeats_left

    def _drawn(self, positions: Sequence[int]) -> tuple[list[Prompt], list[Completion]]:
        """Sample a group of answers to the prompt at each position; return prompts and answers."""
        options = self.drawer.options
        train = self.drawer.prompts.train
        first, last = positions[0], positions[-1]
        # The order of all positions from the first to the last, including skipped ones.
        order = rows_at(first, last - first + 1, len(train), options.seed)
        prompts = [
            train[order[position - first]] for position in positions for _ in range(options.group)
        ]
        seeds = rollout_seeds(options.seed, positions, options.group)
        return prompts, self.drawer.draw(prompts, seeds)

    def _weighed(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[AnswerGroup]:
        """Score and weigh the answers; return their groups."""
        drawer = self.drawer
        options = drawer.options
        rollouts = drawer.rollouts(prompts, completions)
        teacher_advantages = drawer.advantages(prompts, rollouts)
        if teacher_advantages:
            rewards = [statistics.fmean(each) for each in teacher_advantages]
        else:
            rewards = drawer.score(prompts, completions)
        groups = []
        for first in range(0, len(prompts), options.group):
            members = slice(first, first + options.group)
            if teacher_advantages:
                teaches = True
                weights = [
                    AnswerWeight(factors, len(factors)) for factors in teacher_advantages[members]
                ]
            else:
                weights = answer_weights(rollouts[members], rewards[members], options)
                _, compared = keep_and_penalise(rollouts[members], rewards[members], options)
                # An advantage that compares no answers has no gradient only if all rewards are 0.
                if not ADVANTAGES[options.advantage].compares_answers:
                    compared = [*compared, 0.0]
                teaches = not rewards_are_equal(compared)
            groups.append(
                AnswerGroup(
                    prompts[first],
                    completions[members],
                    rollouts[members],
                    rewards[members],
                    weights,
                    teaches,
                )
            )
        return groups

    def _next_positions(self) -> list[int]:
        """Return the positions of the next window's prompts.

        At the end of the last epoch there are fewer, or none.
        """
        options = self.drawer.options
        end_of_run = math.inf
        if options.epochs is not None:
            skipped = sum(end - begin for begin, end in self.skip)
            end_of_run = options.epochs * len(self.drawer.prompts.train) + skipped
        positions: list[int] = []
        position = self.rows_consumed
        while len(positions) < self.rows_per_window and position < end_of_run:
            skip_to = next((end for begin, end in self.skip if begin <= position < end), None)
            if skip_to is None:
                positions.append(position)
                position += 1
            else:
                position = skip_to
        return positions

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, as `Batches.state` does."""
        state: dict[str, Any] = {"seed": self.drawer.options.seed, "rows": self.rows_consumed}
        if self.skip:
            state["skip"] = self.skip
        return state

    def close(self) -> None:
        """Do nothing: no window is prepared ahead."""
