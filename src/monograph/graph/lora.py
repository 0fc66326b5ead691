"""Add low-rank adapters to the linear layers of any module, in place.

The base is the module's own weights. They are frozen, and keep their names and bits. In the embedding
and the head, the rows of a few tokens may be trained along with the adapters
(`monograph.graph.token_rows`). Adapters are merged into the base by `monograph.graph.lora_merge`, and
several sets of them share one base by `monograph.graph.shared_base`.

Sources: Hu et al. 2021, "LoRA", arXiv 2106.09685; Kalajdzievski 2023, "rsLoRA", arXiv 2312.03732;
Liu et al. 2024, "DoRA", arXiv 2402.09353. The order of operations, initial values and names are
PEFT's.

Shapes: N outputs, K inputs, R rank, E experts.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from monograph import compat
from monograph.errors import UsageError
from monograph.graph import inspect
from monograph.graph.experts import ExpertLinear, Int8Experts, NF4Experts
from monograph.graph.frozen import FrozenWeight, Int8Linear, NF4Linear
from monograph.graph.grouped import product_dtype
from monograph.graph.lora_base import Base, OptionalDevice, base_weight, quantise_base
from monograph.graph.lora_targets import ALL_LINEAR, targeted_layers
from monograph.graph.member_products import adapted_product
from monograph.graph.mmap_weights import kept_dtype
from monograph.graph.siblings import families
from monograph.graph.token_rows import ROWS, add_trained_rows, tables_with_rows
from monograph.ops.row_norms import row_norms, sum_row_norms
from monograph.ranges import ABOVE_0, COUNT, DECAY


@dataclass(frozen=True)
class Lora:
    """Options of adapters.

    Attributes:
        rank: R.
        alpha: the adapter's output is multiplied by `scale`, alpha / rank.
        targets: the layers that get an adapter. "all-linear": every linear layer except the head and
            the experts of mixtures, as in PEFT. Another string: a regular expression that matches
            whole names of layers. A tuple: the last parts of names. An expression and a tuple may
            select experts, too.
        dropout: probability with which elements of an adapter's input are dropped in training.
        base: the format of the weights of experts and of all linear layers except the head: "auto"
            (unchanged), "int8" or "nf4".
        tokens: ids of tokens whose rows of embedding and head are trained as well, in ascending
            order.
        rslora: whether `scale` is alpha / sqrt(rank) instead, so that adapters of a larger rank do
            not learn more slowly.
        dora: whether the norm of each row of a weight (the row's magnitude) is trained separately
            from its direction, see `Adapted`.
        dense: names of layers whose weights are unchanged although `base` quantises all others.
        exact_scales: whether the weights of `base` "nf4" have their scales in fp32, in 4 bytes instead of
            1. Weights that a file has in 4 bits always do.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str | tuple[str, ...] = ALL_LINEAR
    dropout: float = 0.0
    base: Base = "auto"
    tokens: tuple[int, ...] = ()
    rslora: bool = False
    dora: bool = False
    dense: tuple[str, ...] = ()
    exact_scales: bool = False

    @property
    def scale(self) -> float:
        """Return s, by which an adapter's output is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        COUNT.require("rank", self.rank)
        ABOVE_0.require("alpha", self.alpha)
        DECAY.require("dropout", self.dropout)
        if self.base not in get_args(Base):
            raise UsageError(f"base = {self.base!r}: expected one of {', '.join(get_args(Base))}")
        if type(self.rslora) is not bool or type(self.dora) is not bool:
            raise UsageError(
                f"rslora = {self.rslora!r}, dora = {self.dora!r}: expected True or False"
            )


class Factor(nn.Linear):
    """One of an adapter's two matrices, uninitialised until `adapt` fills it."""

    def reset_parameters(self) -> None:
        """Do nothing: nn.Linear's own method would advance the process's random generator."""


class Adapted(nn.Linear):
    """Base class of linear layers with an adapter.

        y = W x + b + s B A D(x)                                                    without DoRA
        y = W x + b + g (W D(x) + s B A D(x)) - W D(x),   g = m / ||W + s B A||     with DoRA

    D is dropout in training, and the identity otherwise. ||W + s B A|| has the norm of each row. The
    backward pass treats these norms as constants (DoRA, section 4.3).

    Attributes:
        lora_A: its weight is A, [R, K].
        lora_B: its weight is B, [N, R].
        lora_dropout: D.
        lora_magnitude_vector: m, [N]; None without DoRA.
        lora_norms: [N], the norms of the rows of W; only with DoRA.
        scale: s.
    """

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_dropout: nn.Dropout
    lora_magnitude_vector: Tensor | None
    lora_norms: Tensor
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the dtype of the base layer's output."""
        if self._is_one_product(input):
            return self._product(input)
        output = super().forward(input)
        input_dtype = input.dtype
        has_dropout = self.lora_dropout.p > 0
        # Without autocast, a linear layer needs its weight's dtype. With dropout the input is cast
        # under autocast too, so that the mask's factor 1 / (1 - p) is not rounded to fewer bits.
        if has_dropout or not torch.is_autocast_enabled(input.device.type):
            input = input.to(self.lora_A.weight.dtype)
        dropped = self.lora_dropout(input)
        low_rank = self.lora_A(dropped)
        if torch.compiler.is_compiling():
            # In a graph, scaling [..., R] is cheaper than scaling [..., N], forward and backward,
            # and no scaled copy is kept.
            adapter_output = self.lora_B(low_rank * self.scale)
        else:
            # Eager code has PEFT's order of operations, and so its bits.
            adapter_output = self.lora_B(low_rank) * self.scale
        if self.lora_magnitude_vector is None:
            return (output + adapter_output).to(output.dtype)
        # DoRA needs two more products with W: W D(x), and A W^T for the norms, which costs as much as R
        # more tokens. The base class's `forward` computes both, because only that class can read a
        # quantised W. It also adds the bias, which is subtracted again.
        is_dropping = has_dropout and self.training
        base = super().forward(dropped.to(input_dtype)) if is_dropping else output  # W D(x)
        A = self.lora_A.weight.detach()
        scaled_B = self.lora_B.weight.detach() * self.scale
        base_of_A = super().forward(A.to(input_dtype))  # A W^T
        if self.bias is not None:
            base = base - self.bias
            base_of_A = base_of_A - self.bias
        norms = sum_row_norms(self.lora_norms, base_of_A, A, scaled_B).to(A.dtype)
        gain = self.lora_magnitude_vector / norms
        # For a new adapter the gain is 1 (m is the norm) and `adapter_output` is 0 (B is 0). In this
        # order of operations the result then has the base layer's bits, and only one tensor is kept for
        # the backward pass.
        return (output + (gain * (base + adapter_output) - base)).to(output.dtype)

    def _is_one_product(self, input: Tensor) -> bool:
        """Return whether `_product` computes the output.

        It does where an ensemble calls its members: in eager code inside of a transform such as vmap.
        The adapter must be without DoRA, drop no inputs, and adapt a base that all members share.
        """
        if torch.compiler.is_compiling() or not compat.in_transform():
            return False
        is_plain = self.lora_magnitude_vector is None and not (
            self.lora_dropout.p > 0 and self.training
        )
        # If each member has its own base, the transform passes a wrapped tensor, which is not a
        # parameter. So a base that is a parameter is shared by all members.
        is_shared_base = isinstance(self._base_tensors()[0], nn.Parameter)
        has_one_dtype = (
            torch.is_autocast_enabled(input.device.type) or input.dtype == self.lora_A.weight.dtype
        )
        return is_plain and is_shared_base and has_one_dtype

    def _base_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that store W."""
        return self.stored_tensors() if isinstance(self, FrozenWeight) else (self.weight,)

    def _product(self, input: Tensor) -> Tensor:
        """Return the output by `monograph.graph.member_products`, which is fast for many members."""
        dtype = product_dtype(input)
        scaled_B = self.lora_B.weight * self.scale
        factors = self.lora_A.weight.to(dtype), scaled_B.to(dtype)
        output = adapted_product(input.to(dtype), *factors, self._base_tensors())
        return output if self.bias is None else output + self.bias.to(output.dtype)


class ExpertFactor(ExpertLinear):
    """One of the two stacks of matrices, lora_A and lora_B, that adapt experts."""


class AdaptedExperts(ExpertLinear):
    """Base class of experts with an adapter for each expert e.

        y = W_e x + s B_e A_e D(x)

    A is `lora_A.weight`, [E, R, K]; B is `lora_B.weight`, [E, N, R]; D is dropout in training.
    """

    lora_A: ExpertFactor
    lora_B: ExpertFactor
    lora_dropout: nn.Dropout
    lora_magnitude_vector: None
    scale: float

    def forward(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        """Apply each expert as `ExpertLinear` does."""
        output = super().forward(input, ends_E)
        low_rank = self.lora_A(self.lora_dropout(input), ends_E)
        return (output + self.lora_B(low_rank * self.scale, ends_E)).to(output.dtype)


class LoraInt8Experts(AdaptedExperts, Int8Experts):
    """`Int8Experts` with adapters."""


class LoraNF4Experts(AdaptedExperts, NF4Experts):
    """`NF4Experts` with adapters."""


class LoraLinear(Adapted):
    """A linear layer with an adapter; `adapt` gives layers this class."""


class LoraInt8Linear(Adapted, Int8Linear):
    """An `Int8Linear` with an adapter."""


class LoraNF4Linear(Adapted, NF4Linear):
    """An `NF4Linear` with an adapter."""


FACTORS = (Factor, ExpertFactor)
AnyAdapted = Adapted | AdaptedExperts
# The class that a layer gets with its adapter, by the class that it has. A layer of a class that is not
# listed gets `LoraLinear`.
ADAPTED: dict[type[nn.Module], type[AnyAdapted]] = {
    Int8Linear: LoraInt8Linear,
    NF4Linear: LoraNF4Linear,
    ExpertLinear: AdaptedExperts,
    Int8Experts: LoraInt8Experts,
    NF4Experts: LoraNF4Experts,
}


def adapt(
    module: nn.Module,
    lora: Lora,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: OptionalDevice = None,
) -> dict[str, AnyAdapted]:
    """Freeze a module and give its linear layers adapters.

    Only the adapters and the rows of `lora.tokens` are trained from then on. The layers stay the
    same objects and keep their names. A layer `q_proj` gets `q_proj.lora_A.weight`, uniform in
    +-1 / sqrt(K), and `q_proj.lora_B.weight`, zero, so the module computes the same bits as before.

    Args:
        module: any module with its weights.
        lora: options of the adapters.
        seed: seeds the initial values of A, together with the layer's name.
        dtype: dtype of the adapters; None: the weights' dtype, or fp32 if that has fewer bits.
        device: device of the adapters and of a quantised base, whose layers move there one by one;
            None: the weights' device.

    Returns:
        The adapted layers by name.

    Raises:
        UsageError: a target matches no layer, or matches a layer that cannot have an adapter: one
            that is not a plain linear layer, the head, one that shares its weight, or experts with
            `dora`; the module has adapters or fused siblings already; the rows of tokens cannot be
            trained, see `add_trained_rows`.
    """
    module = inspect.unwrap_(module)
    if families(module):
        raise UsageError(
            "the module has fused siblings, but an adapter belongs to one layer: unfuse_siblings(model) first"
        )
    if adapted_layers(module):
        raise UsageError("the module has adapters already: merge(module) first")
    chosen = chosen_layers(module, lora)
    if lora.tokens:
        add_trained_rows(module, lora.tokens, dtype)
    token_rows = {id(table.token_rows) for table in tables_with_rows(module).values()}
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in token_rows)
    if lora.base != "auto":
        quantise_base(module, lora.base, device, lora.dense, lora.exact_scales)
    for name, layer in chosen.items():
        _adapt(layer, lora, _seed_key(seed, name), device, dtype)
    store_row_norms(module)
    return adapted_layers(module)


def chosen_layers(module: nn.Module, lora: Lora) -> dict[str, nn.Linear | ExpertLinear]:
    """Return the layers that get an adapter, by name.

    Raises:
        UsageError: see `adapt`.
    """
    chosen = targeted_layers(module, lora.targets)
    if not lora.dora:
        return chosen
    for name, layer in chosen.items():
        if isinstance(layer, ExpertLinear):
            raise UsageError(
                f"lora.dora: {name} holds experts, for which there is no DoRA: leave out lora.dora, or the experts"
            )
    return chosen


@torch.no_grad()
def store_row_norms(module: nn.Module, reset_magnitudes: bool = True) -> None:
    """Store the norms of the rows of W, `lora_norms`, in each layer that is adapted by DoRA.

    It must be called again after W was rounded. If W is on the meta device, where tensors have no numbers,
    but the adapter is not, the layer gets no norms: such a module is made only to read the adapter.

    Args:
        module: a module with adapters.
        reset_magnitudes: whether the magnitudes are set to these norms, as in a new adapter.
    """
    for layer in adapted_layers(module).values():
        magnitude = layer.lora_magnitude_vector
        if magnitude is None:
            continue
        norms = row_norms(base_weight(layer))
        if norms.is_meta and not magnitude.is_meta:
            continue
        norms = norms.to(magnitude.device)
        layer.register_buffer("lora_norms", norms, persistent=False)
        if reset_magnitudes:
            magnitude.copy_(norms)


def adapted_layers(module: nn.Module) -> dict[str, AnyAdapted]:
    """Return the layers of a module that have an adapter, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, AnyAdapted)}


@torch.no_grad()
def _adapt(
    layer: nn.Linear | ExpertLinear,
    lora: Lora,
    key: str,
    device: OptionalDevice,
    dtype: torch.dtype | None,
) -> None:
    """Give a layer an adapter.

    Args:
        layer: a linear layer or a layer of experts.
        lora: the adapter's options.
        key: seeds the initial values of A.
        device: see `adapt`.
        dtype: see `adapt`.
    """
    # The weight, or in a quantised layer the first of the parameters that store it.
    weight = next(p for name, p in layer.named_parameters() if name != "bias")
    if dtype is None:
        is_wide = kept_dtype(weight) in (torch.float32, torch.float64)
        dtype = kept_dtype(weight) if is_wide else torch.float32
    options: dict[str, Any] = {"device": device or weight.device, "dtype": dtype}
    # The class changes in place, so that references to the layer stay valid and its tensors keep their
    # names.
    layer.__class__ = ADAPTED.get(type(layer), LoraLinear)
    assert isinstance(layer, AnyAdapted)
    _add_factors(layer, lora, options)
    magnitude = nn.Parameter(torch.empty(layer.out_features, **options)) if lora.dora else None
    layer.register_parameter("lora_magnitude_vector", magnitude)
    if weight.is_meta:
        # The layer is a skeleton, into which the caller loads A and B.
        layer.lora_B.weight.zero_()
    else:
        _initialise(layer, key)


def _add_factors(layer: AnyAdapted, lora: Lora, options: dict[str, Any]) -> None:
    """Give a layer A and B, uninitialised, with the scale and the dropout of an adapter.

    Args:
        layer: the layer.
        lora: the adapter's options.
        options: dtype and device of A and B.
    """
    for name, inputs, outputs in (
        ("lora_A", layer.in_features, lora.rank),
        ("lora_B", lora.rank, layer.out_features),
    ):
        factor: nn.Module
        if isinstance(layer, ExpertLinear):
            factor = ExpertFactor(layer.experts, inputs, outputs, **options)
        else:
            factor = Factor(inputs, outputs, bias=False, **options)
        setattr(layer, name, factor)
    set_scale_and_dropout(layer, lora)


def set_scale_and_dropout(layer: AnyAdapted, lora: Lora) -> None:
    """Give an adapted layer the scale and the dropout of these options."""
    layer.lora_dropout = nn.Dropout(lora.dropout)
    layer.scale = lora.scale


def set_new_adapter(layer: AnyAdapted, name: str, lora: Lora, seed: int) -> None:
    """Give an adapted layer a new adapter, of any rank, in place of its own.

    Args:
        layer: the layer. It keeps its magnitudes, if it has some.
        name: its name, which seeds the values together with `seed`.
        lora: the options of the new adapter.
        seed: see `adapt`.
    """
    A = layer.lora_A.weight
    _add_factors(layer, lora, {"device": A.device, "dtype": A.dtype})
    _initialise(layer, _seed_key(seed, name))


@torch.no_grad()
def _initialise(layer: AnyAdapted, key: str) -> None:
    """Set a new adapter's values: A is uniform in +-1 / sqrt(K), B is zero, and magnitudes are norms.

    Args:
        layer: the adapted layer.
        key: seeds the values of A.
    """
    layer.lora_B.weight.zero_()
    # A's generator is seeded by A's name and is on the CPU, so that the values depend neither on other
    # layers nor on the device.
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(layer.in_features)
    noise = torch.rand(
        layer.lora_A.weight.shape, generator=generator, dtype=torch.float32, device="cpu"
    )
    layer.lora_A.weight.copy_((2 * noise - 1) * bound)
    if layer.lora_magnitude_vector is not None and hasattr(layer, "lora_norms"):
        layer.lora_magnitude_vector.copy_(layer.lora_norms)


def remove_adapter(layer: AnyAdapted) -> None:
    """Remove the tensors of a layer's adapter; the caller changes its class."""
    for name in ("lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector"):
        delattr(layer, name)
    layer._buffers.pop("lora_norms", None)


def _seed_key(seed: int, layer_name: str) -> str:
    """Return the text that seeds the initial values of a layer's adapter."""
    return f"{seed} {layer_name}.lora_A.weight"


def checkpoint_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that a checkpoint stores, by name.

    They are the whole state dict. If the module has adapters, the frozen parameters are left out.
    """
    state = inspect.unique_state(module)
    if not adapted_layers(module):
        return state
    # Tied parameters are listed with all their names, because the state may have any of them.
    frozen_names = {
        name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    return {name: tensor for name, tensor in state.items() if name not in frozen_names}


def may_start_without_gradient(name: str) -> bool:
    """Return whether a parameter's first gradient may be zero.

    The gradient of A is zero because B is zero at first. The gradient of a token's row is zero if the
    token is not in the batch.
    """
    return name.endswith((".lora_A.weight", f".{ROWS}"))
