"""Define what each law compares, and its bound, for `check --laws` and for tests/laws.

| law | comparison |
|---|---|
| 1 compiled, 3 captured, 6, 9 | `error_within`; in float64 `equal_in_float64` |
| 2 | `accumulated_is_large_batch` |
| 1 replayed, 3 eager, 4, 10, 18 | `differing`, of what `outcome` returns if engines have trained |
| 5 | `member_is_alone` |
| 7 | `monograph.laws.reference_sampler` |
| 8 | `cached_is_full`, `log_probabilities_agree`, `differing_draws` from `greedy_ids` |
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

# A relative error that float64 leaves between two ways to compute the same.
FLOAT64_BOUND = 1e-12
# Law 2: the relative error of an accumulated gradient.
ACCUMULATED_BOUND = {torch.float32: 1e-6, torch.float64: FLOAT64_BOUND}
# Law 5: the relative error of what a member's training in float64 leaves.
MEMBER_BOUND = 1e-10
# Laws 8 and 16: the absolute error of a log-probability in fp32.
LOG_PROBABILITY_BOUND = 1e-5


class LawComparison(NamedTuple):
    """The result of a comparison, which is true if the law holds.

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
        """Return whether the law holds; it does not if the error is infinite or NaN.

        The naive path's error, and with it the bound, may be infinite as well.
        """
        return not self.why and math.isfinite(self.error) and self.error <= self.bound

    @property
    def in_words(self) -> tuple[str, str, str]:
        """Return the error, the bound and the verdict as texts."""
        if self.bound:
            error, bound = f"{self.error:.1e}", f"{self.bound:.1e}"
        else:
            error, bound = f"{self.error:.0f} differ", "0"
        if self.holds:
            return error, bound, "holds"
        return error, bound, f"BROKEN: {self.why}" if self.why else "BROKEN"


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ‖found - expected‖ / ‖expected‖ in float64; infinite for NaN, absolute where `expected`
    is zero.

    It is computed on the host, as the exact result often is there and the other one on a GPU.
    """
    assert found.shape == expected.shape, f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    found, expected = (tensor.detach().cpu().double() for tensor in (found, expected))
    difference = (found - expected).norm().item()
    scale = expected.norm().item()
    error = difference / scale if scale > 0 else difference
    return error if error == error else float("inf")


def error_within(
    found: Tensor,
    naive: Tensor,
    exact: Tensor,
    k: float = 2.0,
    rounding: float | None = None,
) -> LawComparison:
    """Compare a fast path with the naive path of the same dtype, both by their errors against
    float64.

    error(found) ≤ k · (error(naive) + rounding). With the rounding, a naive path that happens to be
    exact does not ask for the impossible.

    Use: `assert error_within(found, naive, exact)`. After the test that ml-cross-entropy does for
    its backward (tests/test_cce_loss_backward.py) and the k = 2 of attention-gym
    (attn_gym/testing/kda.py).

    Args:
        found: the result under test, in any floating dtype.
        naive: the same result by the obvious way in the same dtype.
        exact: the same result in float64.
        k: how many times the naive path's error is allowed.
        rounding: the error of merely storing the exact result, by default eps / 2 of found's dtype.
            0: the naive path computed in fewer bits than it stores, so it is far from exact.
    """
    assert found.dtype == naive.dtype, f"{found.dtype} is compared with {naive.dtype}"
    assert exact.dtype == torch.float64, f"the reference is {exact.dtype}, not float64"
    if rounding is None:
        rounding = torch.finfo(found.dtype).eps / 2
    return LawComparison(
        relative_error(found, exact), k * (relative_error(naive, exact) + rounding)
    )


def equal_in_float64(found: Tensor, expected: Tensor) -> LawComparison:
    """Compare two ways to compute the same in float64."""
    return LawComparison(relative_error(found, expected), FLOAT64_BOUND)


def accumulated_is_large_batch(accumulated: Tensor, large_batch: Tensor) -> LawComparison:
    """Compare law 2's gradients: of micro-batches, in fp32 or float64, and of one large batch."""
    return LawComparison(
        relative_error(accumulated, large_batch), ACCUMULATED_BOUND[accumulated.dtype]
    )


def outcome(
    state: EngineState, updates: Iterable[Update] = (), member: int | None = None
) -> dict[str, Tensor]:
    """Return copies of all that training leaves, by name: each update's numbers, and the state.

    Args:
        state: the engine's state, or that of the member.
        updates: what the engine's updates returned.
        member: the number of a member of an ensemble, whose numbers are taken; None: the engine
            trains one model.
    """
    left = dict[str, Tensor]()
    numbers = [each.name for each in fields(Update) if each.compare and each.name != "index"]
    for update in updates:
        for name in numbers:
            value = torch.as_tensor(getattr(update, name))
            left[f"update {update.index} {name}"] = value if member is None else value[member]
    left |= {f"model {name}": tensor for name, tensor in state.model.items()}
    left |= {f"optimizer {name}": tensor for name, tensor in state.optimizer.items()}
    left |= {f"scalar {name}": torch.as_tensor(value) for name, value in state.scalars.items()}
    return {name: tensor.detach().clone() for name, tensor in left.items()}


def differing(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, equal_nan: bool = False
) -> list[str]:
    """Return the names of tensors that differ in a bit, or that only one of the two has.

    Args:
        found: tensors by name.
        expected: the other ones.
        equal_nan: whether a NaN equals a NaN at the same place.
    """
    unmatched = sorted(found.keys() ^ expected.keys())
    return unmatched + [
        name
        for name, tensor in found.items()
        if name in expected and not _same_bits(tensor, expected[name], equal_nan)
    ]


def _same_bits(found: Tensor, expected: Tensor, equal_nan: bool) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    found, expected = found.cpu(), expected.cpu()
    if not equal_nan or not found.is_floating_point():
        return torch.equal(found, expected)
    number = ~found.isnan()
    return torch.equal(number, ~expected.isnan()) and torch.equal(found[number], expected[number])


def member_is_alone(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], least: float = 0.0
) -> LawComparison:
    """Compare law 5's outcomes in float64: a member's, and that of the same model trained alone.

    Losses, norms, weights and moments have a relative error, by their norm and by their largest
    number: a norm hides one wrong element, and the largest number many that are slightly wrong.
    Learning rates, counts and counters must be equal.

    Args:
        found: the member's outcome.
        expected: that of the model trained alone.
        least: the errors of weights and moments whose norm is below this are relative to this. It
            is for models in which some gradients cancel, as that of a bias before a batch norm
            does, so that their moments are nothing but rounding.
    """
    rounded = [name for name, tensor in expected.items() if _is_rounded(name, tensor)]
    exact = {name: tensor for name, tensor in expected.items() if name not in rounded}
    if found.keys() != expected.keys() or differing({name: found[name] for name in exact}, exact):
        return LawComparison(float("inf"), MEMBER_BOUND)
    errors = list[float]()
    for name in rounded:
        difference = found[name] - expected[name]
        smallest = 0.0 if name.startswith("update") else least
        for order in (2, float("inf")):
            scale = max(smallest, float(vector_norm(expected[name], order)))
            error = float(vector_norm(difference, order))
            errors.append(error / scale if scale else error)
    is_number = all(map(math.isfinite, errors))
    return LawComparison(max(errors) if is_number else float("inf"), MEMBER_BOUND)


def _is_rounded(name: str, tensor: Tensor) -> bool:
    kind, *_, number = name.split(" ")
    is_state = kind in ("model", "optimizer") and tensor.is_floating_point()
    return is_state or number in ("loss", "grad_norm")


def cached_is_full(found_SV: Tensor, full_SV: Tensor) -> LawComparison:
    """Compare law 8's logits in float64: of steps with a cache, and of full passes.

    The relative error of each step counts, and the error of each logit e relative to 1 + |e|.

    Args:
        found_SV: the logits of S steps, [..., V].
        full_SV: those of full passes.
    """
    assert found_SV.shape == full_SV.shape
    steps = zip(found_SV.flatten(0, -2), full_SV.flatten(0, -2), strict=True)
    of_steps = max(relative_error(found, full) for found, full in steps)
    of_logits = float(((found_SV - full_SV).abs() / (1 + full_SV.abs())).max())
    return LawComparison(max(of_steps, of_logits), FLOAT64_BOUND)


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
    """Return how many tokens differ, or tokens with their log-probabilities.

    Those that only one of the two has are among them.
    """
    return sum(one != other for one, other in zip_longest(found, expected))


def log_probabilities_agree(found: Tensor, expected: Tensor) -> LawComparison:
    """Compare log-probabilities that decoding reports with those of another pass over the text.

    The other pass is law 8's full pass, or law 16's pass in training.
    """
    error = float((found.cpu() - expected.cpu()).abs().max())
    return LawComparison(error if error == error else float("inf"), LOG_PROBABILITY_BOUND)
