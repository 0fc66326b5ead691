"""Choose the dtype in which a module computes.

Parameters, gradients and optimizer state stay in fp32.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from monograph.device import Device
from monograph.errors import UsageError
from monograph.ranges import ABOVE_0, COUNT

# The precisions of `FP8` are not listed: they are bf16 everywhere except in some products.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = ("fp8", "fp8_head")  # products in fp8: of the blocks' linear layers; of the head
SMALLEST_SCALE = 1.0
LARGEST_SCALE = 2.0**24


@dataclass(frozen=True)
class Precision:
    """The compute dtype of a step: "fp32", "bf16", "fp16", "fp8" or "fp8_head".

    "bf16" runs matrix products, attention and, in this package's models, the residual stream in
    bfloat16 through `torch.autocast`. Sums, norms and the loss stay in fp32; weights and gradients
    are fp32 tensors. "fp16" does the same in half precision, whose small range needs a loss scale
    (`rescale_`). "fp8" is "bf16" except in the linear layers of blocks, and "fp8_head" except in the
    head, see `monograph.graph.fp8`.
    "fp32" changes nothing, so a float64 module computes in float64.

    Attributes:
        name: one of the above.
        loss_scale: the initial loss scale of fp16; a power of two, so that dividing by it is exact.
        grow_after: number of consecutive updates without overflow after which the loss scale of
            fp16 doubles.
    """

    name: str = "fp32"
    loss_scale: float = 2.0**16
    grow_after: int = 2000

    def __post_init__(self) -> None:
        """Refuse an unknown name and numbers outside their range."""
        names = (*DTYPES, *FP8)
        if self.name not in names:
            raise UsageError(f"precision {self.name!r} is not one of {', '.join(names)}")
        ABOVE_0.require("loss_scale", self.loss_scale)
        COUNT.require("grow_after", self.grow_after)

    @property
    def dtype(self) -> torch.dtype:
        """Return the torch dtype; for a precision of `FP8`, that of all but the products in fp8."""
        return DTYPES.get(self.name, torch.bfloat16)

    @property
    def scales_loss(self) -> bool:
        """Return whether the loss is scaled, so that small gradients do not vanish."""
        return self.name == "fp16"

    @property
    def rounds_weights(self) -> bool:
        """Return whether matrix products read fp32 weights rounded to bf16.

        The weights are then kept splittable, see `monograph.optim.narrow.splittable`.
        """
        return self.name in ("bf16", "fp8_head")

    @property
    def datasheet_name(self) -> str:
        """Return which of a datasheet's rates is the upper bound for most products."""
        return "bf16" if self.name == "fp8_head" else self.name

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which tensors of `dtype` are multiplied outside of autocast."""
        return dtype if self.name == "fp32" else self.dtype

    def context(self, device_type: str) -> AbstractContextManager[None]:
        """Return the context in which a forward pass on "cpu" or "cuda" has this precision."""
        if self.name == "fp32" and not torch.is_autocast_enabled(device_type):
            return nullcontext()  # entering autocast takes 40 microseconds
        # For fp32, this disables the caller's autocast, so that a float64 module computes in
        # float64.
        return torch.autocast(device_type, self.dtype, enabled=self.name != "fp32")

    def obstacle(self, device: Device) -> str | None:
        """Return a sentence that says why this precision does not suit a device; None if it does."""
        if self.name == "fp16" and device.type == "cpu":
            return "a CPU computes in fp16 about 30 times slower than in fp32"
        if self.name == "bf16" and device.type == "cuda" and not device.has_bf16:
            return (
                "this GPU has no bf16 arithmetic (NVIDIA's have it from the A100 and RTX 3090 on)"
            )
        if self.name in FP8 and not device.has_fp8:
            return "this device has no fp8 arithmetic (NVIDIA's have it from the L4, RTX 4090 and H100 on)"
        return None

    def rescale_(self, scale: Tensor, good: Tensor, *, finite: Tensor, accepted: Tensor) -> None:
        """Adapt the loss scale after an update.

            gradient not finite:                    s <- s / 2,  n <- 0
            accepted, and n + 1 = grow_after:       s <- 2 s,    n <- 0
            accepted otherwise:                     n <- n + 1

        Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.

        Args:
            scale: s, 0-d fp32, kept between 1 and 2^24.
            good: n, the number of updates accepted since s last changed, 0-d int64.
            finite: whether the scaled gradient is finite, bool.
            accepted: whether the update was made, bool; an update without targets is not made, and
                changes nothing here.
        """
        # `torch.where`, because an `if` would make the host wait for the gradient and break the
        # graph.
        count = good + accepted
        doubles = count >= self.grow_after
        factor = torch.where(finite, torch.where(doubles, 2.0, 1.0), 0.5)
        scale.copy_((scale * factor).clamp(SMALLEST_SCALE, LARGEST_SCALE))
        good.copy_(torch.where(finite & ~doubles, count, 0))
