"""Require the parts of a weight that is stored in few bits, and name them in errors."""

from collections.abc import Mapping
from typing import NoReturn

from monograph.errors import InputRefused
from monograph.model.files import StoredTensor

NUMBERS_AT_ONCE = 1 << 22  # that are dequantised at once, so that fp32 copies stay small


def name_in_file(name: str, tensor: StoredTensor) -> str:
    """Return the name that a tensor has in its file."""
    return tensor.name_in_file or name


def described(name: str, tensor: StoredTensor) -> str:
    """Return the beginning of an error about a tensor: its file, its name, its dtype and its shape."""
    return f"{tensor.path}: {name_in_file(name, tensor)} is {tensor.dtype} of shape {list(tensor.shape)}"


def require(
    name: str, dtype: str, shape: tuple[int, ...], stored: Mapping[str, StoredTensor], owner: str
) -> None:
    """Require a tensor of this dtype and shape, which the tensor `owner` needs."""
    tensor = stored.get(name)
    if tensor is None:
        refuse_missing(name, stored, owner)
    if tensor.dtype != dtype or tensor.shape != shape:
        owner_in_file = name_in_file(owner, stored[owner])
        raise InputRefused(
            f"{described(name, tensor)}, expected {dtype} of shape {list(shape)} by {owner_in_file}"
        )


def refuse_missing(name: str, stored: Mapping[str, StoredTensor], owner: str) -> NoReturn:
    """Raise InputRefused for a tensor that is missing, and that the tensor `owner` needs."""
    tensor = stored[owner]
    raise InputRefused(
        f"{tensor.path}: {name} is missing, which {name_in_file(owner, tensor)} needs: the folder is not complete"
    )
