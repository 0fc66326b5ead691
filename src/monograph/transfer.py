"""Transfer a learning rate that was tuned on a narrow model to a wide model of the same ratios.

The narrow model is called the base; `narrowed` returns its shape. Each tensor of the wide model has its
own initial spread (standard deviation), learning rate, weight decay and eps. They are those of the base
times the factors of the table below. There m is how many times wider the model is than its base: for
matrices in blocks, the tensor's fan_in divided by that of the base's tensor; for all other tensors, the
hidden size divided by that of the base. With these factors, every activation and its change in an update
keep their size at any width, so the best learning rate stays the same (Yang et al. 2022, "Tensor Programs
V", arXiv 2203.03466, table 3; in spectral form Yang, Simon and Bernstein 2023, arXiv 2310.17813). There
is no multiplier in the forward pass, so exports are plain models of their family.

| tensor | initial spread | AdamW lr | AdamW eps | Muon lr |
|---|---|---|---|---|
| embedding, tied to the head or not | 1 | 1 | 1/m | |
| matrices in blocks | m^-1/2 | 1/m | 1/m | m^-1/2 |
| norm gains and biases in blocks, final norm gain | 1 | 1 | 1/m | |
| head | m^-1/2 | 1/m | 1 | |
| final norm gain where the head is tied | 1/m | 1/m | 1 | |

The learning rates of the second row are computed by `width_factor` of each optimizer. Where Muon has no
entry, AdamW updates the tensor. A tied head has the embedding's weights, so it cannot have factors of its
own. The factors that table 3 gives to a head are then those of the final norm gain, which multiplies the
head's inputs. This gain begins at 1/m.

The factor of weight decay is 1 / (factor of lr), so that lr * decay, the decay of one update, is the same
at every width (Wang and Aitchison 2024, arXiv 2405.13698). The factor of the spread of a head that is not
tied is m^-1/2 instead of table 3's 1/m. The best learning rate stays the same with both, and short runs
reach a lower loss with m^-1/2 (Everett et al. 2024, arXiv 2407.05872, and benchmarks/transfer.py).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import nn

from monograph.errors import UsageError
from monograph.graph.inspect import unwrapped
from monograph.model.config import LlamaConfig
from monograph.model.parameters import block_shapes, outer_shapes
from monograph.optim import AdamW, Group, Optimizer

# The smallest width of a base. Narrower models begin to differ from the limit of infinite width, in which
# the rule is derived (Tensor Programs V, appendix).
MIN_BASE_WIDTH = 256
# Multiples of this suit matrix units. If a model's feed-forward width is a multiple of this, so is the
# feed-forward width of the base that `narrowed` returns.
FFN_MULTIPLE = 8
MAX_RATIO_DIFFERENCE = 0.1  # the largest relative difference of two shapes' ratios

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_FINAL_GAIN = "model.norm.weight"
_MATRICES = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
_GAINS = {
    *(f"{name}_layernorm.weight" for name in ("input", "post_attention")),
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
}
_BIASES = {f"self_attn.{name}_proj.bias" for name in "qkvo"}
# The fields in which a model may differ from its base.
_MAY_DIFFER = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "initializer_range",
    "attention_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}


class WidthFactors(NamedTuple):
    """The factors with which a tensor of the wide model is initialised and updated.

    Attributes:
        init: the factor by which `initialise_` multiplies the values that `Llama` gave the tensor. These
            are weights that were sampled with the model's own `initializer_range`, or gains of 1. So
            for weights this is the table's factor times the base's `initializer_range` divided by the
            model's own.
        lr: the learning rate divided by the base's.
        eps: eps divided by the base's, if the tensor's update has an eps.
    """

    init: float
    lr: float
    eps: float


@dataclass(frozen=True)
class WidthTransfer:
    """How to train a model of one shape with the learning rate that is best for another shape.

    If both shapes are the same, every factor is 1 and nothing changes.

        transfer = WidthTransfer(config, narrowed(config))
        model = Llama(config)
        transfer.initialise_(model)
        engine = Resident(model, optim=transfer.optimizer(AdamW(lr=best_of_the_base)))

    Attributes:
        config: the shape that is trained.
        base: the shape that the learning rate, the weight decay and eps were tuned for; it may also
            be wider than `config`.

    Raises:
        UsageError: the shapes differ in more than width, for example in depth, head size or
            vocabulary, or their ratios differ by more than a tenth; the message names what differs.
    """

    config: LlamaConfig
    base: LlamaConfig

    def __post_init__(self) -> None:
        config = self.config
        base = self.base
        differences = list[str]()
        for name in (field.name for field in fields(config) if field.name not in _MAY_DIFFER):
            base_value = getattr(base, name)
            own_value = getattr(config, name)
            if base_value != own_value:
                differences.append(f"{name} {(base_value, own_value)}")
        for numerator, denominator in (
            ("intermediate_size", "hidden_size"),
            ("num_attention_heads", "hidden_size"),
            ("num_attention_heads", "num_key_value_heads"),
        ):
            base_ratio = getattr(base, numerator) / getattr(base, denominator)
            own_ratio = getattr(config, numerator) / getattr(config, denominator)
            if _differs_too_much(own_ratio / base_ratio):
                differences.append(
                    f"{numerator} / {denominator} ({base_ratio:.4g}, {own_ratio:.4g})"
                )
        if differences:
            raise UsageError(
                f"width transfer from a hidden_size of {base.hidden_size} to {config.hidden_size}: the two models "
                f"differ in more than width: {', '.join(differences)}; a rate carries between equal depth, "
                "head size and ratios"
            )

    @property
    def width_ratio(self) -> float:
        """Return m for the residual stream: hidden_size divided by the base's."""
        return self.config.hidden_size / self.base.hidden_size

    @property
    def _spread_ratio(self) -> float:
        """Return the base's initializer_range divided by that of `config`, with which the weights of
        the trained model were sampled.
        """
        return self.base.initializer_range / self.config.initializer_range

    def factors(self, optim: Optimizer | None = None) -> dict[str, WidthFactors]:
        """Return the factors by the tensors' names.

        A star stands for the number of a block, as in `model.layers.*.mlp.up_proj.weight`.

        Args:
            optim: the optimizer; AdamW by default.

        Raises:
            UsageError: the table has no row for a tensor.
        """
        optim = optim or AdamW()
        # Block 0 stands for all. If another block of a model has a tensor that block 0 does not have,
        # `initialise_` refuses the model (`_pattern`).
        base_shapes = block_shapes(self.base, layer=0)
        block_factors = {
            f"model.layers.*.{name}": self._block_factors(name, shape, base_shapes[name], optim)
            for name, shape in block_shapes(self.config, layer=0).items()
        }
        outer_factors = {name: self._outer_factors(name) for name in outer_shapes(self.config)}
        return outer_factors | block_factors

    def _block_factors(
        self,
        name: str,
        shape: tuple[int, ...],
        base_shape: tuple[int, ...],
        optim: Optimizer,
    ) -> WidthFactors:
        """Return the factors of a tensor in a block; its name is without the block's prefix."""
        if name in _MATRICES:
            # A matrix is [fan_out, fan_in].
            m = shape[1] / base_shape[1]
            return WidthFactors(
                init=self._spread_ratio / math.sqrt(m),
                lr=optim.width_factor(shape, base_shape),
                eps=1 / m,
            )
        if name in _GAINS | _BIASES:
            return WidthFactors(init=1.0, lr=1.0, eps=1 / self.width_ratio)
        raise UsageError(f"width transfer has no row for {name}: set optim.transfer to none")

    def _outer_factors(self, name: str) -> WidthFactors:
        """Return the factors of a tensor outside of blocks."""
        m = self.width_ratio
        is_tied = self.config.tie_word_embeddings
        if name == _EMBEDDING:
            return WidthFactors(init=self._spread_ratio, lr=1.0, eps=1 / m)
        if name == _HEAD:
            return WidthFactors(init=self._spread_ratio / math.sqrt(m), lr=1 / m, eps=1.0)
        if name == _FINAL_GAIN:
            if is_tied:
                return WidthFactors(init=1 / m, lr=1 / m, eps=1.0)
            return WidthFactors(init=1.0, lr=1.0, eps=1 / m)
        raise UsageError(f"width transfer has no row for {name}: set optim.transfer to none")

    @torch.no_grad()
    def initialise_(self, model: nn.Module) -> None:
        """Scale the weights that `Llama` has sampled to the spread of the table.

        Raises:
            UsageError: the table has no row for a parameter of the model.
        """
        factors = self.factors()
        for name, parameter in unwrapped(model).named_parameters():
            parameter.mul_(factors[_pattern(name, factors)].init)

    def optimizer(self, optim: Optimizer) -> Optimizer:
        """Return the base's optimizer with the wide model's rates, decays and eps.

        Raises:
            UsageError: the optimizer defines its own groups or patterns of matrices.
        """
        if optim.has_name_patterns:
            raise UsageError(
                "width transfer sets each tensor's rate itself: leave groups and matrices to it"
            )
        return replace(optim, groups=tuple(self._groups(optim)))

    def _groups(self, optim: Optimizer) -> Iterator[Group]:
        """Yield a group of the optimizer for each name of `factors`."""
        # lr * decay stays the same, as this file's docstring says, for the tensors that are decayed:
        # matrices and embeddings.
        for pattern, factors in self.factors(optim).items():
            is_block_matrix = pattern.removeprefix("model.layers.*.") in _MATRICES
            is_decayed = is_block_matrix or pattern in (_EMBEDDING, _HEAD)
            # None: the optimizer's default, which is no decay for gains and biases.
            weight_decay = optim.weight_decay / factors.lr if is_decayed else None
            # `lr` and `eps` are factors of the optimizer's values; `weight_decay` is the decay itself.
            yield Group(pattern, lr=factors.lr, weight_decay=weight_decay, eps=factors.eps)


def narrowed(config: LlamaConfig, hidden_size: int | None = None) -> LlamaConfig:
    """Return the shape of a narrower model on which a model's learning rate can be tuned.

    Depth, head size, ratios, vocabulary and length stay. Heads are removed in whole groups, which are
    one key-value head with its query heads. The initial spread is proportional to 1 / sqrt(width), so
    that the products of matrices and activations have the same size in both models. The base's
    `initializer_range` is thus sqrt(m) times that of `config`. For a matrix or an untied head,
    `WidthFactors.init` is this sqrt(m) times the table's m^-1/2, which is 1: their initial values stay as they
    are sampled. Only where the feed-forward width was rounded is the factor slightly different.

    Args:
        config: the model's shape.
        hidden_size: any width that keeps the ratios. None: of these widths below the model's, the
            smallest of at least 256; if all are less than 256, the smallest of all.

    Raises:
        UsageError: no narrower shape keeps the ratios, or `hidden_size` does not; then the message
            names the widths that do.
    """
    widest = config.hidden_size - 1 if hidden_size is None else hidden_size
    shapes = {shape.hidden_size: shape for shape in _shapes(config, widest)}
    if hidden_size is not None:
        if hidden_size in shapes:
            return shapes[hidden_size]
        widths = ", ".join(str(shape.hidden_size) for shape in _shapes(config, config.hidden_size))
        raise UsageError(
            f"hidden_size = {hidden_size} as a base: does not keep the ratios of {_described(config)}; these "
            f"do: {widths}"
        )
    if not shapes:
        raise UsageError(f"no narrower model keeps the ratios of {_described(config)}")
    wide_enough = [width for width in shapes if width >= MIN_BASE_WIDTH]
    return shapes[min(wide_enough)] if wide_enough else shapes[min(shapes)]


def _shapes(config: LlamaConfig, widest: int) -> Iterator[LlamaConfig]:
    """Yield every shape that keeps the ratios and is at most `widest` wide."""
    width = config.hidden_size
    own_kv_heads = config.num_key_value_heads
    query_heads_per_kv_head = config.num_attention_heads // own_kv_heads
    multiple = FFN_MULTIPLE if config.intermediate_size % FFN_MULTIPLE == 0 else 1
    most_kv_heads = widest * own_kv_heads // width
    for kv_heads in range(1, most_kv_heads + 1):
        if width * kv_heads % own_kv_heads:  # the hidden size would not be a whole number
            continue
        hidden_size = width * kv_heads // own_kv_heads
        exact_ffn_width = config.intermediate_size * kv_heads / own_kv_heads
        ffn_width = multiple * max(1, round(exact_ffn_width / multiple))
        # This width was rounded, so its ratio to the hidden size may differ too much.
        ratio_change = ffn_width * width / (hidden_size * config.intermediate_size)
        if _differs_too_much(ratio_change):
            continue
        yield replace(
            config,
            hidden_size=hidden_size,
            intermediate_size=ffn_width,
            num_attention_heads=query_heads_per_kv_head * kv_heads,
            num_key_value_heads=kv_heads,
            initializer_range=config.initializer_range * math.sqrt(width / hidden_size),
        )


def _differs_too_much(quotient: float) -> bool:
    """Return whether two values, whose quotient is given, differ by more than MAX_RATIO_DIFFERENCE.

    It does not matter which of the two is larger: 1.1 and 1 / 1.1 are equally different from 1.
    """
    return abs(math.log(quotient)) > math.log1p(MAX_RATIO_DIFFERENCE)


def _described(config: LlamaConfig) -> str:
    return (
        f"hidden_size {config.hidden_size}, {config.num_attention_heads} heads of {config.head_dim}, "
        f"{config.num_key_value_heads} key-value heads, intermediate_size {config.intermediate_size}"
    )


def _pattern(name: str, factors: Mapping[str, WidthFactors]) -> str:
    """Return the key of `factors` for a parameter's name.

    Raises:
        UsageError: there is none.
    """
    pattern = name
    if name.startswith("model.layers."):
        _layer, _, name_in_block = name.removeprefix("model.layers.").partition(".")
        pattern = f"model.layers.*.{name_in_block}"
    if pattern not in factors:
        raise UsageError(f"width transfer has no row for {name}: set optim.transfer to none")
    return pattern
