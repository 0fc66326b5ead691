"""Draw answers from the weights in training, score them, and arrange them as the window of one
update.

Answers are drawn when their update's turn comes, from the tensors that the update before has
changed, and nothing is remembered from one draw to the next. A draw is a function of the weights,
the prompt, the options and a seed made from (run, prompt's position in the order, answer's number
in its group), whatever else is drawn at once. So a run that was killed while it drew simply draws
again.

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
from monograph.decode.cache import Slots
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
from monograph.optim import holding
from monograph.rl.advantages import ADVANTAGES, ROUNDING, Weight, are_equal
from monograph.rl.arrange import (
    Group,
    Options,
    Rollout,
    arranged,
    by_answer,
    described,
    judged,
    weighted,
)
from monograph.rl.form import AnswerForm
from monograph.rl.loss import PolicyLoss
from monograph.rl.prompts import Prompt, Prompts
from monograph.rl.rewards import Answer, Reward

MOST_ROWS, MOST_PROMPTS = 256, 32  # answers that are drawn, and prompts that are read at once
# Between two looks at which answers have ended; each look costs as much as a step of a small model.
STEPS = 16
# The reward from which on an answer counts as right: 0.7 + 0.2 + 0.1 is below 1 in floats.
SOLVED = 1.0 - ROUNDING
HELD_OUT = 1 << 62  # the position of the first held-out prompt, beyond all that a run trains on


def decoded_rows(answers: int) -> int:
    """Return the number of rows in which so many answers are decoded at once."""
    return min(padded_count(answers), MOST_ROWS)


def slots_of(options: Options, config: LlamaConfig, tokens: int) -> int:
    """Return the positions of a row for a prompt and its answer of up to so many tokens together.

    Filled up, any number of rows that are scored exactly has as many positions as products are
    filled up to.
    """
    return min(padded_count(tokens), config.max_position_embeddings) if options.exact else tokens


@dataclass(frozen=True)
class Sharing:
    """How ranks share the work of drawing; the defaults are for one process.

    Attributes:
        ranks: their number.
        share: returns work(items), a value of JSON for each item, of which every rank computes a
            part.
        once: returns what a function gives on one rank, on all of them.
    """

    ranks: int = 1
    share: Callable[[Callable[[Sequence[Any]], list[Any]], Sequence[Any]], list[Any]] = (
        lambda work, items: work(items)
    )
    once: Callable[[Callable[[], list[float]]], list[float]] = lambda work: work()


class Drawer:
    """Draws answers from an engine's weights, and scores them.

    Attributes:
        model: the model, whose weights are read where they are trained, or from a copy if ranks
            train rows of them.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        reward: Reward,
        options: Options,
        updates: Callable[[], int],
        sharing: Sharing | None = None,
    ):
        """Take the parts; `updates` returns the number of updates of the run, 0 as long as it is
        unknown.
        """
        self.sharing = sharing or Sharing()
        self.engine = engine
        self.prompts = prompts
        self.reward = reward
        self.options = options
        self.updates = updates
        self.model = cast(Llama, engine.model)
        self.ends = prompts.ends(self.model.config)
        # The planes of the weights that the run begins from.
        self.reference: list[Tensor] | None = None
        self._made: tuple[Mode, Generator] | None = None

    def take(self, options: Options) -> None:
        """Draw and weigh by other options from now on."""
        self.options = options
        self._made = None  # its rows have the form that the former options ask for

    @property
    def form(self) -> AnswerForm | None:
        """Return the form of the answers; None: any."""
        return cast(PolicyLoss, self.engine.step.loss).form

    @property
    def _is_raw(self) -> bool:
        """Return whether answers are drawn from the softmax of the model's own logits."""
        return self.options.temperature == 1 and self.form is None

    @property
    def slots(self) -> int:
        """Return the positions of a row in which an answer is drawn, and those of one in which it
        is scored exactly.
        """
        return slots_of(
            self.options, self.model.config, self.prompts.longest + self.options.max_new_tokens
        )

    @property
    def generator(self) -> Generator:
        """Return the decoder, which runs as is best over the whole run.

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
        steps = (
            self.updates() // options.updates * -(-answers // MOST_ROWS) * options.max_new_tokens
        )
        mode = mode_for(
            steps if step.scope != "none" else 0,
            weight.device.type,
            casts=step.precision.name != "fp32",
        )
        if self._made and self._made[0] == mode:
            return self._made[1]
        at_once = min(options.prompts, MOST_PROMPTS)
        most = options.max_new_tokens
        form = Slots(self.slots, block_of(self.slots), at_once, options.exact, prompts.longest)
        own = -(-answers // self.sharing.ranks)
        # Memory may hold fewer of them than are wanted.
        rows = unpadded_count(
            rows_that_fit(model, form, decoded_rows(own), "lower rl.max_new_tokens")
        )
        chain = chain_of([Sampling(temperature=options.temperature, logprobs=0)], len(self.ends))
        chain = replace(chain, processed=not self._is_raw)
        with modes_kept(model):
            made = Generator(
                model,
                chain,
                rows=rows,
                slots=form,
                vocabulary=prompts.vocab_size,
                block=min(STEPS, most),
                mode=mode,
                automata=[self.form.automaton] if self.form else (),
            )
        self._made = mode, made
        return made

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        # The graphs of blocks were made for training; and autocast computes as the training step
        # does.
        step = self.engine.step
        collects = gc.isenabled()
        # No answer refers to itself, and many make Python look through all its objects again and
        # again.
        gc.disable()
        try:
            with modes_kept(step.model), capture.set_aside(step), step.context(), torch.no_grad():
                step.model.eval()
                yield
        finally:
            if collects:
                gc.enable()

    def draw(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Completion]:
        """Return an answer to each prompt, with its log-probabilities, by its seed; ranks share the
        work.

        Raises:
            Diverged: the model's logits are not finite.
        """

        def written(part: Sequence[tuple[Prompt, int]]) -> list[Any]:
            return [
                (c.text, c.token_ids, c.finish_reason, c.logprobs)
                for c in self._draw(*zip(*part, strict=True))
            ]

        self._gather()
        drawn = self.sharing.share(written, list(zip(prompts, seeds, strict=True)))
        return [
            Completion(text, token_ids, finish, [LogProbability(*one) for one in logprobs])
            for text, token_ids, finish, logprobs in drawn
        ]

    def _gather(self) -> None:
        self.model = cast(Llama, self.engine.step.parameters.gathered())

    def _draw(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Completion]:
        sampling = Sampling(temperature=self.options.temperature, logprobs=0)
        most = self.options.max_new_tokens
        pairs = zip(prompts, seeds, strict=True)
        automaton = self.form.automaton if self.form else None
        requests = [
            Request(prompt.ids, sampling, most, self.ends, automaton, seed=seed)
            for prompt, seed in pairs
        ]
        generator = self.generator  # chosen while the step is captured, which it is not below
        with self._decoding():
            generator.forget()
            drawn = list(Generation(generator, requests, self.prompts.tokenizer, ()))
        for prompt, completion in zip(prompts, drawn, strict=True):
            if completion.finish_reason == "not_finite":
                raise Diverged(
                    f"{prompt.where}: the model's logits for an answer are not finite: lower optim.lr"
                )
        return drawn

    @property
    def held(self) -> list[Tensor]:
        """Return the tensors held beside the step: keys and values, the reference, a teacher's
        weights, a copy.
        """
        caches = [self._made[1].cache, self._made[1].reader.cache] if self._made else []
        teacher = self.reward.teacher.parameters() if self.reward.teacher else ()
        cached = (each for cache in caches for each in (*cache.keys, *cache.values))
        copied = self.model.parameters() if self.model is not self.engine.model else ()
        return [*cached, *(self.reference or ()), *teacher, *copied]

    @property
    def arrangement(self) -> Options:
        """Return the options with the form of the rows in which answers are scored."""
        options = self.options
        return replace(options, length=self.slots, packed=False) if options.exact else options

    def rollouts(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[Rollout]:
        """Return the answers with the log-probabilities of their tokens, and the reference's if
        there is a KL term.
        """
        # Raw ones are computed as the loss computes them; those drawn from have the sampler's own
        # arithmetic.
        drawn = [
            [one.drawn if self._is_raw else one.processed_drawn for one in c.logprobs or ()]
            for c in completions
        ]
        made = [
            Rollout(
                prompt.ids,
                completion.token_ids,
                logprobs,
                is_cut=completion.finish_reason == "length",
                states=self.form.states(completion.token_ids) if self.form else (),
            )
            for prompt, completion, logprobs in zip(prompts, completions, drawn, strict=True)
        ]
        if self.options.kl is None:
            return made
        if not self.options.kl.needs_reference:
            return [rollout._replace(reference=[0.0] * len(rollout.token_ids)) for rollout in made]
        with holding(self.engine.step.planes, self.reference or ()):
            self._gather()
            near = self.scored(made, self.model)
        return [rollout._replace(reference=own) for rollout, own in zip(made, near, strict=True)]

    def scored(self, rollouts: Sequence[Rollout], model: Llama) -> list[list[float]]:
        """Return a model's log-probabilities of the answers' tokens, computed as the loss computes
        them, uncaptured.
        """
        loss = cast(PolicyLoss, self.engine.step.loss)
        device = self.engine.step.device

        def log_probabilities(batch: Batch) -> Tensor:
            return loss.log_probabilities(
                model, {name: each.to(device) for name, each in batch.items()}
            )

        def scored(part: Sequence[Rollout]) -> list[list[float]]:
            with self._decoding():
                return by_answer(
                    log_probabilities, part, self.arrangement, self.engine.micro_batch or len(part)
                )

        return self.sharing.share(scored, rollouts)

    def advantages(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
    ) -> list[list[float]] | None:
        """Return log-probability of the teacher - of the student for each answer's tokens; None
        without a teacher.
        """
        if (teacher := self.reward.teacher) is None:
            return None
        pairs = zip(prompts, rollouts, strict=True)
        told = [
            rollout._replace(prompt_ids=prompt.teacher_ids or prompt.ids)
            for prompt, rollout in pairs
        ]
        return [
            [one - other for one, other in zip(own, rollout.logprobs, strict=True)]
            for own, rollout in zip(self.scored(told, teacher), rollouts, strict=True)
        ]

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        """Return the rewards of these answers: see `Reward.score`, or the mean of a teacher's
        `advantages`.
        """
        if self.reward.teacher is not None:
            found = self.advantages(prompts, self.rollouts(prompts, completions)) or []
            return [statistics.fmean(each) for each in found]
        pairs = zip(prompts, completions, strict=True)
        answers = [Answer(p.text, c.text, p.record, p.where) for p, c in pairs]
        scores = self.sharing.once(lambda: self.reward.score(answers))
        if len(scores) != len(prompts) or not all(map(math.isfinite, scores)):
            raise InputRefused(
                f"{prompts[0].where}: the reward gave {scores!r:.60} for {len(prompts)} answers"
            )
        return scores

    def sample(self) -> tuple[str, str, float]:
        """Return the first prompt, an answer to it, always by the same seed, and its reward."""
        first = self.prompts.train[:1]
        [answer] = self.draw(first, rollout_seeds(self.options.seed, [HELD_OUT - 1], 1))
        [reward] = self.score(first, [answer])
        self.reward.parts()  # of no update
        return first[0].text, answer.text, reward

    def passed(self, rewards: Sequence[float]) -> dict[str, float]:
        """Return figures on the rewards of groups of answers.

        Returns:
            reward: the mean; pass_at_1 and pass_at_k: the share of right answers, and of groups
            with one, except with a teacher, who calls none right.
        """
        mean = {"reward": statistics.fmean(rewards)}
        group = self.options.group
        if self.reward.teacher is not None:
            return mean
        best = [max(rewards[first : first + group]) for first in range(0, len(rewards), group)]
        shares = (statistics.fmean(reward >= SOLVED for reward in of) for of in (rewards, best))
        return mean | dict(zip(("pass_at_1", "pass_at_k"), shares, strict=True))

    def measure(self) -> dict[str, float]:
        """Return figures on a group of answers to each of the first held-out prompts, an update's
        number of them.

        Returns:
            eval_reward, eval_pass_at_1 and eval_pass_at_k, as `passed` says; eval_prompts: their
            number.
        """
        group = self.options.group
        held = self.prompts.held_out[: self.options.prompts]
        asked = [prompt for prompt in held for _ in range(group)]
        # The same seeds each time, so that less of a change is chance.
        answers = self.draw(
            asked, rollout_seeds(self.options.seed, range(HELD_OUT, HELD_OUT + len(held)), group)
        )
        figures = self.passed(self.score(asked, answers))
        figures |= {f"reward.{name}": mean for name, mean in self.reward.parts().items()}
        return {f"eval_{name}": value for name, value in figures.items()} | {
            "eval_prompts": len(held)
        }


class Rollouts(Iterator[Batch]):
    """An iterator over the windows of a run, each drawn when it is asked for.

    Window k has the answers to the prompts at positions start + k P .. start + (k + 1) P - 1 of the
    endless order that the seed gives (`monograph.data.rows.rows_at`). It has the interface of
    `monograph.data.batches.Batches`, with prompts in place of rows.

    Attributes:
        rows_per_window: P, the prompts of an update.
        rows_consumed: the position after the last prompt that was answered.
        skip: stretches of positions that are passed over.
        numbers: figures on the window that was returned last, for the metrics.
        is_fresh: whether the window that was returned last was drawn for it.
    """

    def __init__(self, drawer: Drawer, start: int = 0, skip: Sequence[Sequence[int]] = ()) -> None:
        """Begin at a position; see the class."""
        self.drawer, self.rows_consumed = drawer, start
        self.rows_per_window = drawer.options.prompts
        self.skip = tuple((int(begin), int(end)) for begin, end in skip)
        self.numbers: dict[str, float] = {}
        self._window: Batch = {}
        # The first: updates that are still made of the last draw.
        self._again, self.is_fresh = 0, True

    def __next__(self) -> Batch:
        """Draw, score and weigh the answers of the next window, see `arranged`, or return the last
        one once more.
        """
        if self._again:
            self._again = self._again - 1
            self.is_fresh = False
            return self._window
        wanted = self.rows_per_window
        groups = list[Group]()
        drawn_s = 0.0
        scored_s = 0.0
        for _ in range(self.drawer.options.draws):
            if not (at := self._next_positions()):
                break
            began = clock()
            prompts, completions = self._drawn(at)
            drawn_s = drawn_s + clock() - began
            began = clock()
            groups += self._weighed(prompts, completions)
            scored_s += clock() - began
            self.rows_consumed = at[-1] + 1
            if sum(group.teaches for group in groups) >= wanted:
                break
        if not groups:
            raise StopIteration
        rewards = [reward for group in groups for reward in group.rewards]
        parts = {f"reward.{name}": mean for name, mean in self.drawer.reward.parts().items()}
        seconds = {"drawn_s": drawn_s, "scored_s": scored_s}
        self.numbers = {**self.drawer.passed(rewards), **parts, **described(groups), **seconds}
        # Drawn more than once, an update is of groups that teach, and of any if none does.
        alive = [group for group in groups if group.teaches][:wanted]
        used = alive if alive and self.drawer.options.draws > 1 else groups[:wanted]
        rollouts = [rollout for group in used for rollout in group.rollouts]
        weighed = [weight for group in used for weight in group.weights]
        self._window = arranged(rollouts, weighed, self.drawer.arrangement)
        self._again = self.drawer.options.updates - 1
        self.is_fresh = True
        return self._window

    @property
    def is_between_draws(self) -> bool:
        """Return whether the next window is drawn, so that the run can go on from its state."""
        return not self._again

    def _drawn(self, at: Sequence[int]) -> tuple[list[Prompt], list[Completion]]:
        """Return a group of answers to the prompt at each position, with the prompt of each answer."""
        options, asked = self.drawer.options, self.drawer.prompts.train
        # Those between may be passed over.
        order = rows_at(at[0], at[-1] - at[0] + 1, len(asked), options.seed)
        prompts = [asked[order[position - at[0]]] for position in at for _ in range(options.group)]
        return prompts, self.drawer.draw(prompts, rollout_seeds(options.seed, at, options.group))

    def _weighed(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Group]:
        options, drawer = self.drawer.options, self.drawer
        rollouts = drawer.rollouts(prompts, completions)
        taught = drawer.advantages(prompts, rollouts)
        rewards = (
            [statistics.fmean(each) for each in taught]
            if taught
            else drawer.score(prompts, completions)
        )
        groups = []
        for first in range(0, len(prompts), options.group):
            own = slice(first, first + options.group)
            if taught:
                weighed = [Weight(factors, len(factors)) for factors in taught[own]]
            else:
                weighed = weighted(rollouts[own], rewards[own], options)
            _, judgements = judged(rollouts[own], rewards[own], options)
            compared = judgements if ADVANTAGES[options.advantage].compares else [*judgements, 0.0]
            teaches = bool(taught) or not are_equal(compared)
            groups.append(
                Group(
                    prompts[first], completions[own], rollouts[own], rewards[own], weighed, teaches
                )
            )
        return groups

    def _next_positions(self) -> list[int]:
        """Return the positions of the next window's prompts; fewer, or none, at the end of the last
        epoch.
        """
        options = self.drawer.options
        passed_over = sum(end - begin for begin, end in self.skip)
        last = (
            math.inf
            if options.epochs is None
            else options.epochs * len(self.drawer.prompts.train) + passed_over
        )
        at: list[int] = []
        position = self.rows_consumed
        while len(at) < self.rows_per_window and position < last:
            beyond = next((end for begin, end in self.skip if begin <= position < end), None)
            if beyond is None:
                at.append(position)
            position = position + 1 if beyond is None else beyond
        return at

    def state(self) -> dict[str, Any]:
        """Return the state to go on from, as `Batches.state` does."""
        state = {"seed": self.drawer.options.seed, "rows": self.rows_consumed}
        return state | ({"skip": self.skip} if self.skip else {})

    def close(self) -> None:
        """Do nothing: no window is made ahead."""
