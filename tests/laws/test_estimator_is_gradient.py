"""Run: pytest tests/laws/test_estimator_is_gradient.py (law 17: estimator = gradient of expected
reward; law 2).
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import flat_gradient, tiny_llama
from daily import pairwise
from monograph.model.llama import Llama
from monograph.resident import Resident
from monograph.rl import rollouts as room
from monograph.rl.advantages import ADVANTAGES, AnswerWeight, centred_rewards, ratio_of
from monograph.rl.arrange import Rollout, answer_weights, arrange_window
from monograph.rl.form import AnswerForm
from monograph.rl.loss import PolicyLoss
from monograph.rl.prompts import Prompt, Prompts
from monograph.rl.rewards import AnswerScore, FormName
from monograph.rl.rollouts import Drawer
from monograph.text.tokenizer import Tokenizer
from rewarded import OPTIONS, prompts, windows

END, LONGEST, PROMPT = 0, 3, (1, 2)
FORM = replace(OPTIONS, max_new_tokens=LONGEST, length=8, exact=False)


def answers() -> list[tuple[int, ...]]:
    """All answers of at most three tokens of a vocabulary of three, one of which ends an answer:
    fifteen.
    """
    every = itertools.chain.from_iterable(
        itertools.product(range(3), repeat=size) for size in range(1, LONGEST + 1)
    )
    return [one for one in every if END not in one[:-1] and (one[-1] == END or len(one) == LONGEST)]


def model() -> Llama:
    return tiny_llama(torch.float64, vocab_size=3, num_hidden_layers=1)


def log_probability(net: Llama, answer: Sequence[int]) -> Tensor:
    ids = [*PROMPT, *answer]
    log_TV = (net(torch.tensor([ids[:-1]]))[0] @ net.lm_head.weight.T).log_softmax(-1)
    places = range(len(PROMPT) - 1, len(ids) - 1)
    return sum(
        (log_TV[place, ids[place + 1]] for place in places), torch.zeros((), dtype=torch.float64)
    )


def token_logs(net: Llama, answer: Sequence[int]) -> list[float]:
    ids = torch.tensor([*PROMPT, *answer])
    with torch.no_grad():
        log_TV = (net(ids[None, :-1])[0] @ net.lm_head.weight.T).log_softmax(-1)
    return log_TV[len(PROMPT) - 1 :].gather(-1, ids[len(PROMPT) :, None])[:, 0].tolist()


def rewards() -> dict[tuple[int, ...], float]:
    draws = random.Random(3)
    return {answer: draws.choice([0.0, 1.0, 0.25, 2.0]) for answer in answers()}


def gradient_of(net: Llama, of: Callable[[], Tensor]) -> Tensor:
    net.zero_grad()
    of().backward()
    return flat_gradient(net)


def expected_gradients(
    net: Llama, of: dict[tuple[int, ...], float]
) -> tuple[Tensor, dict[tuple[int, ...], Tensor]]:
    """The gradient of E[r], and that of each answer's log-probability."""
    each = {answer: gradient_of(net, lambda a=answer: log_probability(net, a)) for answer in of}  # type: ignore[misc]
    shares = {answer: float(log_probability(net, answer).detach().exp()) for answer in of}
    assert math.isclose(sum(shares.values()), 1, rel_tol=1e-12)
    return sum(of[a] * shares[a] * each[a] for a in of), each  # type: ignore[return-value]


def mean_gradient(net: Llama, of: dict[tuple[int, ...], float], advantage: str) -> Tensor:
    """The mean over all groups of two answers, each weighted by its probability, of the gradient
    that a run takes.
    """
    loss, mean = PolicyLoss(1.0, ratio_of(advantage, 1)), torch.zeros(())
    shares = {answer: float(log_probability(net, answer).detach().exp()) for answer in of}
    # Each pair once, for both of its orders.
    for group in itertools.combinations_with_replacement(of, 2):
        orders = 1 if group[0] == group[1] else 2
        weighed = ADVANTAGES[advantage].weights(
            [of[a] for a in group], [len(a) for a in group], LONGEST
        )
        batch = arrange_window(
            [Rollout(PROMPT, a, token_logs(net, a)) for a in group], weighed, FORM
        )

        def scaled(batch=batch) -> Tensor:  # type: ignore[no-untyped-def]
            total, count = loss(net, batch)
            return total / count

        mean = mean + orders * math.prod(shares[a] for a in group) * gradient_of(net, scaled)
    return mean


def own_length(own: int, other: int) -> int:
    return 2 * own


def tokens_of_the_group(own: int, other: int) -> int:
    return own + other


# Each advantage is in one of these. Its gradient is that of the expected reward, times this number:
FACTORS = {"reinforce": 1.0, "rloo": 1.0, "dr_grpo": (2 - 1) / (2 * LONGEST)}
# or it is the sum of scaled differences of rewards, each divided by what this gives of two lengths.
DIVISORS = {
    "grpo": own_length,
    "gspo": own_length,
    "dapo": tokens_of_the_group,
    "cispo": tokens_of_the_group,
}


def test_each_advantage_has_its_gradient_here() -> None:
    assert {*FACTORS, *DIVISORS} == ADVANTAGES.keys()


# By day one that is the gradient of the expected reward, and one that is not.
@pytest.mark.parametrize(
    "advantage",
    [
        pytest.param(each, marks=() if each in ("dr_grpo", "grpo") else pytest.mark.slow)
        for each in ADVANTAGES
    ],
)
def test_the_mean_gradient_over_all_groups_is_that_of_the_expected_reward(advantage: str) -> None:
    net, of = model(), rewards()
    exact, each = expected_gradients(net, of)
    mean = mean_gradient(net, of, advantage)
    if advantage in FACTORS:
        error = (mean + FACTORS[advantage] * exact).norm() / exact.norm()
        assert error < 1e-12
        return
    # grpo, dapo and their like are no gradients of E[r], by the amount that their equations say.
    shares = {answer: float(log_probability(net, answer).detach().exp()) for answer in of}
    predicted = torch.zeros_like(exact)
    for one, other in itertools.product(of, repeat=2):
        apart = (of[one] - of[other]) / 2
        scaled = apart / (abs(apart) * math.sqrt(2) + 1e-4)
        by = DIVISORS[advantage](len(one), len(other))
        predicted += 2 * shares[one] * shares[other] * scaled / by * each[one]
    assert (mean + predicted).norm() / predicted.norm() < 1e-12
    along = float(mean @ exact / (mean.norm() * exact.norm()))
    assert -0.9999 < along < 0


@pytest.mark.parametrize("advantage", ["rloo", "dr_grpo"])
def test_answers_that_are_left_out_leave_the_gradient_of_the_reward_of_those_that_end(
    advantage: str,
) -> None:
    """All groups of three: as many times grad E[r | the answer ends] as answers of a group end, and
    0 for one alone.
    """
    net, of = model(), rewards()
    ends = {answer for answer in of if answer[-1] == END}
    shares = {answer: float(log_probability(net, answer).detach().exp()) for answer in of}
    each = {answer: gradient_of(net, lambda a=answer: log_probability(net, a)) for answer in of}  # type: ignore[misc]

    def among_those_that_end() -> Tensor:
        logs = {answer: log_probability(net, answer) for answer in ends}
        return sum(log.exp() * of[answer] for answer, log in logs.items()) / sum(
            log.exp() for log in logs.values()
        )

    exact, options = (
        gradient_of(net, among_those_that_end),
        replace(FORM, advantage=advantage, masks_truncated=True),
    )
    mean, expected = torch.zeros_like(exact), torch.zeros_like(exact)
    for group in itertools.product(of, repeat=3):
        made = [Rollout(PROMPT, answer, (), is_cut=answer not in ends) for answer in group]
        weighed, share = (
            answer_weights(made, [of[answer] for answer in group], options),
            math.prod(shares[a] for a in group),
        )
        kept = sum(not one.is_cut for one in made)
        assert [weight.share for weight in weighed] == [
            0 if one.is_cut else {"rloo": 1, "dr_grpo": LONGEST}[advantage] for one in made
        ]
        for answer, weight in zip(group, weighed, strict=True):
            assert isinstance(weight.factor, float)
            mean += share * weight.factor * each[answer]
        expected += (
            share * ({"rloo": kept, "dr_grpo": kept - 1}[advantage] if kept > 1 else 0) * exact
        )
    assert (mean - expected).norm() / expected.norm() < 1e-12


def formed(pattern: str) -> AnswerForm:
    """Over three tokens: 0 ends an answer, 1 is "a" and 2 is "b"."""
    pieces = SimpleNamespace(pieces=(b"", b"a", b"b"), vocab_size=3, inserted_space=lambda ids: b"")
    prompts = Prompts("prompts", pieces, [Prompt("", PROMPT, {}, "")], [], "", False, 2, {})  # type: ignore[arg-type]
    return AnswerForm(FormName("regex", pattern), prompts, {END}, torch.device("cpu"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_answers_of_a_form_follow_the_gradient_of_the_expected_reward_among_them(
    temperature: float,
) -> None:
    """All groups of two answers that match a[ab]|ba?, drawn from the softmax over allowed tokens."""
    net, form = model(), formed("a[ab]|ba?")
    every = [(1, 1), (1, 2), (2, 0), (2, 1)]
    following = {1: [1, 2], 2: [0, 1]}
    of = dict(zip(every, (0.5, 1.0, 0.0, 2.0), strict=True))

    def masked_logs(answer: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([*PROMPT, *answer])
        logits_TV = (net(ids[None, :-1])[0] @ net.lm_head.weight.T)[len(PROMPT) - 1 :] / temperature
        first = logits_TV[0, 1:].log_softmax(-1)[answer[0] - 1]  # an empty answer does not match
        allowed = following[answer[0]]
        return torch.stack([first, logits_TV[1, allowed].log_softmax(-1)[allowed.index(answer[1])]])

    shares = {answer: float(masked_logs(answer).sum().detach().exp()) for answer in every}
    assert math.isclose(sum(shares.values()), 1, rel_tol=1e-12)
    exact = gradient_of(net, lambda: sum(masked_logs(a).sum().exp() * of[a] for a in every))  # type: ignore[return-value,arg-type]
    made = {
        a: Rollout(PROMPT, a, masked_logs(a).detach().tolist(), states=form.states(a))
        for a in every
    }

    def mean(loss: PolicyLoss) -> Tensor:
        total = torch.zeros_like(exact)
        for group in itertools.product(every, repeat=2):
            weighed = ADVANTAGES["rloo"].weights([of[a] for a in group], [2, 2], LONGEST)
            batch = arrange_window([made[a] for a in group], weighed, FORM)

            def scaled(batch=batch) -> Tensor:  # type: ignore[no-untyped-def]
                loss_sum, count = loss(net, batch)
                return loss_sum / count

            total = total + math.prod(shares[a] for a in group) * gradient_of(net, scaled)
        return total

    loss = PolicyLoss(temperature, form=form)
    assert (mean(loss) + exact).norm() / exact.norm() < 1e-12
    assert loss.take_figures()["drawn_minus_scored_max"] < 1e-12, (
        "the ratio is over the tokens that could be drawn"
    )
    assert (mean(PolicyLoss(temperature)) + exact).norm() / exact.norm() > 1e-3, "without the form"


@pytest.mark.parametrize(
    ("name", "only", "written"),
    [
        (FormName("regex", "(x|[a-f]{2})=[0-9]+"), "=", r"(x|[a-f]{2})=[0-9]*"),
        # Its lengths are counted, so that its states are more than those of the automaton.
        (
            FormName("json_schema", '{"type": "string", "pattern": "^[a-f]*$", "maxLength": 3}'),
            '"',
            '"[a-f]{0,3}"?',
        ),
    ],
)
def test_answers_of_a_form_are_drawn_and_scored_as_such_and_forced_tokens_teach_nothing(
    name: FormName, only: str, written: str
) -> None:
    options = replace(OPTIONS, exact=False)
    form = AnswerForm(
        name,
        prompts("2+2=", "a", "the longest of them", "7"),
        {Tokenizer.bytes().eos_id},
        torch.device("cpu"),
    )
    rollouts = windows(options, loss=PolicyLoss(form=form))
    engine = rollouts.drawer.engine
    window = next(rollouts)
    engine.accumulate(window)
    assert engine.step.loss.take_figures()["drawn_minus_scored_max"] < 1e-5  # type: ignore[attr-defined]
    drawn = (window["targets"] != -100) & (window["states"] > 0)
    first = drawn & ~torch.roll(drawn, 1, dims=1)
    forced = (
        drawn & (window["targets"] == Tokenizer.bytes().encode(only)[0]) & ((only == "=") | first)
    )
    assert (
        bool(forced.any())
        and bool((window["drawn"][forced] == 0).all())
        and bool((window["drawn"][drawn] < 0).any())
    )
    for completion in rollouts.drawer.draw(rollouts.drawer.prompts.train, [1, 2, 3, 4]):
        assert re.fullmatch(written, completion.text), completion.text


def test_an_answer_that_is_cut_is_worth_less_by_what_that_costs() -> None:
    made = [Rollout(PROMPT, (1,) * size, (), is_cut=size == LONGEST) for size in (1, LONGEST, 2)]
    lowered = ADVANTAGES["grpo"].weights([1.0, 0.5, 0.0], [1, LONGEST, 2], LONGEST)
    assert (
        answer_weights(
            made, [1.0, 1.0, 0.0], replace(FORM, advantage="grpo", truncation_penalty=0.5)
        )
        == lowered
    )


def test_an_update_of_answers_that_are_all_left_out_changes_nothing_by_itself() -> None:
    options = replace(OPTIONS, masks_truncated=True, max_new_tokens=1)
    rollouts = windows(options, reward=lambda text: float(len(text)))
    window, engine = next(rollouts), rollouts.drawer.engine
    assert rollouts.numbers["cut"] > 0.9 and rollouts.numbers["dead"] == 1
    engine.accumulate(window)
    update = engine.update()
    assert float(update.grad_norm) == 0 and float(update.count) == 1


def ragged_answers(count: int, seed: int = 0) -> tuple[list[Rollout], list[AnswerWeight]]:
    draws = random.Random(seed)
    made = [
        Rollout([draws.randrange(61) for _ in range(draws.randint(1, 9))], ids, [0.0] * len(ids))
        for ids in (
            [draws.randrange(61) for _ in range(draws.randint(1, 14))] for _ in range(count)
        )
    ]
    scores = [draws.choice([0.0, 0.0, 1.0]) for _ in made]
    weighed: list[AnswerWeight] = []
    for first in range(0, count, 4):
        lengths = [len(one.token_ids) for one in made[first : first + 4]]
        weighed += ADVANTAGES["dapo"].weights(scores[first : first + 4], lengths, 14)
    assert any(weight.factor == 0 for weight in weighed) and any(
        weight.factor for weight in weighed
    )
    return made, weighed


def reference(net: Llama, made: Sequence[Rollout], weighed: Sequence[AnswerWeight]) -> Tensor:
    """One answer after the other, those that weigh nothing included, and one division."""
    total = torch.zeros((), dtype=torch.float64)
    for rollout, weight in zip(made, weighed, strict=True):
        ids = [*rollout.prompt_ids, *rollout.token_ids]
        log_TV = (net(torch.tensor([ids[:-1]]))[0] @ net.lm_head.weight.T).log_softmax(-1)
        for place in range(len(rollout.prompt_ids) - 1, len(ids) - 1):
            total = total - weight.factor * log_TV[place, ids[place + 1]]
    return total / sum(weight.share for weight in weighed)


def test_a_window_groups_answers_by_their_prompts() -> None:
    """Rewards less their mean add up to 0 over the answers to one prompt, and over no other four."""
    window = next(windows(replace(OPTIONS, group=4)))
    sums: dict[tuple[int, ...], list[float]] = {}
    for tokens, targets, factors in zip(
        window["tokens"], window["targets"], window["factors"], strict=True
    ):
        begin = int((targets != -100).nonzero()[0])
        sums.setdefault(tuple(tokens[: begin + 1].tolist()), []).append(float(factors[begin]))
    assert len(sums) == 3
    assert all(len(each) == 4 and abs(sum(each)) < 1e-12 for each in sums.values())


def orders(
    made: list[Rollout], weighed: list[AnswerWeight]
) -> Iterator[tuple[list[Rollout], list[AnswerWeight]]]:
    yield made, weighed
    places = random.Random(1).sample(range(len(made)), len(made))
    yield [made[place] for place in places], [weighed[place] for place in places]


@pytest.mark.parametrize(("micro_batch", "packed"), pairwise([1, 3, None], [True, False]))
def test_ragged_answers_accumulated_in_any_order_and_rows_are_one_batch(
    packed: bool, micro_batch: int | None
) -> None:
    made, weighed = ragged_answers(16)
    net = tiny_llama(torch.float64)
    exact = gradient_of(net, lambda: reference(net, made, weighed))
    form = replace(OPTIONS, length=24, exact=False, packed=packed)
    for some in orders(made, weighed):
        engine = Resident(tiny_llama(torch.float64), loss=PolicyLoss(), micro_batch=micro_batch)
        engine.accumulate(arrange_window(*some, form))
        assert (flat_gradient(engine.model) - exact).norm() / exact.norm() < 1e-12


def test_a_group_of_equal_rewards_weighs_exactly_nothing() -> None:
    for advantage in ADVANTAGES:
        for reward in (0.1, 1 / 3, 1e300):
            if advantage != "reinforce":
                assert {
                    w.factor for w in ADVANTAGES[advantage].weights([reward] * 7, [5] * 7, 9)
                } == {0.0}


def test_no_answer_that_teaches_still_is_a_window() -> None:
    made, _ = ragged_answers(16)
    window = arrange_window(made[:4], [AnswerWeight(0.0, 14.0)] * 4, FORM)
    engine = Resident(tiny_llama(torch.float64), loss=PolicyLoss())
    engine.accumulate(window)
    assert float(engine.update().grad_norm) == 0
    assert float(window["shares"].sum()) == 56


FAULTS: dict[str, Callable[[Sequence[float], Sequence[int], int], list[AnswerWeight]]] = {
    "the mean of means": lambda r, n, longest: [
        AnswerWeight(2 * value / length, 1)
        for value, length in zip(centred_rewards(r), n, strict=True)
    ],
    "a baseline that holds the answer itself": lambda r, n, longest: [
        AnswerWeight(v, 1) for v in centred_rewards(r)
    ],
    "the other answer's advantage": lambda r, n, longest: [
        AnswerWeight(2 * v, 1) for v in centred_rewards(r)[::-1]
    ],
    "its own length as the share": lambda r, n, longest: [
        AnswerWeight(2 * v, length) for v, length in zip(centred_rewards(r), n, strict=True)
    ],
}


def first_token_left_out(window: dict[str, Tensor]) -> None:
    for targets in window["targets"]:
        targets[(targets != -100).nonzero()[0]] = -100


def dead_left_out(window: dict[str, Tensor]) -> None:
    window["shares"][window["factors"] == 0] = 0


def shifted(window: dict[str, Tensor]) -> None:
    window["factors"].copy_(window["factors"].roll(1, dims=-1))


def prompt_trained(window: dict[str, Tensor]) -> None:
    window["targets"][:, :-1] = window["tokens"][:, 1:]
    window["factors"].copy_(
        window["factors"].amax(dim=-1, keepdim=True).expand_as(window["factors"])
    )


@pytest.mark.parametrize("fault", [first_token_left_out, dead_left_out, shifted, prompt_trained])
def test_a_wrong_window_is_noticed(
    fault: Callable[[dict[str, Tensor]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*arguments: Any) -> dict[str, Tensor]:
        window = room.arrange_window(*arguments)
        fault(window)
        return window

    monkeypatch.setitem(globals(), "arrange_window", faulty)
    with pytest.raises(AssertionError):
        test_ragged_answers_accumulated_in_any_order_and_rows_are_one_batch(False, None)


def test_groups_over_the_wrong_axis_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts with four answers each, taken for four prompts with three."""
    score, given = Drawer.score, list[float]()

    def scored(*arguments: Any) -> list[AnswerScore]:
        scores = score(*arguments)
        rewards = [each.value for each in scores]
        less_mean = [centred_rewards(rewards[place::3]) for place in range(3)]
        given.extend(less_mean[place % 3][place // 3] for place in range(12))
        return scores

    monkeypatch.setattr(Drawer, "score", scored)
    monkeypatch.setattr(
        room, "answer_weights", lambda *group: [AnswerWeight(given.pop(0), 7) for _ in range(4)]
    )
    with pytest.raises(AssertionError):
        test_a_window_groups_answers_by_their_prompts()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_weight_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVANTAGES, "rloo", replace(ADVANTAGES["rloo"], weights=FAULTS[fault]))
    with pytest.raises(AssertionError):
        test_the_mean_gradient_over_all_groups_is_that_of_the_expected_reward("rloo")


def test_an_update_that_may_draw_again_has_groups_that_teach_until_it_has_enough() -> None:
    def rare(text: str) -> float:
        return float("a" in text)

    once = windows(replace(OPTIONS, prompts=4), reward=rare)
    assert min(int((next(once)["factors"] != 0).any(-1).sum()) for _ in range(3)) < 16, (
        "some groups teach nothing"
    )
    again, found = windows(replace(OPTIONS, prompts=4, draws=9), reward=rare), 0
    for _ in range(2):
        before, window = again.rows_consumed, next(again)
        alive = int((window["factors"] != 0).any(-1).sum())
        assert alive == 16 or again.rows_consumed == before + 9 * 4
        assert float(window["shares"].sum()) == alive * OPTIONS.max_new_tokens
        found += alive == 16
    assert found > 0 and again.rows_consumed > 12
