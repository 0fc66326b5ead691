"""Sample answers from the weights in training, score them, and arrange them as the window of one
update.

A *window* is the rows of one update. Its answers, the *sample*, are drawn just before the update, with the
weights that the previous update has left. Nothing is kept from one sample to the next. A *group* is the
answers to one prompt. An answer is a function of the weights, the prompt, the options and a seed. The seed
is made from the run's seed, the prompt's position in the order of prompts, and the answer's number in its
group. The answer does not depend on what else is sampled at the same time. So if a run is killed while it
samples, it samples the same answers again.

Shapes: R rows, T positions.
"""

import gc
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as GeneratorType
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

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
from monograph.ops.attention import slots_per_block
from monograph.ops.padded_rows import padded_count, unpadded_count
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
from monograph.rl.rewards import Answer, AnswerScore, Reward

# The maximum number of answers that are decoded at the same time.
MAX_DECODED_ROWS = 256
# The maximum number of prompts that are read into the cache at the same time.
MAX_PREFILL_PROMPTS = 32
# The number of steps that are decoded before the host reads which answers have ended. A read costs
# as much as a step of a small model.
BLOCK_STEPS = 16
# The smallest reward of a right answer. It is below 1, since 0.7 + 0.2 + 0.1 is below 1 in floats.
SOLVED_REWARD = 1.0 - ROUNDING
# A seed is made from a prompt's position in the order of prompts, and held-out prompts have none. They get
# the positions from here on, which no run reaches.
FIRST_HELD_OUT_POSITION = 1 << 62


def decoded_rows(answers: int) -> int:
    """Return the number of rows in which this number of answers is decoded at the same time."""
    return min(padded_count(answers), MAX_DECODED_ROWS)


def slots_per_row(options: RolloutOptions, config: LlamaConfig, tokens: int) -> int:
    """Return the number of positions of a row that holds `tokens` tokens, of a prompt and its answer.

    For exact scoring it is rounded up to a multiple of four and to at least 16, unless the model has fewer
    positions. So a matrix product over the positions of any number of texts has such a number of rows. All
    such products round a row in the same way without padding (`monograph.ops.padded_rows`).
    """
    if not options.exact:
        return tokens
    return min(padded_count(tokens), config.max_position_embeddings)


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector off in the block.

    The collector frees cycles of references, and runs after a certain number of new objects. Decoding
    makes many objects, but no cycles, so the collector would run often and free nothing.
    """
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects_garbage:
            gc.enable()


def not_finite(prompt: Prompt) -> Diverged:
    """Return the error for a model that has no finite logits after a prompt."""
    return Diverged(
        f"{prompt.where}: the model's logits for an answer are not finite: lower optim.lr"
    )


class WantedAnswers(NamedTuple):
    """The answers that a window or an evaluation needs.

    Attributes:
        prompts: the prompt of each answer.
        seeds: the seed of each answer.
    """

    prompts: Sequence[Prompt]
    seeds: Sequence[int]


@dataclass(frozen=True)
class Sharing:
    """How ranks, the processes of distributed training, share the work of sampling.

    The defaults are for one process.

    Attributes:
        ranks: the number of ranks.
        share: a function of (work, items), which returns work(items), a list with one JSON value for
            each item. Each rank computes a part of the list, and all ranks get the whole list.
        once: a function that calls another one on one rank, and returns its result on all ranks. The
            result reaches the other ranks as JSON, so there each tuple has become a list.
    """

    ranks: int = 1
    share: Callable[[Callable[[Sequence[Any]], list[Any]], Sequence[Any]], list[Any]] = (
        lambda work, items: work(items)
    )
    once: Callable[[Callable[[], list[AnswerScore]]], list[Any]] = lambda work: work()


class Drawer:
    """A sampler of answers from the weights of an engine. It also scores the answers.

    An engine is a model with its training step (`monograph.engine`).

    Attributes:
        sharing: how ranks share the work.
        engine: the engine, whose loss is a `PolicyLoss`.
        prompts: the prompts of the run.
        reward: the reward, which scores the answers.
        options: how answers are sampled and weighed.
        updates: a function that returns the number of updates of the run; 0 as long as it is unknown.
        model: the model that is sampled from: the one in training. If each rank (a process of
            distributed training) trains only a part of every tensor, it is a copy with all weights.
        end_ids: the ids that end an answer.
        reference: the weights that the run begins from, as planes (flat buffers of many parameters,
            `monograph.optim.planes`); None without a KL term.
        block_steps: the number of steps that are decoded before the host reads which answers have ended.
    """

    block_steps = BLOCK_STEPS

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        reward: Reward,
        options: RolloutOptions,
        updates: Callable[[], int],
        sharing: Sharing | None = None,
    ):
        """Set the attributes; `sharing` is None for one process."""
        self.sharing = sharing or Sharing()
        self.engine = engine
        self.prompts = prompts
        self.reward = reward
        self.options = options
        self.updates = updates
        self.model = cast(Llama, engine.model)
        self.end_ids = prompts.end_ids(self.model.config)
        self.reference: list[Tensor] | None = None
        # The decoder that `generator` returned last, and its mode.
        self._cached_generator: tuple[Mode, Generator] | None = None

    def set_options(self, options: RolloutOptions) -> None:
        """Sample and weigh by other options from now on."""
        self.options = options
        # The decoder was made for the former options.
        self._cached_generator = None

    @property
    def form(self) -> AnswerForm | None:
        """Return the form of the answers; None: they may have any form."""
        return cast(PolicyLoss, self.engine.step.loss).form

    @property
    def _samples_raw_softmax(self) -> bool:
        """Return whether answers are sampled from the softmax of the model's own logits."""
        return self.options.temperature == 1 and self.form is None

    @property
    def slots(self) -> int:
        """Return the number of positions of a row of decoding, and of a row of exact scoring."""
        return slots_per_row(
            self.options, self.model.config, self.prompts.longest + self.options.max_new_tokens
        )

    @property
    def generator(self) -> Generator:
        """Return the decoder, in the mode of `mode_of`.

        Raises:
            OutOfDeviceMemory: the keys and values of one answer take more than half of the free
                memory.
        """
        answers = self.options.prompts * self.options.group
        mode = self.mode_of(answers)
        if self._cached_generator and self._cached_generator[0] == mode:
            return self._cached_generator[1]
        answers_of_rank = math.ceil(answers / self.sharing.ranks)
        # A decoder puts its model into evaluation mode.
        with modes_kept(self.model):
            generator = self.new_generator(self.model, self.options.prompts, answers_of_rank, mode)
        self._cached_generator = mode, generator
        return generator

    def mode_of(self, answers: int) -> Mode:
        """Return the mode of decoding (eager, captured or compiled) that is likely to be the fastest.

        It depends on the number of steps that the whole run decodes.

        Args:
            answers: the number of answers of a sample.
        """
        options = self.options
        step = self.engine.step
        device_type = self.model.lm_head.weight.device.type
        # A run that compiles nothing must not compile its decoder, so it counts as one without steps, for
        # which compiling is never worth its time.
        decode_steps = 0
        if step.scope != "none":
            samples = self.updates() // options.updates
            batches = math.ceil(answers / MAX_DECODED_ROWS)
            decode_steps = samples * batches * options.max_new_tokens
        return mode_for(decode_steps, device_type, is_autocast=step.precision.name != "fp32")

    def new_generator(self, model: Llama, prompts: int, answers: int, mode: Mode) -> Generator:
        """Return a new decoder for this run's prompts and options.

        Args:
            model: the model that it samples from.
            prompts: the number of prompts that it reads at the same time, up to a maximum.
            answers: the number of answers that it samples at the same time, if the memory allows it.
            mode: the mode of decoding.

        Raises:
            OutOfDeviceMemory: see `generator`.
        """
        options = self.options
        prompts_at_once = min(prompts, MAX_PREFILL_PROMPTS)
        if options.exact and options.turns > 1:
            # The reader of prompts also makes passes of one token for each prompt
            # (`PromptReader.continue_rows`). With such a number of prompts, they need no padding either.
            prompts_at_once = padded_count(prompts_at_once)
        cache_sizes = CacheSizes(
            self.slots,
            slots_per_block(self.slots),
            prompts_at_once,
            options.exact,
            self.prompts.longest,
        )
        # Memory may hold fewer rows than there are answers.
        rows = unpadded_count(
            rows_that_fit(model, cache_sizes, decoded_rows(answers), "lower rl.max_new_tokens")
        )
        chain = chain_of([Sampling(temperature=options.temperature, logprobs=0)], len(self.end_ids))
        chain = replace(chain, reports_processed=not self._samples_raw_softmax)
        return Generator(
            model,
            chain,
            rows=rows,
            slots=cache_sizes,
            vocabulary=self.prompts.vocab_size,
            pace=min(self.block_steps, options.max_new_tokens),
            mode=mode,
            automata=[self.form.automaton] if self.form else (),
        )

    def requests(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], adapter: int = 0
    ) -> list[Request]:
        """Return the request for an answer to each prompt.

        Args:
            prompts: the prompts.
            seeds: the seed of each answer.
            adapter: the slot of the adapter that writes, if the decoder's model has a bank of them.
        """
        sampling = Sampling(temperature=self.options.temperature, logprobs=0)
        max_tokens = self.options.max_new_tokens
        automaton = self.form.automaton if self.form else None
        return [
            Request(
                prompt.ids,
                sampling,
                max_tokens,
                self.end_ids,
                automaton,
                seed=seed,
                adapter=adapter,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Prepare for decoding: no gradients, the step's precision, and no captured graphs."""
        step = self.engine.step
        # The captured graphs of the model's blocks are for training, so decoding must not use them.
        with (
            without_collection(),
            modes_kept(step.model),
            capture.capture_suspended(step),
            step.context(),
            torch.no_grad(),
        ):
            step.model.eval()
            yield

    def draw(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Completion]:
        """Sample an answer to each prompt, and return the answers with their log-probabilities.

        Ranks share the work.

        Args:
            prompts: the prompts.
            seeds: the seed of each answer.

        Raises:
            Diverged: the model's logits are not finite.
        """

        def json_answers(prompts_and_seeds: Sequence[tuple[Prompt, int]]) -> list[Any]:
            own_prompts, own_seeds = zip(*prompts_and_seeds, strict=True)
            return [
                (answer.text, answer.token_ids, answer.finish_reason, answer.logprobs)
                for answer in self._draw_on_this_rank(own_prompts, own_seeds)
            ]

        self._gather_model()
        answers = self.sharing.share(json_answers, list(zip(prompts, seeds, strict=True)))
        completions = []
        for text, token_ids, finish, logprobs in answers:
            log_probabilities = [LogProbability(*fields) for fields in logprobs]
            completions.append(Completion(text, token_ids, finish, log_probabilities))
        return completions

    def _gather_model(self) -> None:
        """Set `model` to a model that has all weights; see the attribute."""
        self.model = cast(Llama, self.engine.gathered_model())

    def _draw_on_this_rank(
        self, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[Completion]:
        """Do what `draw` does, without other ranks."""
        requests = self.requests(prompts, seeds)
        # `generator` has to know whether the step is captured. In the block of `_decoding` the captured
        # graphs are set aside, so the property is read before the block.
        generator = self.generator
        with self._decoding():
            generator.forget()
            completions = list(Generation(generator, requests, self.prompts.tokenizer, ()))
        for prompt, completion in zip(prompts, completions, strict=True):
            if completion.finish_reason == "not_finite":
                raise not_finite(prompt)
        return completions

    @property
    def extra_tensors(self) -> list[Tensor]:
        """Return the tensors that this object keeps in memory, in addition to those of the step.

        They are the keys and values of decoding, the reference, the teacher's weights, and the copy of
        the weights.
        """
        tensors = list[Tensor]()
        if self._cached_generator:
            _, generator = self._cached_generator
            for cache in (generator.cache, generator.reader.cache):
                tensors += cache.position_tensors()
        tensors += self.reference or ()
        if self.reward.teacher:
            tensors += self.reward.teacher.parameters()
        if self.model is not self.engine.model:
            tensors += self.model.parameters()
        return tensors

    @property
    def arrangement(self) -> RolloutOptions:
        """Return the options with the length and the packing of the rows that the loss reads."""
        if not self.options.exact:
            return self.options
        return replace(self.options, length=self.slots, packed=False)

    def rollouts(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[Rollout]:
        """Return the answers with the log-probabilities of their tokens.

        With a KL term they also have the reference's log-probabilities.
        """
        # `drawn` is the log-probability in the model's own softmax, computed as the loss computes
        # it. `processed_drawn` is that in the distribution that was sampled from, computed by the
        # sampler.
        logprobs_of_answers = []
        for completion in completions:
            tokens = completion.logprobs or ()
            if self._samples_raw_softmax:
                logprobs_of_answers.append([token.drawn for token in tokens])
            else:
                logprobs_of_answers.append([token.processed_drawn for token in tokens])
        rollouts = [
            self._rollout(prompt, completion, logprobs)
            for prompt, completion, logprobs in zip(
                prompts, completions, logprobs_of_answers, strict=True
            )
        ]
        if self.options.kl is None:
            return rollouts
        if not self.options.kl.needs_reference:
            # The term "entropy" is a KL term whose reference is 0 for every token.
            return [rollout._replace(reference=[0.0] * rollout.length) for rollout in rollouts]
        # In this block the planes have the reference's weights.
        with temporary_params(self.engine.step.planes, self.reference or ()):
            self._gather_model()
            references = self.log_probabilities_of(rollouts, self.model)
        return [
            rollout._replace(reference=reference)
            for rollout, reference in zip(rollouts, references, strict=True)
        ]

    def _rollout(
        self, prompt: Prompt, completion: Completion, logprobs: Sequence[float]
    ) -> Rollout:
        """Return an answer with the log-probabilities of its tokens."""
        return Rollout(
            prompt.ids,
            completion.token_ids,
            logprobs,
            is_cut=completion.finish_reason == "length",
            states=self.form.states(completion.token_ids) if self.form else (),
        )

    def log_probabilities_of(self, rollouts: Sequence[Rollout], model: Llama) -> list[list[float]]:
        """Return a model's log-probabilities of each answer's tokens.

        They are computed as the loss computes them, but without captured graphs.
        """
        loss = cast(PolicyLoss, self.engine.step.loss)
        device = self.engine.step.device

        def log_probabilities(batch: Batch) -> Tensor:
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            return loss.log_probabilities(model, on_device)

        def score_on_this_rank(part: Sequence[Rollout]) -> list[list[float]]:
            rows = self.engine.micro_batch or len(part)
            with self._decoding(), modes_kept(model):
                model.eval()
                return split_by_answer(log_probabilities, part, self.arrangement, rows)

        return self.sharing.share(score_on_this_rank, rollouts)

    def teacher_advantages(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> list[list[float]] | None:
        """Return the teacher's log-probability of each token of each answer, minus the model's own.

        The result is None if there is no teacher.
        """
        teacher = self.reward.teacher
        if teacher is None:
            return None
        with_teacher_prompts = [
            rollout._replace(prompt_ids=prompt.teacher_ids or prompt.ids)
            for prompt, rollout in zip(prompts, rollouts, strict=True)
        ]
        teacher_logprobs = self.log_probabilities_of(with_teacher_prompts, teacher)
        advantages = []
        for teacher_logprobs_of_answer, rollout in zip(teacher_logprobs, rollouts, strict=True):
            logprobs_of_tokens = zip(teacher_logprobs_of_answer, rollout.logprobs, strict=True)
            advantages.append(
                [
                    teacher_logprob - own_logprob
                    for teacher_logprob, own_logprob in logprobs_of_tokens
                ]
            )
        return advantages

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[AnswerScore]:
        """Return the reward of each answer, see `Reward.scores`.

        With a teacher, the reward is the mean of the answer's `teacher_advantages`.
        """
        if self.reward.teacher is not None:
            advantages = self.teacher_advantages(prompts, self.rollouts(prompts, completions)) or []
            return [AnswerScore(statistics.fmean(of_answer)) for of_answer in advantages]
        answers = [
            Answer(prompt.text, completion.text, prompt.record, prompt.where)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        # On the ranks that did not compute the scores, each one is a list (`Sharing`).
        score_tuples = self.sharing.once(lambda: self.reward.scores(answers))
        scores = [AnswerScore(*score) for score in score_tuples]
        values = [score.value for score in scores]
        if len(values) != len(prompts) or not all(map(math.isfinite, values)):
            raise InputRefused(
                f"{prompts[0].where}: the reward gave {values!r:.60} for {len(prompts)} answers"
            )
        return scores

    def sample(self) -> tuple[str, str, float]:
        """Sample an answer to the first prompt by a fixed seed; return prompt, answer and reward."""
        prompt = self.prompts.train[0]
        # No prompt of a run has this position.
        seeds = rollout_seeds(self.options.seed, [FIRST_HELD_OUT_POSITION - 1], 1)
        [answer] = self.draw([prompt], seeds)
        [score] = self.score([prompt], [answer])
        return prompt.text, answer.text, score.value

    def reward_figures(self, scores: Sequence[AnswerScore]) -> dict[str, float]:
        """Return figures on the scores of groups of answers.

        Returns:
            reward: the mean.
            reward.NAME: the mean of each part of the scores.
            pass_at_1: the share of right answers. It is missing with a teacher, whose rewards do not
                say which answers are right.
            pass_at_k: the share of groups with at least one right answer; missing with a teacher.
        """
        rewards = [score.value for score in scores]
        mean = statistics.fmean(rewards)
        if self.reward.teacher is not None:
            return {"reward": mean}
        values_of_parts = defaultdict[str, list[float]](list)
        for score in scores:
            for name, part in score.parts.items():
                values_of_parts[name].append(part)
        group = self.options.group
        # The best reward of each group: the rewards of a group follow one another.
        best = [max(rewards[first : first + group]) for first in range(0, len(rewards), group)]
        return {
            "reward": mean,
            "pass_at_1": statistics.fmean(reward >= SOLVED_REWARD for reward in rewards),
            "pass_at_k": statistics.fmean(reward >= SOLVED_REWARD for reward in best),
            **{
                f"reward.{name}": statistics.fmean(values)
                for name, values in values_of_parts.items()
            },
        }

    def group_figures(self, groups: Sequence[AnswerGroup]) -> dict[str, float]:
        """Return figures on groups of answers; see `monograph.rl.arrange.group_figures`."""
        return group_figures(groups)

    def evaluate(self) -> dict[str, float]:
        """Sample a group of answers to each of some held-out prompts; return figures on them.

        The prompts are the first held-out ones, at most as many as an update has.

        Returns:
            eval_reward, eval_pass_at_1, eval_pass_at_k, eval_reward.NAME: the figures of
                `reward_figures`.
            eval_prompts: the number of prompts.
        """
        wanted = self.held_out_answers()
        return self.held_out_figures(wanted.prompts, self.draw(wanted.prompts, wanted.seeds))

    def held_out_answers(self) -> WantedAnswers:
        """Return the answers by which the model is evaluated."""
        group = self.options.group
        held_out = self.prompts.held_out[: self.options.prompts]
        # Each evaluation has the same seeds. So less of the difference between two of them is due to chance.
        positions = range(FIRST_HELD_OUT_POSITION, FIRST_HELD_OUT_POSITION + len(held_out))
        return WantedAnswers(
            [prompt for prompt in held_out for _ in range(group)],
            rollout_seeds(self.options.seed, positions, group),
        )

    def held_out_figures(
        self, prompts: Sequence[Prompt], answers: Sequence[Completion]
    ) -> dict[str, float]:
        """Return the figures of `evaluate` on the answers that `held_out_answers` wants."""
        figures = self.reward_figures(self.score(prompts, answers))
        figures["prompts"] = len(prompts) // self.options.group
        return {f"eval_{name}": value for name, value in figures.items()}


class SampledAnswers(NamedTuple):
    """The answers that a window needed.

    Attributes:
        completions: the answers, in the order in which they were wanted.
        seconds: the seconds in which they were sampled.
    """

    completions: Sequence[Completion]
    seconds: float


# A window that is being made, as a Python generator. It yields what answers it needs, is sent these
# answers, and in the end returns the window, or None if no prompts are left. So a caller can sample the
# answers of several windows at the same time.
WindowInTheMaking: TypeAlias = GeneratorType[WantedAnswers, SampledAnswers, Batch | None]


class Rollouts(Iterator[Batch]):
    """An iterator over the windows of a run. Their answers are sampled when a window is asked for.

    Window k has the answers to the prompts at positions start + k P .. start + (k + 1) P - 1 of the
    endless order that the seed gives (`monograph.data.rows.rows_at`). The interface is that of
    `monograph.data.batches.Batches`, with prompts instead of rows.

    Attributes:
        drawer: samples and scores the answers.
        rows_per_window: P, the prompts of an update.
        rows_consumed: the position after the last prompt that was answered.
        skip: (begin, end) of the positions that are skipped.
        numbers: figures on the window that was returned last, for the metrics.
        is_fresh: whether the last window had new answers. If not, it was the previous window, returned
            again.
    """

    def __init__(self, drawer: Drawer, start: int = 0, skip: Sequence[Sequence[int]] = ()) -> None:
        """Begin at the position `start`; see the class."""
        self.drawer = drawer
        self.rows_consumed = start
        self.rows_per_window = drawer.options.prompts
        self.skip = tuple((int(begin), int(end)) for begin, end in skip)
        self.numbers: dict[str, float] = {}
        self._window: Batch = {}
        # How often the last window will be returned again, because several updates may use one sample.
        self._repeats_left = 0
        self.is_fresh = True

    def __next__(self) -> Batch:
        """Sample, score and weigh the answers of the next window, or return the last one again.

        `arrange_window` describes the window.
        """
        making = self.make_window()
        window: Batch | None = None
        try:
            wanted = next(making)
            while True:
                began = clock()
                completions = self.drawer.draw(wanted.prompts, wanted.seeds)
                wanted = making.send(SampledAnswers(completions, clock() - began))
        except StopIteration as made:
            window = made.value
        if window is None:
            raise StopIteration
        return window

    def make_window(self) -> WindowInTheMaking:
        """Make the next window, or return the last one again; see `WindowInTheMaking`."""
        if self._repeats_left:
            self._repeats_left -= 1
            self.is_fresh = False
            return self._window
        wanted_groups = self.rows_per_window
        groups = list[AnswerGroup]()
        drawn_s = 0.0
        scored_s = 0.0
        for _ in range(self.drawer.options.draws):
            positions = self._next_positions()
            if not positions:
                break
            wanted = self._wanted_answers(positions)
            sampled = yield wanted
            drawn_s += sampled.seconds
            began = clock()
            groups += self._score_groups(wanted.prompts, sampled.completions)
            scored_s += clock() - began
            self.rows_consumed = positions[-1] + 1
            if sum(group.teaches for group in groups) >= wanted_groups:
                break
        if not groups:
            return None
        scores = [score for group in groups for score in group.scores]
        seconds = {"drawn_s": drawn_s, "scored_s": scored_s}
        self.numbers = {
            **self.drawer.reward_figures(scores),
            **self.drawer.group_figures(groups),
            **seconds,
        }
        # With several draws, an update uses only groups that teach, unless there are none.
        if self.drawer.options.draws > 1:
            groups = [group for group in groups if group.teaches] or groups
        used_groups = groups[:wanted_groups]
        rollouts = [rollout for group in used_groups for rollout in group.rollouts]
        weights = [weight for group in used_groups for weight in group.weights]
        self._window = arrange_window(rollouts, weights, self.drawer.arrangement)
        self._repeats_left = self.drawer.options.updates - 1
        self.is_fresh = True
        return self._window

    @property
    def is_between_draws(self) -> bool:
        """Return whether the next window will have new answers; then a run can resume from `state`."""
        return not self._repeats_left

    def _wanted_answers(self, positions: Sequence[int]) -> WantedAnswers:
        """Return the prompt and the seed of each answer of the groups at these positions."""
        options = self.drawer.options
        train = self.drawer.prompts.train
        first, last = positions[0], positions[-1]
        # The index of the prompt at each position from the first to the last, including skipped ones.
        order = rows_at(first, last - first + 1, len(train), options.seed)
        prompts = [
            train[order[position - first]] for position in positions for _ in range(options.group)
        ]
        return WantedAnswers(prompts, rollout_seeds(options.seed, positions, options.group))

    def _score_groups(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[AnswerGroup]:
        """Score and weigh the answers, and return their groups.

        Args:
            prompts: the prompt of each answer.
            completions: the answers, group by group.
        """
        drawer = self.drawer
        options = drawer.options
        rollouts = drawer.rollouts(prompts, completions)
        teacher_advantages = drawer.teacher_advantages(prompts, rollouts)
        if teacher_advantages:
            scores = [AnswerScore(statistics.fmean(of_answer)) for of_answer in teacher_advantages]
        else:
            scores = drawer.score(prompts, completions)
        rewards = [score.value for score in scores]
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
                _, kept_rewards = keep_and_penalise(rollouts[members], rewards[members], options)
                # A group has no gradient if all of its rewards are equal. If the advantage does not
                # compare the answers, it has none only if they all equal 0, so 0 is added to the list.
                if not ADVANTAGES[options.advantage].compares_answers:
                    kept_rewards = [*kept_rewards, 0.0]
                teaches = not rewards_are_equal(kept_rewards)
            groups.append(
                AnswerGroup(
                    prompts[first],
                    completions[members],
                    rollouts[members],
                    scores[members],
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
        # Skipped positions do not count for the epochs.
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
