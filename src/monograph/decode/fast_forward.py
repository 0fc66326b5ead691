"""Compute a decode step's logits by the kernels of `monograph.ops.decode_kernels`, on a GPU.

It is the forward pass of `monograph.model.llama.Llama` for one token per row. Up to 16 rows take
five launches per layer, or seven with a mixture of experts. A launch more computes x A^T for each of
the four products with adapters. The kernels read the weights once for every 16 rows, so with more
rows torch's matrix products are used, which are faster then. Attention remains one launch, and a
layer without a mixture takes nine. Weights in 8 or 4 bits, and adapters on them, are multiplied by
kernels for any number of rows; adapters on dense weights are only for up to 16.

`obstacle` says why the kernels cannot compute a model. The model's own forward pass is then used. It
is also the reference against which this one is tested.

Shape suffixes: B rows, D hidden size, V vocabulary, F half of a head's channels, J key-value heads, M
channels inside a feed-forward layer, X any number of channels; in mixtures: E experts, C chosen
experts of a token. In `_torch_project`: K input and N output channels.
"""

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.experts import ExpertLinear
from monograph.graph.frozen import FrozenWeight, Int8Linear, NF4Linear
from monograph.graph.fused_linears import Sibling
from monograph.graph.lora import Adapted, LoraInt8Linear, LoraLinear, LoraNF4Linear
from monograph.graph.siblings import fuse_known
from monograph.model.families import NormNames
from monograph.model.layers import MLP, Attention, CentredRMSNorm, Linear, Mixture, RMSNorm
from monograph.model.llama import Block, Llama
from monograph.model.rope import cos_sin
from monograph.ops.attention import BLOCK
from monograph.ops.decode_kernels import (
    ROWS,
    Activation,
    Norm,
    attend,
    attend_fits,
    channels_at_once,
    project,
    project_gated,
)
from monograph.ops.expert_kernels import Combination, expert_inner, expert_sum, route
from monograph.ops.layer_kernels import Form, Layer, LowRank, fits, multiply, multiply_gated
from monograph.ops.rms_norm import rms_norm

if TYPE_CHECKING:
    from monograph.decode.cache import KVCache

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The forms of the weights of projections that the kernels can compute, by class.
_FORMS: dict[type[nn.Module], Form] = {
    Linear: "dense",
    nn.Linear: "dense",  # a layer whose adapter was merged
    Sibling: "dense",
    LoraLinear: "dense",
    Int8Linear: "int8",
    LoraInt8Linear: "int8",
    NF4Linear: "nf4",
    LoraNF4Linear: "nf4",
}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
MIN_HEAD = 32  # channels of a head: its halves are multiplied by tensor cores, 16 at a time


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
    if config.rotary_dim != config.head_dim:
        return "the kernels rotate all channels of a head, and this family only some"
    if config.family.norm_names != NormNames():
        return "this family normalises what its layers add, which the kernels do not"
    dense = [layer for layer in range(config.num_hidden_layers) if not config.is_mixture(layer)]
    _, activation = config.family.activation
    # The clamped activation exists only in the kernels of mixtures.
    if activation not in _ACTIVATIONS or (config.family.clamped_gating and dense):
        return "the kernels do not have this family's activation"
    if not isinstance(model.scale_last, nn.Identity):
        return "this family scales its logits"
    if type(model.lm_head) not in (Linear, nn.Linear) or _has_hooks(model.lm_head):
        return "the head has trained rows, an adapter or hooks"
    if model.model.embed_tokens.weight.dtype != weight.dtype:
        return "the weights have several dtypes"
    if rows > ROWS and any(type(module) is LoraLinear for module in model.modules()):
        return f"the kernels compute adapters on dense weights for at most {ROWS} rows"
    reasons = (_obstacle_of_block(cast(Block, block), weight.dtype) for block in model.model.layers)
    return next((reason for reason in reasons if reason), None)


def _obstacle_of_block(block: Block, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot compute a block in this dtype, or None if they can."""
    if block.mixer_name != "self_attn":
        return "the kernels compute attention, and some layers have none"
    attention, mlp, *_ = _modules_of(block)
    if attention.is_gated or attention.norms_over_all_heads or attention.clip is not None:
        return "this family changes queries and keys in a way that the kernels do not"
    if not isinstance(attention.scale_query, nn.Identity) or not isinstance(
        block.scale_branch, nn.Identity
    ):
        return "this family scales its heads or what its layers add"
    products = [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
    # A mixture that the kernels cannot compute is called as a module.
    if not isinstance(mlp, Mixture):
        products += [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    reasons = (_obstacle_of_product(layers, dtype) for layers in products)
    return next((reason for reason in reasons if reason), None)


def _obstacle_of_product(layers: list[Linear], dtype: torch.dtype) -> str | None:
    """Return why one launch cannot compute these layers, which read the same tensor."""
    forms = {_FORMS.get(type(layer)) for layer in layers}
    if None in forms or any(map(_has_hooks, layers)):
        return "some projections have hooks or a forward pass of their own"
    if len(forms) > 1:
        return "some projections that read the same tensor are stored in different forms"
    form = cast(Form, forms.pop())
    summed = layers[0].in_features
    if not fits(form, summed):
        multiple = 64 if form == "nf4" else 16
        return f"the kernels need widths that are multiples of {multiple}, not {summed}"
    if form == "dense" and any(layer.weight.dtype != dtype for layer in layers):
        return "the weights have several dtypes"
    adapters = [layer for layer in layers if isinstance(layer, Adapted)]
    if any(layer.lora_magnitude_vector is not None for layer in adapters):
        return "the kernels do not have adapters with magnitudes (DoRA)"
    are_alike = (
        len({layer.bias is None for layer in layers}) == 1
        and len({(a.scale, a.lora_A.weight.shape, a.lora_A.weight.dtype) for a in adapters}) <= 1
    )
    return None if are_alike else "some adapters or biases of the same product are not alike"


def _joined(layers: list[Linear]) -> tuple[Tensor, Tensor | None] | None:
    """Return the weights and biases of dense layers without adapters as one, if they lie side by side.

    The layers must be computed in this order.
    """
    first = layers[0]
    if len(layers) == 1:
        is_plain = _FORMS[type(first)] == "dense" and not isinstance(first, Adapted)
        return (first.weight, first.bias) if is_plain else None
    if not isinstance(first, Sibling) or first.family.weight is None:
        return None
    siblings = first.family.layers
    if len(siblings) != len(layers) or any(
        sibling is not layer for sibling, layer in zip(siblings, layers, strict=True)
    ):
        return None
    return first.family.weight, first.family.bias


def _tensors_of(layer: nn.Linear) -> Layer:
    """Return the tensors of a layer as the kernels take them."""
    form = _FORMS[type(layer)]
    stored = layer.stored_tensors() if isinstance(layer, FrozenWeight) else (layer.weight,)
    adapter = None
    if isinstance(layer, Adapted):
        adapter = LowRank(layer.lora_A.weight, layer.lora_B.weight, layer.scale)
    return Layer(form, stored, layer.bias, adapter)


def _has_hooks(layer: nn.Module) -> bool:
    """Return whether a layer computes more than its class says."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def _has_kernels(mixture: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a module is a mixture of experts that the kernels can compute in this dtype."""
    if not isinstance(mixture, Mixture):
        return False
    experts = mixture.experts
    projections = [experts.gate_proj, experts.up_proj, experts.down_proj]
    modules = [mixture, mixture.gate, experts, *projections]
    are_plain = all(type(each) is ExpertLinear for each in projections)
    if not are_plain or any(map(_has_hooks, modules)):
        return False
    weights = [mixture.gate.weight, *(each.weight for each in projections)]
    is_grouped = not mixture.has_shared_expert and mixture.impl == "grouped"
    return (
        is_grouped
        and all(weight.dtype == dtype for weight in weights)
        and channels_at_once(experts.up_proj.out_features) > 0
    )


class _BlockModules(NamedTuple):
    """The modules of a block with their types, which mypy does not know of submodules."""

    attention: Attention
    mlp: MLP | Mixture
    norm_before_attention: RMSNorm
    norm_before_mlp: RMSNorm


def _modules_of(block: Block) -> _BlockModules:
    modules = (block.self_attn, block.mlp, block.input_layernorm, block.post_attention_layernorm)
    return _BlockModules(*modules)  # type: ignore[arg-type]


class FastForward:
    """Decode steps of one model.

    The weights are read from the model's parameters at each call, so they may change between calls.

    Attributes:
        model: the model.
        dtype: the dtype of the hidden states.
    """

    def __init__(self, model: Llama, rows: int) -> None:
        """Prepare steps of this number of rows, of a model without an `obstacle`."""
        self.model = model
        self.dtype = model.lm_head.weight.dtype
        key_heads = model.config.num_key_value_heads
        # They are zero before and after each launch. All layers share them, because they run one after
        # another.
        self._counters_BJ = torch.zeros(
            rows, key_heads, dtype=torch.int32, device=model.lm_head.weight.device
        )
        family = model.config.family
        _, activation = family.activation
        self._activation = _ACTIVATIONS[activation]
        self._combination: Combination = "clamped" if family.clamped_gating else self._activation
        # The kernels read a weight once for every tile of ROWS rows, and an expert's weight once for
        # each token. So they are fast only for the rows of one tile.
        is_one_tile = rows <= ROWS
        # The layers whose mixture of experts the kernels compute. Other mixtures are called as modules.
        self._kernel_mixtures = frozenset(
            layer
            for layer, block in enumerate(model.model.layers)
            if is_one_tile and _has_kernels(cast(Block, block).mlp, self.dtype)
        )
        self._project = project if is_one_tile else _torch_project
        self._project_gated = project_gated if is_one_tile else _torch_project_gated

    def logits(self, token_B: Tensor, position_B: Tensor, cache: "KVCache", blocks: int) -> Tensor:
        """Return the logits after one token per row, [B, V], and write its keys and values.

        Args:
            token_B: the tokens, int64.
            position_B: their positions, int64.
            cache: the cache of all rows.
            blocks: attention reads this number of first blocks of the cache.
        """
        model = self.model
        rotations = self._rotations(position_B)
        hidden_BD = model.scale_embedded(model.model.embed_tokens(token_B))
        for index, block in enumerate(model.model.layers):
            hidden_BD = self._block(
                hidden_BD, index, cast(Block, block), rotations, position_B, cache, blocks
            )
        return self._project(hidden_BD, model.lm_head.weight, _norm(model.model.norm))

    def computes(self, device_type: str) -> bool:
        """Return whether the kernels compute in the dtype that the model's own forward pass has now.

        Under autocast it is autocast's, in which the weights may not be.
        """
        if not torch.is_autocast_enabled(device_type):
            return True
        return torch.get_autocast_dtype(device_type) == self.dtype

    def _multiply(
        self,
        x_BK: Tensor,
        layers: list[Linear],
        norm: Norm | None = None,
        residual_BN: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of layers one after another, of a norm's output and added to a residual."""
        joined = _joined(layers)
        if joined is not None:
            weight_NK, bias_N = joined
            return self._project(x_BK, weight_NK, norm, bias_N, residual_BN)
        columns = [layer.out_features for layer in layers]
        is_narrow = torch.is_autocast_enabled("cuda")
        return multiply(x_BK, list(map(_tensors_of, layers)), columns, norm, residual_BN, is_narrow)

    def _multiply_gated(self, x_BD: Tensor, mlp: MLP, norm: Norm) -> Tensor:
        """Return act(gate(norm(x))) * up(norm(x)) of a gated layer."""
        layers = [mlp.gate_proj, mlp.up_proj]
        joined = _joined(layers)
        if joined is not None:
            return self._project_gated(x_BD, joined[0], norm, self._activation)
        gate, up = map(_tensors_of, layers)
        is_narrow = torch.is_autocast_enabled("cuda")
        columns = mlp.gate_proj.out_features
        return multiply_gated(x_BD, gate, up, columns, norm, self._activation, is_narrow)

    def _rotations(self, position_B: Tensor) -> list[tuple[Tensor, Tensor] | tuple[None, None]]:
        """Return each layer's cosines and sines, [B, F]; (None, None) if it does not rotate."""
        config = self.model.config
        layers = range(config.num_hidden_layers)
        # There are at most two different rotations: that of local layers, which have a sliding window,
        # and that of all others.
        rotations: dict[bool, tuple[Tensor, Tensor]] = {}
        for layer in layers:
            is_local = config.has_local_theta(layer)
            if config.rotates(layer) and is_local not in rotations:
                cos_B11F, sin_B11F = cos_sin(position_B[:, None], config, torch.float32, is_local)
                rotations[is_local] = cos_B11F[:, 0, 0], sin_B11F[:, 0, 0]
        return [
            rotations[config.has_local_theta(layer)] if config.rotates(layer) else (None, None)
            for layer in layers
        ]

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
        config = self.model.config
        attention, mlp, norm_before_attention, norm_before_mlp = _modules_of(block)
        qkv_BX = self._multiply(
            hidden_BD,
            [attention.q_proj, attention.k_proj, attention.v_proj],
            _norm(norm_before_attention),
        )
        q_norm = attention.q_norm
        k_norm = attention.k_norm
        mixed_BX = attend(
            qkv_BX,
            cache.keys[index],
            cache.values[index],
            position_B,
            self._counters_BJ,
            blocks,
            config.num_attention_heads,
            config.head_dim**-0.5,
            *rotations[index],
            q_norm.weight if isinstance(q_norm, RMSNorm) else None,
            k_norm.weight if isinstance(k_norm, RMSNorm) else None,
            config.rms_norm_eps,
            isinstance(q_norm, CentredRMSNorm),
            attention.sinks,
            config.window(index),
        )
        hidden_BD = self._multiply(mixed_BX, [attention.o_proj], residual_BN=hidden_BD)
        if isinstance(mlp, Mixture):
            if index in self._kernel_mixtures:
                return self._mixture(hidden_BD, mlp, norm_before_mlp)
            mixture_BD: Tensor = mlp(norm_before_mlp(hidden_BD))
            return hidden_BD + mixture_BD
        inner_BM = self._multiply_gated(hidden_BD, mlp, _norm(norm_before_mlp))
        return self._multiply(inner_BM, [mlp.down_proj], residual_BN=hidden_BD)

    def _mixture(self, hidden_BD: Tensor, mixture: Mixture, norm_before: RMSNorm) -> Tensor:
        """Return the hidden states after a mixture of experts, computed by the kernels."""
        router = mixture.gate
        experts = mixture.experts
        norm = _norm(norm_before)
        logits_BE = project(hidden_BD, router.weight, norm, router.bias)
        experts_BC, weights_BC = route(logits_BE, router.top_k, router.normalised)
        gate, up, down = experts.gate_proj, experts.up_proj, experts.down_proj
        biases = None
        if gate.bias is not None and up.bias is not None:
            biases = gate.bias, up.bias
        weights = gate.weight, up.weight
        inner_BCM = expert_inner(hidden_BD, norm, experts_BC, weights, biases, self._combination)
        output_BD: Tensor = expert_sum(
            inner_BCM, experts_BC, weights_BC, down.weight, down.bias, hidden_BD
        )
        return output_BD


def _torch_project(
    x_BK: Tensor,
    weight_NK: Tensor,
    norm: Norm | None = None,
    bias_N: Tensor | None = None,
    residual_BN: Tensor | None = None,
) -> Tensor:
    """Return what `project` returns, by torch's operators."""
    if norm is not None:
        x_BK = _normalised(x_BK, norm)
    y_BN = F.linear(x_BK, weight_NK, bias_N)
    return y_BN if residual_BN is None else residual_BN + y_BN


def _torch_project_gated(
    x_BK: Tensor, weight_NK: Tensor, norm: Norm, activation: Activation
) -> Tensor:
    """Return what `project_gated` returns, by torch's operators."""
    gate_BM, up_BM = F.linear(_normalised(x_BK, norm), weight_NK).chunk(2, -1)
    if activation == "gelu":
        return F.gelu(gate_BM, approximate="tanh") * up_BM
    return F.silu(gate_BM) * up_BM


def _normalised(x_BK: Tensor, norm: Norm) -> Tensor:
    gain_K = 1 + norm.gain_K if norm.is_centred else norm.gain_K
    return rms_norm(x_BK, gain_K, norm.eps)


def _norm(layer: RMSNorm) -> Norm:
    """Return a norm as the kernels take it."""
    return Norm(layer.weight, layer.eps, isinstance(layer, CentredRMSNorm))


def fast_forward(model: Llama, rows: int) -> FastForward | None:
    """Return the fast decode steps of a model on a GPU, or None if it has an `obstacle`.

    In both cases sibling projections, such as those of queries, keys and values, are moved next to
    each other in memory (`monograph.graph.siblings`). This also makes the model's own forward pass
    faster.
    """
    fuse_known(model)
    return FastForward(model, rows) if obstacle(model, rows) is None else None
