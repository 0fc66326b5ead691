"""Run: pytest tests/laws/test_episodes.py (laws 2, 16, 17: over turns as in one answer)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

import calling
from batches import flat_gradient, tiny_llama
from daily import nightly
from monograph.decode.prompt_reader import PromptReader
from monograph.errors import InputRefused
from monograph.laws.comparisons import LOG_PROBABILITY_BOUND
from monograph.loss import IGNORE
from monograph.model.llama import Llama
from monograph.rl import rollouts as room
from monograph.rl.advantages import ADVANTAGES, ratio_of
from monograph.rl.arrange import Rollout, arrange_window
from monograph.rl.episodes import Episode, EpisodeDrawer
from monograph.rl.loss import PolicyLoss
from monograph.rl.prompts import Prompt, Prompts
from monograph.rl.rollouts import Drawer
from played import PLAYED, episodes
from rewarded import OPTIONS, apart, products_have_rows_of_their_own


@pytest.fixture(scope="module")
def drawn() -> tuple[EpisodeDrawer, list[Episode]]:
    """Eight episodes of two groups."""
    drawer = episodes().drawer
    assert isinstance(drawer, EpisodeDrawer)
    prompts = [prompt for prompt in drawer.prompts.train[:2] for _ in range(4)]
    found = drawer.draw(prompts, [11, 12, 13, 14, 21, 22, 23, 24])
    return drawer, cast(list[Episode], found)


def apart_at_most(model: Any, least: int = 16) -> float:
    """How far a log-probability may be from that of another pass over the same tokens."""
    return 0.0 if products_have_rows_of_their_own(model, least=least) else LOG_PROBABILITY_BOUND


def test_answers_of_all_turns_are_scored_in_the_bits_in_which_they_were_drawn() -> None:
    rollouts = episodes()
    engine = rollouts.drawer.engine
    window = next(rollouts)
    engine.accumulate(window)
    largest, number = apart(rollouts)
    assert number == rollouts.numbers["drawn_tokens"] > 60
    assert largest <= apart_at_most(engine.model)


HYBRID = {"model_type": "qwen3_5_text", "layer_types": ("linear_attention", "full_attention")}
SHAPES = {
    "attention": {},
    "hybrid": HYBRID,
    "window": {"model_type": "mistral", "sliding_window": 5},
    "mixture": {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2},
    "mamba": {
        "model_type": "granitemoehybrid",
        "layer_types": ("mamba", "full_attention"),
        "mamba_n_groups": 2,
        "mamba_d_state": 6,
        "mamba_d_conv": 3,
        "position_embedding_type": "nope",
    },
}


@pytest.mark.parametrize("shape", nightly(SHAPES, {"attention", "hybrid"}))
@pytest.mark.parametrize("rows", [4, 8])
def test_a_row_that_goes_on_draws_the_bits_of_reading_the_episode_again(
    shape: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four rows, half of the episodes wait for a row that another one keeps."""
    monkeypatch.setattr(room, "MAX_DECODED_ROWS", rows)
    options = replace(PLAYED, prompts=2)
    drawer = episodes(options, shape=SHAPES[shape]).drawer
    prompts = [prompt for prompt in drawer.prompts.train[:2] for _ in range(4)]
    found = cast(list[Episode], drawer.draw(prompts, range(11, 19)))
    assert drawer.generator.rows == rows == len(drawer.generator._free_rows)
    turns, bound = 0, apart_at_most(drawer.model, least=4)
    for prompt, seed, episode in zip(prompts, range(11, 19), found, strict=True):
        ids = list(episode.prompt_ids)
        for turn in episode.turns:
            [again] = Drawer.draw(drawer, [prompt._replace(ids=tuple(ids))], [seed])
            assert replace(again, logprobs=None) == replace(turn.completion, logprobs=None)
            assert again.logprobs and turn.completion.logprobs
            for one, other in zip(again.logprobs, turn.completion.logprobs, strict=True):
                assert abs(one.drawn - other.drawn) <= bound
                assert abs(one.processed_drawn - other.processed_drawn) <= bound
            ids += [*turn.completion.token_ids, *turn.observed_ids]
            turns += 1
    assert turns > 2 * len(found)


def test_of_an_episode_only_what_is_new_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    read_pass = PromptReader._read_pass

    def counted(reader: PromptReader, prompts: Any, begins: Any, count: int) -> None:
        read.extend(
            len(prompt.ids[begin : begin + count])
            for prompt, begin in zip(prompts, begins, strict=True)
        )
        read_pass(reader, prompts, begins, count)

    monkeypatch.setattr(PromptReader, "_read_pass", counted)
    drawer = episodes().drawer
    prompts = [prompt for prompt in drawer.prompts.train[:2] for _ in range(4)]
    found = cast(list[Episode], drawer.draw(prompts, range(11, 19)))
    openings = sum({episode.prompt_ids: len(episode.prompt_ids) for episode in found}.values())
    # An answer's last token is sampled, and read with what the environment says then.
    new = sum(1 + len(turn.observed_ids) for episode in found for turn in episode.turns[:-1])
    assert sum(read) == openings + new


def test_observations_have_no_target_and_answers_are_never_encoded_again(
    drawn: tuple[EpisodeDrawer, list[Episode]],
) -> None:
    drawer, found = drawn
    rollouts = drawer.rollouts([drawer.prompts.train[0]] * len(found), found)
    assert max(len(episode.turns) for episode in found) > 1
    weights = ADVANTAGES["rloo"].weights(
        [float(number) for number in range(8)], [rollout.length for rollout in rollouts], 12
    )
    window = arrange_window(rollouts, weights, drawer.arrangement)
    for row, episode in enumerate(found):
        ids, targets = list(episode.prompt_ids), [IGNORE] * (len(episode.prompt_ids) - 1)
        for turn in episode.turns:
            ids += turn.completion.token_ids
            targets += turn.completion.token_ids
            ids += turn.observed_ids
            targets += [IGNORE] * len(turn.observed_ids)
        assert window["tokens"][row, : len(ids) - 1].tolist() == ids[:-1]
        assert window["targets"][row, : len(targets)].tolist() == targets
        assert bool((window["targets"][row, len(targets) :] == IGNORE).all())
        is_target = window["targets"][row] != IGNORE
        assert bool((window["factors"][row][~is_target] == 0).all())
        assert bool((window["drawn"][row][~is_target] == 0).all())
        assert window["drawn"][row][is_target].tolist() == [each.drawn for each in episode.logprobs]


def test_an_episode_is_the_same_alone_and_among_others(
    drawn: tuple[EpisodeDrawer, list[Episode]],
) -> None:
    drawer, found = drawn
    [alone] = drawer.draw(drawer.prompts.train[1:2], [21])
    assert alone == found[4]
    environments = {episode.turns[0].observed[-2:] for episode in found[4:]}
    assert len(environments) == 1, "a group's environments have the same chance"


def test_a_return_is_the_discounted_sum_of_the_rewards_of_turns(
    drawn: tuple[EpisodeDrawer, list[Episode]],
) -> None:
    drawer, found = drawn
    scores = drawer.score(drawer.prompts.train, found)
    for episode, score in zip(found, scores, strict=True):
        rewards = [sum(letter < "p" for letter in turn.completion.text) for turn in episode.turns]
        assert score.value == sum(0.5**turn * reward for turn, reward in enumerate(rewards))


class Asked:
    """A chat with a tool; each answer is a message, in which calls were read."""

    tools = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)

    def reset(self, record: Mapping[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": "1+1?"}]

    def step(self, answer: Mapping[str, Any]) -> tuple[str, float, bool]:
        assert answer["role"] == "assistant"
        return f"{len(answer['tool_calls'])} calls", float(len(answer["content"]) % 3), False


def test_episodes_of_a_chat_with_tools_have_the_ids_that_its_template_writes(
    tmp_path: Path,
) -> None:
    tokenizer = calling.speaking(tmp_path, "tags")
    options = replace(PLAYED, length=300, turns=2, prompts=1, group=2)
    prompt = Prompt("", (1,), {}, "records.jsonl:1", is_chat=True)
    opened = Prompts("records.jsonl", tokenizer, [prompt], [], "", True, 1, {})
    rollouts = episodes(options, Asked, opened=opened)
    engine = rollouts.drawer.engine
    engine.accumulate(next(rollouts))
    largest, number = apart(rollouts)
    assert number >= 4 and largest <= apart_at_most(engine.model)
    [episode] = cast(list[Episode], rollouts.drawer.draw([prompt], [3]))
    ends = [turn.completion.token_ids[-1] in rollouts.drawer.end_ids for turn in episode.turns]
    written = tokenizer.decode([*episode.prompt_ids, *episode.ids_after_prompt])
    tail = "" if ends[0] else "<|im_end|>"
    assert tokenizer.encode_rendered(
        f"{tail}\n<|im_start|>tool\n0 calls<|im_end|>\n<|im_start|>assistant\n", inside=True
    ) == list(episode.turns[0].observed_ids), written


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ([{"role": "assistant", "content": "2"}], r"observation\[0\] is a message of assistant"),
        ([{"role": "system", "content": "2"}], r"observation\[0\] is a message of system"),
        (None, "it is empty, and in a chat a message follows an answer"),
    ],
)
def test_an_observation_in_a_chat_has_messages_that_may_follow_an_answer(
    tmp_path: Path, said: Any, refused: str
) -> None:
    class Wrong(Asked):
        def step(self, answer: Mapping[str, Any]) -> Any:
            return said, 0.0, False

    tokenizer = calling.speaking(tmp_path, "tags")
    prompt = Prompt("", (1,), {}, "records.jsonl:1", is_chat=True)
    opened = Prompts("records.jsonl", tokenizer, [prompt], [], "", True, 1, {})
    options = replace(PLAYED, length=300, turns=2, prompts=1, group=1)
    rollouts = episodes(options, Wrong, opened=opened)
    with pytest.raises(InputRefused, match=f"records.jsonl:1: an observation of .*: {refused}"):
        rollouts.drawer.draw([prompt], [3])


def test_episodes_accumulated_one_by_one_are_one_batch() -> None:
    gradients = []
    for rows in (None, 1):
        rollouts = episodes(replace(PLAYED, exact=False), dtype=torch.float64, micro_batch=rows)
        engine = rollouts.drawer.engine
        window = next(rollouts)
        engine.accumulate(window)
        gradients.append(torch.cat([plane.grad.flatten() for plane in engine.step.planes]))
    one, other = gradients
    assert (one - other).norm() <= 1e-12 * one.norm()


# ── law 17, by enumeration ────────────────────────────────────────────────────────────────────────

END, PROMPT = 0, (1, 2)
# The first answer has at most two tokens of three, and the second one has one.
ANSWERS = [(0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
SECOND = [(0,), (1,), (2,)]


class Played(NamedTuple):
    """Two answers, with the environment's token between them; or one, after which it was done."""

    answers: tuple[tuple[int, ...], ...]

    @property
    def ids(self) -> tuple[int, ...]:
        first = self.answers[0]
        if len(self.answers) == 1:
            return first
        return (*first, observed(first), *self.answers[1])

    @property
    def is_sampled(self) -> list[bool]:
        if len(self.answers) == 1:
            return [True] * len(self.ids)
        first, second = map(len, self.answers)
        return [True] * first + [False] + [True] * second

    @property
    def reward(self) -> float:
        """With the discount 0.5, which these rewards of two turns have in them."""
        every = enumerate([*ANSWERS, *SECOND[1:]])
        worth = {answer: (5 * number + 1) % 7 / 3 for number, answer in every}
        return sum(0.5**turn * worth[answer] for turn, answer in enumerate(self.answers))


def observed(answer: tuple[int, ...]) -> int:
    return 1 if sum(answer) % 2 else 2


def every_episode() -> list[Played]:
    """An answer of one token ends the episode."""
    return [Played((answer,)) for answer in ANSWERS if len(answer) == 1] + [
        Played(both) for both in itertools.product(ANSWERS, SECOND) if len(both[0]) > 1
    ]


def logs(net: Llama, played: Played) -> Tensor:
    """The log-probability of each sampled token."""
    ids = torch.tensor([*PROMPT, *played.ids])
    log_TV = (net(ids[None, :-1])[0] @ net.lm_head.weight.T).log_softmax(-1)
    of_tokens = log_TV[len(PROMPT) - 1 :].gather(-1, ids[len(PROMPT) :, None])[:, 0]
    return of_tokens[torch.tensor(played.is_sampled)]


def mean_over_groups(net: Llama, advantage: str, is_masked: bool = True) -> tuple[Tensor, Tensor]:
    """The gradient of the expected return, and the mean over all groups of two of a run's."""
    options = replace(OPTIONS, turns=2, max_new_tokens=2, length=8, exact=False)
    of = {played: played.reward for played in every_episode()}
    shares = {played: float(logs(net, played).detach().sum().exp()) for played in of}
    assert math.isclose(sum(shares.values()), 1, rel_tol=1e-12)

    def gradient(value: Tensor) -> Tensor:
        net.zero_grad()
        value.backward()
        return flat_gradient(net)

    exact = gradient(sum(logs(net, played).sum().exp() * of[played] for played in of))  # type: ignore[arg-type]
    made = {
        played: Rollout(
            PROMPT,
            played.ids,
            logs(net, played).detach().tolist() if is_masked else [0.0] * len(played.ids),
            is_sampled=played.is_sampled if is_masked else (),
        )
        for played in of
    }
    loss = PolicyLoss(1.0, ratio_of(advantage, 1))
    mean = torch.zeros_like(exact)
    for group in itertools.combinations_with_replacement(of, 2):
        orders = 1 if group[0] == group[1] else 2
        rollouts = [made[played] for played in group]
        weighed = ADVANTAGES[advantage].weights(
            [of[played] for played in group],
            [rollout.length for rollout in rollouts],
            options.max_answer_tokens,
        )
        total, count = loss(net, arrange_window(rollouts, weighed, options))
        share = orders * math.prod(shares[played] for played in group)
        mean += share * gradient(total / count)
    return exact, mean


@pytest.mark.parametrize(
    ("advantage", "factor"),
    # Of a group of two, times (2 - 1) / 2, divided by the four tokens that an episode may have.
    [("rloo", 1.0), pytest.param("dr_grpo", 1 / (2 * 4), marks=pytest.mark.slow)],
)
def test_the_mean_gradient_over_all_groups_of_episodes_is_that_of_the_expected_return(
    advantage: str, factor: float
) -> None:
    net = tiny_llama(torch.float64, vocab_size=3, num_hidden_layers=1)
    exact, mean = mean_over_groups(net, advantage)
    assert (mean + factor * exact).norm() / exact.norm() < 1e-12


@pytest.mark.slow
def test_observations_with_a_gradient_would_not_give_that_gradient() -> None:
    net = tiny_llama(torch.float64, vocab_size=3, num_hidden_layers=1)
    exact, mean = mean_over_groups(net, "rloo", is_masked=False)
    assert (mean + exact).norm() / exact.norm() > 1e-3
