"""Add low-rank adapters to the linear layers of any module, in place.

The base is the module's own weights. They are frozen, and keep their names and bits. In the embedding
and the head, the rows of a few tokens may be trained along with the adapters
(`monograph.graph.token_rows`). `plain_parameters` yields the weights with the adapters merged in, one
at a time, for exports. `round_frozen_weights` rounds the base to the 16-bit dtype in which matrix
products read it.

Sources: Hu et al. 2021, "LoRA", arXiv 2106.09685; Kalajdzievski 2023, "rsLoRA", arXiv 2312.03732;
Liu et al. 2024, "DoRA", arXiv 2402.09353. The order of operations, initial values and names are
PEFT's.

Shapes: N outputs, K inputs, R rank, E experts.
"""

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph import inspect
from monograph.graph.experts import MATMUL_MODULES, ExpertLinear, Int8Experts, NF4Experts
from monograph.graph.frozen import FrozenWeight, Int8Linear, NF4Linear
from monograph.graph.lora_targets import (
    ALL_LINEAR,
    expert_layers,
    linear_layers,
    targeted_layers,
)
from monograph.graph.mmap_weights import (
    MappedWeight,
    in_file_order,
    kept_dtype,
    replace_data,
    require_finite,
)
from monograph.graph.siblings import families
from monograph.graph.token_rows import (
    ROWS,
    TableWithRows,
    add_trained_rows,
    merge_rows,
    tables_with_rows,
)
from monograph.ops.row_norms import row_norms, sum_row_norms
from monograph.ops.token_rows import with_replaced_rows
from monograph.ranges import ABOVE_0, COUNT, DECAY

OptionalDevice = torch.device | None  # None: the device of the weights
Base = Literal["auto", "int8", "nf4"]
# For each format of a quantised base: the class of linear layers, and that of the experts of a mixture.
BASES: dict[str, tuple[type[FrozenWeight], type[FrozenWeight]]] = {
    "int8": (Int8Linear, Int8Experts),
    "nf4": (NF4Linear, NF4Experts),
}


@dataclass(frozen=True)
class Lora:
    """Options of adapters.

    Attributes:
        rank: R.
        alpha: the adapter's output is multiplied by `scale`, alpha / rank.
        targets: the layers that get an adapter. "all-linear": every linear layer except the head and
            the experts of mixtures, as in PEFT. Another string: a regular expression that matches
            whole names of layers. A tuple: the last parts of names. The last two may select experts,
            too.
        dropout: probability with which elements of an adapter's input are dropped in training.
        base: the format of the weights of experts and of all linear layers except the head: "auto"
            (unchanged), "int8" or "nf4".
        tokens: ids of tokens whose rows of embedding and head are trained as well, in ascending
            order.
        rslora: whether `scale` is alpha / sqrt(rank) instead, so that adapters of a larger rank do
            not learn more slowly.
        dora: whether the norm of each row of a weight (the row's magnitude) is trained separately
            from its direction, see `Adapted`.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str | tuple[str, ...] = ALL_LINEAR
    dropout: float = 0.0
    base: Base = "auto"
    tokens: tuple[int, ...] = ()
    rslora: bool = False
    dora: bool = False

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
    backward pass takes these norms for constants (DoRA, section 4.3).

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
        # DoRA needs two more products with W: W D(x), and A W^T for the norms. The latter costs as much as
        # R more tokens. The base class computes both, because only it can read a quantised W. It adds the
        # bias, which is subtracted again.
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
        # In this order of operations, a new adapter (m is the norm, and B is 0) gives the base's bits, and
        # only one tensor is kept for the backward pass.
        return (output + (gain * (base + adapter_output) - base)).to(output.dtype)


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
    same objects and keep their names. `q_proj.weight` gets `q_proj.lora_A.weight`, uniform in
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
        _quantise_base(module, lora.base, device)
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


def _quantise_base(module: nn.Module, base: str, device: OptionalDevice) -> None:
    """Quantise the weights of experts and of all linear layers except the head.

    Args:
        module: the module.
        base: the format, a key of `BASES`.
        device: where each layer is moved once it is quantised; None: layers are not moved.
    """
    linear_class, expert_class = BASES[base]
    shared = inspect.shared_parameters(module)
    for layer in (*linear_layers(module).values(), *expert_layers(module).values()):
        weight = layer.weight
        # A shared weight stays dense, because another layer reads it, too.
        if id(weight) in shared:
            continue
        layer.__class__ = expert_class if isinstance(layer, ExpertLinear) else linear_class
        layer.freeze(weight)  # type: ignore[operator]
        # Layer by layer, so that the device never holds the base before it is quantised.
        if device is not None:
            layer.to(device)


@torch.no_grad()
def store_row_norms(module: nn.Module, reset_magnitudes: bool = True) -> None:
    """Store the norms of the rows of W, `lora_norms`, in each layer that is adapted by DoRA.

    It must be called again after W was rounded.

    Args:
        module: a module with adapters.
        reset_magnitudes: whether the magnitudes are set to these norms, as in a new adapter.
    """
    for layer in adapted_layers(module).values():
        if layer.lora_magnitude_vector is not None:
            norms = row_norms(_base_weight(layer)).to(layer.lora_magnitude_vector.device)
            layer.register_buffer("lora_norms", norms, persistent=False)
            if reset_magnitudes:
                layer.lora_magnitude_vector.copy_(norms)


def _base_weight(layer: AnyAdapted) -> Tensor:
    """Return W, dequantised if the base is quantised."""
    return layer.dense() if isinstance(layer, FrozenWeight) else layer.weight


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
    # The weight. In a quantised layer, this is the first of the parameters that store the weight.
    weight = next(p for name, p in layer.named_parameters() if name != "bias")
    if dtype is None:
        is_wide = kept_dtype(weight) in (torch.float32, torch.float64)
        dtype = kept_dtype(weight) if is_wide else torch.float32
    options: dict[str, Any] = {"device": device or weight.device, "dtype": dtype}
    layer.__class__ = ADAPTED.get(type(layer), LoraLinear)
    assert isinstance(layer, AnyAdapted)
    _add_factors(layer, lora, options)
    magnitude = nn.Parameter(torch.empty(layer.out_features, **options)) if lora.dora else None
    layer.register_parameter("lora_magnitude_vector", magnitude)
    if weight.is_meta:
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
    layer.lora_dropout = nn.Dropout(lora.dropout)
    layer.scale = lora.scale


@torch.no_grad()
def _initialise(layer: AnyAdapted, key: str) -> None:
    """Set a new adapter's values: A is uniform in +-1 / sqrt(K), B is zero, and magnitudes are norms.

    Args:
        layer: the adapted layer.
        key: seeds the values of A.
    """
    layer.lora_B.weight.zero_()
    # A is seeded by its name and sampled on the CPU, so that it depends neither on other layers nor on
    # the device.
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(layer.in_features)
    noise = torch.rand(
        layer.lora_A.weight.shape, generator=generator, dtype=torch.float32, device="cpu"
    )
    layer.lora_A.weight.copy_((2 * noise - 1) * bound)
    if layer.lora_magnitude_vector is not None and hasattr(layer, "lora_norms"):
        layer.lora_magnitude_vector.copy_(layer.lora_norms)


def copy_with_shared_base(module: nn.Module, lora: Lora, seed: int | None = None) -> nn.Module:
    """Return a copy of a module with adapters that has its own adapters and shares the base.

    The copy holds the same frozen parameters and constants (buffers outside of the state dict), not
    copies of them, so many sets of adapters take the memory of one base. `monograph.Ensemble` trains
    such modules together without copying the base.

    Args:
        module: a module with adapters.
        lora: the options of the copy's adapters. Only rank, alpha, rslora and dropout may differ from
            those of the module.
        seed: the seed of new adapters' values, as in `adapt`; None: the copy has the module's values,
            and its rank.

    Raises:
        UsageError: `seed` is None, but the rank is another one.
    """
    shared: list[Tensor] = [*frozen_parameters(module)]
    for part in module.modules():
        constants = (part._buffers[name] for name in part._non_persistent_buffers_set)
        shared += [constant for constant in constants if constant is not None]
    # The memo of copy.deepcopy: by an object's id, what the copy has in its place.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    copied = copy.deepcopy(module, memo)
    for name, layer in adapted_layers(copied).items():
        A = layer.lora_A.weight
        if seed is None and A.shape[-2] != lora.rank:
            raise UsageError(
                f"rank = {lora.rank}: these adapters have the rank {A.shape[-2]}; adapters of another rank need a "
                "seed for their values"
            )
        if seed is None:
            layer.lora_dropout = nn.Dropout(lora.dropout)
            layer.scale = lora.scale
        else:
            _add_factors(layer, lora, {"device": A.device, "dtype": A.dtype})
            _initialise(layer, _seed_key(seed, name))
    return copied


def copy_without_adapters(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose layers have no adapters, and which shares all other parameters
    and buffers with the module.

    Raises:
        UsageError: the base is quantised, a layer has experts, or rows of tokens are trained.
    """
    shared = (*module.parameters(), *module.buffers())
    copied = copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
    if tables_with_rows(copied):
        raise UsageError(
            "rows of tokens are trained (lora.tokens), of which there is no plain form"
        )
    for name, layer in adapted_layers(copied).items():
        if isinstance(layer, (FrozenWeight, ExpertLinear)):
            raise UsageError(
                f"{name} has experts or a quantised weight, of which there is no plain form"
            )
        _remove_adapter(layer)
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    return copied


def _remove_adapter(layer: AnyAdapted) -> None:
    """Remove the tensors of a layer's adapter; the caller changes its class."""
    for name in ("lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector"):
        delattr(layer, name)
    layer._buffers.pop("lora_norms", None)


def frozen_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not trained; of a module with adapters, the base."""
    return [parameter for parameter in module.parameters() if not parameter.requires_grad]


@torch.no_grad()
def compute_alike(modules: Sequence[nn.Module]) -> bool:
    """Return whether modules of one structure have the same outputs in evaluation mode, whatever the
    seed, rank and scale of their adapters.

    New adapters have no effect, because their B is zero.
    """
    return all(_computes_as(modules[0], other) for other in modules[1:])


def _computes_as(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules of one structure have the same outputs; see `compute_alike`."""
    factors_of_new = set[str]()
    layers = zip(adapted_layers(one).items(), adapted_layers(other).values(), strict=True)
    for (name, layer), other_layer in layers:
        if not layer.lora_B.weight.any() and not other_layer.lora_B.weight.any():
            factors_of_new |= {f"{name}.lora_A.weight", f"{name}.lora_B.weight"}
        elif layer.scale != other_layer.scale:
            return False
    tensors = one.state_dict()
    other_tensors = other.state_dict()
    return all(
        # A shared base is not compared with itself.
        tensor.data_ptr() == other_tensors[name].data_ptr()
        or torch.equal(tensor, other_tensors[name])
        for name, tensor in tensors.items()
        if name not in factors_of_new
    )


def _seed_key(seed: int, layer_name: str) -> str:
    """Return the text that seeds the initial values of a layer's adapter."""
    return f"{seed} {layer_name}.lora_A.weight"


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Turn every adapted layer, one after another, into a plain layer that computes the same.

    The new weight is `merged_weight(layer)`. A quantised weight becomes dense. Its dtype is then that of
    the module's other weights, or fp32 if these have several dtypes. The trained rows of tokens are
    written into the embedding and the head. Frozen weights stay frozen.
    """
    dense_modules = [m for m in module.modules() if not isinstance(m, (*FACTORS, FrozenWeight))]
    dtypes = {kept_dtype(p) for m in dense_modules for p in m.parameters(recurse=False)}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    for layer in adapted_layers(module).values():
        weight = merged_weight(layer)
        _remove_adapter(layer)
        if isinstance(layer, FrozenWeight):
            for name in [name for name in layer._parameters if name != "bias"]:
                del layer._parameters[name]
            layer._buffers.clear()  # NF4's table
            layer.register_parameter("weight", nn.Parameter(weight.to(dtype), requires_grad=False))
        else:
            replace_data(layer.weight, weight)
        layer.__class__ = ExpertLinear if isinstance(layer, ExpertLinear) else nn.Linear  # type: ignore[assignment]
    merge_rows(module)


@torch.no_grad()
def merged_weight(layer: AnyAdapted) -> Tensor:
    """Return a layer's weight with its adapter merged in.

        round(W + s B A),   with DoRA  round(g (W + s B A)),  see `Adapted`

    The sum is fp32, or fp64 if W or B is, and is rounded once to W's dtype.

    Returns:
        A new tensor, [N, K], or [E, N, K] of experts.
    """
    weight = _base_weight(layer)
    weight_dtype = kept_dtype(weight)
    adapted_dtype = torch.promote_types(weight_dtype, layer.lora_B.weight.dtype)
    sum_dtype = torch.promote_types(adapted_dtype, torch.float32)
    B_A = layer.lora_B.weight.to(sum_dtype) @ layer.lora_A.weight.to(sum_dtype)
    total = weight.detach().to(sum_dtype, copy=True).add_(B_A, alpha=layer.scale)
    magnitude = layer.lora_magnitude_vector
    if magnitude is not None:
        total *= (magnitude.to(sum_dtype) / row_norms(total).to(magnitude.dtype))[:, None]
    return total.to(weight_dtype)


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


class Plain(NamedTuple):
    """The description of a tensor that is exported: a parameter of a plain module, without adapters.

    The tensor's numbers need not be in memory.

    Attributes:
        name: the tensor's name.
        like: a meta tensor of its shape and dtype.
        read: a function that returns the tensor. A merged weight is computed at each call.
    """

    name: str
    like: Tensor
    read: Callable[[], Tensor]


def plain_parameters(module: nn.Module) -> Iterator[Plain]:
    """Yield each parameter that a module would have after `merge`. The module is not changed.

    Adapters must be on dense weights, not on quantised ones. `read` raises InputRefused if a value
    is NaN or infinite.
    """
    module = inspect.unwrapped(module)
    adapted = adapted_layers(module)
    row_tables = tables_with_rows(module)
    trained_ids = {
        id(p)
        for child in module.modules()
        if isinstance(child, FACTORS)
        for p in child.parameters()
    }
    trained_ids |= {id(layer.lora_magnitude_vector) for layer in adapted.values()}
    trained_ids |= {id(table.token_rows) for table in row_tables.values()}
    # This reads `named_parameters`, because a tied head appears twice in the state dict.
    for name, parameter in module.named_parameters():
        if id(parameter) in trained_ids:
            continue
        owner, _, attribute = name.rpartition(".")
        is_weight = attribute == "weight"
        layer = adapted.get(owner) if is_weight else None
        table = row_tables.get(owner) if is_weight else None
        like = torch.empty(parameter.shape, dtype=kept_dtype(parameter), device="meta")
        yield Plain(name, like, functools.partial(_read, name, parameter, layer, table))


def _read(
    name: str, parameter: nn.Parameter, layer: AnyAdapted | None, table: TableWithRows | None
) -> Tensor:
    """Return the value of a parameter of the merged module.

    Args:
        name: the parameter's name.
        parameter: the parameter.
        layer: the adapted layer whose weight it is, or None.
        table: the layer with trained rows whose weight it is, or None.
    """
    if layer is not None:
        return require_finite(merged_weight(layer), name)
    value = parameter.detach().to(kept_dtype(parameter))
    if table is not None:
        value = with_replaced_rows(value, table.rows).detach()
    return require_finite(value, name)


def round_frozen_weights(
    module: nn.Module,
    dtype: torch.dtype,
    more: Iterable[nn.Module] = (),
    device: OptionalDevice = None,
) -> None:
    """Round the frozen fp32 weights and biases of linear layers, including the head, in place.

    Autocast would round them to the same bits at each call.

    Args:
        module: a module with adapters.
        dtype: autocast's dtype.
        more: other modules of which the weights may be rounded, because they are read only in
            `dtype`.
        device: where these weights are moved, one after another; None: they are not moved.
    """
    rounding_modules: set[nn.Module] = {
        m for m in module.modules() if isinstance(m, MATMUL_MODULES) and not isinstance(m, FACTORS)
    }
    rounding_modules |= set(more)
    # A weight that another module reads as well, such as a tied embedding, keeps its precision.
    read_elsewhere = {
        id(p)
        for m in module.modules()
        if m not in rounding_modules
        for p in m.parameters(recurse=False)
    }
    parameters = {
        id(p): p
        for m in rounding_modules
        for p in (m._parameters.get("weight"), m._parameters.get("bias"))
        if p is not None
    }
    to_round = [
        p
        for key, p in parameters.items()
        if key not in read_elsewhere and kept_dtype(p) == torch.float32
    ]
    for parameter in in_file_order(to_round):
        is_mapped = isinstance(parameter, MappedWeight)
        moved = parameter.data.to(device or parameter.device, copy=is_mapped)
        replace_data(parameter, moved.to(dtype))
