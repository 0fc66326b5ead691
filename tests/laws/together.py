"""What every combination of precision, recomputation, compile scope and accumulation must do, of
any model.

Laws 1, 2, 3, 9 and 10 in one check, and law 5 of two members.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from adapted import trained
from batches import captured_to_train, copied, flat_gradient, packed, ragged
from monograph.ensemble import Ensemble
from monograph.graph.remat import Remat
from monograph.laws.comparisons import error_within, member_is_alone, outcome, relative_error
from monograph.model.llama import Llama
from monograph.optim import AdamW
from monograph.resident import Resident

POLICIES = (Remat.Off(), Remat.Pointwise(), Remat.Budget(0.3), Remat.Full(), Remat.Offload())
SCOPES = ("none", "whole", "blocks")
LAYERS = 1  # by day: each further one is the same lines again, in a graph, too; by night two
ROWS = 6
SPLITS = (ROWS, 4)  # rows of a micro-batch: all at once, or two, the second one filled up


def cross(precisions: Sequence[str], *further: Sequence[Any]) -> list[tuple[Any, ...]]:
    """(precision, policy, scope, split, ...), all that are possible.

    What is sent to the host crosses between graphs; the refusal is a test of its own.
    """
    every = itertools.product(precisions, POLICIES, SCOPES, SPLITS, *further)
    return [each for each in every if each[1:3] != (Remat.Offload(), "whole")]


def pairs(each: Sequence[Any]) -> set[Any]:
    return set(itertools.combinations(enumerate(each), 2))


def pairwise(every: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A part of a cross that has every pair of choices: each time the combination with the most new
    ones.
    """
    seen, chosen = set(), []
    while new := max(every, key=lambda each: len(pairs(each) - seen)):
        if not pairs(new) - seen:
            return chosen
        seen |= pairs(new)
        chosen.append(new)
    return chosen


def by_day(chosen: Sequence[tuple[Any, ...]], *compiled: int) -> list[Any]:
    """The combinations as parameters of a test; slow are those whose every choice one before them
    has.

    Eager ones come first, as they cost little. Compiled ones with a budget come last, as each layer
    is traced for itself there. `compiled`: places whose every choice is compiled once, too.
    """
    seen, parameters = set[Any](), []
    for each in sorted(
        chosen, key=lambda each: (each[2] != "none") * (1 + isinstance(each[1], Remat.Budget))
    ):
        has = {*enumerate(each), *((place, each[place], each[2] != "none") for place in compiled)}
        parameters.append(pytest.param(*each, marks=pytest.mark.slow if has <= seen else ()))
        seen |= has
    return parameters


def gradient(engine: Resident, batch: Any) -> Tensor:
    """Of a window, unscaled; what was accumulated is forgotten again."""
    engine.accumulate(batch)
    found = flat_gradient(engine.model).clone() / engine.step.loss_scale
    engine.step.discard()
    return found


def separate_gradient(model: Llama, head: Tensor, batch: Any) -> Tensor:
    """The slow, obviously correct path: float64, every document a row of its own, one dense loss,
    one backward pass.
    """
    losses, count = [], 0
    for row in range(ROWS):
        for part in (slice(0, 10), slice(10, None)):
            targets = batch["targets"][row, part]
            logits = model(batch["tokens"][row : row + 1, part])[0] @ head.T
            losses.append(cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
            count += int((targets != -100).sum())
    (torch.stack(losses).nansum() / count).backward()
    return flat_gradient(model)


def stored_first(each: Sequence[Any]) -> bool:
    """A key that sorts first what recomputes nothing, whose graph of a whole step is traced at a
    third of the cost.
    """
    return each[1] != Remat.Off()


def backend_by_day(policy: Any) -> str:
    """Dynamo's graphs as they are; AOT autograd, which all go through by night, chooses only what a
    budget keeps.
    """
    return "aot_eager" if isinstance(policy, Remat.Budget) else "eager"


def check(
    made: Callable[..., Resident],
    exact: Tensor,
    policy: Any,
    scope: str,
    split: int,
    backend: str = "aot_eager",
) -> Resident:
    """Compare the engines `made(policy, split)` with the exact gradient and with one another; the
    one that trained.
    """
    batch = packed(ROWS)
    naive = gradient(made(Remat.Off(), ROWS), batch)
    mine = made(policy, split)
    frozen = {
        name: p.detach().clone() for name, p in mine.model.named_parameters() if not p.requires_grad
    }
    if scope != "none":
        captured_to_train(mine, batch, backend, scope)
    # Laws 1, 2 and 9. fp8 rounds by the largest number of a micro-batch: another split, other
    # roundings as large.
    assert error_within(gradient(mine, batch), naive, exact, rounding=5e-7)
    assert relative_error(naive, exact) < 0.3
    if scope == "none":  # law 3: bits
        assert torch.equal(gradient(mine, batch), gradient(made(Remat.Off(), split), batch))
    # Law 10: taken up after two updates, bits of the third. A captured engine goes back itself, as
    # another would be compiled to the same graphs; that capturing leaves a loaded state alone is a
    # test of law 1.
    for seed in range(2):
        mine.accumulate(packed(ROWS, seed))
        mine.update()
    kept, ends = copied(mine.state()), []
    for resumed in (mine, made(policy, split) if scope == "none" else mine):
        if ends:
            resumed.load_state(kept)
        resumed.accumulate(packed(ROWS, 2))
        resumed.update()
        ends.append(copied(resumed.state()).model)
    assert all(
        torch.equal(one, two) for one, two in zip(*(end.values() for end in ends), strict=True)
    )
    assert set(kept.model) == {name for name, p in mine.model.named_parameters() if p.requires_grad}
    assert not any(torch.equal(kept.model[name], now) for name, now in mine.state().model.items())
    assert all(
        torch.equal(p, frozen[name]) for name, p in mine.model.named_parameters() if name in frozen
    )
    return mine


def members_are_alone(made: Callable[[], Llama]) -> int:
    """Law 5, in fp64: two members of one base, after two updates; gives how many tensors are
    trained.
    """

    def members() -> list[Llama]:
        found = [made().double() for _ in range(2)]
        trained(found[1], seed=7)
        return found

    together = Ensemble(members(), optim=AdamW(lr=1e-2), clip=0.5)
    solo = [Resident(each, optim=AdamW(lr=1e-2), clip=0.5) for each in members()]
    for seed in range(2):
        for each in (together, *solo):
            each.accumulate(ragged(4, seed))
            each.update()
    for number, alone in enumerate(solo):
        found, expected = together.member_state(number), alone.state()
        assert member_is_alone(outcome(found), outcome(expected))
    return len(expected.model)
