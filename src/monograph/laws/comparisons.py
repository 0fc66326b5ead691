"""Define what each law compares, and its bound, for `check --laws` and for tests/laws.

The laws are those of docs/laws.md, by their numbers.

| law | comparison |
|---|---|
| 1 of compiled steps, 3 of captured steps, 6, 9 | `error_within`; in float64 `equal_in_float64` |
| 2 | `accumulated_is_large_batch` |
| 1 of replayed steps, 3 of eager steps, 4, 10, 18 | `differing`; after training, of what `outcome` returns |
| 5 | `member_is_alone` |
| 7 | `monograph.laws.reference_sampler` |
| 8 | `cached_is_full`, `log_probabilities_agree`; `differing_draws`, with the tokens of `greedy_ids` |
| 16 | `log_probabilities_agree`; where both must have the same bits, `differing` |
| 19 | `differing_draws` |

Errors are measured in float64. A bound is fixed, or derived from the error that a naive path makes
in the same dtype, so none is chosen to fit a result.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from monograph.loop import EngineState
from monograph.model.llama import Llama
from monograph.step import Update

# The relative error that rounding in float64 may cause between two ways to compute the same.
FLOAT64_BOUND = 1e-12
# Law 2: the relative error of an accumulated gradient.
ACCUMULATED_BOUND = {torch.float32: 1e-6, torch.float64: FLOAT64_BOUND}
# Law 5: the relative error of losses, norms, weights and moments of a member that was trained in
# float64.
MEMBER_BOUND = 1e-10
# Laws 8 and 16: the absolute error of a log-probability in fp32.
LOG_PROBABILITY_BOUND = 1e-5


class LawComparison(NamedTuple):
    """The result of a comparison. As a boolean it says whether the law holds.

    Attributes:
        error: how far the fast path is off; with the bound 0, how many values differ.
        bound: the largest error that the law allows.
        why: why the paths could not be compared; "": they were compared.
    """

    error: float
    bound: float
    why: str = ""

    def __bool__(self) -> bool:
        return self.holds

    @property
    def holds(self) -> bool:
        """Return whether the law holds.

        An error that is infinite or NaN breaks it, even if the naive path's error, and with it the bound,
        is infinite as well.
        """
        return not self.why and math.isfinite(self.error) and self.error <= self.bound

    @property
    def in_words(self) -> tuple[str, str, str]:
        """Return the error, the bound and the verdict as texts."""
        if self.bound:
            error = f"{self.error:.1e}"
            bound = f"{self.bound:.1e}"
        else:
            error = f"{self.error:.0f} differ"
            bound = "0"
        verdict = "holds" if self.holds else "BROKEN"
        if self.why:
            verdict += f": {self.why}"
        return error, bound, verdict


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ‖found - expected‖ / ‖expected‖ in float64.

    It is ‖found‖ if `expected` is zero, and infinite if there is a NaN.
    """
    assert found.shape == expected.shape, f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    # On the host, because often one of them is there and the other one on a GPU.
    found = found.detach().cpu().double()
    expected = expected.detach().cpu().double()
    difference = (found - expected).norm().item()
    scale = expected.norm().item()
    error = difference / scale if scale > 0 else difference
    return float("inf") if math.isnan(error) else error


def error_within(
    found: Tensor,
    naive: Tensor,
    exact: Tensor,
    k: float = 2.0,
    rounding: float | None = None,
) -> LawComparison:
    """Compare a fast path with the naive path of the same dtype, both by their errors against
    float64.

        error(found) ≤ k · (error(naive) + rounding)

    Without the rounding, a naive path that happens to be exact would demand an exact result.

    Use: `assert error_within(found, naive, exact)`. The tests of ml-cross-entropy compare its backward
    pass in this way (tests/test_cce_loss_backward.py), and those of attention-gym with k = 2
    (attn_gym/testing/kda.py).

    Args:
        found: the result under test, in any floating dtype.
        naive: the same result by the obvious way in the same dtype.
        exact: the same result in float64.
        k: how many times the naive path's error is allowed.
        rounding: the error of merely storing the exact result, by default eps / 2 of found's dtype.
            It is 0 if the naive path computes in fewer bits than it stores, because such a path is
            never exact.
    """
    assert found.dtype == naive.dtype, f"{found.dtype} is compared with {naive.dtype}"
    assert exact.dtype == torch.float64, f"the reference is {exact.dtype}, not float64"
    if rounding is None:
        rounding = torch.finfo(found.dtype).eps / 2
    return LawComparison(
        error=relative_error(found, exact), bound=k * (relative_error(naive, exact) + rounding)
    )


def equal_in_float64(found: Tensor, expected: Tensor) -> LawComparison:
    """Compare two ways to compute the same in float64."""
    return LawComparison(error=relative_error(found, expected), bound=FLOAT64_BOUND)


def accumulated_is_large_batch(accumulated: Tensor, large_batch: Tensor) -> LawComparison:
    """Compare the two gradients of law 2: of micro-batches, and of one large batch.

    Both are in fp32 or float64.
    """
    return LawComparison(
        error=relative_error(accumulated, large_batch), bound=ACCUMULATED_BOUND[accumulated.dtype]
    )


def outcome(
    state: EngineState, updates: Iterable[Update] = (), member: int | None = None
) -> dict[str, Tensor]:
    """Return copies of all results of training by name: each update's numbers, and the state.

    The names are such as "update 3 loss", "model lm_head.weight" and "scalar index".

    Args:
        state: the engine's state, or the member's.
        updates: what the engine's updates returned.
        member: in an ensemble, the index of the member whose numbers are taken from the updates; None:
            the engine trains one model.
    """
    results = dict[str, Tensor]()
    # Fields with `compare=False`, such as times, differ between equal runs.
    numbers = [each.name for each in fields(Update) if each.compare and each.name != "index"]
    for update in updates:
        for name in numbers:
            value = torch.as_tensor(getattr(update, name))
            results[f"update {update.index} {name}"] = value if member is None else value[member]
    results |= {f"model {name}": tensor for name, tensor in state.model.items()}
    results |= {f"optimizer {name}": tensor for name, tensor in state.optimizer.items()}
    results |= {f"scalar {name}": torch.as_tensor(value) for name, value in state.scalars.items()}
    return {name: tensor.detach().clone() for name, tensor in results.items()}


def differing(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, equal_nan: bool = False
) -> list[str]:
    """Return the names of tensors that differ in a bit, or that only one of the two has.

    Args:
        found: tensors by name.
        expected: the tensors to compare them with, by name.
        equal_nan: whether a NaN equals a NaN at the same place.
    """
    unmatched = sorted(found.keys() ^ expected.keys())
    return unmatched + [
        name
        for name, tensor in found.items()
        if name in expected and not _same_bits(tensor, expected[name], equal_nan)
    ]


def _same_bits(found: Tensor, expected: Tensor, equal_nan: bool) -> bool:
    """Return whether two tensors have the same dtype, shape and values."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    found = found.cpu()
    expected = expected.cpu()
    if not equal_nan or not found.is_floating_point():
        return torch.equal(found, expected)
    is_nan = found.isnan()
    same_places = torch.equal(is_nan, expected.isnan())
    return same_places and torch.equal(found[~is_nan], expected[~is_nan])


def member_is_alone(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], least: float = 0.0
) -> LawComparison:
    """Compare the outcomes of law 5 in float64: a member's, and that of the same model trained alone.

    Losses, gradient norms, weights and moments may differ by a relative error. It is measured twice, by
    the norm of the difference and by its largest element: the norm would hide one wrong element, and the
    largest element would hide many that are slightly wrong. Learning rates, counts and counters must be
    equal.

    Args:
        found: the member's outcome.
        expected: the outcome of the model trained alone.
        least: if the norm (or the largest element) of a weight or a moment is below this, its error is
            relative to `least` instead. This is for weights such as a bias before a batch norm, whose
            gradient and moments are zero except for rounding.
    """
    broken = LawComparison(error=float("inf"), bound=MEMBER_BOUND)
    if found.keys() != expected.keys():
        return broken
    rounded = [name for name, tensor in expected.items() if _is_rounded(name, tensor)]
    exact = {name: tensor for name, tensor in expected.items() if name not in rounded}
    if differing({name: found[name] for name in exact}, exact):
        return broken
    errors = list[float]()
    for name in rounded:
        difference = found[name] - expected[name]
        smallest = 0.0 if name.startswith("update") else least
        for order in (2, float("inf")):
            scale = max(smallest, float(vector_norm(expected[name], order)))
            error = float(vector_norm(difference, order))
            errors.append(error / scale if scale else error)
    # `max` could overlook a NaN.
    if not all(map(math.isfinite, errors)):
        return broken
    return LawComparison(error=max(errors), bound=MEMBER_BOUND)


def _is_rounded(name: str, tensor: Tensor) -> bool:
    """Return whether a result of `outcome` may differ by rounding."""
    first_word, *_, last_word = name.split(" ")
    is_state = first_word in ("model", "optimizer") and tensor.is_floating_point()
    return is_state or last_word in ("loss", "grad_norm")


def cached_is_full(found_SV: Tensor, full_SV: Tensor) -> LawComparison:
    """Compare the logits of law 8 in float64: of steps with a cache, and of full passes.

    The error is the larger of two: the largest relative error of a step's logits, and the largest error
    of a single logit relative to 1 + |logit|.

    Args:
        found_SV: the logits of S steps, [..., V].
        full_SV: those of full passes.
    """
    assert found_SV.shape == full_SV.shape
    steps = zip(found_SV.flatten(0, -2), full_SV.flatten(0, -2), strict=True)
    error_of_steps = max(relative_error(found, full) for found, full in steps)
    error_of_logits = float(((found_SV - full_SV).abs() / (1 + full_SV.abs())).max())
    return LawComparison(error=max(error_of_steps, error_of_logits), bound=FLOAT64_BOUND)


@torch.no_grad()
def greedy_ids(
    model: Llama, prompt_ids: Sequence[int], count: int, end_id: int | None = None
) -> list[int]:
    """Return the likeliest continuation of a prompt, by a full pass over the text for each token.

    Args:
        model: the model.
        prompt_ids: the prompt.
        count: the number of tokens to write at most.
        end_id: the token after which nothing is written; None: there is none.
    """
    ids = torch.tensor([*prompt_ids], device=model.lm_head.weight.device)
    written = list[int]()
    while len(written) < count and (not written or written[-1] != end_id):
        likeliest = model.logits(model(ids[None])[0, -1]).argmax()
        ids = torch.cat([ids, likeliest[None]])
        written.append(int(likeliest))
    return written


def differing_draws(found: Sequence[object], expected: Sequence[object]) -> int:
    """Return the number of places at which two sequences differ.

    Their items are tokens, or pairs of a token and its log-probability. A place that only the longer
    sequence has counts, too.
    """
    return sum(one != other for one, other in zip_longest(found, expected))


def log_probabilities_agree(found: Tensor, expected: Tensor) -> LawComparison:
    """Compare log-probabilities that decoding reports with those of another pass over the text.

    The other pass is the full pass of law 8, or the pass in training of law 16.
    """
    error = float((found.cpu() - expected.cpu()).abs().max())
    return LawComparison(
        error=float("inf") if math.isnan(error) else error, bound=LOG_PROBABILITY_BOUND
    )
