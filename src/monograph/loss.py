"""Define losses, which a training step minimises.

A loss is any callable `loss(model, batch) -> (sum, count)`: the sum of the losses of all targets, and
the number of targets or the sum of their weights. It may have three more attributes:

- `count(batch)` returns the number of a batch's targets without a forward pass, so that the number
  of an update's targets is known before its first backward pass.
- `fill` is a dict of numbers by the names of a batch's tensors. It promises that a row adds nothing to
  sum and count if it has these values, and zeros in all other tensors. A micro-batch that has fewer
  rows than the others of its update is padded with such rows.
- `update_of(index, batches, score, sum_over_ranks)` is a context manager. The gradient of update
  `index` is computed in its `with` block. A loss needs it if the loss of a row depends on other rows
  of the update, which may be in other micro-batches. `score(batches)` passes micro-batches through
  the loss without gradients. `sum_over_ranks` sums a 0-d tensor over all ranks, which are the
  processes of distributed training.

Shapes: B rows, T positions, N = B * T positions of all rows, D hidden size, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph.fp8 import Float8Head
from monograph.graph.token_rows import trained_rows
from monograph.ops.cross_entropy import linear_cross_entropy, token_log_probabilities
from monograph.ops.logit_cap import cap_of
from monograph.ops.mixture import Teacher, mixture_cross_entropy
from monograph.ops.token_rows import with_replaced_rows
from monograph.ranges import NOT_NEGATIVE

IGNORE = -100  # torch's default ignore_index
# The name of a tensor that a step adds to a batch: for each position, the factor of its loss in the
# number that is differentiated. Only a model that balances its experts reads it, because it adds the
# gradient of its balance to that of the loss, and needs the same factors for this.
SHARES = "token_shares"
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


class CountedLoss(Protocol):
    """A loss whose targets can be counted from the batch alone."""

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the differentiable sum of the losses, 0-d, and the number of targets or the sum of
        their weights.
        """

    def count(self, batch: Any) -> Tensor | float:
        """Return the number of targets in the batch, or the sum of their weights."""


def has_count(loss: object) -> TypeGuard[CountedLoss]:
    """Return whether a loss has the attribute `count`, which counts a batch's targets."""
    return callable(getattr(loss, "count", None))


class TokenLoss:
    """Next-token cross-entropy of a model that returns hidden states and has `model.lm_head.weight`
    [V, D].

    sum = sum over positions with targets != -100 of -log softmax(hidden @ head.T)[target],   in nats

    If the head has a `logit_cap`, its logits are bounded before the softmax (`monograph.ops.logit_cap`).

    The batch holds `tokens` and `targets` [B, T] int64. For packed rows, which have several documents
    each, it also holds `segments` and `positions` [B, T] int64. For a model that balances its experts,
    a step adds `token_shares`, the argument `shares` of `Llama.forward`.

    Attributes:
        impl: see `__init__`.
        head: the function that computes the sum and the count from hidden states, the weight of the
            model's `lm_head`, and targets.
    """

    fill: Mapping[str, float] = MappingProxyType({"targets": IGNORE})

    def __init__(self, impl: Literal["chunked", "reference"] = "chunked"):
        """Choose the implementation `impl` of `monograph.ops.cross_entropy.linear_cross_entropy`."""
        self.impl = impl
        self.head: Callable[..., tuple[Tensor, Tensor]] = linear_cross_entropy

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum in nats and the number of targets; see the class."""
        teaching = self.teaching_arguments(batch)
        hidden_ND, lm_head = hidden_of(model, batch, **shares_of(batch))
        return self.head_loss(hidden_ND, lm_head, batch["targets"].flatten(), **teaching)

    def head_loss(
        self, hidden_ND: Tensor, lm_head: Any, targets_N: Tensor, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the sum and the number of targets, from hidden states and the model's `lm_head`.

        `more` are further arguments of `head`.
        """
        # If the head's weight is frozen, some tokens may have trained rows instead. None: no token has one.
        rows = trained_rows(lm_head)
        head_arguments: dict[str, Any] = {}
        if isinstance(lm_head, Float8Head):
            head_arguments["in_fp8"] = True
        cap = cap_of(lm_head)
        if cap is not None:
            head_arguments["cap"] = cap
        return self.head(
            hidden_ND,
            lm_head.weight,
            targets_N,
            impl=self.impl,
            rows=rows,
            **more,
            **head_arguments,
        )

    def teaching_arguments(self, batch: Batch) -> dict[str, Any]:
        """Return further arguments of `head`: none here. A subclass that has teachers has some."""
        return {}

    def count(self, batch: Batch) -> Tensor:
        """Return the number of targets that are not -100, 0-d int64."""
        return (batch["targets"] != IGNORE).sum()


token_loss = TokenLoss()


def shares_of(batch: Batch) -> dict[str, Tensor]:
    """Return the argument `shares` of the model's forward pass, if the step has added it to the batch."""
    return {"shares": batch[SHARES]} if SHARES in batch else {}


def hidden_of(model: nn.Module, batch: Batch, **model_arguments: Tensor) -> tuple[Tensor, Any]:
    """Return a model's hidden states at all positions of a batch, [N, D], and its module `lm_head`."""
    hidden_BTD = model(
        batch["tokens"],
        segments=batch.get("segments"),
        positions=batch.get("positions"),
        **model_arguments,
    )
    return hidden_BTD.flatten(0, -2), model.lm_head


def target_log_probabilities(
    model: nn.Module,
    batch: Batch,
    temperature: float = 1.0,
    among: tuple[Callable[[Tensor], Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the log-probability of each target, [N].

    A position without a target has the log-probability of token 0. `temperature` divides the logits,
    and `among` leaves out the tokens that a grammar does not allow; see
    `monograph.ops.cross_entropy.token_log_probabilities`.
    """
    hidden_ND, lm_head = hidden_of(model, batch)
    return log_probabilities_by_hidden(hidden_ND, lm_head, batch, temperature, among)


def log_probabilities_by_hidden(
    hidden_ND: Tensor,
    lm_head: nn.Module,
    batch: Batch,
    temperature: float = 1.0,
    among: tuple[Callable[[Tensor], Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the log-probability of each target, [N], given the pair that `hidden_of` returns.

    See `target_log_probabilities`.
    """
    targets_N = batch["targets"].flatten()
    tokens_N = torch.where(targets_N != IGNORE, targets_N, 0)
    weight_VD: Any = lm_head.weight
    return token_log_probabilities(
        hidden_ND,
        weight_VD,
        tokens_N,
        temperature,
        rows=trained_rows(lm_head),
        among=among,
        cap=cap_of(lm_head),
    )


class MixtureLoss(TokenLoss):
    """The loss of distillation: a model learns from its text, and from the probabilities of other
    models, its teachers.

    sum = sum over targets of share * -log q(target) + (1 - share) * KL(m || q)

    q are the model's probabilities, and m is the mean of the teachers' probabilities. If gradients are
    off, as in evaluation, the sum is that of `TokenLoss`, so that the scores of this model can be
    compared with those of any other. The teachers run without gradients, in the caller's precision. If
    the step is compiled block by block (`compile` is "blocks"), the teachers run uncompiled. If it is
    compiled as a whole ("whole"), they are part of the graph.

    Attributes:
        teachers: models with the same vocabulary, on the same device.
        share: the targets' share of the loss, 0 to 1; the rest is the teachers'.
    """

    def __init__(
        self,
        teachers: Sequence[nn.Module],
        share: float = 0.5,
        hidden_of_teachers: Callable[[Batch], list[tuple[Tensor, Any]]] | None = None,
    ):
        """Freeze the teachers, and switch them to evaluation mode.

        Args:
            teachers: see the class.
            share: see the class.
            hidden_of_teachers: a function that returns `hidden_of` of each teacher faster than one
                after another; None: there is none.
        """
        super().__init__()
        self.teachers = tuple(teacher.requires_grad_(False).train(False) for teacher in teachers)
        self.share = share
        self.head = mixture_cross_entropy
        self._hidden_of_teachers = hidden_of_teachers or self._hidden_one_by_one

    def _hidden_one_by_one(self, batch: Batch) -> list[tuple[Tensor, Any]]:
        return [hidden_of(teacher, batch) for teacher in self.teachers]

    def teaching_arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the teachers' hidden states and heads, and `share`; {} without gradients."""
        if not torch.is_grad_enabled():
            return {}
        with torch.no_grad():
            pairs = self._hidden_of_teachers(batch)
            return {
                "teachers": [
                    Teacher(hidden_ND, _whole_head(lm_head), cap_of(lm_head))
                    for hidden_ND, lm_head in pairs
                ],
                "share": self.share,
            }


def _whole_head(lm_head: Any) -> Tensor:
    """Return the weight of a head, with its trained rows of tokens if it has some."""
    weight_VD: Tensor = lm_head.weight
    rows = trained_rows(lm_head)
    return weight_VD if rows is None else with_replaced_rows(weight_VD, rows)


class MtpLoss(nn.Module, TokenLoss):
    """The loss of a model with a head that predicts the token after the next one (multi-token
    prediction, `monograph.model.mtp`).

    differentiated: sum over targets of -log softmax(logits)[x_t+1]
                    + weight * sum over targets ahead of -log softmax(logits ahead)[x_t+2]

    Both sums are divided by the number of targets of the first, as in DeepSeek-V3 (arXiv 2412.19437,
    equations 24 and 25, where both are divided by the number of tokens). So a split into micro-batches
    changes nothing. The value of the loss is the first sum alone, so that it can be compared with that of
    other models; only the gradient is of both. If gradients are off, as in evaluation, the second sum is
    not computed.

    Attributes:
        weight: see above.
        totals: the sum and the number of the targets ahead since `take_mean` was called, fp64 [2].
    """

    totals: Tensor

    def __init__(self, weight: float = 0.3):
        """Take the weight; the default is DeepSeek-V3's for most of its training."""
        nn.Module.__init__(self)
        TokenLoss.__init__(self)
        self.weight = weight
        self.register_buffer("totals", torch.zeros(2, dtype=torch.float64))

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum and the number of targets; see the class."""
        hidden_ND, lm_head = hidden_of(model, batch, **shares_of(batch))
        loss_sum, count = self.head_loss(hidden_ND, lm_head, batch["targets"].flatten())
        if not torch.is_grad_enabled():
            return loss_sum, count
        next_tokens_BT, targets_BT = ahead(batch)
        ahead_BTD = cast(Any, model).predict_ahead(
            hidden_ND.unflatten(0, next_tokens_BT.shape),
            next_tokens_BT,
            segments=batch.get("segments"),
            positions=batch.get("positions"),
        )
        ahead_sum, ahead_count = self.head_loss(
            ahead_BTD.flatten(0, -2), lm_head, targets_BT.flatten()
        )
        with torch.no_grad():
            self.totals.add_(torch.stack([ahead_sum.double(), ahead_count.double()]))
        weighted = self.weight * ahead_sum
        # The difference is 0, or NaN if the sum is not finite, so that such an update is skipped.
        return loss_sum + (weighted - weighted.detach()), count

    def take_mean(self, sum_over_ranks: Callable[[Tensor], Tensor] = lambda total: total) -> Tensor:
        """Set `totals` to zero, and return the mean loss of the targets ahead since the last call, 0-d.

        Args:
            sum_over_ranks: a function that returns the sum of all ranks' tensors.
        """
        loss_sum, count = sum_over_ranks(self.totals).unbind()
        mean = loss_sum / count
        self.totals.zero_()
        return mean


def ahead(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return what a head for multi-token prediction reads and learns at each position.

    Returns:
        The token after each position, [B, T]. After the last position of a row it is any token.
        The target of the position after each one, [B, T]: -100 at the last position of a document, whose
        next position belongs to another document.
    """
    next_tokens_BT = batch["tokens"].roll(-1, dims=1)
    targets_BT = batch["targets"].roll(-1, dims=1)
    length = targets_BT.shape[1]
    is_last_BT = (torch.arange(length, device=targets_BT.device) == length - 1)[None]
    if "segments" in batch:
        is_last_BT = is_last_BT | (batch["segments"].roll(-1, dims=1) != batch["segments"])
    return next_tokens_BT, torch.where(is_last_BT, IGNORE, targets_BT)


def fill_of(loss: Loss, batch: Batch) -> Mapping[str, float] | None:
    """Return the loss's `fill`, the values of a row without targets, or None if it has no `fill`.

    Raises:
        UsageError: `fill` names a tensor that is not in the batch, or has a value that is not a
            number or that the tensor's dtype cannot hold.
    """
    fill: object = getattr(loss, "fill", None)
    if fill is None:
        return None
    if not isinstance(fill, Mapping) or not all(
        isinstance(value, int | float | np.generic) for value in fill.values()
    ):
        raise UsageError(
            f"the loss's fill is {fill!r}: expected numbers by name, such as {{'targets': {IGNORE}}}"
        )
    missing = [name for name in fill if name not in batch]
    if missing:
        raise UsageError(
            f"the loss's fill names {missing[0]!r}, which is not in the window: it has {', '.join(batch)}"
        )
    numbers = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in fill.items()
    }
    for name, value in numbers.items():
        if not _holds(batch[name].dtype, value):
            dtype = str(batch[name].dtype).removeprefix("torch.")
            raise UsageError(
                f"the loss's fill has {fill[name]!r} for {name!r}, which no {dtype} holds"
            )
    return numbers


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Return whether a tensor of this dtype can hold the number; a floating dtype may round it."""
    if dtype.is_floating_point or dtype.is_complex:
        return abs(value) <= torch.finfo(dtype).max
    if dtype == torch.bool:
        low = 0
        high = 1
    else:
        low = torch.iinfo(dtype).min
        high = torch.iinfo(dtype).max
    return low <= value <= high and value == int(value)


_EXPECTED = "the loss must return (sum of the losses, number of targets): loss(model, batch) -> (sum, count)"


def check_result(result: object) -> tuple[Tensor, Tensor]:
    """Check the result of a loss, and return its sum and its count.

    The count becomes a tensor, as `count_tensor` makes it.

    Raises:
        UsageError: the result is not a pair of a real 0-d tensor and a count.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError(_EXPECTED)
    total, count = result
    if not isinstance(total, Tensor) or total.ndim:
        if isinstance(total, Tensor):
            actual = f"a tensor of shape {list(total.shape)}"
        else:
            actual = type(total).__name__
        raise UsageError(
            f"{_EXPECTED}; its sum is {actual}, expected a tensor of one number: .sum()"
        )
    if total.is_complex():
        raise UsageError(
            f"{_EXPECTED}; its sum is complex, expected a real number: .abs() or .real"
        )
    return total, count_tensor(count, total.device)


def count_tensor(count: Any, device: torch.device) -> Tensor:
    """Return a count of targets, or a sum of their weights, as a 0-d fp64 tensor.

    The host does not read the value of a tensor, because it would have to wait for the device. So a
    tensor below 0 is not refused here. It becomes NaN, which makes the device skip the update.

    Args:
        count: a number of Python or numpy, or a 0-d tensor, integer, fp32 or fp64.
        device: the result's device.

    Raises:
        UsageError: the count has another type, is a number that is negative or not finite, or is a
            tensor that depends on the parameters.
    """
    # Dynamo traces numpy's scalars and 0-d arrays as tensors, whose value must not be read in a graph.
    if isinstance(count, (np.generic, np.ndarray)) and not count.ndim:
        count = torch.as_tensor(count) if torch.compiler.is_compiling() else count.item()
    if isinstance(count, Tensor):
        if (
            count.ndim
            or count.dtype in (torch.bool, torch.float16, torch.bfloat16)
            or count.is_complex()
        ):
            kind = str(count.dtype).removeprefix("torch.")
            actual = f"a tensor of shape {list(count.shape)}" if count.ndim else kind
            hint = "weights are summed in float32 or float64, and targets by .sum() of booleans"
            raise UsageError(f"{_EXPECTED}; its count is {actual}, expected one number: {hint}")
        wide = require_constant(count).to(device=device, dtype=torch.float64)
        return torch.where(wide >= 0, wide, math.nan)
    if not NOT_NEGATIVE.holds(count):
        raise UsageError(f"{_EXPECTED}; its count is {count!r}, expected {NOT_NEGATIVE.expected}")
    # `torch.full` makes the number on the device. With `torch.tensor` the host would wait for a copy.
    return torch.full((), float(count), dtype=torch.float64, device=device)


def require_constant(count: Tensor) -> Tensor:
    """Return `count`, and refuse one that depends on the parameters.

    Raises:
        UsageError: the count depends on the parameters, but only the sum is differentiated.
    """
    if count.requires_grad:
        raise UsageError(
            f"{_EXPECTED}; its count requires a gradient: only the sum is differentiated, so detach it"
        )
    return count
