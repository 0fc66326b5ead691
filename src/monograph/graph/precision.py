"""In which dtype a module computes; its parameters, gradients and optimizer state stay as they are (fp32 masters)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from monograph.errors import UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """The compute dtype of a step, "fp32" or "bf16".

    "bf16" runs matrix products, attention and (in this package's models) the residual stream in bfloat16 through
    `torch.autocast`; sums, norms and the loss stay in fp32, weights and gradients are fp32 tensors. "fp32" changes
    nothing, so a float64 module computes in float64.
    """

    name: str = "fp32"

    def __post_init__(self) -> None:
        """Refuse an unknown name."""
        if self.name not in DTYPES:
            raise UsageError(f"precision {self.name!r} is not one of {', '.join(DTYPES)}")

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        return DTYPES[self.name]

    def products(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of matrix products of tensors of `dtype` outside of `context`, where autocast does not choose."""
        return dtype if self.name == "fp32" else self.dtype

    def context(self, device_type: str) -> AbstractContextManager[None]:
        """The context in which a forward pass computes at this precision on "cpu" or "cuda"."""
        return torch.autocast(device_type, self.dtype, enabled=self.name != "fp32")
