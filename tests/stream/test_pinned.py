"""Run: pytest tests/stream/test_pinned.py (page-locked memory: size, end, and what is said where it
is refused)
"""

from __future__ import annotations

import gc
import mmap
import resource

import pytest
import torch

from monograph.errors import InputRefused
from monograph.stream import placement as pinned_module
from monograph.stream.placement import on_host, pinned

CARD = torch.device("cuda", 0)


class Runtime:
    """What of CUDA's runtime locks memory."""

    def __init__(self, refusal: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.refusal = refusal

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert (
            address % mmap.PAGESIZE == size % mmap.PAGESIZE == flags == 0
            and address not in self.locked
        )
        if not self.refusal:
            self.locked[address] = size
        return self.refusal

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1,), torch.float32),
        ((5000, 3), torch.bfloat16),
        ((5000, 3), torch.int16),
        ((2**16 + 1,), torch.uint8),
    ],
)
def test_locked_at_its_size_in_pages_as_long_as_it_is_used(
    runtime: Runtime, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    memory = pinned(torch.empty(shape, dtype=dtype), "a plane")
    assert memory.shape == shape and memory.dtype == dtype and not memory.any()
    size = memory.numel() * memory.element_size()
    assert list(runtime.locked) == [memory.data_ptr()]
    assert size <= runtime.locked[memory.data_ptr()] < size + mmap.PAGESIZE
    memory.fill_(3)
    part = memory.flatten()[-1:]
    del memory
    assert len(runtime.locked) == 1 and part == 3
    del part
    assert not runtime.locked


@pytest.mark.parametrize(
    ("limit", "said"), [(8192, "ulimit -l allows 8,192 bytes"), (-1, "ulimit -l allows no limit")]
)
def test_a_refusal_names_the_limit(monkeypatch: pytest.MonkeyPatch, limit: int, said: str) -> None:
    runtime = Runtime(refusal=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    with pytest.raises(
        InputRefused, match=f"^block 3, weights: 12,288 bytes .*CUDA error 2.*{said}: raise it"
    ) as error:
        on_host(torch.empty(3000), "block 3, weights", CARD)
    assert "\n" not in str(error.value)
    gc.collect()


def test_no_memory_left(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pinned_module, "_LockedPages", none)
    with pytest.raises(
        InputRefused, match="block 3, weights needs 4,096 bytes of the host's memory"
    ):
        pinned(torch.empty(10), "block 3, weights")


def test_where_no_gpu_copies_from_it_it_is_ordinary_memory(runtime: Runtime) -> None:
    memory = on_host(torch.empty(7, 2, dtype=torch.bfloat16), "a plane", torch.device("cpu"))
    assert memory.shape == (7, 2) and memory.dtype == torch.bfloat16 and not runtime.locked


@pytest.mark.gpu
def test_a_gpu_takes_it_for_page_locked() -> None:
    memory = pinned(torch.empty(3_000_000), "a plane")
    assert memory.is_pinned()
    memory.copy_(torch.arange(3_000_000))
    assert torch.equal(memory.to(CARD, non_blocking=True).cpu(), memory)
