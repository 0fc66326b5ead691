"""Write and read the safetensors layout without a second copy of the tensors in memory.

A file has the length of its header (8 bytes, little-endian), a JSON header padded with spaces, and
the bytes of all tensors without gaps (https://github.com/huggingface/safetensors#format).

The `safetensors` library is not used, for two reasons:

- Its writer refuses strided tensors and shared storage, so all such tensors would have to be copied before
  the file is written. It also creates files of mode 0600, and renames them without fsync.
- Its reader maps the file into memory, so the bytes may change on the disk after they were verified.

The tests compare this writer and this reader with the library's.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monograph.errors import InputRefused
from monograph.storage.reading import parse_json

# The dtypes in the library's order of tensors. Larger elements come first, so that each tensor is
# aligned to its element size.
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
ORDER = list(NAMES)  # the order of the dtypes in a file
LENGTH_BYTES = 8  # bytes at the beginning of a file that say how long the header is
MAX_HEADER_BYTES = 1 << 24  # enough for 100,000 tensors; the library's own limit is 100 MB
ALIGNMENT = 8  # the tensors' bytes begin at a multiple of this
MAX_ELEMENTS = 2**60  # the most elements of a tensor, so that its strides do not overflow 64 bits


class LayoutError(ValueError):
    """A header is damaged, or does not fit the length of its file."""


def encode(
    tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> tuple[int, Iterator[memoryview]]:
    """Encode tensors as a safetensors file, in the library's order: by dtype, then by name.

    Tensors may share storage, be strided or be on a device. A tensor that is not contiguous on the
    host is copied when its piece is taken from the iterator. So tensors must not change until then.

    Args:
        tensors: the tensors by name.
        read: a function that returns the tensor with a name, for tensors that are too large to be in
            memory together. It is called when the tensor's piece is taken. `tensors` then only say
            the shapes and dtypes, and may be meta tensors. None: `tensors` themselves are encoded.

    Returns:
        The file's length in bytes, and the pieces of its content in order.

    Raises:
        TypeError: the format lacks the dtype of a tensor (complex, quantised).
        InputRefused: the header would be larger than MAX_HEADER_BYTES.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise TypeError(f"{name}: dtype {tensor.dtype} cannot be stored in a safetensors file")
    names = sorted(tensors, key=lambda name: (ORDER.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin = end
        end = begin + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header_text = json.dumps(header, separators=(",", ":")).encode()
    header_text += b" " * (-len(header_text) % ALIGNMENT)
    if len(header_text) > MAX_HEADER_BYTES:
        raise InputRefused(
            f"{len(tensors):,} tensors: more than a file of weights may list; use fewer and larger ones"
        )
    prefix = len(header_text).to_bytes(LENGTH_BYTES, "little") + header_text

    def pieces() -> Iterator[memoryview]:
        yield memoryview(prefix)
        for name in names:
            tensor = tensors[name] if read is None else read(name)
            yield bytes_of(tensor)

    return len(prefix) + end, pieces()


def prefix_bytes(length_field: bytes, file_bytes: int) -> int:
    """Return how many bytes are before the tensors: the header's length field and the header.

    Args:
        length_field: the first LENGTH_BYTES of the file, which are the header's length.
        file_bytes: the file's length.

    Raises:
        LayoutError: the header is longer than the file or than MAX_HEADER_BYTES.
    """
    length = LENGTH_BYTES + int.from_bytes(length_field, "little")
    if length > min(file_bytes, LENGTH_BYTES + MAX_HEADER_BYTES):
        raise LayoutError(
            f"a header of {length} bytes in a file of {file_bytes} bytes; at most {MAX_HEADER_BYTES}"
        )
    return length


class TensorEntry(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: the tensor's name.
        begin: its first byte, counted from the end of the header.
        end: the byte after its last one.
        dtype: its dtype.
        shape: its shape.
    """

    name: str
    begin: int
    end: int
    dtype: torch.dtype
    shape: list[int]


def allocate(prefix: bytes, file_bytes: int) -> dict[str, Tensor]:
    """Return a tensor for each tensor of a file, allocated but not filled, in the order of their bytes.

    The caller then reads the file into their memory (`bytes_of`). The arguments and errors are those
    of `tensor_entries`.
    """
    return {
        entry.name: torch.empty(entry.shape, dtype=entry.dtype)
        for entry in tensor_entries(prefix, file_bytes)
    }


def tensor_entries(prefix: bytes, file_bytes: int) -> list[TensorEntry]:
    """Return the tensors that a header describes, in the order of their bytes.

    Args:
        prefix: the bytes before the tensors, see `prefix_bytes`.
        file_bytes: the file's length.

    Raises:
        LayoutError: the header is damaged, or the tensors do not fill the rest of the file without
            gaps and overlaps. So a damaged header cannot make a caller allocate more memory than the
            file has bytes.
    """
    try:
        header = parse_json(prefix[LENGTH_BYTES:].decode())
        header.pop("__metadata__", None)
        unordered = [_entry(name, value) for name, value in header.items()]
        in_order = sorted(unordered, key=lambda entry: (entry.begin, entry.end))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LayoutError(f"an unreadable header ({error})") from error
    next_begin = 0
    for name, begin, end, dtype, shape in in_order:
        expected_end = next_begin + math.prod(shape) * dtype.itemsize
        if (begin, end) != (next_begin, expected_end):
            raise LayoutError(
                f"tensor {name} at bytes {begin} to {end} where {next_begin} to {expected_end} was expected"
            )
        next_begin = end
    tensor_bytes = next_begin
    if len(prefix) + tensor_bytes != file_bytes:
        raise LayoutError(
            f"tensors of {tensor_bytes} bytes in a file of {file_bytes} bytes with a header of {len(prefix)}"
        )
    return in_order


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's elements as bytes. A contiguous tensor on the host is not copied."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _entry(name: str, value: dict[str, Any]) -> TensorEntry:
    """Return the entry of a tensor in a header; raises ValueError and others for damage."""
    dtype = DTYPES[value["dtype"]]
    shape = value["shape"]
    begin, end = value["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"tensor {name} has a shape or offset that is not a natural number")
    # A size of 0 counts as 1, because the strides of an empty tensor overflow, too, if its shape is,
    # for example, [0, 2**62, 2**62].
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise ValueError(f"tensor {name} has an impossible shape")
    return TensorEntry(name, begin, end, dtype, shape)
