"""Linear layers with frozen weights in 8 or 4 bits; no dense weight is kept from the forward to the backward pass.

Shapes: N outputs, K inputs, C = ceil(N K / 64) blocks of S = 64 numbers, G = ceil(C / 256) groups of 256 blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK, GROUP = 64, 256
# Quantiles of a normal distribution that include -1, 0 and 1 (Dettmers et al. 2023, "QLoRA", 2305.14314, appendix E),
# to four digits as in torchao; bitsandbytes' differ from these by less than 5e-5.
NF4 = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
SMALLEST = torch.finfo(torch.float32).eps  # smallest scale of a row, for rows of zeros


class Int8Linear(nn.Linear):
    """A linear layer whose weight is 8-bit integers with a scale for each output: 1 byte a weight.

        W[n, k] = codes[n, k] scales[n],   scales = max |W[n]| / 127.5,   codes = round(W / scales) in -128 .. 127

    The parameters `codes` [N, K] int8 and `scales` [N] fp32, without gradients, take the place of `weight`.
    """

    @torch.no_grad()
    def freeze(self, weight_NK: Tensor) -> None:
        """Round a weight to codes and scales, which take its place."""
        weight_NK = weight_NK.float()
        scale_N = (weight_NK.abs().amax(1) / 127.5).clamp_min(SMALLEST)
        codes_NK = (weight_NK * scale_N.reciprocal()[:, None]).round().clamp(-128, 127).to(torch.int8)
        _keep(self, codes=codes_NK, scales=scale_N)

    def dense(self) -> Tensor:
        """Return the dequantised weight, [N, K] fp32."""
        return self.codes.float() * self.scales[:, None]  # type: ignore[operator, index]

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in the input's dtype, or in autocast's."""
        output: Tensor = _Int8Product.apply(_cast(input), self.codes, self.scales)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class NF4Linear(nn.Linear):
    """A linear layer whose weight is 4-bit codes with a scale for each block of 64: 0.516 bytes a weight.

        W[i] = NF4[code[i]] scale[c],   scale[c] = max |W of block c| = mean + levels[c] / steps[g]

    Block c is 64 consecutive numbers of the flattened weight. Scales less their mean are 8-bit `levels`, of which 256
    share one of `steps`. All are parameters without gradients: `codes` [ceil(N K / 2)] uint8, the first of two in the
    upper bits, `levels` [C] int8, `steps` [G] and `mean` [] fp32.
    """

    @torch.no_grad()
    def freeze(self, weight_NK: Tensor) -> None:
        """Round a weight to codes and scales, which take its place."""
        flat = weight_NK.float().flatten()
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
        edges, shares_of = (table[1:] + table[:-1]) / 2, scale_C.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        # int32 codes, and a quotient that is freed at once: at most three times the weight is in memory, not five.
        codes = torch.bucketize(blocks_CS / shares_of, edges, out_int32=True).to(torch.uint8).flatten()
        packed = (codes[::2] << 4 | codes[1::2])[: -(-flat.numel() // 2)]
        # A clone, because a slice would keep the padded codes in memory.
        _keep(self, codes=packed.clone(), levels=levels.to(torch.int8), steps=steps_G, mean=mean)
        self.register_buffer("table", table, persistent=False)  # a constant, not part of a checkpoint

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def dense(self) -> Tensor:
        """Return the dequantised weight, [N, K] fp32."""
        return _dense(self.codes, self.levels, self.steps, self.mean, self.table, *self._shape)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., K] to [..., N] in the input's dtype, or in autocast's."""
        held = self.codes, self.levels, self.steps, self.mean, self.table
        output: Tensor = _NF4Product.apply(_cast(input), *held, *self._shape)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def parameter_count(module: nn.Module) -> int:
    """Count parameters, tied ones once; a quantised layer counts as many as its dense weight has."""
    layers = [layer for layer in module.modules() if isinstance(layer, Int8Linear | NF4Linear)]
    quantised = {id(param) for layer in layers for name, param in layer._parameters.items() if name != "bias"}
    others = sum(param.numel() for param in module.parameters() if id(param) not in quantised)
    return others + sum(layer.in_features * layer.out_features for layer in layers)


def _keep(layer: nn.Linear, **tensors: Tensor) -> None:
    if "weight" in layer._parameters:
        del layer.weight
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def _cast(input: Tensor) -> Tensor:
    kind = input.device.type
    return input.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else input


class _Int8Product(torch.autograd.Function):
    """Compute y = (x codes^T) scale and dx = (dy scale) codes; integers up to 128 are exact also in bf16."""

    generate_vmap_rule = True  # an ensemble runs its members under vmap

    @staticmethod
    def forward(x: Tensor, codes_NK: Tensor, scale_N: Tensor) -> Tensor:
        return ((x @ codes_NK.to(x.dtype).mT) * scale_N).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        codes_NK, scale_N = ctx.saved_tensors
        return (dy * scale_N).to(dy.dtype) @ codes_NK.to(dy.dtype), None, None


class _NF4Product(torch.autograd.Function):
    """Compute y = x W^T and dx = dy W; both make W from the codes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, codes: Tensor, levels_C: Tensor, steps_G: Tensor, mean: Tensor, table: Tensor, N: int, K: int
    ) -> Tensor:
        return x @ _dense(codes, levels_C, steps_G, mean, table, N, K).to(x.dtype).mT

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:-2])
        ctx.shape = inputs[-2:]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        codes, levels_C, steps_G, mean, table = ctx.saved_tensors
        return dy @ _dense(codes, levels_C, steps_G, mean, table, *ctx.shape).to(dy.dtype), *[None] * 7


def _dense(codes: Tensor, levels_C: Tensor, steps_G: Tensor, mean: Tensor, table: Tensor, N: int, K: int) -> Tensor:
    steps_C = steps_G.repeat_interleave(GROUP, output_size=len(steps_G) * GROUP)[: len(levels_C)]
    scale_C = levels_C / steps_C + mean
    pairs = torch.stack([codes >> 4, codes & 15], -1).flatten().int()
    numbers = table[pairs]
    blocks = F.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK) * scale_C[:, None]
    return blocks.flatten()[: N * K].view(N, K)
