"""What the library offers of this room: train on judged answers with an engine of one's own.

The loss is given to the engine, and the answers are its windows:

    engine = monograph.Resident(model, loss=monograph.policy_loss("dr_grpo"),
    optim=monograph.AdamW(lr=1e-5)) answers = monograph.rollouts(engine, tokenizer, records,
    "number", group=8, max_new_tokens=64) for update in monograph.train(engine, answers,
    updates=200):
        print(answers.numbers["reward"])
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from monograph.data.corpus import Corpus
from monograph.data.options import ReadingOptions
from monograph.data.progress import Progress
from monograph.errors import UsageError
from monograph.model.llama import Llama
from monograph.ranges import COUNT
from monograph.resident import Resident
from monograph.rl.advantages import ADVANTAGES, ratio_of
from monograph.rl.arrange import Options
from monograph.rl.loss import PolicyLoss, penalty
from monograph.rl.pairs import PairRows, read_pairs
from monograph.rl.preferences import PreferenceLoss, preference
from monograph.rl.prompts import prompts_of
from monograph.rl.rewards import Called, Reward, Taught, reward_of
from monograph.rl.rollouts import Drawer, Rollouts
from monograph.text.tokenizer import Tokenizer

Scores = str | Reward | Callable[[str, str, Mapping[str, Any]], float | Mapping[str, float]]


def policy_loss(
    advantage: str = "dr_grpo",
    *,
    temperature: float = 1.0,
    updates: int = 1,
    kl: str = "none",
    kl_coef: float | None = None,
    entropy_coef: float | None = None,
) -> PolicyLoss:
    """Return the loss of answers that are rewarded, for an engine; see `rollouts`.

    Args:
        advantage: a name of `monograph.rl.advantages`, which has their equations.
        temperature: divides the logits, of the draws and in the loss.
        updates: updates that are made of each draw.
        kl: "none", "k1", "k2" or "k3", a term as `monograph.rl.loss.Kl` describes it.
        kl_coef: its strength.
        entropy_coef: the strength of a term for even choices, in place of `kl`.

    Raises:
        UsageError: a value is out of range.
    """
    if advantage not in ADVANTAGES:
        raise UsageError(f"advantage = {advantage!r}: expected one of {', '.join(ADVANTAGES)}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise UsageError(f"temperature = {temperature!r}: expected a number above 0")
    COUNT.require("updates", updates)
    term = penalty(kl, kl_coef, entropy_coef, advantage)
    return PolicyLoss(temperature, ratio_of(advantage, updates), term, advantage, updates)


def rollouts(
    engine: Resident,
    tokenizer: Tokenizer,
    records: Iterable[Mapping[str, Any]],
    reward: Scores,
    *,
    regex: str | None = None,
    schema: str | None = None,
    prompts: int = 16,
    group: int = 8,
    max_new_tokens: int = 64,
    truncated: str = "keep",
    truncation_penalty: float = 0.0,
    draws: int = 1,
    epochs: int | None = None,
    seed: int = 0,
    trust_code: bool = False,
) -> Rollouts:
    """Return the windows of `monograph.train` with answers that the engine's model draws when each
    is asked for.

    A window has `group` answers to each of `prompts` prompts. On a CPU, in eager mode and at
    temperature 1, answers are scored in the bits in which they were drawn. A KL term's reference is
    the weights at this call, so load a checkpoint after it.

    Args:
        engine: an engine of a language model, with a `policy_loss`.
        tokenizer: the model's.
        records: each with a "prompt", a text or a list of messages, and what the reward reads.
        reward: a name as the key rl.reward takes it; or a `Reward`, such as `distill` returns; or a
            function of (prompt, answer, record), called in this process, which returns a number, or
            {name: number} to be added up.
        regex: the regular expression of the reward "regex".
        schema: the file of the reward "json-schema".
        prompts: prompts of a window.
        group: answers to each, at least two.
        max_new_tokens: most tokens of an answer.
        truncated: "keep" answers that this limit cuts, or "mask" them: leave them out of the loss.
        truncation_penalty: what the reward of an answer that is cut is lowered by.
        draws: most times that a window draws, until it has as many groups of unequal rewards as
            prompts.
        epochs: passes over the prompts; None: without end.
        seed: of the prompts' order and of all draws.
        trust_code: whether the programs of "python" may run where the system allows no namespaces
            to confine them.

    Returns:
        An iterator; its `numbers` are figures on the window that it returned last, and `state()` is
        its position.

    Raises:
        UsageError: an argument is out of range, or the engine has another loss.
        InputRefused: a record has no prompt, one that leaves no room for an answer, or not what the
            reward reads.
    """
    loss, model = engine.step.loss, engine.model
    if not isinstance(loss, PolicyLoss) or not isinstance(model, Llama):
        raise UsageError(
            "rollouts needs an engine of a language model with loss=monograph.policy_loss(...)"
        )
    _require_counts(
        prompts=prompts, group=group, max_new_tokens=max_new_tokens, draws=draws, epochs=epochs or 1
    )
    if isinstance(reward, str):
        reward = reward_of(reward, regex=regex, schema=schema)
    scorer = reward if isinstance(reward, Reward) else Called(reward)
    _require_scorer(scorer, loss, model, truncated, truncation_penalty)
    scorer.unconfined = scorer.unconfined or trust_code
    asked = prompts_of(
        records, tokenizer, scorer, model.config.max_position_embeddings - max_new_tokens
    )
    exact = engine.step.scope == "none" and engine.step.device.type == "cpu"
    options = Options(
        prompts,
        group,
        max_new_tokens,
        loss.temperature,
        loss.advantage,
        draws,
        asked.longest + max_new_tokens,
        not exact,
        exact,
        seed,
        epochs,
        loss.updates,
        loss.kl,
        truncated == "mask",
        truncation_penalty,
    )
    if exact:
        model.use_attention("cached")
    drawer = Drawer(engine, asked, scorer, options, lambda: 0)
    if loss.kl and loss.kl.needs_reference:
        drawer.reference = [plane.param.clone() for plane in engine.step.planes]
    return Rollouts(drawer)


def _require_counts(**counts: int) -> None:
    for name, value in counts.items():
        least = 2 if name == "group" else 1
        if not COUNT.holds(value) or value < least:
            raise UsageError(f"{name} = {value!r}: expected a whole number from {least}")


def _require_scorer(
    scorer: Reward, loss: PolicyLoss, model: Llama, truncated: str, truncation_penalty: float
) -> None:
    """Refuse what does not go with what scores answers."""
    if truncated not in ("keep", "mask"):
        raise UsageError(f"truncated = {truncated!r}: expected 'keep' or 'mask'")
    if not isinstance(truncation_penalty, int | float) or not 0 <= truncation_penalty < math.inf:
        raise UsageError(f"truncation_penalty = {truncation_penalty!r}: expected a number from 0")
    if truncated == "mask" and truncation_penalty:
        raise UsageError(
            "truncation_penalty lowers the reward of answers that truncated = 'mask' leaves out"
        )
    if not isinstance(scorer, Taught):
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
    theirs, own = scorer.teacher.config, model.config
    if (
        theirs.vocab_size != own.vocab_size
        or theirs.max_position_embeddings < own.max_position_embeddings
    ):
        raise UsageError("the teacher has another vocabulary or fewer positions than the model")


def distill(teacher: Llama) -> Reward:
    """Return a reward that a teacher gives: how much likelier it finds each token of an answer than
    the student does.

    It lowers KL(student || teacher) on the student's own answers. The teacher is frozen. It reads a record's
    "teacher_prompt", if there is one, in place of the prompt.

    Args:
        teacher: a model with the student's tokenizer, on its device.
    """
    reward = Taught()
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
    progress: Progress | None = None,
) -> Corpus:
    """Read pairs of answers, or labelled ones, and arrange them in rows; `pairs(...).batches(...)`
    are their windows.

    Args:
        source: a file or a pattern of files; `monograph.rl.pairs.read_pairs` says what a record
            has.
        tokenizer: the model's.
        labelled: whether records have single answers, labelled good or bad, for the loss kto.
        sequence_length: T, positions of a row, which holds both answers of a pair, each after its
            prompt.
        held_out: the share of prompts that are held out.
        ignore_keys: keys of records that are left out; any other unknown key is refused.
        bad_records: "refuse" a bad record, or "skip" and count it.
        progress: see `monograph.data.progress`.

    Raises:
        InputRefused: a record is bad, or a pair too long.
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

    The reference is the weights of the first update, with which all pairs are scored once before
    it; figures of an evaluation mean something from then on. A loss belongs to one engine.

    Args:
        pairs: what `monograph.pairs` returns.
        loss: "dpo", "robust", "ipo", "simpo", "orpo" or "kto"; `monograph.rl.preferences` has their
            equations.
        parameters: those of the loss by their names, such as beta=0.1.

    Raises:
        UsageError: there is no such loss, or it does not go with these answers.
    """
    chosen = preference(loss, **parameters)
    sides = [pairs.train, pairs.held_out]
    rows = [side for side in sides if isinstance(side, PairRows)]
    if len(rows) < len(sides):
        raise UsageError(
            "preference_loss compares pairs: give it what monograph.pairs(...) returns"
        )
    labels = np.concatenate([side.labels for side in rows])
    if chosen.labelled != bool(labels.any()):
        kind = (
            "labelled answers: read them with labelled=True"
            if chosen.labelled
            else "pairs, not labelled answers"
        )
        raise UsageError(f"loss = {loss!r} compares {kind}")
    made = PreferenceLoss(chosen, len(labels), max(side.most for side in rows))
    made.labels[1:] = torch.from_numpy(labels)
    made.sides = rows if chosen.needs_reference else ()
    return made
