"""Keep weights in a memory-mapped file until they are copied, one by one, to where they are used.

The operating system can drop pages of a mapped file when memory is short. So a model of mapped
weights takes no memory of its own. Converting it tensor by tensor takes the memory of the result
and of one tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from monograph.errors import InputRefused
from monograph.graph.stored_codes import StoredCodes

M = TypeVar("M", bound=nn.Module)


class MappedWeight(nn.Parameter):
    """A parameter in a mapped file that has not been read yet, in its stored dtype.

    Attributes:
        final_dtype: the dtype in which it will be kept in memory, which can represent every number
            of the stored dtype.
    """

    final_dtype: torch.dtype


class Pieces(NamedTuple):
    """Tensors in mapped files that together are one weight.

    Attributes:
        parts: the tensors, each of which may be made of several itself.
        join: a function that makes the weight from `parts`, such as `torch.stack`.
        shape: the weight's shape.
        dtype: the weight's dtype.
        codes_form: the form in which `read_codes` returns the weight, "int8" or "nf4"; "": in none.
        read_codes: a function that returns the weight's codes, if the file has it in few bits.
    """

    parts: "Sequence[Tensor | Pieces]"
    join: Callable[[list[Tensor]], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    codes_form: str = ""
    read_codes: Callable[[], StoredCodes] | None = None

    def read(self) -> Tensor:
        """Return the weight in memory."""
        parts = (part.read() if isinstance(part, Pieces) else part for part in self.parts)
        if self.join is not torch.stack:
            return self.join(list(parts))
        # Unlike `torch.stack`, this holds one part at a time besides the result. The parts may be
        # dequantised experts.
        stacked = torch.empty(self.shape, dtype=self.dtype)
        for index, part in enumerate(parts):
            stacked[index] = part
        return stacked


class MappedPieces(MappedWeight):
    """Several mapped tensors as one parameter, which is joined from them each time it is read.

    The parameter's own data is a single number, expanded to the weight's shape. It gives the
    parameter its shape, dtype and device, and is never read: `detach` returns another
    `MappedPieces`, and every function of torch that reads numbers gets the weight itself.
    """

    pieces: Pieces

    def read(self) -> Tensor:
        """Return the weight in memory."""
        return self.pieces.read()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function; if it reads numbers, it gets weights in memory."""
        # `state_dict` detaches each parameter, which must not read the weight into memory.
        if function is Tensor.detach:
            with torch._C.DisableTorchFunctionSubclass():
                return _mapped_pieces(args[0].pieces, args[0].final_dtype, args[0].detach())
        if function not in _FUNCTIONS_WITHOUT_NUMBERS:
            args, kwargs = tree_map_only(MappedPieces, MappedPieces.read, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


# The functions that do not read a tensor's numbers, only its shape, its memory's address or its flags.
_METHODS = (
    "data_ptr dim element_size is_complex is_contiguous is_floating_point numel requires_grad_ size "
    "stride untyped_storage"
).split()
_READ_ATTRIBUTES = (
    "device dtype grad is_cuda is_leaf is_meta is_sparse layout nbytes ndim requires_grad shape"
).split()
_WRITTEN_ATTRIBUTES = ("data", "grad", "requires_grad")
_FUNCTIONS_WITHOUT_NUMBERS = {
    *(getattr(Tensor, name) for name in _METHODS),
    *(getattr(Tensor, name).__get__ for name in _READ_ATTRIBUTES),
    *(getattr(Tensor, name).__set__ for name in _WRITTEN_ATTRIBUTES),
}


def mapped(stored: Tensor | Pieces, final_dtype: torch.dtype) -> Tensor:
    """Return a parameter whose numbers are those of a tensor in a mapped file, or of its pieces.

    If `final_dtype` cannot represent all numbers of the stored dtype, this returns a rounded copy in
    memory instead, because readers must see the numbers that will be kept.
    """
    if torch.promote_types(stored.dtype, final_dtype) != final_dtype:
        tensor = stored.read() if isinstance(stored, Pieces) else stored
        return tensor.to(final_dtype)
    if isinstance(stored, Pieces):
        placeholder = torch.zeros(1, dtype=stored.dtype).expand(stored.shape)
        return _mapped_pieces(stored, final_dtype, placeholder)
    parameter = MappedWeight(stored)
    parameter.final_dtype = final_dtype
    return parameter


def _mapped_pieces(pieces: Pieces, final_dtype: torch.dtype, data: Tensor) -> MappedPieces:
    weight = MappedPieces(data)
    weight.pieces = pieces
    weight.final_dtype = final_dtype
    return weight


def codes_of(weight: Tensor, form: str) -> StoredCodes | None:
    """Return a weight's codes as its file has them; None if the file does not have it in this form.

    Args:
        weight: the weight.
        form: "int8" or "nf4".
    """
    if not isinstance(weight, MappedPieces) or weight.pieces.codes_form != form:
        return None
    assert weight.pieces.read_codes is not None  # it is there with every form
    return weight.pieces.read_codes()


def require_finite(tensor: Tensor, name: str) -> Tensor:
    """Return the tensor if all its numbers are finite.

    Raises:
        InputRefused: it holds NaN or an infinity.
    """
    if tensor.numel() == 0:
        return tensor
    # The extremes of a tensor with a NaN are NaN. Unlike a mask of all elements, computing them
    # takes no memory.
    least, greatest = tensor.detach().aminmax()
    if not (bool(least.isfinite()) and bool(greatest.isfinite())):
        raise InputRefused(
            f"{name} holds NaN or infinity, so the model's outputs would be NaN: use another copy of the weights"
        )
    return tensor


def kept_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is kept, or will be kept if it is still mapped."""
    return tensor.final_dtype if isinstance(tensor, MappedWeight) else tensor.dtype


def replace_data(parameter: Tensor, data: Tensor) -> None:
    """Replace a parameter's data; a mapped parameter becomes an ordinary one."""
    parameter.data = data
    if isinstance(parameter, MappedWeight):
        vars(parameter).clear()  # `final_dtype` and `pieces`
        # The object stays the same, so that tied layers and other owners see the new numbers.
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def in_file_order(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Sort mapped parameters by their position in the file, so that the file is read in order.

    Parameters that are not mapped come first.
    """
    return sorted(parameters, key=_address)


def _address(parameter: nn.Parameter) -> int:
    if not isinstance(parameter, MappedWeight):
        return 0
    first: Tensor | Pieces = parameter
    if isinstance(parameter, MappedPieces):
        first = parameter.pieces
    while isinstance(first, Pieces):
        first = first.parts[0]
    return first.data_ptr()


def materialize_(module: M, device: torch.device | None = None, trained: bool = True) -> M:
    """Copy a module's mapped weights into memory, one after another, and return the module.

    Args:
        module: any module; without mapped weights it is not changed.
        device: where the weights are copied; None: the host.
        trained: whether to include trained weights. They can be left out for a step on the host,
            which copies them straight into its planes, the flat buffers of all weights that are
            updated in the same way (`monograph.optim.planes`).
    """
    still_mapped = [
        p
        for p in module.parameters()
        if isinstance(p, MappedWeight) and (trained or not p.requires_grad)
    ]
    for weight in in_file_order(still_mapped):
        # The weight is moved before it is converted, because the stored dtype is the smaller one. For
        # `MappedPieces`, `data.to` reads the numbers, so it joins the pieces.
        moved = weight.data.to(device or "cpu", copy=True)
        replace_data(weight, moved.to(kept_dtype(weight)))
    return module
