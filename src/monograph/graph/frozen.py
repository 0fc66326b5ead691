"""Linear layers with frozen weights in 8 or 4 bits; no dense weight is kept from the forward to the
backward pass.

Shapes: N outputs, K inputs, C = ceil(N K / 64) blocks of S = 64 numbers, G = ceil(C / 256) groups
of 256 blocks.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monograph.graph.grouped import product_dtype
from monograph.ops.autograd import Context

BLOCK, GROUP = 64, 256
# Quantiles of a normal distribution that include -1, 0 and 1 (Dettmers et al. 2023, "QLoRA",
# 2305.14314, appendix E), to four digits as in torchao; bitsandbytes' differ from these by less
# than 5e-5.
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
SMALLEST = torch.finfo(torch.float32).eps  # smallest scale of a row, for rows of zeros


class FrozenWeight(nn.Module):
    """A layer whose weight, [N, K] or [E, N, K] of E experts, is kept in few bits."""

    out_features: int
    in_features: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""
        experts = (self.experts,) if hasattr(self, "experts") else ()
        return (*experts, self.out_features, self.in_features)

    def freeze(self, weight: Tensor) -> None:
        """Round a weight to codes and scales, which take its place."""
        raise NotImplementedError

    def held(self) -> tuple[Tensor, ...]:
        """Return the codes and scales, as `dense_of` takes them."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """Return the dequantised weight, fp32."""
        return dense_of(self.shape, *self.held())


def dense_of(
    shape: tuple[int, ...], codes: Tensor, scales: Tensor, *of_nf4: Tensor | None
) -> Tensor:
    """Return the weight of this shape that an `NF4Weight` holds, or an `Int8Weight`, which has no
    more; fp32.
    """
    if any(each is not None for each in of_nf4):
        return _dense(codes, scales, *of_nf4, *shape)  # type: ignore[arg-type]
    return codes.float() * scales[..., None]


class Int8Weight(FrozenWeight):
    """A layer whose weight is 8-bit integers with a scale for each output: 1 byte a weight.

        W[n, k] = codes[n, k] scales[n],   scales = max |W[n]| / 127.5,   codes = round(W / scales) in -128 .. 127

    The parameters `codes` [N, K] int8 and `scales` [N] fp32, without gradients, take the place of
    `weight`.
    """

    @torch.no_grad()
    def freeze(self, weight: Tensor) -> None:
        """Round a weight to codes and scales, which take its place."""
        weight = weight.float()
        scale_N = (weight.abs().amax(-1) / 127.5).clamp_min(SMALLEST)
        codes = (weight * scale_N.reciprocal()[..., None]).round().clamp(-128, 127).to(torch.int8)
        _keep(self, codes=codes, scales=scale_N)

    def held(self) -> tuple[Tensor, ...]:
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

        W[i] = NF4[code[i]] scale[c],   scale[c] = max |W of block c| = mean + levels[c] / steps[g]

    Block c is 64 consecutive numbers of the flattened weight. Scales less their mean are 8-bit
    `levels`, of which 256 share one of `steps`. All are parameters without gradients: `codes`
    [ceil(N K / 2)] uint8, the first of two in the upper bits, `levels` [C] int8, `steps` [G] and
    `mean` [] fp32.
    """

    @torch.no_grad()
    def freeze(self, weight: Tensor) -> None:
        """Round a weight to codes and scales, which take its place."""
        flat = weight.float().flatten()
        short = -flat.numel() % BLOCK
        blocks_CS = (F.pad(flat, (0, short)) if short else flat).view(-1, BLOCK)
        scale_C = blocks_CS.abs().amax(1)
        mean = scale_C.mean()
        around_C = scale_C - mean
        groups = F.pad(around_C, (0, -len(around_C) % GROUP)).view(-1, GROUP)
        steps_G = 128 / groups.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
        levels = (groups * steps_G[:, None]).round().clamp(-128, 127).flatten()[: len(scale_C)]
        table = torch.tensor(NF4, device=flat.device)
        # A block of zeros has the scale 0, and 0 / 0 would be NaN.
        edges = (table[1:] + table[:-1]) / 2
        shares_of = scale_C.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        # int32 codes, and a quotient that is freed at once: at most three times the weight is in
        # memory, not five.
        codes = (
            torch.bucketize(blocks_CS / shares_of, edges, out_int32=True).to(torch.uint8).flatten()
        )
        packed = (codes[::2] << 4 | codes[1::2])[: -(-flat.numel() // 2)]
        # A clone, because a slice would keep the padded codes in memory.
        _keep(self, codes=packed.clone(), levels=levels.to(torch.int8), steps=steps_G, mean=mean)
        # A constant, not part of a checkpoint.
        self.register_buffer("table", table, persistent=False)

    def held(self) -> tuple[Tensor, ...]:
        """Return the codes, scales and the table."""
        return self.codes, self.levels, self.steps, self.mean, self.table  # type: ignore[return-value]


class NF4Linear(NF4Weight, nn.Linear):
    """A linear layer with a weight of 4 bits."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in the input's dtype, or in autocast's."""
        output: Tensor = _NF4Product.apply(
            input.to(product_dtype(input)), *self.held(), *self.shape
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)


def parameter_count(module: nn.Module) -> int:
    """Count parameters, tied ones once; a quantised layer counts as many as its dense weight has."""
    layers = [layer for layer in module.modules() if isinstance(layer, FrozenWeight)]
    quantised = {
        id(param) for layer in layers for name, param in layer._parameters.items() if name != "bias"
    }
    others = sum(param.numel() for param in module.parameters() if id(param) not in quantised)
    return others + sum(math.prod(layer.shape) for layer in layers)


def _keep(layer: nn.Module, **tensors: Tensor) -> None:
    if "weight" in layer._parameters:
        del layer.weight
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class _Int8Product(torch.autograd.Function):
    """Compute y = (x codes^T) scale and dx = (dy scale) codes; integers up to 128 are exact also in
    bf16.
    """

    generate_vmap_rule = True  # an ensemble runs its members under vmap

    @staticmethod
    def forward(x: Tensor, codes_NK: Tensor, scale_N: Tensor) -> Tensor:
        y = (x @ codes_NK.to(x.dtype).mT) * scale_N
        # Torch 2.11: captured, a `to` of no effect has no gradient.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        codes_NK, scale_N = ctx.saved_tensors
        return (dy * scale_N).to(dy.dtype) @ codes_NK.to(dy.dtype), None, None


class _NF4Context(Context):
    shape: tuple[int, int]


class _NF4Product(torch.autograd.Function):
    """Compute y = x W^T and dx = dy W; both make W from the codes."""

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
        return x @ _dense(codes, levels_C, steps_G, mean, table, N, K).to(x.dtype).mT

    @staticmethod
    def setup_context(
        ctx: _NF4Context,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int],
        output: Tensor,
    ) -> None:
        ctx.save_for_backward(*inputs[1:-2])
        ctx.shape = inputs[-2:]

    @staticmethod
    def backward(ctx: _NF4Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        codes, levels_C, steps_G, mean, table = ctx.saved_tensors
        return dy @ _dense(codes, levels_C, steps_G, mean, table, *ctx.shape).to(dy.dtype), *[
            None
        ] * 7


def _dense(
    codes: Tensor, levels_C: Tensor, steps_G: Tensor, mean: Tensor, table: Tensor, *shape: int
) -> Tensor:
    steps_C = steps_G.repeat_interleave(GROUP, output_size=len(steps_G) * GROUP)[: len(levels_C)]
    scale_C = levels_C / steps_C + mean
    numbers = table[torch.stack([codes >> 4, codes & 15], -1).flatten().int()]
    blocks = F.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK) * scale_C[:, None]
    return blocks.flatten()[: math.prod(shape)].view(shape)
