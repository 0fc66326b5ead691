"""A layer that takes the place of attention and mixes positions by the gated delta rule.

Each head keeps a matrix, the state. A token lets the state decay, corrects it for the token's key and
value, and reads it with the token's query (`monograph.ops.delta_rule` has the equations). So the state
has the same size for texts of every length, while attention keeps a key and a value for each token.

Shape suffixes: B batch, T positions, D hidden size, C channels of the convolution, K taps of the
convolution, S positions of the convolution's input, H value heads, G key heads, E key dimension, V
value dimension, X any number of channels; 1 and 2 are axes of these lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.errors import InputRefused
from monograph.graph.lora_merge import UnreadTensor
from monograph.model.config import LlamaConfig
from monograph.model.layer_types import L2_NORM_EPS
from monograph.model.layers import Linear, RMSNorm
from monograph.model.mixer import (
    USE_HF,
    LayerCache,
    Mixer,
    VisiblePositions,
    mixer_of,
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
from monograph.ops import delta_rule
from monograph.ops.attention import Impl, Mask

if TYPE_CHECKING:
    from gguf import GGUFWriter

# llama.cpp's names of the tensors of a delta net, by their names in the layer.
_LLAMA_CPP_NAMES = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_qkvz.weight": "ssm_in.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
# Tensors of a delta net whose first rows belong to queries and keys.
_WITH_QUERIES_AND_KEYS = ("in_proj_qkv.weight", "conv1d.weight")


class _KeptMultiples(NamedTuple):
    """How many numbers a block keeps per token for the backward pass, as multiples of some sizes.

    The rule is computed in chunks of positions.

    Attributes:
        hidden: multiples of the hidden size.
        keys: multiples of the channels of all key heads.
        value_head_keys: multiples of the channels of one key head times the number of value heads.
        values: multiples of the channels of all value heads.
        chunk: multiples of the positions of a chunk times the number of value heads.
        state: multiples of the numbers of all states divided by the positions of a chunk.
    """

    hidden: float
    keys: float
    value_head_keys: float
    values: float
    chunk: float
    state: float


# The multiples by (whether the block is captured, whether it computes in fp32). They were fitted to traces
# of 9 shapes, within 0.03 % (1 % in eager bf16).
_KEPT_MULTIPLES = {
    (True, True): _KeptMultiples(4.0, 4.1, 9.0, 8.0, 4.2, 1.5),
    (True, False): _KeptMultiples(4.0, 6.1, 9.9, 11.0, 7.3, 4.0),
    (False, True): _KeptMultiples(6.0, 12.1, 11.0, 15.0, 5.4, 1.5),
    (False, False): _KeptMultiples(10.0, 16.5, 22.2, 25.2, 10.7, 3.2),
}


class GatedDeltaNet(Mixer):
    """A layer of three steps: a short convolution over positions, the gated delta rule for each head,
    and a gated norm.

    The rule is in `monograph.ops.delta_rule`.

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464.
    """

    name = "linear_attn"
    reads_segments = True
    llama_cpp_fp32 = (_LLAMA_CPP_NAMES["conv1d.weight"],)

    def __init__(self, config: LlamaConfig, impl: Impl) -> None:
        super().__init__(config, impl)
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        key_width = config.linear_num_key_heads * self.key_dim
        value_width = config.linear_num_value_heads * self.value_dim
        # The widths of all queries, all keys and all values. There are as many query heads as key heads.
        self.qkv_widths = key_width, key_width, value_width
        self.value_heads_per_key_head = config.linear_num_value_heads // config.linear_num_key_heads
        # True: there are two input projections, in which the channels of each key head are together.
        # False: there are four, one each for queries, keys and values, for z, for b and for a.
        self.by_key_head = config.family.projections_by_key_head
        # Modules are added in the order of the computation, so that parameters have this order, too.
        if self.by_key_head:
            self.siblings: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")
            self.in_proj_qkvz = Linear(
                config.hidden_size, sum(self.qkv_widths) + value_width, bias=False
            )
            self.in_proj_ba = Linear(
                config.hidden_size, 2 * config.linear_num_value_heads, bias=False
            )
        else:
            self.siblings = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            self.in_proj_qkv = Linear(config.hidden_size, sum(self.qkv_widths), bias=False)
            self.in_proj_z = Linear(config.hidden_size, value_width, bias=False)
            self.in_proj_b = Linear(config.hidden_size, config.linear_num_value_heads, bias=False)
            self.in_proj_a = Linear(config.hidden_size, config.linear_num_value_heads, bias=False)
        self.conv1d = CausalConv(sum(self.qkv_widths), config.linear_conv_kernel_dim)
        self.dt_bias = nn.Parameter(torch.empty(config.linear_num_value_heads))
        self.A_log = nn.Parameter(torch.empty(config.linear_num_value_heads))
        self.norm = RMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(value_width, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_BTD: Tensor,
        cos_sin_B1TF: CosSin | None,
        mask: Mask,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return out_proj(norm(delta_rule(conv(qkv), beta, g)) * silu(z)).

        qkv, z, a and b are projections of x, beta = sigmoid(b), and the decay is
        g = -exp(A_log) softplus(a + dt_bias). Each head's queries and keys are scaled to length 1, and
        then queries are divided by sqrt(E). With `impl` "cached" the rule is computed token by token,
        with the same bits as in decoding.

        Args:
            hidden_BTD: x.
            cos_sin_B1TF: not used, because this layer does not rotate.
            mask: the document number of each position, [B, T]; None: each row is one document.
            cache: the block's view of a cache; None: the pass has no cache.
        """
        segments_BT = cast(Tensor | None, mask)
        channels_BTC, gate_BTX, b_BTH, a_BTH = self._project(hidden_BTD)
        # The dtype in which the rule is computed.
        wide = torch.float64 if hidden_BTD.dtype == torch.float64 else torch.float32
        # beta and g are computed in float64 for two reasons. First, sums of g are subtracted from each
        # other, which magnifies their errors. Second, torch's functions in fp32 may compute the last
        # numbers of a tensor differently from the others, so that equal numbers get different bits. As in
        # transformers, beta is then rounded to the dtype of the hidden states.
        beta_BTH = b_BTH.double().sigmoid().to(hidden_BTD.dtype).to(wide)
        decay_BTH = -self.A_log.double().exp() * F.softplus(a_BTH.double() + self.dt_bias)
        if cache is None:
            mixed_BTC = self.conv1d(channels_BTC, segments_BT)
            starts_BT = document_starts(segments_BT)
            # Autocast would round the rule's products to 16 bits, and each chunk of the text would pass
            # its errors on to the next.
            with torch.autocast(hidden_BTD.device.type, enabled=False):
                out_BHTV, _ = self._rule(
                    *self._heads(mixed_BTC, wide),
                    heads_first(decay_BTH),
                    heads_first(beta_BTH),
                    starts_BT,
                )
        else:
            out_BHTV = self._cached(channels_BTC, decay_BTH, beta_BTH, cache)
        out_BTHV = self.norm(out_BHTV.transpose(1, 2).to(hidden_BTD.dtype))
        gate_BTHV = F.silu(gate_BTX.to(wide)).unflatten(-1, (-1, self.value_dim))
        return self.out_proj((out_BTHV * gate_BTHV).to(hidden_BTD.dtype).flatten(2))

    def _project(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return qkv [B, T, C], z [B, T, H V], b [B, T, H] and a [B, T, H]."""
        if not self.by_key_head:
            return (
                self.in_proj_qkv(hidden_BTD),
                self.in_proj_z(hidden_BTD),
                self.in_proj_b(hidden_BTD),
                self.in_proj_a(hidden_BTD),
            )
        key_heads = self.qkv_widths[0] // self.key_dim
        # Each key head has a query, a key, and the values and gates of its value heads.
        values_width = self.value_heads_per_key_head * self.value_dim
        head_widths = [self.key_dim, self.key_dim, values_width, values_width]
        heads_BTGX = self.in_proj_qkvz(hidden_BTD).unflatten(-1, (key_heads, -1))
        *qkv, z_BTX = (part.flatten(2) for part in heads_BTGX.split(head_widths, dim=-1))
        ba_BTG2X = self.in_proj_ba(hidden_BTD).unflatten(-1, (key_heads, 2, -1))
        b_BTH, a_BTH = (part.flatten(2) for part in ba_BTG2X.unbind(-2))
        return torch.cat(qkv, dim=-1), z_BTX, b_BTH, a_BTH

    @property
    def _rule(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the implementation of the rule for several tokens."""
        return delta_rule.recurrent if self.impl == "cached" else delta_rule.chunked

    def _heads(self, mixed_BTC: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of each value head, given the convolution's outputs.

        Queries and keys are normalised, and repeated for each value head of their key head.

        Returns:
            Queries and keys [B, H, T, E] and values [B, H, T, V], in the dtype `wide`.
        """
        query_BTX, key_BTX, value_BTX = mixed_BTC.to(wide).split(self.qkv_widths, dim=-1)
        queries_and_keys = []
        for channels_BTX in (query_BTX, key_BTX):
            heads_BGTE = heads_first(channels_BTX.unflatten(-1, (-1, self.key_dim)))
            squared_length_BGT1 = heads_BGTE.square().sum(dim=-1, keepdim=True)
            unit_BGTE = heads_BGTE * (squared_length_BGT1 + L2_NORM_EPS).rsqrt()
            queries_and_keys.append(
                unit_BGTE.repeat_interleave(self.value_heads_per_key_head, dim=1)
            )
        query_BHTE, key_BHTE = queries_and_keys
        value_BHTV = heads_first(value_BTX.unflatten(-1, (-1, self.value_dim)))
        return query_BHTE / math.sqrt(self.key_dim), key_BHTE, value_BHTV

    def _cached(
        self, channels_BTC: Tensor, decay_BTH: Tensor, beta_BTH: Tensor, cache: LayerCache
    ) -> Tensor:
        """Add the pass's tokens to the cached state, and return the rule's outputs.

        A pass of one token, such as a decode step, may be repeated: a token that the state already
        includes does not change the state, and gets the same output again. In a pass of several tokens,
        all must be new. A token whose position is at or beyond the row's limit is not added.
        """
        cache.cache.keep_call(
            lambda other: self._cached(
                channels_BTC, decay_BTH, beta_BTH, cache._replace(cache=other)
            )
        )
        recurrence = cast(LayerState, cache.cache.recurrence(cache.layer_index))
        new = recurrence.with_inputs(channels_BTC, cache.positions_BT)
        is_one_token = channels_BTC.shape[1] == 1
        mixed_BTC = self.conv1d.convolve_inputs(new.convolved_BSC)
        query_BHTE, key_BHTE, value_BHTV = self._heads(mixed_BTC, recurrence.state_BHEV.dtype)
        # A token with g = 0 (no decay) and beta = 0 does not change the state.
        decay_BHT, beta_BHT = (
            heads_first(torch.where(new.is_new_BT[..., None], numbers_BTH, 0.0))
            for numbers_BTH in (decay_BTH, beta_BTH)
        )
        if is_one_token:
            state_BHEV = delta_rule.step(
                key_BHTE[:, :, 0],
                value_BHTV[:, :, 0],
                decay_BHT[..., 0],
                beta_BHT[..., 0],
                recurrence.state_BHEV,
            )
            out_BHTV = delta_rule.read(query_BHTE[:, :, 0], state_BHEV)[:, :, None]
        else:
            out_BHTV, state_BHEV = self._rule(
                query_BHTE, key_BHTE, value_BHTV, decay_BHT, beta_BHT, None, recurrence.state_BHEV
            )
        recurrence.store(new, state_BHEV)
        return out_BHTV

    @classmethod
    def initial_values(
        cls, name: str, shape: torch.Size, generator: torch.Generator
    ) -> Tensor | None:
        """Return the initial values of a parameter that is not a matrix."""
        if len(shape) == 2:
            return None
        return initial_vector(name, shape, generator)

    @classmethod
    def recurrence(
        cls, config: LlamaConfig, rows: int, dtype: torch.dtype, device: torch.device
    ) -> LayerState:
        """Return a state that includes no token and has no limit."""
        key_size = config.linear_key_head_dim
        value_size = config.linear_value_head_dim
        heads = config.linear_num_value_heads
        channels = 2 * config.linear_num_key_heads * key_size + heads * value_size
        return empty_state(
            inputs_shape=(rows, config.linear_conv_kernel_dim, channels),
            state_shape=(rows, heads, key_size, value_size),
            dtype=dtype,
            device=device,
        )

    @classmethod
    def training_flops(
        cls, config: LlamaConfig, layer: int, visible_positions: VisiblePositions
    ) -> float:
        """Return 18 · H · E · V FLOPs per token.

        Each head reads its state, a matrix of E × V numbers, corrects it, and reads it again.
        """
        head_size = config.linear_key_head_dim * config.linear_value_head_dim
        return 18 * config.linear_num_value_heads * head_size

    @classmethod
    def kept_numbers(cls, config: LlamaConfig, *, captured: bool, in_fp32: bool) -> float:
        """Return the numbers that a block keeps per token, without its feed-forward layer."""
        value_heads = config.linear_num_value_heads
        key_size = config.linear_key_head_dim
        value_size = config.linear_value_head_dim
        sizes = (
            config.hidden_size,
            config.linear_num_key_heads * key_size,
            value_heads * key_size,
            value_heads * value_size,
            value_heads * delta_rule.CHUNK,
            value_heads * key_size * value_size / delta_rule.CHUNK,
        )
        multiples = _KEPT_MULTIPLES[captured, in_fp32]
        return sum(multiple * size for multiple, size in zip(multiples, sizes, strict=True))

    @classmethod
    def require_llama_cpp(cls, config: LlamaConfig) -> None:
        """Refuse delta nets that llama.cpp computes differently or does not load."""
        key_size = config.linear_key_head_dim
        value_size = config.linear_value_head_dim
        if key_size != value_size:
            raise InputRefused(
                f"linear_key_head_dim = {key_size} and linear_value_head_dim = {value_size} are one size in llama.cpp"
                f"{USE_HF}"
            )
        if config.rms_norm_eps != L2_NORM_EPS:
            raise InputRefused(
                f"rms_norm_eps = {config.rms_norm_eps:g}: llama.cpp adds it to the lengths of a delta net's keys, too, "
                f"where the model adds {L2_NORM_EPS:g}{USE_HF}"
            )
        require_both_kinds(config)

    @classmethod
    def llama_cpp_row_lengths(cls, config: LlamaConfig) -> Mapping[str, int]:
        """Return the width of the output projection's input."""
        values_width = config.linear_num_value_heads * config.linear_value_head_dim
        return {"linear_num_value_heads * linear_value_head_dim": values_width}

    @classmethod
    def add_llama_cpp_sizes(
        cls, writer: GGUFWriter, config: LlamaConfig, architecture: str
    ) -> None:
        """Add the sizes of the delta nets to a file, and which layers are delta nets."""
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        are_delta_nets = [
            mixer_of(config, layer) is cls for layer in range(config.num_hidden_layers)
        ]
        # The block of a head for multi-token prediction, which has attention, is counted, too.
        of_mtp = [False] * config.mtp_num_hidden_layers
        writer.add_array(f"{architecture}.attention.recurrent_layers", [*are_delta_nets, *of_mtp])
        if config.family.projections_by_key_head:
            return
        # What remains are the families of Qwen 3.5. They also have models that see pictures. Their rotary
        # pairs are divided into three sections, one for each coordinate of a position in a picture. In a
        # text the three coordinates are equal. llama.cpp puts pair i into section i % 3 if i is below
        # three times the section's size, and does not rotate a pair without a section. These sizes give
        # each pair a section.
        pairs = config.rotary_dim // 2
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])

    @classmethod
    def llama_cpp_tensor(
        cls, name: str, like: Tensor, read: Callable[[], Tensor], config: LlamaConfig
    ) -> UnreadTensor:
        """Return a tensor of a delta net with llama.cpp's name, order and values.

        Each key head has several value heads. Monograph lists all value heads of the first key head, then
        all of the second, and so on. llama.cpp lists the first value head of every key head, then the
        second of every key head, and so on. If the family orders its projections by key heads
        (`projections_by_key_head`), llama.cpp has the same order as Monograph. Instead of A_log,
        llama.cpp stores -exp(A_log).

        Args:
            name: the tensor's name in the layer.
            like: a meta tensor of the tensor's shape and dtype.
            read: returns the tensor.
            config: the model's configuration.
        """
        query_key_rows = 0
        if name in _WITH_QUERIES_AND_KEYS:
            query_key_rows = 2 * config.linear_num_key_heads * config.linear_key_head_dim

        def change(tensor: Tensor) -> Tensor:
            """Return the tensor with llama.cpp's values and order."""
            if name == "A_log":
                tensor = -tensor.exp()
            # All heads share the norm's weight, so it has no order.
            if name == "norm.weight" or config.family.projections_by_key_head:
                return tensor
            # The output projection has the heads in its columns, all others have them in their rows.
            axis = 1 if name == "out_proj.weight" else 0
            queries_and_keys, values = tensor.tensor_split([query_key_rows], dim=axis)
            head_width = values.shape[axis] // config.linear_num_value_heads
            # The axis becomes [key head, value head of the key head, width], and these are reordered to
            # [value head of the key head, key head, width].
            heads = values.unflatten(axis, (config.linear_num_key_heads, -1, head_width))
            reordered = heads.transpose(axis, axis + 1).flatten(axis, axis + 2)
            return torch.cat([queries_and_keys, reordered], dim=axis)

        return UnreadTensor(
            _LLAMA_CPP_NAMES[name],
            without_middle_axis(like),
            lambda: without_middle_axis(change(read())),
        )

    @classmethod
    def keeps_blocks(cls, config: LlamaConfig, size: int) -> bool:
        """Return whether the heads that `llama_cpp_tensor` reorders consist of whole blocks."""
        heads_keep_their_order = config.linear_num_value_heads == config.linear_num_key_heads
        if config.family.projections_by_key_head or heads_keep_their_order:
            return True
        return config.linear_value_head_dim % size == 0
