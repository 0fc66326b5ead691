"""The public functions of this room: train an engine on rewards, a teacher or preferences.

An engine is a model with its training step and its loss. It trains on windows, and a window is the rows
of one update. Here is a loop that learns from rewards, with windows of sampled answers:

    loss = monograph.policy_loss("dr_grpo")
    engine = monograph.Resident(model, loss=loss, optim=monograph.AdamW(lr=1e-5))
    answers = monograph.rollouts(engine, tokenizer, records, "number", max_new_tokens=64)
    for update in monograph.train(engine, answers, updates=200):
        print(answers.numbers["reward"])
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from monograph.data.corpus import Corpus
from monograph.data.options import ReadingOptions
from monograph.data.progress import ProgressCallback
from monograph.engine import Engine
from monograph.ensemble import Ensemble
from monograph.ensemble.member import MemberEngine
from monograph.errors import UsageError
from monograph.model.llama import Llama
from monograph.ranges import COUNT, between
from monograph.resident import Resident
from monograph.rl.advantages import ADVANTAGES, ratio_of
from monograph.rl.arrange import RolloutOptions
from monograph.rl.environments import OwnEnvironments
from monograph.rl.episodes import EpisodeDrawer
from monograph.rl.loss import PolicyLoss, kl_term
from monograph.rl.members import EPISODES, MembersDrawer, MembersRollouts
from monograph.rl.pairs import PairRows, read_pairs
from monograph.rl.preference_loss import PreferenceLoss
from monograph.rl.preferences import preference
from monograph.rl.prompts import Prompts, prompts_of
from monograph.rl.rewards import (
    EnvironmentReward,
    FunctionReward,
    Reward,
    TeacherReward,
    reward_of,
)
from monograph.rl.rollouts import Drawer, Rollouts
from monograph.text.tokenizer import Tokenizer

RewardLike = str | Reward | Callable[[str, str, Mapping[str, Any]], float | Mapping[str, float]]


def policy_loss(
    advantage: str = "dr_grpo",
    *,
    temperature: float = 1.0,
    updates: int = 1,
    kl: str = "none",
    kl_coef: float | None = None,
    entropy_coef: float | None = None,
) -> PolicyLoss:
    """Return the loss of answers with rewards, for an engine; see `rollouts`.

    Args:
        advantage: a name of `monograph.rl.advantages`, which has the equations.
        temperature: divides the logits, in sampling and in the loss.
        updates: the number of updates that use each sample.
        kl: "k1", "k2" or "k3", see `monograph.rl.loss.Kl`; "none": no KL term.
        kl_coef: the strength of the KL term.
        entropy_coef: the strength of a term that favours entropy, instead of a KL term; None: no
            such term.

    Raises:
        UsageError: a value is out of range, or the values do not go together.
    """
    if advantage not in ADVANTAGES:
        raise UsageError(f"advantage = {advantage!r}: expected one of {', '.join(ADVANTAGES)}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise UsageError(f"temperature = {temperature!r}: expected a number above 0")
    COUNT.require("updates", updates)
    term = kl_term(kl, kl_coef, entropy_coef, advantage)
    return PolicyLoss(temperature, ratio_of(advantage, updates), term, advantage, updates)


def rollouts(
    engine: Resident,
    tokenizer: Tokenizer,
    records: Iterable[Mapping[str, Any]],
    reward: RewardLike,
    *,
    prompts: int = 16,
    group: int = 8,
    max_new_tokens: int = 64,
    truncated: str = "keep",
    truncation_penalty: float = 0.0,
    draws: int = 1,
    epochs: int | None = None,
    seed: int = 0,
    trust_code: bool = False,
    **parameters: object,
) -> Rollouts:
    """Return windows for `monograph.train`, whose answers the engine's model samples on demand.

    A window has `group` answers to each of `prompts` prompts. On a CPU, in eager mode and at
    temperature 1, an answer's log-probabilities have the same bits in the loss as in sampling. The
    weights at this call become the reference of a KL term, so call this before you load a checkpoint.

    Args:
        engine: an engine of a language model, with a `policy_loss`.
        tokenizer: the model's tokenizer.
        records: records with a "prompt", which is a text or a list of messages, and the keys that
            the reward reads.
        reward: a value of the key rl.reward; or a `Reward`, such as `distill` returns; or a
            function of (prompt, answer, record), called in this process, which returns a number, or
            {name: number} of parts, whose sum is the score. With a reward of
            `environment`, an episode of several answers takes the place of an answer.
        prompts: number of prompts of a window.
        group: number of answers to each prompt, at least two.
        max_new_tokens: maximum number of tokens of an answer.
        truncated: "keep" or "mask" answers that are cut at max_new_tokens; the loss leaves masked
            answers out.
        truncation_penalty: is subtracted from the reward of an answer that is cut.
        draws: the maximum number of times that answers are sampled for a window. They are sampled
            again as long as fewer than `prompts` groups have unequal rewards.
        epochs: passes over the prompts; None: endless.
        seed: the seed of the order of prompts and of all sampling.
        trust_code: whether the programs of the reward "python" may run if the system has no
            namespaces to confine them.
        parameters: parameters of a reward that is given by name: `regex`, the regular expression of
            the reward "regex", or `schema`, the file of the reward "json-schema".

    Returns:
        An iterator. Its `numbers` are figures on the window that it returned last, and `state()` is
        its position.

    Raises:
        UsageError: an argument is out of range, or the engine has another loss.
        InputRefused: a record has no prompt, a prompt is too long, or a record lacks the keys that
            the reward reads.
    """
    # Only eager mode on a CPU computes an answer's log-probabilities with the same bits in sampling and
    # in the loss.
    exact = engine.step.scope == "none" and engine.step.device.type == "cpu"
    prepared = _prepare(
        engine,
        tokenizer,
        records,
        reward,
        exact=exact,
        prompts=prompts,
        group=group,
        max_new_tokens=max_new_tokens,
        truncated=truncated,
        truncation_penalty=truncation_penalty,
        draws=draws,
        epochs=epochs,
        seed=seed,
        trust_code=trust_code,
        **parameters,
    )
    if exact:
        prepared.model.use_attention("cached")
    drawer = prepared.drawer(engine)
    kl = prepared.options.kl
    if kl and kl.needs_reference:
        drawer.reference = [plane.param.clone() for plane in engine.step.planes]
    return Rollouts(drawer)


def member_rollouts(
    ensemble: Ensemble,
    tokenizer: Tokenizer,
    records: Iterable[Mapping[str, Any]],
    reward: RewardLike,
    *,
    seeds: Sequence[int],
    **options: Any,
) -> MembersRollouts:
    """Return windows for `monograph.train`, whose answers the members of an ensemble sample on demand,
    all in one decoder.

    The members have adapters on one base. Each samples the answers that it would sample alone, up to
    the rounding of its adapter's products.

    Args:
        ensemble: an ensemble of language models, with a `policy_loss` and each=True.
        tokenizer: the members' tokenizer.
        records: see `rollouts`.
        reward: see `rollouts`.
        seeds: for each member, the seed of the order of its prompts and of its sampling.
        options: the other arguments of `rollouts`.

    Returns:
        An iterator. Each of its `members` has `numbers`, the figures on the member's answers.

    Raises:
        UsageError: an argument is out of range, the ensemble has another loss, or its members have no
            adapters or adapters of a kind that one decoder cannot have.
        InputRefused: see `rollouts`.
    """
    if len(seeds) != ensemble.size:
        raise UsageError(f"{len(seeds)} seeds for {ensemble.size} members: give one each")
    if not ensemble.stacked_parameters.each:
        raise UsageError("members sample answers of their own: make the ensemble with each=True")
    records = list(records)
    drawers = []
    for number, seed in enumerate(seeds):
        # The options that are not given have the defaults of `rollouts`.
        defaults = rollouts.__kwdefaults__ or {}
        member_options = {**defaults, **options, "seed": seed}
        prepared = _prepare(ensemble, tokenizer, records, reward, exact=False, **member_options)
        if prepared.reward.environments is not None:
            raise UsageError(f"{EPISODES}: train the members one after another")
        drawers.append(prepared.drawer(MemberEngine(ensemble, number)))
    kl = drawers[0].options.kl
    if kl and kl.needs_reference:
        # The planes have the weights of all members, so one copy of them is the reference of each.
        reference = [plane.param.clone() for plane in ensemble.step.planes]
        for drawer in drawers:
            drawer.reference = reference
    return MembersRollouts(MembersDrawer(ensemble, drawers), list(map(Rollouts, drawers)))


class _Prepared(NamedTuple):
    """What sampling needs besides an engine.

    Attributes:
        model: the language model.
        prompts: its prompts.
        reward: scores the answers.
        options: how they are sampled and weighed.
    """

    model: Llama
    prompts: Prompts
    reward: Reward
    options: RolloutOptions

    def drawer(self, engine: Engine) -> Drawer:
        """Return the sampler for an engine."""
        drawer_class = EpisodeDrawer if self.reward.environments is not None else Drawer
        # The number of updates is not known here, so it is given as 0.
        return drawer_class(engine, self.prompts, self.reward, self.options, updates=lambda: 0)


def _prepare(
    engine: Engine,
    tokenizer: Tokenizer,
    records: Iterable[Mapping[str, Any]],
    reward: RewardLike,
    *,
    exact: bool,
    prompts: int,
    group: int,
    max_new_tokens: int,
    truncated: str,
    truncation_penalty: float,
    draws: int,
    epochs: int | None,
    seed: int,
    trust_code: bool,
    **parameters: object,
) -> _Prepared:
    """Check the arguments of `rollouts`, and read the records; `exact` is that of `RolloutOptions`.

    Raises:
        UsageError, InputRefused: see `rollouts`.
    """
    loss = engine.step.loss
    model = engine.model
    if not isinstance(loss, PolicyLoss) or not isinstance(model, Llama):
        raise UsageError(
            "rollouts needs an engine of a language model with loss=monograph.policy_loss(...)"
        )
    _require_counts(
        prompts=prompts, group=group, max_new_tokens=max_new_tokens, draws=draws, epochs=epochs or 1
    )
    arguments = {name: value for name, value in parameters.items() if value is not None}
    if isinstance(reward, str):
        reward = reward_of(reward, None, **arguments)
    elif arguments:
        raise UsageError(
            f"{next(iter(arguments))} is no argument of rollouts, nor a parameter of this reward, which has no name"
        )
    scorer = reward if isinstance(reward, Reward) else FunctionReward(reward)
    _require_scorer(scorer, loss, model, truncated, truncation_penalty)
    scorer.unconfined = scorer.unconfined or trust_code
    context = model.config.max_position_embeddings
    run_prompts = prompts_of(records, tokenizer, scorer, room=context - max_new_tokens)
    row_length = run_prompts.longest + max_new_tokens
    turns = 1
    discount = 1.0
    if isinstance(scorer, EnvironmentReward):
        # An episode may fill the model's context. Its last token is only a target, and takes no
        # position.
        row_length = context - 1
        turns = scorer.turns
        discount = scorer.discount
    options = RolloutOptions(
        prompts=prompts,
        group=group,
        max_new_tokens=max_new_tokens,
        temperature=loss.temperature,
        advantage=loss.advantage,
        draws=draws,
        length=row_length,
        packed=not exact,
        exact=exact,
        seed=seed,
        epochs=epochs,
        updates=loss.updates,
        kl=loss.kl,
        masks_truncated=truncated == "mask",
        truncation_penalty=truncation_penalty,
        turns=turns,
        discount=discount,
    )
    return _Prepared(model, run_prompts, scorer, options)


def _require_counts(**counts: int) -> None:
    """Refuse a count below 1, or below 2 for `group`, by its name.

    Raises:
        UsageError: a count is too small, or not a whole number.
    """
    for name, value in counts.items():
        minimum = 2 if name == "group" else 1
        if not COUNT.holds(value) or value < minimum:
            raise UsageError(f"{name} = {value!r}: expected a whole number from {minimum}")


def _require_scorer(
    scorer: Reward, loss: PolicyLoss, model: Llama, truncated: str, truncation_penalty: float
) -> None:
    """Refuse a reward, a loss and settings of truncation that do not go together.

    Raises:
        UsageError: the message says which.
    """
    if truncated not in ("keep", "mask"):
        raise UsageError(f"truncated = {truncated!r}: expected 'keep' or 'mask'")
    if not isinstance(truncation_penalty, int | float) or not 0 <= truncation_penalty < math.inf:
        raise UsageError(f"truncation_penalty = {truncation_penalty!r}: expected a number from 0")
    if truncated == "mask" and truncation_penalty:
        raise UsageError(
            "truncation_penalty lowers the reward of answers that truncated = 'mask' leaves out"
        )
    if not isinstance(scorer, TeacherReward):
        return
    if scorer.teacher is None:
        raise UsageError("a teacher is given as a model: reward=monograph.distill(teacher)")
    if scorer.teacher is model:
        raise UsageError(
            "the teacher is the model in training, which would be frozen: give a copy of it"
        )
    if loss.kl or truncated == "mask" or truncation_penalty:
        raise UsageError(
            "a teacher says what each token is worth: leave kl, truncated and truncation_penalty out"
        )
    teacher_config = scorer.teacher.config
    student_config = model.config
    if (
        teacher_config.vocab_size != student_config.vocab_size
        or teacher_config.max_position_embeddings < student_config.max_position_embeddings
    ):
        raise UsageError("the teacher has another vocabulary or fewer positions than the model")


def environment(environment: Callable[[], Any], *, turns: int = 8, discount: float = 1.0) -> Reward:
    """Return the reward of episodes with an environment, a class of this process; see `rollouts`.

    The class is as `monograph.rl.environments` describes it. An episode's score is the sum over its turns
    t = 0, 1, ... of discount^t times the turn's reward. The records need no prompt, since the
    environment opens each episode. A row has as many positions as the model.

    Args:
        environment: the class, which is called without arguments at the beginning of each episode.
        turns: the maximum number of answers of an episode.
        discount: from 0 to 1.

    Raises:
        UsageError: a number is out of range, or the class has no `reset` or `step`.
    """
    COUNT.require("turns", turns)
    between(0, 1).require("discount", discount)
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise UsageError(
                f"environment: expected a class with reset(record) and step(answer), not {environment!r:.60}"
            )
    return EnvironmentReward(OwnEnvironments(environment), turns, discount)


def distill(teacher: Llama) -> Reward:
    """Freeze a teacher, and return its reward, which compares it with the student on each token.

    The reward of a token is the teacher's log-probability - the student's. It lowers
    KL(student || teacher) on the student's own answers. If a record has a "teacher_prompt", the
    teacher reads that instead of the prompt.

    Args:
        teacher: a model with the student's tokenizer, on the student's device.
    """
    reward = TeacherReward()
    reward.teacher = teacher.requires_grad_(False).train(False)
    return reward


def pairs(
    source: str | Path,
    tokenizer: Tokenizer,
    *,
    labelled: bool = False,
    sequence_length: int = 256,
    held_out: float = 0.05,
    ignore_keys: str | Sequence[str] | None = None,
    bad_records: str = "refuse",
    progress: ProgressCallback | None = None,
) -> Corpus:
    """Read pairs of answers, or labelled answers, and arrange them in rows.

    Args:
        source: a file or a pattern of files; `monograph.rl.pairs.read_pairs` describes a record.
        tokenizer: the model's tokenizer.
        labelled: whether records have single answers, labelled good or bad, for the loss kto.
        sequence_length: T, the positions of a row. A row holds both answers of a pair, each after
            the prompt.
        held_out: the share of prompts that are held out.
        ignore_keys: keys of records that are ignored; None: none. Any other unknown key is refused.
        bad_records: "refuse" a bad record, or "skip" and count it.
        progress: see `monograph.data.progress`.

    Returns:
        the rows; their windows are `pairs(...).batches(...)`.

    Raises:
        InputRefused: a record is bad, or a pair is too long.
        UsageError: an argument is out of range.
    """
    if bad_records not in ("refuse", "skip"):
        raise UsageError(f"bad_records = {bad_records!r}: must be 'refuse' or 'skip'")
    COUNT.require("sequence_length", sequence_length)
    reading = ReadingOptions(
        str(source),
        tokenizer=tokenizer,
        sequence_length=sequence_length,
        held_out=held_out,
        ignore_keys=ignore_keys,
        bad_records=bad_records,
    )
    return read_pairs(reading, labelled=labelled, progress=progress)


def preference_loss(pairs: Corpus, loss: str = "dpo", **parameters: float) -> PreferenceLoss:
    """Return the loss that compares the answers of pairs, for an engine.

    The reference is the weights before the first update. All pairs are scored with them once, just
    before that update, so the figures of an earlier evaluation have no meaning. Make a new loss for each
    engine.

    Args:
        pairs: the result of `monograph.pairs`.
        loss: "dpo", "robust", "ipo", "simpo", "orpo" or "kto"; `monograph.rl.preferences` has the
            equations.
        parameters: parameters of the loss by name, such as beta=0.1.

    Raises:
        UsageError: there is no such loss, or it does not go with these answers.
    """
    choice = preference(loss, **parameters)
    sides = [pairs.train, pairs.held_out]
    rows = [side for side in sides if isinstance(side, PairRows)]
    if len(rows) < len(sides):
        raise UsageError(
            "preference_loss compares pairs: give it what monograph.pairs(...) returns"
        )
    labels = np.concatenate([side.labels for side in rows])
    if choice.labelled != bool(labels.any()):
        if choice.labelled:
            expected = "labelled answers: read them with labelled=True"
        else:
            expected = "pairs, not labelled answers"
        raise UsageError(f"loss = {loss!r} compares {expected}")
    result = PreferenceLoss(choice, len(labels), max(side.max_row_answers for side in rows))
    # Answers are numbered from 1.
    result.labels[1:] = torch.from_numpy(labels)
    result.sides = rows if choice.needs_reference else ()
    return result
