"""Compute a decode step's logits by the kernels of `monograph.ops.decode_kernels`, on a GPU.

`FastForward.logits` is the forward pass of `monograph.model.llama.Llama` for one token per row. For up to
16 rows, the parts of a layer take these numbers of launches:

| part of a layer | launches |
|---|---|
| attention: two products and `attend` between them | 3 |
| attention with gates (`monograph.ops.gated_heads_kernels`) | 5 |
| a delta net (`monograph.decode.fast_delta_net`) | 4 |
| a feed-forward layer | 2 |
| a mixture of experts | 4 |
| a mixture of experts with a shared expert | 8 |

A product with an adapter takes one launch more, for x A^T, whether all rows have the same adapter or each
row has one of a bank (`monograph.decode.adapter_bank`).

For more than 16 rows, dense weights are multiplied by torch. This is faster, since the kernels would read
a weight once for every 16 rows. Attention without gates and a feed-forward layer then take eight
launches together in a compiled step: four for the products, one for `attend`, two for the norms, which
also add the residual, and one for the activation. Weights in 8 or 4 bits, and adapters on them, are
multiplied by the kernels for any number of rows, and so are dense weights with a bank of adapters. A
dense weight with one adapter for all rows is multiplied by the kernels for up to 16 rows; for more rows
it is an obstacle.

`obstacle` says why the kernels cannot compute a model. Its steps are then computed by the model's own
forward pass, which is also the reference against which this one is tested.

Shape suffixes: B rows, D hidden size, V vocabulary, K input and N output channels of a product, H
query heads, J key-value heads, 2F channels of a head, F half of them (for cosines and sines: half of
those that are rotated), X several heads' channels one after another, M channels inside a feed-forward
layer; in mixtures: E experts, C chosen experts of a token.
"""

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from monograph.decode.banked_layers import BankedHead
from monograph.decode.fast_delta_net import delta_net_step, obstacle_of_delta_net
from monograph.decode.fast_projections import (
    SEVERAL_DTYPES,
    family_weights,
    has_hooks,
    is_plain,
    is_plain_head,
    joined_tensors,
    norm_of,
    obstacle_of_product,
    tensors_of,
    torch_project,
    torch_project_gated,
)
from monograph.graph.experts import ExpertLinear
from monograph.graph.lora import LoraLinear
from monograph.graph.siblings import fuse_known, is_in_planes
from monograph.model.delta_net import GatedDeltaNet
from monograph.model.families import NormNames
from monograph.model.layers import MLP, Attention, CentredRMSNorm, Linear, RMSNorm
from monograph.model.llama import Block, Llama
from monograph.model.mixture import Mixture
from monograph.model.recurrent import LayerState
from monograph.model.rope import cos_sin
from monograph.ops.attention import BLOCK
from monograph.ops.decode_kernels import ROWS, Norm, attend, attend_fits, channels_at_once
from monograph.ops.expert_kernels import Combination, expert_inner, expert_sum, route
from monograph.ops.gated_heads_kernels import multiply_by_gate, multiply_by_gates, prepare_heads
from monograph.ops.layer_kernels import (
    Activation,
    multiply,
    multiply_gated,
    project,
    project_gated,
)

if TYPE_CHECKING:
    from monograph.decode.cache import KVCache

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A reason why the kernels cannot compute a layer, which two functions give.
_SCALES_REASON = "this family scales its heads or what its layers add"
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
# The fewest channels of a head. `attend` computes each half of a head's channels by a matrix product of
# its own, which needs at least 16 channels.
MIN_HEAD = 32


def obstacle(model: Llama, rows: int = 1) -> str | None:
    """Return why the kernels cannot compute decode steps of this model, or None if they can.

    Args:
        model: the model.
        rows: the number of rows of a step.
    """
    weight = model.lm_head.weight
    config = model.config
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) < (8, 0):
        return "the kernels need a GPU of compute capability 8.0 or higher"
    if weight.dtype not in _DTYPES:
        return f"the kernels compute in fp32, fp16 or bf16, not {weight.dtype}"
    if config.head_dim < MIN_HEAD or config.head_dim & (config.head_dim - 1):
        return f"the kernels need heads of 32, 64, 128 or 256 channels, not {config.head_dim}"
    if not attend_fits(weight.device, BLOCK, config.head_dim, weight.dtype):
        return f"this card's shared memory is too small for heads of {config.head_dim} channels"
    # `attend` rotates whole heads. In gated attention, `prepare_heads` rotates them before `attend`, and
    # it can rotate a part of a head.
    if config.rotary_dim != config.head_dim and not config.family.gated_attention:
        return "the kernels rotate all channels of a head, and this family only some"
    if config.family.interleaved_rotary:
        return "the kernels do not rotate neighbouring channels, as this family does"
    if config.final_logit_softcapping is not None:
        return "this family caps its logits"
    # The default is norms before attention and the feed-forward layer, and none after them.
    if config.family.norm_names != NormNames():
        return "this family normalises what its layers add, which the kernels do not"
    has_mlps = not all(map(config.is_mixture, range(config.num_hidden_layers)))
    _, activation = config.family.activation
    # The clamped activation exists only in the kernels of mixtures.
    if activation not in _ACTIVATIONS or (config.family.clamped_gating and has_mlps):
        return "the kernels do not have this family's activation"
    if not isinstance(model.scale_last, nn.Identity):
        return "this family scales its logits"
    # The rows of a few tokens may have been trained along with adapters (`monograph.graph.token_rows`).
    if not is_plain_head(model.lm_head):
        return "the head has trained rows, an adapter or hooks"
    if model.model.embed_tokens.weight.dtype != weight.dtype:
        return SEVERAL_DTYPES
    if rows > ROWS and any(type(module) is LoraLinear for module in model.modules()):
        return f"the kernels compute adapters on dense weights for at most {ROWS} rows"
    for block in model.model.layers:
        reason = _obstacle_of_block(cast(Block, block), weight.dtype)
        if reason is not None:
            return reason
    return None


def _obstacle_of_block(block: Block, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot compute a block in this dtype, or None if they can."""
    mixer, mlp, *_ = _modules_of(block)
    if not isinstance(block.scale_branch, nn.Identity):
        return _SCALES_REASON
    reason: str | None
    if isinstance(mixer, GatedDeltaNet):
        reason = obstacle_of_delta_net(mixer, dtype)
    elif isinstance(mixer, Attention):
        reason = _obstacle_of_attention(mixer, dtype)
    else:
        reason = "the kernels compute attention and delta nets, and some layers are neither"
    if reason is not None:
        return reason
    # A mixture is no obstacle: if the kernels cannot compute it, it is called as a module.
    return None if isinstance(mlp, Mixture) else _obstacle_of_mlp(mlp, dtype)


def _obstacle_of_attention(attention: Attention, dtype: torch.dtype) -> str | None:
    if attention.norms_over_all_heads or attention.clip is not None:
        return "this family changes queries and keys in a way that the kernels do not"
    if not isinstance(attention.scale_query, nn.Identity):
        return _SCALES_REASON
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    return obstacle_of_product(inputs, dtype) or obstacle_of_product([attention.o_proj], dtype)


def _obstacle_of_mlp(mlp: MLP, dtype: torch.dtype) -> str | None:
    inputs = [mlp.gate_proj, mlp.up_proj]
    return obstacle_of_product(inputs, dtype) or obstacle_of_product([mlp.down_proj], dtype)


def _is_computable_mixture(mixture: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a module is a mixture of experts that the kernels can compute in this dtype."""
    if not isinstance(mixture, Mixture):
        return False
    experts = mixture.experts
    projections = [experts.gate_proj, experts.up_proj, experts.down_proj]
    # The modules that must not have hooks.
    modules: list[nn.Module] = [mixture, mixture.gate, experts, *projections]
    inner_widths = [experts.down_proj.in_features]
    if mixture.has_shared_expert:
        shared = mixture.shared_expert
        # One launch computes both projections, as one weight.
        if joined_tensors([shared.gate_proj, shared.up_proj]) is None:
            return False
        gate = mixture.shared_expert_gate
        if gate is None or not is_plain(shared.down_proj) or not is_plain(gate):
            return False
        modules.append(shared)
        inner_widths.append(shared.down_proj.in_features)
    are_plain = all(type(each) is ExpertLinear for each in projections)
    # The other implementation is the slow reference, in which every expert computes every token. If
    # it was chosen, the module itself is called.
    is_grouped = mixture.impl == "grouped"
    # `channels_at_once` is 0 for a width that the kernels cannot sum over.
    widths_fit = all(channels_at_once(width) > 0 for width in inner_widths)
    return (
        are_plain
        and is_grouped
        and not any(map(has_hooks, modules))
        and all(parameter.dtype == dtype for parameter in mixture.parameters())
        and widths_fit
    )


class _BlockModules(NamedTuple):
    """The modules of a block. A module's attributes have no types, so they get theirs here."""

    mixer: nn.Module
    mlp: MLP | Mixture
    norm_before_mixer: RMSNorm
    norm_before_mlp: RMSNorm


def _modules_of(block: Block) -> _BlockModules:
    mixer = getattr(block, block.mixer_name)
    modules = (mixer, block.mlp, block.input_layernorm, block.post_attention_layernorm)
    return _BlockModules(*modules)  # type: ignore[arg-type]


class FastForward:
    """The decode steps of one model by kernels.

    The weights are read from the model's parameters at each call, so they may change between calls.

    Attributes:
        model: the model.
        dtype: the dtype of the hidden states.
    """

    def __init__(self, model: Llama, rows: int) -> None:
        """Prepare steps of this number of rows, of a model that has no `obstacle`."""
        self.model = model
        self.dtype = model.lm_head.weight.dtype
        key_heads = model.config.num_key_value_heads
        # For each row and key-value head, `attend` counts here how many blocks of the cache have been
        # computed. The program that computes the last block adds up the results of all blocks, and sets
        # the counter to zero again. All layers share the counters, because they run one after another.
        self._counters_BJ = torch.zeros(
            rows, key_heads, dtype=torch.int32, device=model.lm_head.weight.device
        )
        self._has_delta_nets = any(isinstance(module, GatedDeltaNet) for module in model.modules())
        family = model.config.family
        _, activation = family.activation
        self._activation = _ACTIVATIONS[activation]
        # How experts combine their gate and up projections: by the activation, or, as in gpt-oss, by its
        # clamped form.
        self._expert_combination: Combination = self._activation
        if family.clamped_gating:
            self._expert_combination = "clamped"
        # The kernels read a weight once for every tile of ROWS rows, and an expert's weight once for
        # each token. So they are fast only for the rows of one tile.
        is_one_tile = rows <= ROWS
        # The indices of the layers whose mixture the kernels compute. Other mixtures are called as modules.
        self._kernel_mixtures = frozenset(
            layer
            for layer, block in enumerate(model.model.layers)
            if is_one_tile and _is_computable_mixture(cast(Block, block).mlp, self.dtype)
        )
        self._project = project if is_one_tile else torch_project
        self._project_gated = project_gated if is_one_tile else torch_project_gated

    def logits(self, token_B: Tensor, position_B: Tensor, cache: "KVCache", blocks: int) -> Tensor:
        """Return the logits after one token per row, [B, V], and write its keys and values.

        Args:
            token_B: the tokens, int64.
            position_B: their positions, int64.
            cache: the cache of all rows.
            blocks: how many blocks of the cache attention reads, from the first on.
        """
        model = self.model
        rotations = self._rotations(position_B)
        hidden_BD = model.scale_embedded(model.model.embed_tokens(token_B))
        for index, block in enumerate(model.model.layers):
            hidden_BD = self._block(
                hidden_BD, index, cast(Block, block), rotations, position_B, cache, blocks
            )
        head = model.lm_head
        logits_BV = self._project(hidden_BD, head.weight, norm_of(model.model.norm))
        if isinstance(head, BankedHead):
            return head.with_own_rows(logits_BV, model.model.norm(hidden_BD))
        return logits_BV

    def logits_of_columns(
        self, tokens_BS: Tensor, positions_BS: Tensor, cache: "KVCache", blocks: int
    ) -> Tensor | None:
        """Return the logits after several tokens per row, [B, S, V], in the bits of S steps.

        Products compute all tokens at once, as if each were a row. They give a row the same bits in any
        number of rows that one tile has. Attention has a launch for each column, since a token's keys and
        values must be written before the next token of its row attends to them.

        Args:
            tokens_BS: the tokens, int64.
            positions_BS: their positions, int64, ascending in a row.
            cache: the cache of the rows, whose layers all have attention.
            blocks: how many blocks of the cache attention reads, from the first on.

        Returns:
            None: there are more tokens than a tile has rows, so that the model's own forward pass is faster.
        """
        if tokens_BS.numel() > ROWS:
            return None
        rows, columns = tokens_BS.shape
        # Column after column, so that a column's rows are contiguous.
        logits_RV = self.logits(tokens_BS.T.flatten(), positions_BS.T.flatten(), cache, blocks)
        return logits_RV.view(columns, rows, -1).transpose(0, 1)

    def follows_autocast(self, device_type: str) -> bool:
        """Return whether the kernels compute in the dtypes in which the model's forward pass would now.

        Without autocast they do. Under autocast, the model computes products in the dtype of autocast,
        and some operators of its delta nets in fp32. The kernels compute products in the dtype of the
        weights all the same, and delta nets in the dtype of the hidden states.
        """
        if not torch.is_autocast_enabled(device_type):
            return True
        is_same = torch.get_autocast_dtype(device_type) == self.dtype
        return is_same and not self._has_delta_nets

    def _multiply(
        self,
        x_BK: Tensor,
        layers: list[Linear],
        norm: Norm | None = None,
        residual_BN: Tensor | None = None,
    ) -> Tensor:
        """Return residual + layer(norm(x)), [B, N], with the outputs of all layers one after another."""
        joined = joined_tensors(layers)
        if joined is not None:
            weight_NK, bias_N = joined
            return self._project(x_BK, weight_NK, norm, bias_N, residual_BN)
        columns = [layer.out_features for layer in layers]
        return multiply(
            x_BK, list(map(tensors_of, layers)), columns, norm, residual_BN, _rounds_adapters()
        )

    def _multiply_gated(self, x_BD: Tensor, mlp: MLP, norm: Norm) -> Tensor:
        """Return act(gate(norm(x))) * up(norm(x)) of a gated layer, [B, M]."""
        layers = [mlp.gate_proj, mlp.up_proj]
        joined = joined_tensors(layers)
        if joined is not None:
            # The projections of a feed-forward layer have no biases.
            weight, _ = joined
            return self._project_gated(x_BD, weight, norm, self._activation)
        gate, up = map(tensors_of, layers)
        columns = mlp.gate_proj.out_features
        return multiply_gated(x_BD, gate, up, columns, norm, self._activation, _rounds_adapters())

    def _rotations(self, position_B: Tensor) -> list[tuple[Tensor, Tensor] | tuple[None, None]]:
        """Return each layer's cosines and sines, [B, F]; (None, None) if it does not rotate."""
        config = self.model.config
        layers = range(config.num_hidden_layers)
        # There are at most two different rotations: that of local layers, which have a sliding window,
        # and that of all others.
        rotation_by_is_local: dict[bool, tuple[Tensor, Tensor]] = {}
        rotations: list[tuple[Tensor, Tensor] | tuple[None, None]] = []
        for layer in layers:
            if not config.rotates(layer):
                rotations.append((None, None))
                continue
            is_local = config.has_local_theta(layer)
            if is_local not in rotation_by_is_local:
                cos_B11F, sin_B11F = cos_sin(position_B[:, None], config, torch.float32, is_local)
                rotation_by_is_local[is_local] = cos_B11F[:, 0, 0], sin_B11F[:, 0, 0]
            rotations.append(rotation_by_is_local[is_local])
        return rotations

    def _block(
        self,
        hidden_BD: Tensor,
        index: int,
        block: Block,
        rotations: list[tuple[Tensor, Tensor] | tuple[None, None]],
        position_B: Tensor,
        cache: "KVCache",
        blocks: int,
    ) -> Tensor:
        """Return the hidden states after a block, which is the model's layer `index`."""
        mixer, mlp, norm_before_mixer, norm_before_mlp = _modules_of(block)
        norm = norm_of(norm_before_mixer)
        if isinstance(mixer, GatedDeltaNet):
            recurrence = cast(LayerState, cache.recurrence(index))
            hidden_BD = delta_net_step(
                mixer, hidden_BD, norm, position_B, recurrence, self._project
            )
        else:
            assert isinstance(mixer, Attention)  # `obstacle` refuses all others
            hidden_BD = self._attention(
                mixer, hidden_BD, norm, index, rotations[index], position_B, cache, blocks
            )
        if isinstance(mlp, Mixture):
            if index in self._kernel_mixtures:
                return self._mixture(hidden_BD, mlp, norm_before_mlp)
            mixture_BD: Tensor = mlp(norm_before_mlp(hidden_BD))
            return hidden_BD + mixture_BD
        inner_BM = self._multiply_gated(hidden_BD, mlp, norm_of(norm_before_mlp))
        return self._multiply(inner_BM, [mlp.down_proj], residual_BN=hidden_BD)

    def _attention(
        self,
        attention: Attention,
        hidden_BD: Tensor,
        norm: Norm,
        index: int,
        rotation: tuple[Tensor, Tensor] | tuple[None, None],
        position_B: Tensor,
        cache: "KVCache",
        blocks: int,
    ) -> Tensor:
        """Return the hidden states after attention, which is that of layer `index`."""
        config = self.model.config
        heads = config.num_attention_heads
        q_norm = attention.q_norm
        k_norm = attention.k_norm
        norms = None
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            norms = norm_of(q_norm), norm_of(k_norm)
        inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
        # Queries, keys and values. In gated attention, each head's gates are next to its queries.
        projected_BX = self._multiply(hidden_BD, inputs, norm)
        qkv_BX = projected_BX
        cos_BF, sin_BF = rotation
        if attention.is_gated:
            key_heads = config.num_key_value_heads
            # These have no gates, and are already normalised and rotated.
            qkv_BX = prepare_heads(projected_BX, norms, cos_BF, sin_BF, heads, key_heads)
            # `attend` must not normalise and rotate them a second time.
            norms = None
            cos_BF = sin_BF = None
        q_gain_2F = k_gain_2F = None
        if norms is not None:
            query_norm, key_norm = norms
            q_gain_2F = query_norm.gain_K
            k_gain_2F = key_norm.gain_K
        mixed: list[Tensor] = []
        # A launch computes one token per row of the cache (`logits_of_columns`).
        cache_rows = cache.keys[index].shape[1]
        for begin in range(0, len(position_B), cache_rows):
            column = slice(begin, begin + cache_rows)
            mixed_column: Tensor = attend(
                qkv_BX[column],
                cache.keys[index],
                cache.values[index],
                position_B[column],
                self._counters_BJ,
                blocks,
                heads,
                config.head_dim**-0.5,
                cos_BF=None if cos_BF is None else cos_BF[column],
                sin_BF=None if sin_BF is None else sin_BF[column],
                q_gain_E=q_gain_2F,
                k_gain_E=k_gain_2F,
                eps=config.rms_norm_eps,
                is_centred=isinstance(q_norm, CentredRMSNorm),
                sink_H=attention.sinks,
                window=config.window(index),
            )
            mixed.append(mixed_column)
        mixed_BX = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        if attention.is_gated:
            mixed_BX = multiply_by_gates(mixed_BX, projected_BX, heads)
        return self._multiply(mixed_BX, [attention.o_proj], residual_BN=hidden_BD)

    def _mixture(self, hidden_BD: Tensor, mixture: Mixture, norm_before: RMSNorm) -> Tensor:
        """Return the hidden states after a mixture of experts, computed by the kernels."""
        router = mixture.gate
        experts = mixture.experts
        norm = norm_of(norm_before)
        logits_BE = project(hidden_BD, router.weight, norm, router.bias)
        experts_BC, weights_BC = route(logits_BE, router.top_k, router.normalised)
        gate = experts.gate_proj
        up = experts.up_proj
        down = experts.down_proj
        biases = None
        if gate.bias is not None and up.bias is not None:
            biases = gate.bias, up.bias
        weights = gate.weight, up.weight
        inner_BCM = expert_inner(
            hidden_BD, norm, experts_BC, weights, biases, self._expert_combination
        )
        output_BD: Tensor = expert_sum(
            inner_BCM, experts_BC, weights_BC, down.weight, down.bias, hidden_BD
        )
        if not mixture.has_shared_expert:
            return output_BD
        shared = mixture.shared_expert
        # One tensor with the weights of the gate and up projections, which `_is_computable_mixture` has found
        # next to each other.
        gate_up_weight, _ = family_weights(shared.gate_proj)
        inner_BM = project_gated(hidden_BD, gate_up_weight, norm, self._activation)
        # The output of the shared expert must be multiplied by its gate. Its last layer is linear, so the
        # layer's input is multiplied instead. The launch of this layer can then add its output to that of
        # the other experts.
        assert mixture.shared_expert_gate is not None  # as `_is_computable_mixture` has found
        gate_B1 = project(hidden_BD, mixture.shared_expert_gate.weight, norm)
        return project(
            multiply_by_gate(inner_BM, gate_B1), shared.down_proj.weight, residual_BN=output_BD
        )


def _rounds_adapters() -> bool:
    """Return whether products with adapters must be rounded to the dtype of their input.

    Autocast rounds them to its dtype in the model's own forward pass, even if adapters are in fp32.
    """
    return torch.is_autocast_enabled("cuda")


def fast_forward(model: Llama, rows: int) -> FastForward | None:
    """Return the fast decode steps of a model on a GPU, or None if it has an `obstacle`.

    In both cases sibling projections, such as those of queries, keys and values, are moved next to
    each other in memory (`monograph.graph.siblings`). This also makes the model's own forward pass
    faster. A model that a step trains stays as it is: otherwise a sample in the middle of the run would
    change how its next updates are rounded, and they would be compiled again.
    """
    if not is_in_planes(model):
        fuse_known(model)
    return FastForward(model, rows) if obstacle(model, rows) is None else None
