"""Encode and decode the safetensors layout without a second copy of the tensors in memory.

Layout: u64 little-endian header length, JSON header padded with spaces, then the tensors' bytes
without gaps (https://github.com/huggingface/safetensors#format).

The tests compare with the `safetensors` library. It is not used here because its writer refuses
strided tensors and shared storage (so all of them would have to be copied at once), creates files
with mode 0600 and renames without fsync; and because its reader maps the file, so that the bytes
may change on the disk after they were verified.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.storage.reading import parse_json

# The library's order of dtypes, by falling element size, so that every tensor is aligned to its
# element size.
DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ORDER = list(NAMES)
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 1 << 24  # 100,000 tensors; the library's own limit is 100 MB
ALIGNMENT = 8
MOST_ELEMENTS = 2**60


class LayoutError(ValueError):
    """The header is not a safetensors header of a file of this length."""


def encode(
    tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> tuple[int, Iterator[memoryview]]:
    """Lay out tensors as one safetensors file, ordered by dtype and then name, exactly as the
    library does.

    Tensors may share storage, be strided views or live on a device: each is made contiguous on the
    host only when its turn comes, and a contiguous host tensor is not copied at all. They must not
    change until the pieces are used.

    Args:
        tensors: the tensors by name.
        read: a function that returns a tensor by name when its turn comes; `tensors` then only give
            shapes and dtypes.

    Returns:
        The file's length in bytes and its pieces in order.

    Raises:
        TypeError: a tensor has a dtype that the format lacks (complex, quantised).
        InputRefused: the header would be larger than `decode` accepts.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise TypeError(f"{name}: dtype {tensor.dtype} cannot be stored in a safetensors file")
    ordered = sorted(tensors, key=lambda name: (ORDER.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        begin = end
        end = end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MOST_HEADER_BYTES:
        raise InputRefused(
            f"{len(tensors):,} tensors: more than a file of weights may list; use fewer and larger ones"
        )
    prefix = len(text).to_bytes(LENGTH_BYTES, "little") + text

    def pieces() -> Iterator[memoryview]:
        yield memoryview(prefix)
        yield from (bytes_of(tensors[name] if read is None else read(name)) for name in ordered)

    return len(prefix) + end, pieces()


def header_bytes(first: bytes, file_bytes: int) -> int:
    """Return the length of a file's header, including the LENGTH_BYTES `first` that give it; raise
    LayoutError.
    """
    length = LENGTH_BYTES + int.from_bytes(first, "little")
    if length > min(file_bytes, LENGTH_BYTES + MOST_HEADER_BYTES):
        raise LayoutError(
            f"a header of {length} bytes in a file of {file_bytes} bytes; at most {MOST_HEADER_BYTES}"
        )
    return length


class Entry(NamedTuple):
    """The place, dtype and shape of a tensor in a file; `begin` and `end` count bytes from the end
    of the header.
    """

    name: str
    begin: int
    end: int
    dtype: torch.dtype
    shape: list[int]


def decode(prefix: bytes, file_bytes: int) -> dict[str, Tensor]:
    """Allocate, but do not fill, the tensors that a file's first `header_bytes` describe, in the
    order of their bytes.

    Raises:
        LayoutError: see `entries`.
    """
    return {
        entry.name: torch.empty(entry.shape, dtype=entry.dtype)
        for entry in entries(prefix, file_bytes)
    }


def entries(prefix: bytes, file_bytes: int) -> list[Entry]:
    """Return the tensors that a file's first `header_bytes` describe, in the order of their bytes.

    Raises:
        LayoutError: the tensors do not fill the file from the header to its end without gaps or
            overlaps. So tensors allocated by these entries never exceed the file's length.
    """
    try:
        header = parse_json(prefix[LENGTH_BYTES:].decode())
        header.pop("__metadata__", None)
        in_order = sorted(
            (_entry(name, value) for name, value in header.items()),
            key=lambda one: (one.begin, one.end),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LayoutError(f"an unreadable header ({error})") from error
    at = 0
    for name, begin, end, dtype, shape in in_order:
        size = math.prod(shape) * dtype.itemsize
        if (begin, end) != (at, at + size):
            raise LayoutError(
                f"tensor {name} at bytes {begin} to {end} where {at} to {at + size} was expected"
            )
        at = end
    if len(prefix) + at != file_bytes:
        raise LayoutError(
            f"tensors of {at} bytes in a file of {file_bytes} bytes with a header of {len(prefix)}"
        )
    return in_order


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's elements as bytes, without a copy if the tensor is contiguous and on the
    host.
    """
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _entry(name: str, value: dict[str, Any]) -> Entry:
    dtype = DTYPES[value["dtype"]]
    shape = value["shape"]
    begin, end = value["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"tensor {name} has a shape or offset that is not a natural number")
    if math.prod(number or 1 for number in shape) > MOST_ELEMENTS:
        # The strides of an empty one would overflow too.
        raise ValueError(f"tensor {name} has an impossible shape")
    return Entry(name, begin, end, dtype, shape)
