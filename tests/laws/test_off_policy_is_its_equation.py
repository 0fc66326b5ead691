"""Run: pytest tests/laws/test_off_policy_is_its_equation.py (laws 2, 16, 17: ratios and KL terms)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from batches import flat_gradient, tiny_llama
from daily import nightly
from laws.test_estimator_is_gradient import (
    FORM,
    LONGEST,
    PROMPT,
    answers,
    gradient_of,
    log_probability,
    model,
    rewards,
)
from monograph.laws.comparisons import LOG_PROBABILITY_BOUND
from monograph.model.llama import Llama
from monograph.resident import Resident
from monograph.rl import loss as room
from monograph.rl.advantages import ADVANTAGES, AnswerWeight, RatioUse, ratio_of
from monograph.rl.arrange import Rollout, answer_weights, arrange_window, split_by_answer
from monograph.rl.loss import Kl, PolicyLoss
from rewarded import OPTIONS, products_have_rows_of_their_own, windows

RATIOS = [
    RatioUse("clip", 0.2, 0.28),
    RatioUse("truncate", 0.0, 1.1),
    RatioUse("sequence", 0.02, 0.03),
]
KLS = [None, Kl("k2", 0.3), Kl("k3", 0.3)]


def drawn(count: int = 9) -> tuple[list[Rollout], list[AnswerWeight]]:
    """Answers of weights that have moved since, and of a reference that is somewhere else."""
    draws, net, made = random.Random(2), tiny_llama(torch.float64), list[Rollout]()
    for _ in range(count):
        prompt = [draws.randrange(61) for _ in range(draws.randint(1, 9))]
        ids = [draws.randrange(61) for _ in range(draws.randint(1, 14))]
        logs = [log + draws.gauss(0, 0.2) for log in logs_of(net, prompt, ids).tolist()]
        made.append(Rollout(prompt, ids, logs, [log + draws.gauss(0, 0.5) for log in logs]))
    weighed = [
        AnswerWeight(
            draws.choice([-1.0, 0.0, 0.7]) / len(one.token_ids), 1, 0.3 / len(one.token_ids)
        )
        for one in made
    ]
    return made, weighed


def logs_of(net: Llama, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
    every = torch.tensor([*prompt, *ids])
    log_TV = (net(every[None, :-1])[0] @ net.lm_head.weight.T).log_softmax(-1)
    return log_TV[len(prompt) - 1 :].gather(-1, every[len(prompt) :, None])[:, 0]


def slow(net: Llama, ratio: RatioUse, kl: Kl | None) -> Tensor:
    """One answer and one token after the other."""
    total, shares = torch.zeros((), dtype=torch.float64), 0.0
    for rollout, weight in zip(*drawn(), strict=True):
        logs = logs_of(net, rollout.prompt_ids, rollout.token_ids)
        apart = logs - torch.tensor(rollout.logprobs, dtype=torch.float64)
        shares += weight.share
        for place, log in enumerate(logs):
            rho = apart.mean().exp() if ratio.kind == "sequence" else apart[place].exp()
            assert isinstance(weight.factor, float)
            clipped = rho.clamp(1 - ratio.low, 1 + ratio.high) * weight.factor
            if ratio.kind == "truncate":
                total = total - min(rho.item(), ratio.high) * weight.factor * log
            else:
                total = total - (clipped if clipped < rho * weight.factor else rho * weight.factor)
            far = log - rollout.reference[place]
            if kl:
                total = total + weight.penalty * (
                    far**2 / 2 if kl.estimator == "k2" else (-far).exp() - 1 + far
                )
    return total / shares


def apart(ratio: RatioUse, kl: Kl | None, packed: bool, micro_batch: int | None) -> float:
    made, weighed = drawn()
    if kl is None:
        made, weighed = (
            [one._replace(reference=()) for one in made],
            [one._replace(penalty=0.0) for one in weighed],
        )
    net = tiny_llama(torch.float64)
    exact = gradient_of(net, lambda: slow(net, ratio, kl))
    loss = PolicyLoss(1.0, ratio, kl)
    engine = Resident(tiny_llama(torch.float64), loss=loss, micro_batch=micro_batch)
    engine.accumulate(
        arrange_window(made, weighed, replace(OPTIONS, length=24, exact=False, packed=packed))
    )
    assert 0 < loss.take_figures()["clipped"] < 1
    return float((flat_gradient(engine.model) - exact).norm() / exact.norm())


# By day each ratio with each divergence, of rows that are packed or not.
@pytest.mark.parametrize(
    ("ratio", "kl", "packed", "micro_batch"),
    [
        pytest.param(ratio, kl, *rows, marks=() if (one + other) % 2 == at else pytest.mark.slow)
        for one, ratio in enumerate(RATIOS)
        for other, kl in enumerate(KLS)
        for at, rows in enumerate([(True, 2), (False, None)])
    ],
    ids=str,
)
def test_the_gradient_is_that_of_one_token_after_the_other(
    ratio: RatioUse, kl: Kl | None, packed: bool, micro_batch: int | None
) -> None:
    assert apart(ratio, kl, packed, micro_batch) < 1e-12


def _unclipped(
    self: PolicyLoss, log_N: Tensor, rho_N: Tensor, factors_N: Tensor
) -> tuple[Tensor, Tensor]:
    return rho_N * factors_N, rho_N > 1.2


def _both_sides(
    self: PolicyLoss, log_N: Tensor, rho_N: Tensor, factors_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Clipped without the minimum: nothing pulls a token back that has gone too far the wrong way."""
    return rho_N.clamp(1 - self.ratio.low, 1 + self.ratio.high) * factors_N, rho_N > 1.2


def _of_rows(
    self: PolicyLoss, values_N: Tensor, kept_N: Tensor, batch: dict[str, Tensor]
) -> Tensor:
    """The mean over a row, not over an answer."""
    rows = batch["targets"].shape
    kept = kept_N.view(rows)
    return (
        (values_N.view(rows).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True))
        .expand(rows)
        .flatten()
    )


@pytest.mark.parametrize(
    ("name", "fault", "ratio", "kl"),
    [
        ("_policy_terms", _unclipped, RATIOS[0], None),
        ("_policy_terms", _both_sides, RATIOS[0], None),
        ("_answer_means", _of_rows, RATIOS[2], None),
        ("", None, RATIOS[0], Kl("k3", 0.3)),
    ],
    ids=["unclipped", "without the minimum", "means over rows", "k2 for k3"],
)
def test_a_planted_fault_is_caught(
    name: str, fault: object, ratio: RatioUse, kl: Kl | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name:
        monkeypatch.setattr(PolicyLoss, name, fault)
    else:
        monkeypatch.setattr(room.torch, "expm1", lambda far: far.square() / 2 + far)
    assert apart(ratio, kl, True, None) > 1e-3


@pytest.mark.parametrize("advantage", nightly(ADVANTAGES, {"grpo", "gspo", "rloo"}))
def test_the_first_update_of_a_draw_is_on_policy(advantage: str) -> None:
    """The ratio is 1, to the bit if a row of a product has its own bits; nothing is clipped, and the
    gradient is that of the weighted log-probabilities.
    """
    options = replace(OPTIONS, advantage=advantage, updates=2)
    rollouts = windows(options, loss=PolicyLoss(1.0, ratio_of(advantage, 2)))
    plain = windows(replace(options, updates=1), loss=PolicyLoss(1.0))
    own_rows = products_have_rows_of_their_own(rollouts.drawer.model)
    bound = 0.0 if own_rows else LOG_PROBABILITY_BOUND
    gradients = []
    for each in (rollouts, plain):
        engine = each.drawer.engine
        engine.accumulate(next(each))
        gradients.append(flat_gradient(engine.model))
        figures = engine.step.loss.take_figures()  # type: ignore[attr-defined]
        assert abs(figures["ratio"] - 1.0) <= bound
        assert figures["drawn_minus_scored_max"] <= bound
        assert figures["clipped"] == 0.0
    assert (gradients[0] - gradients[1]).norm() <= (1e-6 + bound) * gradients[1].norm()
    rollouts.drawer.engine.update()
    again = next(rollouts)
    assert not rollouts.is_fresh and rollouts.is_between_draws
    rollouts.drawer.engine.accumulate(again)
    assert rollouts.drawer.engine.step.loss.take_figures()["ratio"] != 1.0  # type: ignore[attr-defined]
    assert next(rollouts) is not again and rollouts.is_fresh


def test_k1_in_the_reward_follows_the_gradient_of_the_divergence_of_answers() -> None:
    """All groups of two of all answers, in fp64: grad (E[r] - strength KL(pi || ref))."""
    net, near, of, strength = model(), model(), rewards(), 0.4
    with torch.no_grad():
        near.lm_head.weight.add_(
            0.3 * torch.randn(near.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
        )
    logs = {a: logs_of(net, PROMPT, a).tolist() for a in of}
    reference = {a: logs_of(near, PROMPT, a).tolist() for a in of}
    shares = {a: math.exp(sum(logs[a])) for a in of}

    def objective() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for a in of:
            log = log_probability(net, a)
            total = total + log.exp() * (of[a] - strength * (log - sum(reference[a])))
        return total

    exact, options = (
        gradient_of(net, objective),
        replace(FORM, advantage="rloo", kl=Kl("k1", strength)),
    )
    mean, loss = torch.zeros(()), PolicyLoss()
    for one in answers():
        for other in answers():
            made = [Rollout(PROMPT, a, logs[a], reference[a]) for a in (one, other)]
            batch = arrange_window(
                made, answer_weights(made, [of[one], of[other]], options), options
            )

            def scaled(batch: dict[str, Tensor] = batch) -> Tensor:
                total, count = loss(net, batch)
                return total / count

            mean = mean + shares[one] * shares[other] * gradient_of(net, scaled)
    assert (mean + exact).norm() / exact.norm() < 1e-12


@pytest.mark.parametrize("estimator", ["k2", "k3", "entropy"])
def test_k2_k3_and_entropy_follow_the_gradients_of_what_they_estimate_of_next_tokens(
    estimator: str,
) -> None:
    """At each place that answers come to: KL(pi || ref) for k2, KL(ref || pi) for k3, minus the entropy for entropy."""
    net, near = model(), model()
    with torch.no_grad():
        near.lm_head.weight.add_(
            0.3 * torch.randn(near.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
        )
    begins = {a[:place] for a in answers() for place in range(len(a)) if 0 not in a[:place]}

    def distribution(of: Llama, begin: tuple[int, ...]) -> Tensor:
        return (of(torch.tensor([[*PROMPT, *begin]]))[0, -1] @ of.lm_head.weight.T).log_softmax(-1)

    def divergence() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for begin in begins:
            share = math.exp(float(logs_of(net, PROMPT, begin).detach().sum())) if begin else 1.0
            own, other = distribution(net, begin), distribution(near, begin).detach()
            forth, back = own.exp() * (own - other), other.exp() * (other - own)
            total = (
                total
                + share * {"k2": forth, "k3": back, "entropy": own.exp() * own}[estimator].sum()
            )
        return total

    exact, mean = gradient_of(net, divergence), torch.zeros(())
    loss = PolicyLoss(kl=Kl(estimator, 1.0))  # type: ignore[arg-type]
    for a in answers():
        logs = logs_of(net, PROMPT, a).tolist()
        reference = (
            [0.0] * len(logs) if estimator == "entropy" else logs_of(near, PROMPT, a).tolist()
        )
        batch = arrange_window(
            [Rollout(PROMPT, a, logs, reference)], [AnswerWeight(0.0, 1, 1.0)], FORM
        )
        mean = mean + math.exp(sum(logs)) * gradient_of(net, lambda b=batch: loss(net, b)[0])  # type: ignore[misc]
    assert (mean - exact).norm() / exact.norm() < 1e-12 and LONGEST == 3


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_computed_at_positions_comes_back_by_answer(packed: bool) -> None:
    made, _ = drawn()
    form = replace(OPTIONS, length=24, exact=False, packed=packed)
    found = split_by_answer(lambda batch: batch["targets"].flatten(), made, form, rows=2)
    assert found == [[float(token) for token in rollout.token_ids] for rollout in made]


def test_the_reference_is_the_weights_of_the_beginning_and_the_model_keeps_its_own() -> None:
    rollouts = windows(replace(OPTIONS, kl=Kl("k2", 0.1)), loss=PolicyLoss(1.0, kl=Kl("k2", 0.1)))
    drawer, planes = rollouts.drawer, rollouts.drawer.engine.step.planes
    drawer.reference = [plane.param.clone() for plane in planes]
    drawer.engine.accumulate(next(rollouts))
    assert drawer.engine.step.loss.take_figures()["kl"] == 0.0  # type: ignore[attr-defined]
    drawer.engine.update()
    before = [plane.param.clone() for plane in planes]
    drawer.engine.accumulate(next(rollouts))
    assert drawer.engine.step.loss.take_figures()["kl"] != 0.0  # type: ignore[attr-defined]
    assert all(torch.equal(plane.param, param) for plane, param in zip(planes, before, strict=True))


def test_the_limits_of_each_objective_are_those_of_its_paper() -> None:
    clip = RatioUse("clip", 0.2, 0.2)
    expected = {"dapo": RatioUse("clip", 0.2, 0.28), "cispo": RatioUse("truncate", 0.0, 5.0)}
    expected |= {"gspo": RatioUse("sequence", 3e-4, 4e-4)}
    for advantage in ADVANTAGES:
        assert ratio_of(advantage, 2) == expected.get(advantage, clip)
        assert ratio_of(advantage, 1) == (
            expected["cispo"] if advantage == "cispo" else RatioUse("none")
        )


@pytest.mark.parametrize("advantage", ["dr_grpo", "dapo", "grpo", "gspo"])
def test_a_kl_term_weighs_tokens_as_the_objective_does(advantage: str) -> None:
    made, _ = drawn(4)
    weighed = answer_weights(
        made, [1.0, 1.0, 1.0, 1.0], replace(FORM, advantage=advantage, kl=Kl("k3", 0.3))
    )
    lengths = [len(one.token_ids) for one in made]
    by_length = advantage in ("grpo", "gspo")
    assert [each.penalty for each in weighed] == [
        0.3 / length if by_length else 0.3 for length in lengths
    ]
    assert all(each.factor == 0 and each.changes_gradient for each in weighed), (
        "a dead group has its KL term"
    )


@pytest.mark.parametrize("kl", [Kl("k2", 0.3), Kl("k3", 0.3)])
def test_positions_without_a_target_give_no_gradient_however_unlikely_they_are(kl: Kl) -> None:
    made, weighed = drawn()
    loss = PolicyLoss(0.002, kl=kl)
    engine = Resident(tiny_llama(), loss=loss)
    window = arrange_window(made, weighed, replace(OPTIONS, length=24, exact=False, packed=True))
    with torch.no_grad():
        log_N = loss.log_probabilities(engine.model, window)
    window["reference"] = log_N.view(window["reference"].shape).double() * (
        window["targets"] != -100
    )
    assert float(log_N.min()) < -89, "its exponential has no number in fp32"
    engine.accumulate(window)
    assert bool(flat_gradient(engine.model).isfinite().all())


def test_a_teacher_s_advantages_are_its_log_probabilities_less_the_student_s() -> None:
    rollouts = windows(replace(OPTIONS, exact=False, advantage="dapo"))
    drawer, teacher = rollouts.drawer, tiny_llama(vocab_size=259)
    drawer.reward.teacher = teacher
    window = next(rollouts)
    [tokens, targets, factors, drawn_at] = (
        window[key] for key in ("tokens", "targets", "factors", "drawn")
    )
    for row in range(len(tokens)):
        at = targets[row] != -100
        begin = int(at.nonzero()[0])
        with torch.no_grad():
            better = logs_of(teacher, tokens[row, : begin + 1].tolist(), targets[row][at].tolist())
        assert (factors[row][at] - (better - drawn_at[row][at])).abs().max() < 1e-4
    assert float(window["shares"].sum()) == int((targets != -100).sum()), "the mean over all tokens"
    expected = float(factors[targets != -100].sum() / (targets != -100).sum())
    assert abs(rollouts.numbers["reward"] - expected) < 1 and "pass_at_1" not in rollouts.numbers


def test_a_teacher_may_read_another_prompt() -> None:
    """Its scores are those of a teacher who reads that prompt, whatever the student reads."""
    rollouts = windows(replace(OPTIONS, exact=False))
    drawer, teacher = rollouts.drawer, tiny_llama(vocab_size=259)
    drawer.reward.teacher = teacher
    plain = drawer.prompts.train[:2]
    told = [plain[0]._replace(teacher_ids=(7, 8, 9)), plain[1]]
    answers = [Rollout(prompt.ids, (40, 41, 42), (-1.0, -2.0, -3.0)) for prompt in plain]
    found, alike = (
        drawer.teacher_advantages(told, answers),
        drawer.teacher_advantages(plain, answers),
    )
    assert found and alike and found[1] == alike[1] and found[0] != alike[0]
    with torch.no_grad():
        better = logs_of(teacher, (7, 8, 9), (40, 41, 42)) - torch.tensor([-1.0, -2.0, -3.0])
    assert (torch.tensor(found[0]) - better).abs().max() < 1e-4


def test_an_even_choice_is_no_reference_that_has_to_be_kept() -> None:
    kl = Kl("entropy", 0.1)
    rollouts = windows(replace(OPTIONS, kl=kl), loss=PolicyLoss(1.0, kl=kl))
    window = next(rollouts)
    assert (
        rollouts.drawer.reference is None
        and not window["reference"].any()
        and (window["penalties"] > 0).any()
    )


def test_groups_of_equal_rewards_are_dead_whatever_a_kl_term_adds() -> None:
    kl = Kl("k1", 0.5)
    rollouts = windows(replace(OPTIONS, kl=kl, draws=2), reward=lambda text: 1.0)
    rollouts.drawer.reference = [plane.param + 0.1 for plane in rollouts.drawer.engine.step.planes]
    next(rollouts)
    assert rollouts.numbers["dead"] == 1 and rollouts.rows_consumed == 2 * rollouts.rows_per_window
