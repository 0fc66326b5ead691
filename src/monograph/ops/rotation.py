"""Rotate the pairs of channels of queries and keys (rotary position embedding) in compiled graphs on a
GPU.

The kernels are in `monograph.ops.rotation_kernel`. It is imported only where they run, because a machine
without a GPU may have no Triton, but it traces the operators to plan for a GPU.

Shapes: B rows, T positions, H query heads, K key-value heads, D = 2 F channels of a head, F pairs of
channels: i and i + F, X channels of all heads of a projection or of several.
"""

import torch
from torch import Tensor

from monograph.ops.autograd import Context

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def can_rotate_projections(heads: Tensor, angles: Tensor) -> bool:
    """Return whether `rotate_projections` takes heads, and cosines and sines, of these dtypes."""
    return heads.dtype in _DTYPES and angles.dtype == torch.float32


def rotate_projections(
    query_BTX: Tensor,
    key_BTX: Tensor,
    value_BTX: Tensor,
    cos_BTF: Tensor,
    sin_BTF: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated queries and keys, and the values, by heads.

        y[i] = x[i] cos[i] - x[i + F] sin[i]        y[i + F] = x[i + F] cos[i] + x[i] sin[i]

    It is computed in fp32 and rounded once. The three projections may be columns of one common product. So the
    backward pass writes their gradients next to each other, as the backward pass of this product needs them,
    and a compiler need not join them.

    Args:
        query_BTX: the queries of all heads, bf16, fp16 or fp32.
        key_BTX: the keys of all heads.
        value_BTX: the values of all heads.
        cos_BTF: [B or 1, T, F] fp32.
        sin_BTF: the same.

    Returns:
        Queries [B, T, H, D], keys and values [B, T, K, D].
    """
    rotated: tuple[Tensor, Tensor, Tensor] = _RotateProjections.apply(
        query_BTX, key_BTX, value_BTX, cos_BTF, sin_BTF
    )
    return rotated


class _RotateProjections(torch.autograd.Function):
    """Compute `rotate_projections`."""

    @staticmethod
    def forward(
        ctx: Context,
        query_BTX: Tensor,
        key_BTX: Tensor,
        value_BTX: Tensor,
        cos_BTF: Tensor,
        sin_BTF: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_BTF, sin_BTF)
        query_BTHD, key_BTKD, value_BTKD = (
            each_BTX.unflatten(2, (-1, 2 * cos_BTF.shape[2]))
            for each_BTX in (query_BTX, key_BTX, value_BTX)
        )
        return *_rotate(query_BTHD, key_BTKD, cos_BTF, sin_BTF), value_BTKD

    @staticmethod
    def backward(
        ctx: Context, query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor
    ) -> tuple[Tensor | None, ...]:
        cos_BTF, sin_BTF = ctx.saved_tensors
        joined_BTX = _rotate_back(query_BTHD, key_BTKD, value_BTKD, cos_BTF, sin_BTF)
        widths = [each.shape[2] * each.shape[3] for each in (query_BTHD, key_BTKD, value_BTKD)]
        # If the projections are columns of a common product, autograd concatenates these parts again. Inductor
        # drops the split and the concatenation, which undo each other, but only if both have the same axis:
        # autograd names it 2, so it must not be -1 here.
        return *joined_BTX.split(widths, 2), None, None


# They have the tag `flexible_layout` because the kernels take any strides of rows, positions and heads; a
# contiguous layout would need copies of a product's columns.
@torch.library.custom_op("monograph::rotate", mutates_args=(), tags=[torch.Tag.flexible_layout])
def _rotate(
    query_BTHD: Tensor, key_BTKD: Tensor, cos_BTF: Tensor, sin_BTF: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the rotated queries and keys, contiguous; see `rotate_projections`."""
    query_BTHD, key_BTKD = _with_whole_heads(query_BTHD), _with_whole_heads(key_BTKD)
    rotated_query_BTHD, rotated_key_BTKD = _contiguous_like(query_BTHD), _contiguous_like(key_BTKD)
    if query_BTHD.is_cuda:
        from monograph.ops.rotation_kernel import launch

        angles = cos_BTF.contiguous(), sin_BTF.contiguous()
        launch(query_BTHD, key_BTKD, *angles, rotated_query_BTHD, rotated_key_BTKD)
        return rotated_query_BTHD, rotated_key_BTKD
    _rotate_to(query_BTHD, cos_BTF, sin_BTF, rotated_query_BTHD)
    _rotate_to(key_BTKD, cos_BTF, sin_BTF, rotated_key_BTKD)
    return rotated_query_BTHD, rotated_key_BTKD


@_rotate.register_fake
def _(
    query_BTHD: Tensor, key_BTKD: Tensor, cos_BTF: Tensor, sin_BTF: Tensor
) -> tuple[Tensor, Tensor]:
    return _contiguous_like(query_BTHD), _contiguous_like(key_BTKD)


@torch.library.custom_op(
    "monograph::rotate_back", mutates_args=(), tags=[torch.Tag.flexible_layout]
)
def _rotate_back(
    query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, cos_BTF: Tensor, sin_BTF: Tensor
) -> Tensor:
    """Return the gradients of the projections next to each other, [B, T, X], contiguous.

    The transpose of a rotation is the rotation by the negative angle.

    Args:
        query_BTHD: the gradients of rotated queries.
        key_BTKD: the gradients of rotated keys.
        value_BTKD: the gradients of values.
        cos_BTF: see `rotate_projections`.
        sin_BTF: see `rotate_projections`.
    """
    query_BTHD, key_BTKD, value_BTKD = (
        _with_whole_heads(each) for each in (query_BTHD, key_BTKD, value_BTKD)
    )
    joined_BTX = _joined_like(query_BTHD, key_BTKD)
    if query_BTHD.is_cuda:
        from monograph.ops.rotation_kernel import launch_back

        angles = cos_BTF.contiguous(), sin_BTF.contiguous()
        launch_back(query_BTHD, key_BTKD, value_BTKD, *angles, joined_BTX)
        return joined_BTX
    joined_BTND = joined_BTX.unflatten(2, (-1, query_BTHD.shape[3]))  # N = H + 2 K heads
    heads, key_heads = query_BTHD.shape[2], key_BTKD.shape[2]
    to_query_BTHD, to_key_BTKD, to_value_BTKD = joined_BTND.split(
        [heads, key_heads, key_heads], dim=2
    )
    _rotate_to(query_BTHD, cos_BTF, -sin_BTF, to_query_BTHD)
    _rotate_to(key_BTKD, cos_BTF, -sin_BTF, to_key_BTKD)
    to_value_BTKD.copy_(value_BTKD)
    return joined_BTX


@_rotate_back.register_fake
def _(
    query_BTHD: Tensor, key_BTKD: Tensor, value_BTKD: Tensor, cos_BTF: Tensor, sin_BTF: Tensor
) -> Tensor:
    return _joined_like(query_BTHD, key_BTKD)


def _with_whole_heads(heads_BTHD: Tensor) -> Tensor:
    """Return heads whose channels lie side by side, as those in a product's columns do."""
    return heads_BTHD if heads_BTHD.stride(3) == 1 else heads_BTHD.contiguous()


def _contiguous_like(heads_BTHD: Tensor) -> Tensor:
    return torch.empty_like(heads_BTHD, memory_format=torch.contiguous_format)


def _joined_like(query_BTHD: Tensor, key_BTKD: Tensor) -> Tensor:
    rows, positions, heads, channels = query_BTHD.shape
    width = (heads + 2 * key_BTKD.shape[2]) * channels
    return query_BTHD.new_empty(rows, positions, width)


def _rotate_to(heads_BTHD: Tensor, cos_BTF: Tensor, sin_BTF: Tensor, out_BTHD: Tensor) -> None:
    """Write rotated heads, computed by PyTorch's operators."""
    left_BTHF, right_BTHF = heads_BTHD.float().chunk(2, dim=-1)
    cos_BT1F, sin_BT1F = cos_BTF.unsqueeze(2), sin_BTF.unsqueeze(2)
    rotated = (
        left_BTHF * cos_BT1F - right_BTHF * sin_BT1F,
        right_BTHF * cos_BT1F + left_BTHF * sin_BT1F,
    )
    out_BTHD.copy_(torch.cat(rotated, dim=-1))


def rotate_by_operators(
    heads_BTHD: Tensor, cos_BT1F: Tensor, sin_BT1F: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Return rotated heads, by elementwise operators only.

    A compiler can fuse them with the operator that reads their result, in both passes. If the heads were
    split by `chunk`, the backward pass would have a concatenation, which Inductor computes in kernels of
    its own, or in a loop that computes both halves for every element.

    Args:
        heads_BTHD: x; see `rotate_projections` for the equation.
        cos_BT1F: the cosines.
        sin_BT1F: the sines.
        interleaved: whether the two channels of a pair are neighbours. If false, they are in the two
            halves of a head.
    """
    # The axis with the two channels of a pair is the last one or the one before.
    axis = -1 if interleaved else -2
    pairs = heads_BTHD.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    swapped = pairs.flip(axis)
    # The sine is subtracted in the first channel of a pair, and added in the second.
    is_first_2 = torch.arange(2, device=heads_BTHD.device) == 0
    is_first = is_first_2 if interleaved else is_first_2.unsqueeze(-1)
    cos = cos_BT1F.unsqueeze(axis)
    sin = sin_BT1F.unsqueeze(axis)
    signed_sin = torch.where(is_first, -sin, sin)
    rotated = pairs * cos + swapped * signed_sin
    return rotated.flatten(-2).to(heads_BTHD.dtype)
