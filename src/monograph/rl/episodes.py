"""Sample episodes: conversations of several turns of the model in training with an environment
(`monograph.rl.environments`).

The token ids of an episode are the ids of its opening, and then, for each turn, the ids of the answer
and the ids of the observation. The ids of an answer stay as they were sampled: its text is never
tokenized again. Each answer is sampled after all ids before it. Only the ids of answers have a gradient
and a log-probability.

The *return* of an episode is the sum over its turns t = 0, 1, ... of discount^t times the turn's reward.
It takes the place of the reward of a single answer. It is compared with the returns of the other
episodes of the same record, which gives the episode a weight. All ids of its answers have this weight.

The noise of sampling depends only on the episode's seed and on the position of an id. So an episode
depends neither on the others that are sampled at the same time, nor on how long environments take.

An episode keeps its row of the decoder until its end, also while it waits for its environment. The row
has the keys and values of all ids so far, so after the opening the decoder reads only what the environment
says. If a waiting episode lent its row to another one, it would have to be read again from its beginning.
How long environments take would then decide which episodes are read again, and on a GPU these would be
rounded differently.

An answer that is cut at the maximum number of tokens is given to the environment as it is, and the
episode goes on. In a chat, the chat template adds the end of such an answer's turn, which has no gradient.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from monograph.automata import types_of_tools
from monograph.data.conversations import require_question, with_chat_keys
from monograph.data.forms import TOOLS
from monograph.data.loss_mask import TEMPLATE_DATE
from monograph.data.messages import read_messages
from monograph.data.records import Unusable
from monograph.decode.completion import Completion
from monograph.decode.generator import Generator
from monograph.decode.request import Finish, LogProbability, Request
from monograph.decode.sampling import Sampling
from monograph.decode.transcript import Transcript
from monograph.errors import InputRefused
from monograph.rl.arrange import AnswerGroup, Rollout, RolloutOptions
from monograph.rl.environments import (
    KEY,
    TOOLS_NEED_A_CHAT,
    Environments,
    Observation,
    PlayedAnswer,
    Said,
)
from monograph.rl.prompts import Prompt
from monograph.rl.rewards import AnswerScore, score_of
from monograph.rl.rollouts import Drawer, not_finite, slots_per_row
from monograph.text.call_reader import message_of
from monograph.text.calls import find_frame, spellings
from monograph.text.chat import require_variables_read
from monograph.text.tokenizer import Tokenizer
from monograph.text.turns import ChatTurns, TextTurns

# If the decoder has nothing to do, it waits for a first reply, and then up to this long for the others. A
# step takes as long for one row as for all, so rows that go on together take fewer steps.
TOGETHER_S = 0.05
# See `EpisodeDrawer.block_steps`.
BLOCK_STEPS_OF_EPISODES = 4
# The roles of messages that may follow an answer.
OBSERVED_ROLES = ("user", "tool")


@dataclass(frozen=True)
class Turn:
    """An answer, and what followed.

    Attributes:
        completion: the answer.
        observed: what the environment said then, as a text.
        observed_ids: the ids between this answer and the next one; empty after the last answer.
        parts: the parts of the turn's reward by name; a plain number is the part "".
    """

    completion: Completion
    observed: str
    observed_ids: tuple[int, ...]
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Episode(Completion):
    """An episode: a completion of several answers.

    Attributes:
        text: the texts of answers and observations, each on lines of its own.
        token_ids: the ids of all answers.
        finish_reason: "stop" if the environment was done and no answer was cut; otherwise "length": an
            answer was cut, or no room was left, or the last turn that is allowed was over.
        logprobs: one for each of `token_ids`.
        prompt_ids: the ids of the opening.
        turns: the turns, at least one.
        discount: the discount of rewards by turn.
    """

    prompt_ids: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()
    discount: float = 1.0

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        turns: Sequence[Turn],
        discount: float,
        finish_reason: Finish,
    ) -> Episode:
        """Return the episode of these turns."""
        texts = [said for turn in turns for said in (turn.completion.text, turn.observed)]
        return cls(
            text="\n".join(text for text in texts if text),
            token_ids=[each for turn in turns for each in turn.completion.token_ids],
            finish_reason=finish_reason,
            logprobs=[each for turn in turns for each in turn.completion.logprobs or ()],
            prompt_ids=tuple(prompt_ids),
            turns=tuple(turns),
            discount=discount,
        )

    @property
    def ids_after_prompt(self) -> list[int]:
        """Return the ids of answers and observations, in order."""
        ids: list[int] = []
        for turn in self.turns:
            ids += [*turn.completion.token_ids, *turn.observed_ids]
        return ids

    @property
    def is_sampled(self) -> list[bool]:
        """Return for each of `ids_after_prompt` whether it is of an answer."""
        is_of_answer: list[bool] = []
        for turn in self.turns:
            is_of_answer += [True] * len(turn.completion.token_ids)
            is_of_answer += [False] * len(turn.observed_ids)
        return is_of_answer

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts of the return, by name."""
        sums = defaultdict[str, float](float)
        for number, turn in enumerate(self.turns):
            for name, part in turn.parts.items():
                sums[name] += self.discount**number * part
        return dict(sums)


class Start(NamedTuple):
    """What an episode begins with.

    Attributes:
        prompt: the record, which opens the environment, and its place.
        seed: the seed of the model's answers.
        environment_seed: the seed of the environment, which all episodes of a group share.
    """

    prompt: Prompt
    seed: int
    environment_seed: int


class _Unfinished:
    """An episode that is being sampled.

    Attributes:
        number: the number by which the environments know the episode.
        start: what it began with.
        turns: the turns that are over.
        request: the number that the decoder gave the request for the last answer; None: none was made.
        chat: makes the ids between answers.
        prompt_ids: the ids of the opening.
        ids: all ids so far.
        transcript: the text of the answer that is being sampled.
        logprobs: the log-probabilities of that answer's ids.
        answer: the last answer that has ended, to which the environment replies.
    """

    def __init__(self, number: int, start: Start) -> None:
        self.number = number
        self.start = start
        self.turns: list[Turn] = []
        self.request: int | None = None
        self.chat: ChatTurns | TextTurns
        self.prompt_ids: tuple[int, ...] = ()
        self.ids: list[int] = []
        self.transcript: Transcript
        self.logprobs: list[LogProbability] = []
        self.answer: Completion


class EpisodeSampler:
    """Samples episodes of a decoder's model with environments."""

    def __init__(
        self,
        environments: Environments,
        tokenizer: Tokenizer,
        end_ids: tuple[int, ...],
        options: RolloutOptions,
    ) -> None:
        """Take what the sampling needs.

        Args:
            environments: the environments of the episodes.
            tokenizer: the tokenizer, with the date that its chat template shows.
            end_ids: the ids that end an answer.
            options: how answers are sampled.
        """
        self._environments = environments
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._options = options
        self._sampling = Sampling(temperature=options.temperature, logprobs=0)
        self._has_tools = environments.tools is not None
        if self._has_tools:
            try:
                self._frame = find_frame(tokenizer, end_ids)
            except InputRefused as error:
                raise InputRefused(f"the tools of {KEY}: {error}") from None
            self._spelling_V = spellings(tokenizer)
            self._types = types_of_tools(environments.tools)

    def sample(self, generator: Generator, starts: Sequence[Start]) -> list[Episode]:
        """Sample an episode from each start.

        While environments are at work, the decoder goes on with the answers of other episodes.

        Raises:
            InputRefused: an environment failed, or its messages cannot be rendered.
            Diverged: the model's logits are not finite.
        """
        finished: dict[int, Episode] = {}
        unfinished: dict[int, _Unfinished] = {}
        # The episodes whose answer is being sampled, by the number that the decoder gave the request.
        answering: dict[int, _Unfinished] = {}
        # The episodes that wait for their environment, by the future of its reply.
        waiting: dict[Future[Any], _Unfinished] = {}
        upcoming = iter(enumerate(starts))

        def begin(count: int) -> None:
            """Open the next episodes, at most this number."""
            for number, start in itertools.islice(upcoming, count):
                episode = _Unfinished(number, start)
                unfinished[number] = episode
                record, where = start.prompt.record, start.prompt.where
                opening = self._environments.reset(number, start.environment_seed, record, where)
                waiting[opening] = episode

        def go_on(episode: _Unfinished) -> None:
            """Ask the decoder for the episode's next answer."""
            episode.request = generator.submit(self._request(episode, generator))
            answering[episode.request] = episode

        def release(episode: _Unfinished) -> None:
            """Give the episode's row back to the decoder."""
            if episode.request is not None:
                generator.cancel(episode.request)

        try:
            # There are two episodes for each row. So when one has ended, another one already has a request
            # that its row can take.
            begin(2 * generator.rows)
            while answering or waiting:
                if answering:
                    for event in generator.advance():
                        episode = answering[event.number]
                        episode.transcript.add(event.token_ids)
                        episode.logprobs += event.logprobs
                        if event.finish is not None:
                            del answering[event.number]
                            waiting[self._answered(episode, event.finish)] = episode
                if not generator.can_advance:
                    # All episodes wait for their environments; see TOGETHER_S.
                    wait(waiting, return_when=FIRST_COMPLETED)
                    wait(waiting, TOGETHER_S)
                # The replies that are there by now.
                replies = wait(waiting, timeout=0).done
                for reply in replies:
                    episode = waiting.pop(reply)
                    said = reply.result()
                    if isinstance(said, Observation):
                        finish = self._observed(episode, said, generator.slots)
                    else:
                        self._opened(episode, said, generator.slots)
                        finish = None
                    if finish is None:
                        go_on(episode)
                        continue
                    finished[episode.number] = Episode.of(
                        episode.prompt_ids, episode.turns, self._options.discount, finish
                    )
                    self._environments.end(episode.number)
                    release(unfinished.pop(episode.number))
                    begin(1)
        except BaseException:
            for episode in unfinished.values():
                release(episode)
            # Otherwise the processes would keep the objects of the unfinished episodes.
            self._environments.close()
            raise
        return [finished[number] for number in range(len(starts))]

    def _request(self, episode: _Unfinished, generator: Generator) -> Request:
        """Return the request for the next answer, for which there is room."""
        ids = tuple(episode.ids)
        episode.transcript = Transcript(self._tokenizer, (), ids)
        episode.logprobs = []
        room = generator.slots - len(ids)  # the positions of the row that are left
        return Request(
            ids,
            self._sampling,
            min(self._options.max_new_tokens, room),
            self._end_ids,
            seed=episode.start.seed,
            keeps_row=len(episode.turns) + 1 < self._options.turns,
            continues=episode.request,
        )

    def _opened(self, episode: _Unfinished, opening: Said, slots: int) -> None:
        """Begin the episode's ids with its opening.

        Raises:
            InputRefused: the opening fills a row, or cannot be rendered.
        """
        prompt = episode.start.prompt
        try:
            episode.chat = opened_chat(
                opening, prompt.chat_keys, self._environments.tools, self._tokenizer, self._end_ids
            )
        except (Unusable, InputRefused) as error:
            raise InputRefused(f"{prompt.where}: the opening of {KEY}: {error}") from None
        episode.prompt_ids = tuple(episode.chat.ids)
        episode.ids = list(episode.chat.ids)
        if len(episode.ids) >= slots:
            raise InputRefused(
                f"{prompt.where}: the opening of {KEY} has {len(episode.ids)} tokens, and a row has {slots}: raise "
                "data.sequence_length"
            )

    def _answered(self, episode: _Unfinished, finish: Finish) -> Future[Observation]:
        """Give the environment the answer that has ended; return the future of what it observes.

        Raises:
            Diverged: the model's logits were not finite.
        """
        prompt = episode.start.prompt
        if finish == "not_finite":
            raise not_finite(prompt)
        transcript = episode.transcript
        transcript.finish()
        episode.answer = Completion(transcript.text, transcript.token_ids, finish, episode.logprobs)
        episode.ids += transcript.token_ids
        answer = self._as_read(episode, len(episode.ids) - len(transcript.token_ids))
        return self._environments.step(episode.number, answer, prompt.where)

    def _as_read(self, episode: _Unfinished, begin: int) -> PlayedAnswer:
        """Return the last answer of an episode, as the environment gets it.

        Args:
            episode: the episode.
            begin: the index of the answer's first id in the episode's ids.
        """
        if not self._has_tools:
            return episode.answer.text
        answer_ids = episode.answer.token_ids
        if answer_ids[-1] in self._end_ids:
            answer_ids = answer_ids[:-1]
        lead = bytes(self._tokenizer.inserted_space(episode.ids[:begin]))
        return message_of(answer_ids, self._frame, self._spelling_V, lead, self._types)

    def _observed(
        self, episode: _Unfinished, observation: Observation, slots: int
    ) -> Finish | None:
        """End the turn; return how the episode has ended, or None if it goes on.

        Args:
            episode: the episode.
            observation: what its environment said after the answer.
            slots: the number of positions of its row.
        """
        answer = episode.answer
        observed_ids: list[int] = []
        finish: Finish | None = None
        if observation.done:
            was_cut = any(turn.completion.finish_reason == "length" for turn in episode.turns)
            finish = "length" if was_cut or answer.finish_reason == "length" else "stop"
        elif len(episode.turns) + 1 == self._options.turns:
            finish = "length"
        else:
            observed_ids = self._ids_after(episode, observation.said)
            # The next answer needs room for a token.
            if len(episode.ids) + len(observed_ids) >= slots:
                observed_ids = []
                finish = "length"
        episode.ids += observed_ids
        shown = observation.said
        if not isinstance(shown, str):
            shown = json.dumps(shown, ensure_ascii=False)
        episode.turns.append(Turn(answer, shown, tuple(observed_ids), observation.parts))
        return finish

    def _ids_after(self, episode: _Unfinished, said: Said) -> list[int]:
        """Return the ids between the answer and the next one.

        Raises:
            InputRefused: the observation cannot be rendered.
        """
        where = f"{episode.start.prompt.where}: an observation of {KEY}"
        chat = episode.chat
        answer_ids = episode.answer.token_ids
        try:
            if isinstance(chat, TextTurns):
                if not isinstance(said, str):
                    raise InputRefused("it has messages, but the opening was a text: return a text")
                return chat.ids_after(answer_ids, said)
            if not said:
                raise InputRefused(
                    "it is empty, and in a chat a message follows an answer: return a text"
                )
            if isinstance(said, str):
                role = "tool" if self._has_tools else "user"
                said = [{"role": role, "content": said}]
            messages = read_messages(said, "observation")
            _require_observed_roles(messages)
            return chat.ids_after(answer_ids, messages)
        except (Unusable, InputRefused) as error:
            raise InputRefused(f"{where}: {error}") from None


def _require_observed_roles(messages: Sequence[Mapping[str, Any]]) -> None:
    """Require that messages are of users and tools, as those after an answer in a chat are.

    Raises:
        InputRefused: a message has another role.
    """
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in OBSERVED_ROLES:
            raise InputRefused(
                f"observation[{number}] is a message of {role}: an observation has those of user or tool"
            )


def opened_chat(
    opening: Said,
    chat_keys: Mapping[str, Any],
    tools: Any,
    tokenizer: Tokenizer,
    end_ids: Collection[int],
) -> ChatTurns | TextTurns:
    """Return the beginning of an episode.

    Args:
        opening: what the environment opened it with.
        chat_keys: the record's values for the chat template.
        tools: the environment's tools; None: those of the record.
        tokenizer: the tokenizer, with its date.
        end_ids: the ids that end an answer.

    Raises:
        Unusable, InputRefused: the opening is not a chat that an answer may follow, or the chat template
            does not render it.
    """
    if isinstance(opening, str):
        if tools is not None:
            raise InputRefused(TOOLS_NEED_A_CHAT)
        return TextTurns(tokenizer, opening)
    messages = read_messages(opening, "opening")
    require_question(messages, "opening")
    if tools is not None:
        chat_keys = {**chat_keys, TOOLS: tools}
    chat = with_chat_keys(messages, chat_keys)
    require_variables_read(tokenizer, chat.template_variables)
    return ChatTurns(tokenizer, chat.messages, chat.template_variables, end_ids)


class EpisodeDrawer(Drawer):
    """A `Drawer` that samples episodes with the environments of its reward."""

    # An answer that has ended keeps its row until the host has read it. The answers of episodes have very
    # different lengths, such as a call of a tool and then one word, so the host reads more often.
    block_steps = BLOCK_STEPS_OF_EPISODES

    @property
    def slots(self) -> int:
        """Return the number of positions of a row: an episode may fill a row of training."""
        # The last token of an episode is only a target, so an episode has one token more than a row.
        return slots_per_row(self.options, self.model.config, self.options.length + 1)

    def draw(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Completion]:
        """Sample an episode of each prompt's record; see `Drawer.draw`."""
        group = self.options.group
        starts = []
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            # All episodes of a group have the environment's seed of its first episode.
            first_of_group = number - number % group
            starts.append(Start(prompt, seed, environment_seed=seeds[first_of_group]))

        def json_episodes(of_rank: Sequence[Start]) -> list[Any]:
            return [_as_json(episode) for episode in self._sample_on_this_rank(of_rank)]

        self._gather_model()
        return [
            _from_json(found, self.options.discount)
            for found in self.sharing.share(json_episodes, starts)
        ]

    def _sample_on_this_rank(self, starts: Sequence[Start]) -> list[Episode]:
        """Do what `draw` does, without other ranks."""
        environments = self.reward.environments
        assert environments is not None
        sampler = EpisodeSampler(
            environments,
            self.prompts.tokenizer.with_date(TEMPLATE_DATE),
            self.end_ids,
            self.options,
        )
        # `Drawer._draw_on_this_rank` says why this property is read before the block.
        generator = self.generator
        with self._decoding():
            generator.forget()
            return sampler.sample(generator, starts)

    def _rollout(
        self, prompt: Prompt, completion: Completion, logprobs: Sequence[float]
    ) -> Rollout:
        """Return an episode with the log-probabilities of its answers' tokens."""
        episode = cast(Episode, completion)
        return Rollout(
            episode.prompt_ids,
            episode.ids_after_prompt,
            logprobs,
            is_cut=episode.finish_reason == "length",
            is_sampled=episode.is_sampled,
        )

    def group_figures(self, groups: Sequence[AnswerGroup]) -> dict[str, float]:
        """Return figures on groups of episodes, with the mean number of their turns."""
        episodes = [episode for group in groups for episode in group.completions]
        turns = statistics.fmean(len(cast(Episode, episode).turns) for episode in episodes)
        return {**super().group_figures(groups), "turns": turns}

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[AnswerScore]:
        """Return the return of each episode, and its parts."""
        episodes = cast(Sequence[Episode], completions)
        return [score_of(episode.parts) for episode in episodes]


def _as_json(episode: Episode) -> list[Any]:
    """Return an episode as a JSON value, for other ranks."""
    turns = [
        (
            turn.completion.text,
            turn.completion.token_ids,
            turn.completion.finish_reason,
            turn.completion.logprobs,
            turn.observed,
            turn.observed_ids,
            dict(turn.parts),
        )
        for turn in episode.turns
    ]
    return [episode.prompt_ids, turns, episode.finish_reason]


def _from_json(value: Sequence[Any], discount: float) -> Episode:
    """Return the episode that `_as_json` has written."""
    prompt_ids, turn_values, finish = value
    turns = []
    for text, token_ids, reason, logprobs, observed, observed_ids, parts in turn_values:
        log_probabilities = [LogProbability(*fields) for fields in logprobs]
        completion = Completion(text, token_ids, reason, log_probabilities)
        turns.append(Turn(completion, observed, tuple(observed_ids), parts))
    return Episode.of(prompt_ids, turns, discount, finish)
