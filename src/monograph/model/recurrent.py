"""The parts that recurrent layers share: a short convolution over positions, and the state of a row.

A recurrent layer is a gated delta net (`monograph.model.delta_net`), a Mamba 2 layer
(`monograph.model.mamba`) or a gated short convolution (`monograph.model.short_conv`). What it keeps of
a row's earlier tokens has the same size for texts of every length: the last inputs of the
convolution, and, except in a short convolution, a matrix for each head.

Shape suffixes: B batch, T positions, C channels of the convolution, K taps of the convolution, S
positions of the convolution's input, H heads, E key dimension, V value dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PassInputs(NamedTuple):
    """What a pass adds to the inputs of a row's convolution.

    Attributes:
        is_new_BT: whether a token changes the state, bool.
        inputs_BKC: the last K inputs after the pass.
        convolved_BSC: the inputs from which the convolution computes the pass's outputs.
    """

    is_new_BT: Tensor
    inputs_BKC: Tensor
    convolved_BSC: Tensor


class InputState(NamedTuple):
    """What a convolution needs of the earlier tokens of each row: its last inputs.

    Attributes:
        inputs_BKC: the last K inputs of the convolution, the newest last.
        count_B: number of tokens that the state includes, int64.
        limit_B: largest number of tokens that it may include, int64.
    """

    inputs_BKC: Tensor
    count_B: Tensor
    limit_B: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all tensors except the limit."""
        return [self.inputs_BKC, self.count_B]

    def copied(self) -> Self:
        """Return a state of its own with the same numbers."""
        return type(self)(*(tensor.clone() for tensor in self))

    def limited(self, limit_B: Tensor) -> Self:
        """Return the same state, with another limit."""
        return self._replace(limit_B=limit_B)

    def with_inputs(self, channels_BTC: Tensor, positions_BT: Tensor) -> PassInputs:
        """Return what a pass adds to the inputs, and from which inputs it computes its outputs.

        A pass of one token, such as a decode step, may be repeated: a token that the state already
        includes is not new, and its outputs are computed from the same inputs again. In a pass of
        several tokens, all must be new. A token whose position is at or beyond the row's limit is
        not added.
        """
        is_new_BT = (positions_BT >= self.count_B[:, None]) & (positions_BT < self.limit_B[:, None])
        inputs_BSC = torch.cat([self.inputs_BKC, channels_BTC.to(self.inputs_BKC.dtype)], dim=1)
        # In `inputs_BSC`, the K old inputs of a row come first, and then its new tokens. So after n new
        # tokens, the last K inputs are at the indices n to n + K - 1.
        taps = self.inputs_BKC.shape[1]
        new_count_B = is_new_BT.sum(dim=1)
        index_BK = new_count_B[:, None] + torch.arange(taps, device=is_new_BT.device)
        inputs_BKC = inputs_BSC.gather(1, index_BK[..., None].expand(-1, -1, inputs_BSC.shape[-1]))
        is_one_token = channels_BTC.shape[1] == 1
        # Each output needs K inputs: its own and K - 1 earlier ones. So T outputs do not need the oldest of
        # the K old inputs. A single token that is repeated is among the old inputs already, so its inputs
        # are `inputs_BKC`, which ends with it.
        convolved_BSC = inputs_BKC if is_one_token else inputs_BSC[:, 1:]
        return PassInputs(is_new_BT, inputs_BKC, convolved_BSC)

    def store(self, new: PassInputs) -> None:
        """Replace the state by the one after a pass."""
        self.inputs_BKC.copy_(new.inputs_BKC)
        self.count_B.add_(new.is_new_BT.sum(dim=1))


class LayerState(NamedTuple):
    """The state of a recurrent layer with matrices after some tokens of each row.

    Attributes:
        inputs_BKC: the last K inputs of the convolution, the newest last.
        state_BHEV: the matrix of each head.
        count_B: number of tokens that the state includes, int64.
        limit_B: largest number of tokens that it may include, int64.
    """

    inputs_BKC: Tensor
    state_BHEV: Tensor
    count_B: Tensor
    limit_B: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all tensors except the limit."""
        return [self.inputs_BKC, self.state_BHEV, self.count_B]

    def copied(self) -> Self:
        """Return a state of its own with the same numbers."""
        return type(self)(*(tensor.clone() for tensor in self))

    def limited(self, limit_B: Tensor) -> Self:
        """Return the same state, with another limit."""
        return self._replace(limit_B=limit_B)

    def with_inputs(self, channels_BTC: Tensor, positions_BT: Tensor) -> PassInputs:
        """Return what a pass adds to the inputs (`InputState.with_inputs`)."""
        return self._inputs().with_inputs(channels_BTC, positions_BT)

    def store(self, new: PassInputs, state_BHEV: Tensor) -> None:
        """Replace the state by the one after a pass."""
        self._inputs().store(new)
        self.state_BHEV.copy_(state_BHEV)

    def _inputs(self) -> InputState:
        """Return the part of the state that is the convolution's."""
        return InputState(self.inputs_BKC, self.count_B, self.limit_B)


def empty_inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> InputState:
    """Return the state of a convolution that includes no token and has no limit.

    Args:
        shape: [B, K, C].
        dtype: the dtype of the model's weights.
        device: the device of the state.
    """
    rows = shape[0]
    return InputState(
        torch.zeros(shape, dtype=dtype, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.full((rows,), torch.iinfo(torch.int64).max, device=device),
    )


def empty_state(
    inputs_shape: tuple[int, int, int],
    state_shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> LayerState:
    """Return a state that includes no token and has no limit.

    Args:
        inputs_shape: [B, K, C].
        state_shape: [B, H, E, V].
        dtype: the dtype of the model's weights.
        device: the device of the state.
    """
    inputs = empty_inputs(inputs_shape, dtype, device)
    # The matrices are at least in fp32.
    state_dtype = torch.promote_types(dtype, torch.float32)
    matrices = torch.zeros(state_shape, dtype=state_dtype, device=device)
    return LayerState(inputs.inputs_BKC, matrices, inputs.count_B, inputs.limit_B)


def initial_vector(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return the initial values of a parameter of a recurrent layer that is neither a matrix nor a bias.

    A is uniform in [1, 16). The steps softplus(dt_bias) are between 0.001 and 0.1, and their logarithms
    are uniform. So some heads remember a few tokens, and others up to a thousand. Source: Dao and Gu,
    "Transformers are SSMs", arXiv 2405.21060.
    """
    uniform = torch.rand(shape, generator=generator, device="cpu")
    if name.endswith("A_log"):
        return (1 + 15 * uniform).log()
    if name.endswith("dt_bias"):
        step = (math.log(0.001) + uniform * math.log(100)).exp()
        # The inverse of softplus, so that softplus(dt_bias) is the step.
        return step + (-(-step).expm1()).log()
    if len(shape) == 3:  # of a convolution
        return (2 * uniform - 1) / math.sqrt(uniform.shape[-1])
    return torch.ones_like(uniform)  # factors: of a norm, and D of Mamba 2


class CausalConv(nn.Module):
    """A causal convolution over positions, for each channel alone, and then an activation.

    Args:
        channels: the number of channels.
        taps: the number of positions that an output reads: its own and those before.
        bias: whether a bias is added to the sum.
        activation: the function that follows; None: no function.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] | None = F.silu,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))  # the shape of a Conv1d
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, channels_BTC: Tensor, segments_BT: Tensor | None) -> Tensor:
        """Return act(sum_j w[j] x[t - K + 1 + j] + b) over the positions of t's document, [B, T, C]."""
        total_BTC = channels_BTC * self.weight[:, 0, -1]
        indices_T = torch.arange(channels_BTC.shape[1], device=channels_BTC.device)
        for back in range(1, self.weight.shape[-1]):
            # Whether the position that is `back` positions earlier is in the same document.
            is_same_BT = (indices_T >= back)[None]
            if segments_BT is not None:
                is_same_BT = is_same_BT & (segments_BT.roll(back, dims=1) == segments_BT)
            # A compiler fuses `roll` into loops without branches, forward and backward, but not
            # `pad`.
            earlier_BTC = torch.where(is_same_BT[..., None], channels_BTC.roll(back, dims=1), 0.0)
            total_BTC = total_BTC + earlier_BTC * self.weight[:, 0, -1 - back]
        return self._finish(total_BTC)

    def convolve_inputs(self, inputs_BSC: Tensor) -> Tensor:
        """Return the outputs at the last S - K + 1 positions, which are those with all K inputs.

        Args:
            inputs_BSC: consecutive inputs of one document.
        """
        taps = self.weight.shape[-1]
        length = inputs_BSC.shape[1] - taps + 1
        total_BTC = inputs_BSC[:, taps - 1 :] * self.weight[:, 0, -1]
        for back in range(1, taps):
            begin = taps - 1 - back
            total_BTC = (
                total_BTC + inputs_BSC[:, begin : begin + length] * self.weight[:, 0, -1 - back]
            )
        return self._finish(total_BTC)

    def _finish(self, total_BTC: Tensor) -> Tensor:
        """Return act(x + b)."""
        if self.bias is not None:
            total_BTC = total_BTC + self.bias
        return total_BTC if self.activation is None else self.activation(total_BTC)


def document_starts(segments_BT: Tensor | None) -> Tensor | None:
    """Return whether each position begins a document, bool [B, T]; None without segments.

    The first position of a row is False, because there is no earlier state to drop.
    """
    if segments_BT is None:
        return None
    return F.pad(segments_BT[:, 1:] != segments_BT[:, :-1], (1, 0))


def heads_first(tensor: Tensor) -> Tensor:
    """Swap positions and heads, [B, T, H, ...] to [B, H, T, ...]."""
    return tensor.transpose(1, 2)


def without_middle_axis(tensor: Tensor) -> Tensor:
    """Return a convolution's weight [C, 1, K] as [C, K], and any other tensor unchanged."""
    return tensor.squeeze(1) if tensor.ndim == 3 else tensor
