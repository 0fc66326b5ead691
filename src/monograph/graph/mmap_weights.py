"""Keep weights in a memory-mapped file until they are copied, one by one, to where they are used.

The operating system can drop pages of a mapped file when memory is short. So a model of mapped
weights takes no memory of its own, and converting it tensor by tensor takes the memory of the
result and of one tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from monograph.errors import InputRefused

M = TypeVar("M", bound=nn.Module)


class MappedWeight(nn.Parameter):
    """A parameter in a mapped file, not read yet, in the dtype in which it is stored.

    Attributes:
        becomes: the dtype in which it will be kept, which can hold every number of the stored
            dtype.
    """

    becomes: torch.dtype


class Pieces(NamedTuple):
    """Tensors in mapped files of which a weight is made, and its shape and dtype.

    Attributes:
        join: makes it, such as `torch.stack`.
    """

    parts: list[Tensor]
    join: Callable[[list[Tensor]], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype


class MappedPieces(MappedWeight):
    """Several mapped tensors as one parameter, which is made of them at each reading.

    Its own data is one number, expanded to the weight's shape, which no function reads: shape,
    dtype and place are this number's, `detach` keeps the tensors apart, and every other function of
    torch gets the weight.
    """

    pieces: Pieces

    def read(self) -> Tensor:
        """Return the weight in memory."""
        return self.pieces.join(self.pieces.parts)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function with weights in memory, unless it reads no numbers."""
        if function is Tensor.detach:
            with torch._C.DisableTorchFunctionSubclass():
                return _of_pieces(args[0].pieces, args[0].becomes, args[0].detach())
        if function not in _READ_NOTHING:
            args, kwargs = tree_map_only(MappedPieces, MappedPieces.read, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


_READ_NOTHING = {
    *(
        getattr(Tensor, name)
        for name in ("size", "dim", "numel", "requires_grad_", "untyped_storage", "is_complex")
    ),
    *(
        getattr(Tensor, name)
        for name in ("data_ptr", "stride", "element_size", "is_floating_point", "is_contiguous")
    ),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "nbytes", "grad")
    ),
    *(
        getattr(Tensor, name).__get__
        for name in ("is_meta", "is_sparse", "requires_grad", "is_leaf", "is_cuda")
    ),
    *(getattr(Tensor, name).__set__ for name in ("data", "grad", "requires_grad")),
}


def mapped(stored: Tensor | Pieces, becomes: torch.dtype) -> Tensor:
    """Return a parameter over a tensor in a mapped file, or over what is made of several.

    If `becomes` cannot hold its numbers it is rounded now, because readers must see the numbers
    that will be kept.
    """
    if torch.promote_types(stored.dtype, becomes) != becomes:
        return (stored.join(stored.parts) if isinstance(stored, Pieces) else stored).to(becomes)
    if isinstance(stored, Pieces):
        return _of_pieces(stored, becomes, torch.zeros(1, dtype=stored.dtype).expand(stored.shape))
    parameter = MappedWeight(stored)
    parameter.becomes = becomes
    return parameter


def _of_pieces(pieces: Pieces, becomes: torch.dtype, number: Tensor) -> MappedPieces:
    weight = MappedPieces(number)
    weight.pieces, weight.becomes = pieces, becomes
    return weight


def require_finite(tensor: Tensor, name: str) -> Tensor:
    """Return the tensor if all its numbers are finite.

    Raises:
        InputRefused: it holds NaN or an infinity.
    """
    # The extremes of a tensor with a NaN are NaN. Unlike a mask of all elements they take no
    # memory.
    if tensor.numel() and not all(
        bool(extreme.isfinite()) for extreme in tensor.detach().aminmax()
    ):
        raise InputRefused(
            f"{name} holds NaN or infinity, with which a model computes nothing: take sound weights"
        )
    return tensor


def kept_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is or will be kept."""
    return tensor.becomes if isinstance(tensor, MappedWeight) else tensor.dtype


def keep(parameter: Tensor, data: Tensor) -> None:
    """Replace a parameter's data; a mapped parameter becomes an ordinary one."""
    parameter.data = data
    if isinstance(parameter, MappedWeight):
        vars(parameter).clear()  # what it becomes, and its pieces
        # The object stays the same, so that tied layers and other holders see the new numbers.
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def in_file_order(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Sort mapped parameters by their place in the file, so that it is read from beginning to end."""
    return sorted(parameters, key=_place)


def _place(parameter: nn.Parameter) -> int:
    first = parameter.pieces.parts[0] if isinstance(parameter, MappedPieces) else parameter
    return first.data_ptr() if isinstance(parameter, MappedWeight) else 0


def materialize_(module: M, device: torch.device | None = None, trained: bool = True) -> M:
    """Copy a module's mapped weights into memory, one after another in the order of the file;
    return the module.

    Args:
        module: any; without mapped weights it stays as it is.
        device: where to; None: the host.
        trained: whether to include trained weights, which a step on the host can copy straight into
            its planes.
    """
    still_mapped = [
        p
        for p in module.parameters()
        if isinstance(p, MappedWeight) and (trained or not p.requires_grad)
    ]
    for weight in in_file_order(still_mapped):
        # Move first and convert then: the stored dtype is the smaller one.
        keep(weight, weight.data.to(device or "cpu", copy=True).to(kept_dtype(weight)))
    return module
