"""The losses of preferences: each compares the log-probabilities of two answers to one prompt.

log pi(o) is the sum of the log-probabilities of the tokens of an answer o, and |o| is their number.
log ref(o) is the same sum by the weights that a run begins from, and h(o) = log pi(o) - log ref(o). w is
the chosen answer and l the rejected one:

| name   | loss of a pair                                                            | arXiv      |
|--------|---------------------------------------------------------------------------|------------|
| dpo    | -log sigmoid(B (h(w) - h(l)))                                             | 2305.18290 |
| robust | (-(1-E) log sigmoid(x) + E log sigmoid(-x)) / (1-2E), x = B (h(w) - h(l)) | 2403.00409 |
| ipo    | (h(w) / |w| - h(l) / |l| - 1 / (2 B))^2                                   | 2310.12036 |
| simpo  | -log sigmoid(B (log pi(w) / |w| - log pi(l) / |l|) - G)                   | 2405.14734 |
| orpo   | -log pi(w) / |w| - B log sigmoid(odds(w) - odds(l)), where                | 2403.07691 |
|        | odds(o) = m - log(1 - e^m), m = log pi(o) / |o|                           |            |
| kto    | D sigmoid(B (z - h(o))) of a good answer o, U sigmoid(B (h(o) - z)) of    | 2402.01306 |
|        | a bad one, where z = max(0, mean of h(o')), a constant                    |            |

o' is a prompt of the update followed by the answer of another record. B is beta, E label_smoothing, G gamma,
D desirable_weight and U undesirable_weight.

An update's loss is the mean over its pairs, or over its answers for kto. IPO divides by the numbers of
tokens, as its authors' code does. For kto, the mean in z is over all o' of the whole update, not of a
micro-batch. So all rows of an update are scored once before its gradient is computed.
`monograph.rl.preference_loss` computes the sums over the rows of a batch.

`monograph.config.keys` makes keys of the settings from the table `LOSSES`, and settings must be read
without importing torch. So formulas call methods of tensors, and a function of torch that is not a method
is imported only where a formula calls it.

Shapes: P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from monograph.errors import UsageError
from monograph.ranges import Range
from monograph.rl.parameters import Parameter, values_of

if TYPE_CHECKING:
    from torch import Tensor

# The largest factor of a loss. It is far above any useful one, and far below one that overflows
# fp32 gradients.
_MAX_FACTOR = 1e9


class Preference(NamedTuple):
    """The choice of a loss.

    Attributes:
        name: a name of `LOSSES`.
        parameters: the values of all its parameters.
    """

    name: str
    parameters: dict[str, float]

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss reads log ref."""
        return LOSSES[self.name].needs_reference

    @property
    def labelled(self) -> bool:
        """Return whether the loss learns from single answers, each labelled good or bad."""
        return LOSSES[self.name].labelled


def preference(name: str, **arguments: float | None) -> Preference:
    """Return the choice of a loss, after checking its parameters.

    Args:
        name: a name of `LOSSES`.
        arguments: values of its parameters by name; None, or a missing one: the default.

    Raises:
        UsageError: there is no such loss, it has no such parameter, or a value is out of range.
    """
    if name not in LOSSES:
        raise UsageError(f"prefer.loss = {name}: expected {', '.join(LOSSES)}")
    parameters = LOSSES[name].parameters
    names = [parameter.name for parameter in parameters]
    for argument, value in arguments.items():
        if argument not in names and value is not None:
            raise UsageError(
                f"prefer.{argument} does not go with prefer.loss = {name}, which has {', '.join(names)}"
            )
    return Preference(name, values_of(parameters, arguments, f"prefer.loss = {name}"))


class PreferenceInputs(NamedTuple):
    """The numbers from which a loss of P pairs is computed, fp64 [P] except `labels` and `expected`.

    Attributes:
        chosen, rejected: log pi of the answers.
        chosen_reference, rejected_reference: log ref of the answers.
        chosen_tokens, rejected_tokens: the numbers of tokens, at least 1.
        labels: int64 [P]. For kto, 1 if the chosen answer is good and -1 if it is bad, and the
            rejected answer is o'. For all other losses, 0.
        expected: 0-d, z of kto.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_reference: Tensor
    rejected_reference: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    labels: Tensor
    expected: Tensor

    @property
    def gains(self) -> tuple[Tensor, Tensor]:
        """Return h of the chosen and of the rejected answers."""
        return self.chosen - self.chosen_reference, self.rejected - self.rejected_reference

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Return the mean log-probability of a token of the chosen and of the rejected answers."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def _log_sigmoid(value: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(value)


def _dpo(pairs: PreferenceInputs, *, beta: float) -> Tensor:
    chosen, rejected = pairs.gains
    return -_log_sigmoid(beta * (chosen - rejected))


def _robust(pairs: PreferenceInputs, *, beta: float, label_smoothing: float) -> Tensor:
    chosen, rejected = pairs.gains
    margin = beta * (chosen - rejected)
    swapped_term = label_smoothing * _log_sigmoid(-margin)
    right_term = (1 - label_smoothing) * _log_sigmoid(margin)
    return (swapped_term - right_term) / (1 - 2 * label_smoothing)


def _ipo(pairs: PreferenceInputs, *, beta: float) -> Tensor:
    chosen, rejected = pairs.gains
    difference = chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens
    return (difference - 1 / (2 * beta)).square()


def _simpo(pairs: PreferenceInputs, *, beta: float, gamma: float) -> Tensor:
    chosen, rejected = pairs.means
    return -_log_sigmoid(beta * (chosen - rejected) - gamma)


def _orpo(pairs: PreferenceInputs, *, beta: float) -> Tensor:
    # If a mean m rounds to 0, log(1 - e^m) would be -inf.
    chosen, rejected = (mean.clamp_max(-1e-12) for mean in pairs.means)
    chosen_odds = chosen - (-chosen.expm1()).log()
    rejected_odds = rejected - (-rejected.expm1()).log()
    return -chosen - beta * _log_sigmoid(chosen_odds - rejected_odds)


def _kto(
    pairs: PreferenceInputs, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    gain, _ = pairs.gains
    loss = (pairs.labels * (pairs.expected - gain) * beta).sigmoid()
    return (desirable_weight * loss).where(pairs.labels > 0, undesirable_weight * loss)


@dataclass(frozen=True)
class LossOfPairs:
    """A loss of preferences.

    Attributes:
        meaning: how it compares answers, in one line, as the key prefer.loss says it.
        formula: returns the loss of each of P pairs, [P], from the pairs and the parameters.
        parameters: its parameters, each of which is a key of [prefer].
        needs_reference: whether it reads log ref.
        labelled: whether it learns from single answers, each labelled good or bad.
    """

    meaning: str
    formula: Callable[..., Tensor]
    parameters: tuple[Parameter, ...]
    needs_reference: bool = True
    labelled: bool = False


_ABOVE_0 = Range(
    "a number above 0 and below 1e9", 0, _MAX_FACTOR, excludes_low=True, excludes_high=True
)
_NOT_NEGATIVE = Range("a number, 0 or more and below 1e9", 0, _MAX_FACTOR, excludes_high=True)
_BETA = Parameter("prefer.beta", "Strength of the comparison.", _ABOVE_0, 0.1)
# The names that the key prefer.loss takes.
LOSSES = {
    "dpo": LossOfPairs("by what they gain on the weights that the run begins from", _dpo, (_BETA,)),
    "robust": LossOfPairs(
        "as dpo, where label_smoothing is the share of swapped pairs",
        _robust,
        (
            _BETA,
            Parameter(
                "prefer.label_smoothing",
                "Share of the pairs that robust takes to be swapped.",
                Range("a number from 0 and below 0.5", 0, 0.5, excludes_high=True),
                0.1,
            ),
        ),
    ),
    "ipo": LossOfPairs("as dpo, with a squared error around a gap of 1 / (2 beta)", _ipo, (_BETA,)),
    "simpo": LossOfPairs(
        "by likelihood a token, with gamma as the margin; no reference",
        _simpo,
        (
            _BETA._replace(default=2.0),
            Parameter("prefer.gamma", "Margin of simpo.", _NOT_NEGATIVE, 1.0),
        ),
        needs_reference=False,
    ),
    "orpo": LossOfPairs(
        "by odds, beside plain training on the chosen one; no reference",
        _orpo,
        (_BETA,),
        needs_reference=False,
    ),
    "kto": LossOfPairs(
        "one by one, each labelled good or bad",
        _kto,
        (
            _BETA,
            Parameter(
                "prefer.desirable_weight",
                "Weight of good answers for kto.",
                _NOT_NEGATIVE,
                1.0,
            ),
            Parameter(
                "prefer.undesirable_weight",
                "Weight of bad answers for kto.",
                _NOT_NEGATIVE,
                1.0,
            ),
        ),
        labelled=True,
    ),
}


def losses(preference: Preference, pairs: PreferenceInputs) -> Tensor:
    """Return the loss of each pair, [P]; see the module."""
    return LOSSES[preference.name].formula(pairs, **preference.parameters)
