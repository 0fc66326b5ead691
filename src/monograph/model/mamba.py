"""A layer of Mamba 2, which takes the place of attention and mixes positions by a scan.

Each head keeps a matrix, the state. A token lets the state decay, adds its own input to it, and reads it
(`monograph.ops.state_space` has the equations). So the state has the same size for texts of every
length, while attention keeps a key and a value for each token.

Shape suffixes: B batch, T positions, D hidden size, C channels of the convolution, H heads, G groups
of heads, E width of a key, V width of a head, X any number of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.errors import InputRefused
from monograph.graph.lora_merge import UnreadTensor
from monograph.model.config import LlamaConfig
from monograph.model.layers import Linear
from monograph.model.mixer import (
    USE_HF,
    LayerCache,
    Mixer,
    VisiblePositions,
    require_both_kinds,
)
from monograph.model.recurrent import (
    CausalConv,
    LayerState,
    document_starts,
    empty_state,
    heads_first,
    initial_vector,
    without_middle_axis,
)
from monograph.model.rope import CosSin
from monograph.ops import state_space
from monograph.ops.attention import Impl, Mask

if TYPE_CHECKING:
    from gguf import GGUFWriter

# llama.cpp's names of the tensors of a layer, by their names in the layer.
_LLAMA_CPP_NAMES = {
    "in_proj.weight": "ssm_in.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


class _Projections(NamedTuple):
    """The parts of the input projection.

    Attributes:
        gate_BTX: z, as wide as all heads.
        channels_BTC: the inputs of the convolution, from which it makes the inputs of all heads, the
            keys and the queries.
        step_BTH: the time step of each head, before its bias and softplus.
    """

    gate_BTX: Tensor
    channels_BTC: Tensor
    step_BTH: Tensor


class _KeptMultiples(NamedTuple):
    """How many numbers a block keeps per token for the backward pass, as multiples of some sizes.

    The scan is computed in chunks of positions.

    Attributes:
        hidden: multiples of the hidden size.
        heads: multiples of the width of all heads.
        keys: multiples of the width of the keys of all groups.
        chunk: multiples of the positions of a chunk times the number of heads.
    """

    hidden: float
    heads: float
    keys: float
    chunk: float


# The multiples by (whether the block is captured, whether it computes in fp32). For 7 shapes, their sums are
# within a half of what traces say. That is enough to compare plans, since the chosen plan is traced if its
# memory may matter.
_KEPT_MULTIPLES = {
    (True, True): _KeptMultiples(2.0, 7.0, 5.0, 3.0),
    (True, False): _KeptMultiples(3.0, 11.0, 8.0, 5.0),
    (False, True): _KeptMultiples(2.0, 13.0, 10.0, 5.0),
    (False, False): _KeptMultiples(4.0, 23.0, 18.0, 9.0),
}


class Mamba2(Mixer):
    """A layer of three steps: a short convolution over positions, the scan of each head, and a gated
    norm.

    In the names of the paper, keys are B, queries are C, and the values are the inputs x times their
    time steps.

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060.
    """

    name = "mamba"
    reads_segments = True
    siblings = ()
    llama_cpp_fp32 = tuple(
        _LLAMA_CPP_NAMES[name] for name in ("conv1d.weight", "A_log", "D", "norm.weight")
    )

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__(config, impl)
        self.head_dim = config.mamba_d_head
        self.key_dim = config.mamba_d_state
        self.least_step = config.time_step_min
        heads_width = config.mamba_n_heads * config.mamba_d_head
        keys_width = config.mamba_n_groups * config.mamba_d_state
        # The widths of the inputs of all heads, of all keys and of all queries.
        self.channel_widths = heads_width, keys_width, keys_width
        self.projection_widths = heads_width, sum(self.channel_widths), config.mamba_n_heads
        # Modules are added in the order of the computation, so that parameters have this order, too.
        self.in_proj = Linear(
            config.hidden_size, sum(self.projection_widths), bias=config.mamba_proj_bias
        )
        self.conv1d = CausalConv(
            sum(self.channel_widths), config.mamba_d_conv, bias=config.mamba_conv_bias
        )
        self.dt_bias = nn.Parameter(torch.empty(config.mamba_n_heads))
        self.A_log = nn.Parameter(torch.empty(config.mamba_n_heads))
        self.D = nn.Parameter(torch.empty(config.mamba_n_heads))
        self.norm = GatedNorm(heads_width, config.mamba_n_groups, config.rms_norm_eps)
        self.out_proj = Linear(heads_width, config.hidden_size, bias=config.mamba_proj_bias)

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return out_proj(norm((scan(dt x, B, C, dt A) + D x) * silu(z))).

        z, dt and the convolution's inputs are projections of the hidden states. x, B and C are the
        convolution's outputs, dt = max(softplus(dt + dt_bias), time_step_min), and A = -exp(A_log).
        With `impl` "cached" the scan is computed token by token, with the same bits as in decoding.

        Args:
            hidden_BTD: the hidden states.
            cos_sin_B1TF: not used, because this layer does not rotate.
            mask: the document number of each position, [B, T]; None: each row is one document.
            cache: the block's view of a cache; None: the pass has no cache.
        """
        segments_BT = cast(Tensor | None, mask)
        gate_BTX, channels_BTC, step_BTH = _Projections(
            *self.in_proj(hidden_BTD).split(self.projection_widths, dim=-1)
        )
        # The decay is computed in float64 for two reasons. First, sums of decays are subtracted from each
        # other, which magnifies their errors. Second, torch's functions in fp32 may compute the last
        # numbers of a tensor differently from the others, so that equal numbers get different bits.
        step_BTH = F.softplus(step_BTH.double() + self.dt_bias)
        if self.least_step > 0:
            step_BTH = step_BTH.clamp(min=self.least_step)
        decay_BTH = -self.A_log.double().exp() * step_BTH
        if cache is None:
            mixed_BTC = self.conv1d(channels_BTC, segments_BT)
            starts_BT = document_starts(segments_BT)
            # The dtype in which the scan is computed.
            wide = torch.float64 if hidden_BTD.dtype == torch.float64 else torch.float32
            input_BTHV, key_BGTE, query_BGTE = self._heads(mixed_BTC, wide)
            value_BTHV = input_BTHV * step_BTH.to(wide)[..., None]
            # Autocast would round the scan's products to 16 bits, and each chunk of the text would pass
            # its errors on to the next.
            with torch.autocast(hidden_BTD.device.type, enabled=False):
                out_BHTV, _ = self._scan(
                    query_BGTE, key_BGTE, heads_first(value_BTHV), heads_first(decay_BTH), starts_BT
                )
        else:
            input_BTHV, out_BHTV = self._cached(channels_BTC, decay_BTH, step_BTH, cache)
        out_BTHV = heads_first(out_BHTV) + input_BTHV * self.D[:, None]
        return self.out_proj(self.norm(out_BTHV.flatten(2), gate_BTX).to(hidden_BTD.dtype))

    @property
    def _scan(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the implementation of the scan for several tokens."""
        return state_space.recurrent if self.impl == "cached" else state_space.chunked

    def _heads(self, mixed_BTC: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of each head, and the keys and queries of each group, in the dtype `wide`.

        Returns:
            Inputs [B, T, H, V], keys [B, G, T, E] and queries [B, G, T, E].
        """
        input_BTX, key_BTX, query_BTX = mixed_BTC.to(wide).split(self.channel_widths, dim=-1)
        return (
            input_BTX.unflatten(-1, (-1, self.head_dim)),
            heads_first(key_BTX.unflatten(-1, (-1, self.key_dim))),
            heads_first(query_BTX.unflatten(-1, (-1, self.key_dim))),
        )

    def _cached(
        self, channels_BTC: Tensor, decay_BTH: Tensor, step_BTH: Tensor, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        """Add the pass's tokens to the cached state.

        `LayerState.with_inputs` says which tokens change the state.

        Returns:
            The inputs of each head, [B, T, H, V], and the scan's outputs, [B, H, T, V].
        """
        cache.cache.keep_call(
            lambda other: self._cached(
                channels_BTC, decay_BTH, step_BTH, cache._replace(cache=other)
            )
        )
        recurrence = cast(LayerState, cache.cache.recurrence(cache.layer_index))
        wide = recurrence.state_BHEV.dtype
        new = recurrence.with_inputs(channels_BTC, cache.positions_BT)
        mixed_BTC = self.conv1d.convolve_inputs(new.convolved_BSC)
        input_BTHV, key_BGTE, query_BGTE = self._heads(mixed_BTC, wide)
        # A token with a decay and a step of 0 does not change the state.
        decay_BTH = torch.where(new.is_new_BT[..., None], decay_BTH, 0.0)
        step_BTH = torch.where(new.is_new_BT[..., None], step_BTH, 0.0)
        value_BHTV = heads_first(input_BTHV * step_BTH.to(wide)[..., None])
        decay_BHT = heads_first(decay_BTH)
        if channels_BTC.shape[1] == 1:
            state_BHEV = state_space.step(
                key_BGTE[:, :, 0], value_BHTV[:, :, 0], decay_BHT[..., 0], recurrence.state_BHEV
            )
            out_BHTV = state_space.read(query_BGTE[:, :, 0], state_BHEV)[:, :, None]
        else:
            out_BHTV, state_BHEV = self._scan(
                query_BGTE, key_BGTE, value_BHTV, decay_BHT, None, recurrence.state_BHEV
            )
        recurrence.store(new, state_BHEV)
        return input_BTHV, out_BHTV

    @classmethod
    def initial_values(
        cls, name: str, shape: torch.Size, generator: torch.Generator
    ) -> Tensor | None:
        """Return the initial values of a parameter that is neither a matrix nor a bias."""
        if len(shape) == 2 or name.endswith(".bias"):
            return None
        return initial_vector(name, shape, generator)

    @classmethod
    def recurrence(
        cls, config: LlamaConfig, rows: int, dtype: torch.dtype, device: torch.device
    ) -> LayerState:
        """Return a state that includes no token and has no limit."""
        heads = config.mamba_n_heads
        channels = heads * config.mamba_d_head + 2 * config.mamba_n_groups * config.mamba_d_state
        return empty_state(
            inputs_shape=(rows, config.mamba_d_conv, channels),
            state_shape=(rows, heads, config.mamba_d_state, config.mamba_d_head),
            dtype=dtype,
            device=device,
        )

    @classmethod
    def training_flops(
        cls, config: LlamaConfig, layer: int, visible_positions: VisiblePositions
    ) -> float:
        """Return 12 · H · E · V FLOPs per token: each head writes and reads its state, a matrix of E × V
        numbers.
        """
        return 12 * config.mamba_n_heads * config.mamba_d_state * config.mamba_d_head

    @classmethod
    def kept_numbers(cls, config: LlamaConfig, *, captured: bool, in_fp32: bool) -> float:
        """Return the numbers that a block keeps per token, without its feed-forward layer."""
        sizes = (
            config.hidden_size,
            config.mamba_n_heads * config.mamba_d_head,
            config.mamba_n_groups * config.mamba_d_state,
            config.mamba_n_heads * state_space.CHUNK,
        )
        multiples = _KEPT_MULTIPLES[captured, in_fp32]
        return sum(multiple * size for multiple, size in zip(multiples, sizes, strict=True))

    @classmethod
    def decode_flops(cls, config: LlamaConfig, context: float) -> float:
        """Return 4 · H · E · V FLOPs: a token's write and its read."""
        return 4 * config.mamba_n_heads * config.mamba_d_state * config.mamba_d_head

    @classmethod
    def require_llama_cpp(cls, config: LlamaConfig) -> None:
        """Refuse layers that llama.cpp does not load."""
        require_both_kinds(config)
        if config.mamba_proj_bias:
            raise InputRefused(f"mamba_proj_bias = true is not computed by llama.cpp{USE_HF}")
        width = config.mamba_n_heads * config.mamba_d_head
        if width != 2 * config.hidden_size and not config.family.any_mamba_width:
            raise InputRefused(
                f"mamba_n_heads * mamba_d_head = {width}: llama.cpp loads only twice hidden_size = "
                f"{config.hidden_size}{USE_HF}"
            )

    @classmethod
    def llama_cpp_row_lengths(cls, config: LlamaConfig) -> Mapping[str, int]:
        """Return the width of the output projection's input."""
        return {"mamba_n_heads * mamba_d_head": config.mamba_n_heads * config.mamba_d_head}

    @classmethod
    def add_llama_cpp_sizes(
        cls, writer: GGUFWriter, config: LlamaConfig, architecture: str
    ) -> None:
        """Add the sizes of the layers. llama.cpp calls the number of heads the rank of the time steps."""
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_group_count(config.mamba_n_groups)

    @classmethod
    def llama_cpp_tensor(
        cls, name: str, like: Tensor, read: Callable[[], Tensor], config: LlamaConfig
    ) -> UnreadTensor:
        """Return a tensor of the layer with llama.cpp's name, shape and values.

        llama.cpp stores -exp(A_log) instead of A_log. It has one column for each head's A and D, and
        one row of the norm's weight for each group.
        """

        def change(tensor: Tensor) -> Tensor:
            """Return the tensor with llama.cpp's values and shape."""
            if name == "A_log":
                tensor = -tensor.exp()
            if name in ("A_log", "D"):
                return tensor[:, None]
            if name == "norm.weight":
                return tensor.view(config.mamba_n_groups, -1)
            return without_middle_axis(tensor)

        return UnreadTensor(_LLAMA_CPP_NAMES[name], change(like), lambda: change(read()))

    @classmethod
    def more_llama_cpp_tensors(cls, config: LlamaConfig) -> list[UnreadTensor]:
        """Return a bias of zeros for a convolution that has none, without which llama.cpp crashes."""
        if config.mamba_conv_bias:
            return []
        width = config.mamba_n_heads * config.mamba_d_head
        channels = width + 2 * config.mamba_n_groups * config.mamba_d_state
        zeros = torch.zeros(channels)
        return [UnreadTensor(_LLAMA_CPP_NAMES["conv1d.bias"], zeros.to("meta"), zeros.clone)]


class GatedNorm(nn.Module):
    """The root-mean-square norm over each group of channels, of x * silu(z)."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.groups = groups
        self.eps = eps

    def forward(self, x_BTX: Tensor, gate_BTX: Tensor) -> Tensor:
        """Return x silu(z) / sqrt(mean((x silu(z))^2) + eps) * weight, in the dtype of x.

        Args:
            x_BTX: x, in fp32 or float64.
            gate_BTX: z.
        """
        gated_BTX = x_BTX * F.silu(gate_BTX.to(x_BTX.dtype))
        by_group = gated_BTX.unflatten(-1, (self.groups, -1))
        scale = torch.rsqrt(by_group.square().mean(dim=-1, keepdim=True) + self.eps)
        return (by_group * scale).flatten(-2) * self.weight
