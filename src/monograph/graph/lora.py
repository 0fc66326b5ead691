"""Add low-rank adapters to the linear layers of any module, in place; the base weights keep their
names and bits.

The rows of a few tokens may be trained along with them (`monograph.graph.token_rows`).
`plain_parameters` yields the weights with adapters merged in, one at a time; `narrow` stores frozen
weights in the 16 bits that products read.

Source: Hu et al. 2021, "LoRA", arXiv 2106.09685; Kalajdzievski 2023, "rsLoRA", arXiv 2312.03732;
Liu et al. 2024, "DoRA", arXiv 2402.09353. Order of operations, initial values and names are PEFT's.
Shapes: N outputs, K inputs, R rank.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from monograph.errors import UsageError
from monograph.graph import inspect
from monograph.graph.experts import MULTIPLYING, ExpertLinear, Int8Experts, NF4Experts
from monograph.graph.frozen import FrozenWeight, Int8Linear, NF4Linear
from monograph.graph.mmap_weights import (
    MappedWeight,
    in_file_order,
    keep,
    kept_dtype,
    require_finite,
)
from monograph.graph.siblings import families
from monograph.graph.token_rows import ROWS, TableWithRows, merge_rows, put_rows, tables
from monograph.ops.row_norms import row_norms, sum_row_norms
from monograph.ops.token_rows import replaced
from monograph.ranges import ABOVE_0, COUNT, DECAY

Place = torch.device | None  # None: where the weights are
Base = Literal["auto", "int8", "nf4"]
BASES: dict[str, tuple[Any, Any]] = {
    "int8": (Int8Linear, Int8Experts),
    "nf4": (NF4Linear, NF4Experts),
}


@dataclass(frozen=True)
class Lora:
    """Options of adapters.

    Attributes:
        rank: R.
        alpha: the adapter's output is multiplied by `scale`, alpha / rank.
        targets: "all-linear": every linear layer but the head and the experts of mixtures, as in
            PEFT; another string: a regular expression that matches whole names; a tuple: the last
            parts of names, also of experts'.
        dropout: probability with which elements of an adapter's input are dropped in training.
        base: how the weights of all linear layers but the head, and of experts, are kept: "auto"
            (as they are), "int8" or "nf4".
        tokens: ids of tokens whose rows of embedding and head are trained as well, in ascending
            order.
        rslora: whether `scale` is alpha / sqrt(rank) instead, with which a larger rank learns no
            slower.
        dora: whether the length of each row of a weight is trained apart from its direction, see
            `Adapted`.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str | tuple[str, ...] = inspect.ALL_LINEAR
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
        if not {type(self.rslora), type(self.dora)} == {bool}:
            raise UsageError(
                f"rslora = {self.rslora!r}, dora = {self.dora!r}: expected True or False"
            )


class Factor(nn.Linear):
    """One of an adapter's two matrices, uninitialised until `adapt` fills it."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is: nn.Linear's own method would advance the process's random
        generator.
        """


class Adapted(nn.Linear):
    """Base class of linear layers with an adapter.

        y = W x + b + s B A D(x)
        y = W x + b + g (W D(x) + s B A D(x)) - W D(x),   g = m / ||W + s B A||     with a magnitude

    A is `lora_A.weight` [R, K], B is `lora_B.weight` [N, R], D is dropout in training. m is
    `lora_magnitude_vector` [N], or None. Norms are those of rows, and constants in the backward
    pass (DoRA, section 4.3).
    """

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_dropout: nn.Module
    lora_magnitude_vector: Tensor | None
    lora_norms: Tensor
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the dtype of the base layer's output."""
        output = super().forward(input)
        given = input.dtype
        # Without autocast, a linear layer wants its weight's dtype. With dropout the input is cast
        # under autocast as well, so that the mask's factor 1 / (1 - p) is not rounded to fewer
        # bits.
        if not torch.is_autocast_enabled(input.device.type) or isinstance(
            self.lora_dropout, nn.Dropout
        ):
            input = input.to(self.lora_A.weight.dtype)
        dropped = self.lora_dropout(input)
        inner = self.lora_A(dropped)
        # In a graph, scaling [..., R] instead of [..., N] is cheaper, forward and backward, and no
        # scaled copy of either is kept. Eager code has PEFT's order, and so its bits.
        change = (
            self.lora_B(inner * self.scale)
            if torch.compiler.is_compiling()
            else self.lora_B(inner) * self.scale
        )
        if self.lora_magnitude_vector is None:
            return (output + change).to(output.dtype)
        drops = self.training and isinstance(self.lora_dropout, nn.Dropout)
        plain = super().forward(dropped.to(given)) if drops else output
        A = self.lora_A.weight.detach()
        scaled_B = self.lora_B.weight.detach() * self.scale
        of_A = super().forward(A.to(given))  # it costs as much as R tokens more
        if self.bias is not None:
            plain, of_A = plain - self.bias, of_A - self.bias
        gain = self.lora_magnitude_vector / sum_row_norms(self.lora_norms, of_A, A, scaled_B).to(
            A.dtype
        )
        # In this order the output has the base's bits where m is the norm, and one tensor waits for
        # the backward pass.
        return (output + (gain * (plain + change) - plain)).to(output.dtype)


class ExpertFactor(ExpertLinear):
    """One of the two stacks of matrices that adapt experts."""


class AdaptedExperts(ExpertLinear):
    """Experts with an adapter for each: y = W_e x + s B_e A_e D(x), A [E, R, K], B [E, N, R]."""

    lora_A: ExpertFactor
    lora_B: ExpertFactor
    lora_dropout: nn.Module
    lora_magnitude_vector: None
    scale: float

    def forward(self, input: Tensor, ends_E: Tensor | None) -> Tensor:
        """Map rows as `ExpertLinear` does."""
        output = super().forward(input, ends_E)
        inner = self.lora_A(self.lora_dropout(input), ends_E)
        return (output + self.lora_B(inner * self.scale, ends_E)).to(output.dtype)


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
    device: Place = None,
) -> dict[str, AnyAdapted]:
    """Freeze a module and give its linear layers adapters; only these, and rows of tokens, are
    trained then.

    The layers stay the same objects and keep their names: `q_proj.weight` gets
    `q_proj.lora_A.weight`, uniform in +-1 / sqrt(K), and `q_proj.lora_B.weight`, zero, so that the
    module computes the same bits as before.

    Args:
        module: any module with its weights.
        lora: options of the adapters.
        seed: seeds the initial values of A, together with the layer's name.
        dtype: dtype of the adapters; None: the weights', but fp32 where these have fewer bits.
        device: device of the adapters and of a quantised base, whose layers move there one by one;
            None: the weights'.

    Returns:
        The adapted layers by name.

    Raises:
        UsageError: a target matches nothing, no plain linear layer, the head, a layer that shares
            its weight, or experts with `dora`; the module has adapters or fused siblings already;
            tokens' rows cannot be trained, see `put_rows`.
    """
    module = inspect.unwrap_(module)
    if families(module):
        raise UsageError("an adapter belongs to one layer: unfuse_siblings(model) first")
    if adapters(module):
        raise UsageError("the module has adapters already: merge(module) first")
    chosen = chosen_layers(module, lora)
    if lora.tokens:
        put_rows(module, lora.tokens, dtype)
    rows = {id(table.token_rows) for table in tables(module).values()}
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in rows)
    if lora.base != "auto":
        shared = inspect.shared_parameters(module)
        for layer in (
            *inspect.linear_layers(module).values(),
            *inspect.expert_layers(module).values(),
        ):
            weight = layer.weight
            if id(weight) in shared:  # another layer reads it, and needs a dense weight
                continue
            layer.__class__ = BASES[lora.base][isinstance(layer, ExpertLinear)]
            layer.freeze(weight)  # type: ignore[operator]
            # Layer by layer, so that the device never holds the base before it is quantised.
            if device is not None:
                layer.to(device)
    for name, layer in chosen.items():
        _adapt(layer, lora, f"{seed} {name}.lora_A.weight", device, dtype)
    measure(module)
    return adapters(module)


def chosen_layers(module: nn.Module, lora: Lora) -> dict[str, nn.Linear | ExpertLinear]:
    """Return the layers that get an adapter, by name; raises UsageError, see `adapt`."""
    chosen = inspect.targeted_layers(module, lora.targets)
    if lora.dora and (
        experts := [name for name, layer in chosen.items() if isinstance(layer, ExpertLinear)]
    ):
        raise UsageError(
            f"lora.dora: {experts[0]} holds experts, which have no DoRA: leave it out, or the experts"
        )
    return chosen


@torch.no_grad()
def measure(module: nn.Module, fresh: bool = True) -> None:
    """Take the norms of the rows of W, as it is kept now, for layers with a magnitude; if `fresh`
    it begins as these.

    It is called again after W was rounded.
    """
    for layer in adapters(module).values():
        if layer.lora_magnitude_vector is not None:
            norms = row_norms(_base_weight(layer)).to(layer.lora_magnitude_vector.device)
            layer.register_buffer("lora_norms", norms, persistent=False)
            if fresh:
                layer.lora_magnitude_vector.copy_(norms)


def _base_weight(layer: AnyAdapted) -> Tensor:
    return layer.dense() if isinstance(layer, FrozenWeight) else layer.weight


def adapters(module: nn.Module) -> dict[str, AnyAdapted]:
    """Return the layers of a module that have an adapter, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, AnyAdapted)}


@torch.no_grad()
def _adapt(layer: Any, lora: Lora, key: str, device: Place, dtype: torch.dtype | None) -> None:
    weight = next(p for name, p in layer.named_parameters() if name != "bias")
    wide = (
        kept_dtype(weight)
        if kept_dtype(weight) in (torch.float32, torch.float64)
        else torch.float32
    )
    like: dict[str, Any] = {"device": device or weight.device, "dtype": dtype or wide}
    layer.__class__ = ADAPTED.get(type(layer), LoraLinear)
    for name, inputs, outputs in (
        ("lora_A", layer.in_features, lora.rank),
        ("lora_B", lora.rank, layer.out_features),
    ):
        factor: nn.Module = Factor(inputs, outputs, bias=False, **like)
        if isinstance(layer, ExpertLinear):
            factor = ExpertFactor(layer.experts, inputs, outputs, **like)
        setattr(layer, name, factor)
    layer.lora_dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
    layer.scale = lora.scale
    magnitude = nn.Parameter(torch.empty(layer.out_features, **like)) if lora.dora else None
    layer.register_parameter("lora_magnitude_vector", magnitude)
    layer.lora_B.weight.zero_()
    if not weight.is_meta:
        # A is seeded by its name and drawn on the CPU, so that it depends neither on other layers
        # nor on the device.
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
        generator = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(layer.in_features)
        noise = torch.rand(
            layer.lora_A.weight.shape, generator=generator, dtype=torch.float32, device="cpu"
        )
        layer.lora_A.weight.copy_((2 * noise - 1) * bound)


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Turn every adapted layer, one after another, into a plain linear layer that computes the
    same; see `merged`.

    A quantised weight becomes dense, in the dtype of all other weights if they have one in common,
    else in fp32. The rows of tokens are written into their tables. Frozen weights stay frozen.
    """
    plain = [m for m in module.modules() if not isinstance(m, (*FACTORS, FrozenWeight))]
    dtypes = {kept_dtype(p) for m in plain for p in m.parameters(recurse=False)}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    for layer in adapters(module).values():
        weight = merged(layer)
        for name in ("lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector"):
            delattr(layer, name)
        layer._buffers.pop("lora_norms", None)
        if isinstance(layer, FrozenWeight):
            for name in [name for name in layer._parameters if name != "bias"]:
                del layer._parameters[name]
            layer._buffers.clear()  # NF4's table
            layer.register_parameter("weight", nn.Parameter(weight.to(dtype), requires_grad=False))
        else:
            keep(layer.weight, weight)
        layer.__class__ = ExpertLinear if isinstance(layer, ExpertLinear) else nn.Linear  # type: ignore[assignment]
    merge_rows(module)


@torch.no_grad()
def merged(layer: AnyAdapted) -> Tensor:
    """Return a layer's weight with its adapter merged in, a new tensor [N, K], or [E, N, K] of
    experts.

    round(W + s B A),   the sum in fp32 (fp64 if W or B is), rounded once to W's dtype; with a magnitude, round(g (...))
    """
    weight = _base_weight(layer)
    kept = kept_dtype(weight)
    wide = torch.promote_types(torch.promote_types(kept, layer.lora_B.weight.dtype), torch.float32)
    change = layer.lora_B.weight.to(wide) @ layer.lora_A.weight.to(wide)
    whole = weight.detach().to(wide, copy=True).add_(change, alpha=layer.scale)
    if (magnitude := layer.lora_magnitude_vector) is not None:
        whole *= (magnitude.to(wide) / row_norms(whole).to(magnitude.dtype))[:, None]
    return whole.to(kept)


def kept_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state for a checkpoint: the whole state dict, or with adapters all but the frozen
    parameters.
    """
    state = inspect.unique_state(module)
    if not adapters(module):
        return state
    # All names of tied parameters, as the state may have any of them.
    frozen = {
        name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def starts_still(name: str) -> bool:
    """Return whether a parameter's first gradient may be zero: A's, since B is zero, or that of
    absent tokens' rows.
    """
    return name.endswith((".lora_A.weight", f".{ROWS}"))


class Plain(NamedTuple):
    """A parameter of the merged module.

    Attributes:
        name: its name.
        like: a meta tensor of its shape and dtype.
        read: returns its value; a merged weight is computed at each call.
    """

    name: str
    like: Tensor
    read: Callable[[], Tensor]


def plain_parameters(module: nn.Module) -> Iterator[Plain]:
    """Yield the parameters of a module as `merge` would leave them, each once; the module itself
    stays as it is.

    Adapters must be on plain weights, not on quantised ones. `read` raises InputRefused for NaN or
    an infinity.
    """
    module = inspect.unwrapped(module)
    adapted = adapters(module)
    with_rows = tables(module)
    trained = {
        id(p)
        for child in module.modules()
        if isinstance(child, FACTORS)
        for p in child.parameters()
    }
    trained |= {id(layer.lora_magnitude_vector) for layer in adapted.values()}
    trained |= {id(table.token_rows) for table in with_rows.values()}
    # Not the state dict: a tied head appears once.
    for name, parameter in module.named_parameters():
        if id(parameter) in trained:
            continue
        holder, _, last = name.rpartition(".")
        layer, table = (
            (adapted.get(holder), with_rows.get(holder)) if last == "weight" else (None, None)
        )
        like = torch.empty(parameter.shape, dtype=kept_dtype(parameter), device="meta")
        yield Plain(name, like, functools.partial(_read, name, parameter, layer, table))


def _read(
    name: str, parameter: nn.Parameter, layer: AnyAdapted | None, table: TableWithRows | None
) -> Tensor:
    if layer is not None:
        return require_finite(merged(layer), name)
    value = parameter.detach().to(kept_dtype(parameter))
    return require_finite(value if table is None else replaced(value, table.rows).detach(), name)


def narrow(
    module: nn.Module, dtype: torch.dtype, more: Iterable[nn.Module] = (), device: Place = None
) -> None:
    """Round frozen fp32 weights and biases of linear layers, including the head, once to autocast's
    dtype.

    The bits are those to which autocast would round them at each call.

    Args:
        module: a module with adapters.
        dtype: autocast's.
        more: other modules whose weights are read in that dtype only.
        device: where these weights are moved, one after another; None: they stay.
    """
    readers = {
        m for m in module.modules() if isinstance(m, MULTIPLYING) and not isinstance(m, FACTORS)
    } | set(more)
    # A weight that another module reads as well, such as a tied embedding, keeps its precision.
    elsewhere = {
        id(p) for m in module.modules() if m not in readers for p in m.parameters(recurse=False)
    }
    parameters = {
        id(p): p
        for m in readers
        for p in map(m._parameters.get, ("weight", "bias"))
        if p is not None
    }
    wide = [
        p
        for key, p in parameters.items()
        if key not in elsewhere and kept_dtype(p) == torch.float32
    ]
    for parameter in in_file_order(wide):
        moved = parameter.data.to(
            device or parameter.device, copy=isinstance(parameter, MappedWeight)
        )
        keep(parameter, moved.to(dtype))
