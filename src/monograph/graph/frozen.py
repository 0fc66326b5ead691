"""Linear layers with frozen weights in 8 or 4 bits. They are the base of QLoRA, which trains adapters.

The dense weight is computed for each product, and again in the backward pass. It is not kept between
the two, because all dense weights together would need as much memory as the model in 16 bits.

Shapes: N outputs, K inputs, E experts, C = ceil(N K / 64) blocks of S = 64 numbers,
G = ceil(C / 256) groups of 256 blocks.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.grouped import product_dtype
from monograph.graph.stored_codes import BLOCK, StoredCodes
from monograph.ops.autograd import Context

GROUP = 256  # blocks whose scales are rounded in equal steps
# Quantiles of a normal distribution that include -1, 0 and 1 (Dettmers et al. 2023, "QLoRA",
# 2305.14314, appendix E). They have four digits, as in torchao; those of bitsandbytes differ by
# less than 5e-5.
NF4 = (
    -1.0,
    -0.6962,
    -0.5251,
    -0.3949,
    -0.2844,
    -0.1848,
    -0.0911,
    0.0,
    0.0796,
    0.1609,
    0.2461,
    0.3379,
    0.4407,
    0.5626,
    0.7230,
    1.0,
)
MIN_ROW_SCALE = torch.finfo(torch.float32).eps  # for rows of zeros, whose scale would be 0


class FrozenWeight(nn.Module):
    """Base class of layers whose weight, [N, K] or [E, N, K] of experts, is stored in few bits."""

    out_features: int
    in_features: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the dense weight."""
        experts = (self.experts,) if hasattr(self, "experts") else ()
        return (*experts, self.out_features, self.in_features)

    def freeze(self, weight: Tensor, exact_scales: bool = False) -> None:
        """Round a weight to codes and scales, and replace it by them.

        Args:
            weight: the weight.
            exact_scales: whether the scales of `NF4Weight` are kept in fp32. Those of `Int8Weight` are
                always.
        """
        raise NotImplementedError

    def adopt(self, stored: StoredCodes) -> None:
        """Replace the weight by codes and scales that a file has, without rounding."""
        raise NotImplementedError

    def stored_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that store the weight, in the order in which `dequantise` takes them."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """Return the dequantised weight, fp32."""
        return dequantise(self.shape, *self.stored_tensors())


def dequantise(
    shape: tuple[int, ...], codes: Tensor, scales: Tensor, *nf4_only: Tensor | None
) -> Tensor:
    """Return a dequantised weight, fp32.

    Args:
        shape: the weight's shape.
        codes: `codes` of an `Int8Weight` or an `NF4Weight`.
        scales: `scales` of an `Int8Weight`, or `levels` of an `NF4Weight`.
        nf4_only: `steps`, `mean` and `table` of an `NF4Weight`. For an `Int8Weight` it is empty, or
            has None in their places.
    """
    if any(tensor is not None for tensor in nf4_only):
        return _dequantise_nf4(codes, scales, *nf4_only, *shape)  # type: ignore[arg-type]
    return codes.float() * scales[..., None]


def frozen_product(x: Tensor, shape: tuple[int, ...], *stored: Tensor) -> Tensor:
    """Return x W^T in the dtype of x, without autograd.

    Args:
        x: [..., K].
        shape: the weight's shape, N and K.
        stored: the dense weight, or `stored_tensors()` of a `FrozenWeight`.
    """
    if _scales_product(x.dtype, stored):
        codes_NK, scale_N = stored
        return ((x @ codes_NK.to(x.dtype).mT) * scale_N).to(x.dtype)
    return x @ _dense_weight(x.dtype, shape, stored).mT


def frozen_gradient(dy: Tensor, shape: tuple[int, ...], *stored: Tensor) -> Tensor:
    """Return dy W, the gradient of `frozen_product` with respect to x."""
    if _scales_product(dy.dtype, stored):
        codes_NK, scale_N = stored
        return (dy * scale_N).to(dy.dtype) @ codes_NK.to(dy.dtype)
    return dy @ _dense_weight(dy.dtype, shape, stored)


def _scales_product(dtype: torch.dtype, stored: tuple[Tensor, ...]) -> bool:
    """Return whether the scales of an `Int8Weight` multiply the product instead of the weight.

    In 16 bits they do: codes are exact there, and scaled codes are not. A weight that is stored in two
    tensors is an `Int8Weight`.
    """
    return len(stored) == 2 and dtype.itemsize == 2


def _dense_weight(dtype: torch.dtype, shape: tuple[int, ...], stored: tuple[Tensor, ...]) -> Tensor:
    """Return the dense weight in a dtype; `stored` is that of `frozen_product`."""
    if len(stored) == 1:  # the dense weight itself
        return stored[0].to(dtype)
    if len(stored) == 2:  # an `Int8Weight`
        codes_NK, scale_N = stored
        return codes_NK.to(dtype) * scale_N[:, None].to(dtype)
    return dequantise(shape, *stored).to(dtype)


class Int8Weight(FrozenWeight):
    """A layer whose weight is 8-bit integers with a scale for each output: 1 byte a weight.

        W[n, k] = codes[n, k] scales[n],   scales = max |W[n]| / 127.5,   codes = round(W / scales) in -128 .. 127

    The parameters `codes` [N, K] int8 and `scales` [N] fp32, without gradients, take the place of
    `weight`.
    """

    @torch.no_grad()
    def freeze(self, weight: Tensor, exact_scales: bool = False) -> None:
        """Round a weight to codes and scales, and replace it by them."""
        weight = weight.float()
        scale_N = (weight.abs().amax(-1) / 127.5).clamp_min(MIN_ROW_SCALE)
        codes = (weight * scale_N.reciprocal()[..., None]).round().clamp(-128, 127).to(torch.int8)
        _replace_weight(self, codes=codes, scales=scale_N)

    @torch.no_grad()
    def adopt(self, stored: StoredCodes) -> None:
        """Replace the weight by codes and scales that a file has, without rounding."""
        # The codes may be in a mapped file.
        _replace_weight(self, codes=stored.codes.clone(), scales=stored.scales)

    def stored_tensors(self) -> tuple[Tensor, ...]:
        """Return the codes and scales."""
        return self.codes, self.scales  # type: ignore[return-value]


class Int8Linear(Int8Weight, nn.Linear):
    """A linear layer with a weight of 8-bit integers."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in the input's dtype, or in autocast's."""
        output: Tensor = _Int8Product.apply(input.to(product_dtype(input)), self.codes, self.scales)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class NF4Weight(FrozenWeight):
    """A layer whose weight is 4-bit codes with a scale for each block of 64: 0.516 bytes a weight.

        W[i] = NF4[code[i]] scale[c],   scale[c] = max |W of block c|

    Block c is 64 consecutive numbers of the flattened weight. Group g is 256 consecutive blocks. The
    scales are rounded as well, in steps that are equal within a group:

        levels[c] = round((scale[c] - mean) steps[g]),   so scale[c] ~ mean + levels[c] / steps[g]

    Exact scales, such as those of a file's weight, are kept as they are: levels = scale, steps = 1 and mean = 0.
    They take 4 bytes instead of 1, so 0.5625 bytes a weight.

    The parameters below, without gradients, take the place of `weight`.

    Attributes:
        codes: [ceil(N K / 2)] uint8, two codes each, the first of them in the upper bits.
        levels: [C] int8, the blocks' rounded scales; or [C] fp32, the exact ones.
        steps: [G] fp32, levels per unit of scale.
        mean: [] fp32, the mean of the scales.
        table: the 16 numbers of `NF4`, or those of a file; a buffer.
        numbers: the same numbers on the host, so that two layers' can be compared without waiting for a
            device.
    """

    numbers: tuple[float, ...]

    @torch.no_grad()
    def freeze(self, weight: Tensor, exact_scales: bool = False) -> None:
        """Round a weight to codes and scales, and replace it by them."""
        tiny = torch.finfo(torch.float32).tiny
        flat = weight.float().flatten()
        padding = -flat.numel() % BLOCK
        blocks_CS = (F.pad(flat, (0, padding)) if padding else flat).view(-1, BLOCK)
        scale_C = blocks_CS.abs().amax(1)
        table = torch.tensor(NF4, device=flat.device)
        edges = (table[1:] + table[:-1]) / 2  # a number is rounded to the nearest of the table
        # A block of zeros has the scale 0, and 0 / 0 would be NaN.
        divisor_C1 = scale_C.clamp_min(tiny)[:, None]
        # Codes are int32 at first, not int64, and the quotient is freed immediately. So at most three
        # times the weight's bytes are in memory, instead of five times.
        codes = (
            torch.bucketize(blocks_CS / divisor_C1, edges, out_int32=True).to(torch.uint8).flatten()
        )
        # A byte has two codes. Those of the padding at the end are cut off.
        packed = (codes[::2] << 4 | codes[1::2])[: math.ceil(flat.numel() / 2)]
        stored_scales = _exact_scales(scale_C) if exact_scales else _rounded_scales(scale_C)
        # The codes are copied, because a slice would keep the padded codes in memory.
        self._store(packed.clone(), stored_scales, table)
        self.numbers = NF4

    @torch.no_grad()
    def adopt(self, stored: StoredCodes) -> None:
        """Replace the weight by codes and scales that a file has, without rounding."""
        assert stored.table is not None  # it is there with codes of 4 bits
        # The codes and the table may be in a mapped file.
        self._store(stored.codes.clone(), _exact_scales(stored.scales), stored.table.clone())
        self.numbers = tuple(stored.table.tolist())

    def _store(self, codes: Tensor, scales: tuple[Tensor, Tensor, Tensor], table: Tensor) -> None:
        """Replace the weight by codes, `levels`, `steps` and `mean`, and a table."""
        levels_C, steps_G, mean = scales
        _replace_weight(self, codes=codes, levels=levels_C, steps=steps_G, mean=mean)
        # The table is not part of a checkpoint, because it is constant.
        self.register_buffer("table", table, persistent=False)

    def stored_tensors(self) -> tuple[Tensor, ...]:
        """Return the codes, what the scales are made of, and the table."""
        return self.codes, self.levels, self.steps, self.mean, self.table  # type: ignore[return-value]


def _rounded_scales(scale_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `levels`, `steps` and `mean` of an `NF4Weight` that rounds these scales."""
    tiny = torch.finfo(torch.float32).tiny
    mean = scale_C.mean()
    deviation_C = scale_C - mean
    group_padding = -len(deviation_C) % GROUP
    deviation_by_group = F.pad(deviation_C, (0, group_padding)).view(-1, GROUP)  # [G, 256]
    steps_G = 128 / deviation_by_group.abs().amax(1).clamp_min(tiny)
    levels_by_group = (deviation_by_group * steps_G[:, None]).round().clamp(-128, 127)
    levels_C = levels_by_group.flatten()[: len(scale_C)]
    return levels_C.to(torch.int8), steps_G, mean


def _exact_scales(scale_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `levels`, `steps` and `mean` of an `NF4Weight` that keeps these scales."""
    steps_G = scale_C.new_ones(math.ceil(len(scale_C) / GROUP))
    return scale_C, steps_G, scale_C.new_zeros(())


class NF4Linear(NF4Weight, nn.Linear):
    """A linear layer with a weight of 4 bits."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in the input's dtype, or in autocast's."""
        output: Tensor = _NF4Product.apply(
            input.to(product_dtype(input)), *self.stored_tensors(), *self.shape
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)


def parameter_count(module: nn.Module) -> int:
    """Return the number of elements of a module's parameters.

    Tied parameters count once. A quantised weight counts as its dense weight.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, FrozenWeight)]
    quantised_ids = {
        id(param) for layer in layers for name, param in layer._parameters.items() if name != "bias"
    }
    others = sum(param.numel() for param in module.parameters() if id(param) not in quantised_ids)
    return others + sum(math.prod(layer.shape) for layer in layers)


def _replace_weight(layer: nn.Module, **tensors: Tensor) -> None:
    """Give a layer these tensors as frozen parameters, in place of its weight."""
    if "weight" in layer._parameters:
        del layer.weight
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class _Int8Product(torch.autograd.Function):
    """Compute y = (x codes^T) scale and dx = (dy scale) codes.

    The codes, -128 .. 127, are exact in bf16 too, which represents all integers up to 256.
    """

    generate_vmap_rule = True  # an ensemble runs its members under vmap

    @staticmethod
    def forward(x: Tensor, codes_NK: Tensor, scale_N: Tensor) -> Tensor:
        y = (_rows(x) @ codes_NK.to(x.dtype).mT) * scale_N
        y = y.view(*x.shape[:-1], -1)
        # In torch 2.11, a captured `to` without effect has no gradient.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        _x, codes_NK, scale_N = inputs
        ctx.save_for_backward(codes_NK, scale_N)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        codes_NK, scale_N = ctx.saved_tensors
        dx = _rows((dy * scale_N).to(dy.dtype)) @ codes_NK.to(dy.dtype)
        return dx.view(*dy.shape[:-1], -1), None, None


class _NF4Context(Context):
    shape: tuple[int, int]


class _NF4Product(torch.autograd.Function):
    """Compute y = x W^T and dx = dy W; each dequantises W from the codes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        codes: Tensor,
        levels_C: Tensor,
        steps_G: Tensor,
        mean: Tensor,
        table: Tensor,
        N: int,
        K: int,
    ) -> Tensor:
        weight_NK = _dequantise_nf4(codes, levels_C, steps_G, mean, table, N, K)
        y = _rows(x) @ weight_NK.to(x.dtype).mT
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def setup_context(
        ctx: _NF4Context,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int],
        output: Tensor,
    ) -> None:
        _x, codes, levels_C, steps_G, mean, table, N, K = inputs
        ctx.save_for_backward(codes, levels_C, steps_G, mean, table)
        ctx.shape = N, K

    @staticmethod
    def backward(ctx: _NF4Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        codes, levels_C, steps_G, mean, table = ctx.saved_tensors
        weight_NK = _dequantise_nf4(codes, levels_C, steps_G, mean, table, *ctx.shape)
        no_grads = [None] * 7  # of the arguments after x
        dx = _rows(dy) @ weight_NK.to(dy.dtype)
        return dx.view(*dy.shape[:-1], -1), *no_grads


def _rows(x: Tensor) -> Tensor:
    """Return [..., K] as rows without gaps, [L, K].

    The output of attention may have gaps between its rows. With them, the product of all members of an
    ensemble would read the weight once for each member.
    """
    return x.reshape(-1, x.shape[-1]).contiguous()


def _dequantise_nf4(
    codes: Tensor, levels_C: Tensor, steps_G: Tensor, mean: Tensor, table: Tensor, *shape: int
) -> Tensor:
    """Return the dense weight of an `NF4Weight` in fp32, by the equations of that class."""
    # Without `output_size`, the host would wait for a GPU to compute the size of the result.
    steps_C = steps_G.repeat_interleave(GROUP, output_size=len(steps_G) * GROUP)[: len(levels_C)]
    scale_C = levels_C / steps_C + mean
    unpacked = torch.stack([codes >> 4, codes & 15], -1).flatten()
    quantiles = table[unpacked.int()]
    quantiles_CS = F.pad(quantiles, (0, -len(quantiles) % BLOCK)).view(-1, BLOCK)
    blocks_CS = quantiles_CS * scale_C[:, None]
    return blocks_CS.flatten()[: math.prod(shape)].view(shape)
