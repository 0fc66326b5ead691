"""Rotate the pairs of channels of heads (rotary position embedding) in compiled graphs on a GPU.

The kernel is in `monograph.ops.rotation_kernel`. It is imported only where it runs, because a machine
without a GPU may have no Triton, but it traces the operator `rotate_heads` to plan for a GPU.

Shapes: B rows, T positions, H heads, D = 2 F channels of a head, F pairs of channels: i and i + F.
"""

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def can_rotate_heads(heads: Tensor, angles: Tensor) -> bool:
    """Return whether `rotate_heads` takes heads, and cosines and sines, of these dtypes."""
    return heads.dtype in _DTYPES and angles.dtype == torch.float32


@torch.library.custom_op(
    "monograph::rotate_heads", mutates_args=(), tags=[torch.Tag.flexible_layout]
)
def rotate_heads(heads_BTHD: Tensor, cos_BTF: Tensor, sin_BTF: Tensor) -> Tensor:
    """Return the rotated heads, contiguous.

        y[i] = x[i] cos[i] - x[i + F] sin[i]        y[i + F] = x[i + F] cos[i] + x[i] sin[i]

    It is computed in fp32 and rounded once.

    Args:
        heads_BTHD: x, bf16, fp16 or fp32.
        cos_BTF: [B or 1, T, F] fp32.
        sin_BTF: the same.
    """
    # The kernel needs the channels of a head side by side, as in a view of a product's columns. It takes
    # any other strides.
    if heads_BTHD.stride(-1) != 1:
        heads_BTHD = heads_BTHD.contiguous()
    out_BTHD = torch.empty_like(heads_BTHD, memory_format=torch.contiguous_format)
    if heads_BTHD.is_cuda:
        from monograph.ops.rotation_kernel import launch

        launch(heads_BTHD, cos_BTF.contiguous(), sin_BTF.contiguous(), out_BTHD)
        return out_BTHD
    left_BTHF, right_BTHF = heads_BTHD.float().chunk(2, dim=-1)
    cos_BT1F, sin_BT1F = cos_BTF.unsqueeze(2), sin_BTF.unsqueeze(2)
    rotated = (
        left_BTHF * cos_BT1F - right_BTHF * sin_BT1F,
        right_BTHF * cos_BT1F + left_BTHF * sin_BT1F,
    )
    return out_BTHD.copy_(torch.cat(rotated, dim=-1))


@rotate_heads.register_fake
def _(heads_BTHD: Tensor, cos_BTF: Tensor, sin_BTF: Tensor) -> Tensor:
    return torch.empty_like(heads_BTHD, memory_format=torch.contiguous_format)


def _save_angles(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, cos_BTF, sin_BTF = inputs
    ctx.save_for_backward(cos_BTF, sin_BTF)


def _rotate_back(ctx, grad_BTHD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
    cos_BTF, sin_BTF = ctx.saved_tensors
    # The transpose of a rotation is the rotation by the negative angle.
    grad_of_heads = rotate_by_operators(grad_BTHD, cos_BTF.unsqueeze(2), -sin_BTF.unsqueeze(2))
    return grad_of_heads, None, None


rotate_heads.register_autograd(_rotate_back, setup_context=_save_angles)


def rotate_by_operators(heads_BTHD: Tensor, cos_BT1F: Tensor, sin_BT1F: Tensor) -> Tensor:
    """Return what `rotate_heads` returns, by elementwise operators only.

    A compiler can fuse them with the operator that reads their result, in both passes. If the heads were
    split by `chunk`, the backward pass would have a concatenation, which Inductor computes in kernels of
    its own, or in a loop that computes both halves for every element.
    """
    halves_BTH2F = heads_BTHD.unflatten(-1, (2, -1))
    swapped_BTH2F = halves_BTH2F.flip(-2)
    # The sine is subtracted in the first half, and added in the second half.
    is_first_half_21 = torch.arange(2, device=heads_BTHD.device).unsqueeze(-1) == 0
    cos_BT11F = cos_BT1F.unsqueeze(-2)
    sin_BT11F = sin_BT1F.unsqueeze(-2)
    signed_sin_BT12F = torch.where(is_first_half_21, -sin_BT11F, sin_BT11F)
    rotated_BTH2F = halves_BTH2F * cos_BT11F + swapped_BTH2F * signed_sin_BT12F
    return rotated_BTH2F.flatten(-2).to(heads_BTHD.dtype)
