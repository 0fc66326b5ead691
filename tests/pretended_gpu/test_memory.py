"""Run: make gpu-less ARGS=tests/pretended_gpu/test_memory.py (device memory seen from the host)"""

from __future__ import annotations

import pytest
import torch

from pretended_gpu.memory import on_host


def test_what_the_host_writes_the_card_has() -> None:
    """Also where a view begins late, goes backwards through its dimensions, or repeats a number."""
    tensor = torch.arange(24.0, device="cuda").view(4, 6)
    for view in (
        tensor,
        tensor[1:, 2:],
        tensor.T,
        tensor[2, :1].expand(3, 5),
        tensor[3, 5],
        tensor.view(torch.int32),
    ):
        host = on_host(view)
        assert host.device.type == "cpu" and host.dtype == view.dtype
        assert (host.shape, host.stride(), host.data_ptr()) == (
            view.shape,
            view.stride(),
            view.data_ptr(),
        )
    on_host(tensor[1:, 2:])[0, 0] = -1
    assert tensor.cpu()[1, 2] == -1 and tensor.sum().cpu() == sum(range(24)) - 9


def test_nothing_else_is_changed() -> None:
    for value in (torch.zeros(2), 3, None, "cuda", torch.device("cuda")):
        assert on_host(value) is value


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_a_tensor_without_numbers_has_no_memory(shape: tuple[int, ...]) -> None:
    host = on_host(torch.empty(shape, dtype=torch.float16, device="cuda"))
    assert (host.shape, host.dtype, host.device.type) == (shape, torch.float16, "cpu")


def test_a_tensor_whose_memory_was_given_back_has_none() -> None:
    tensor = torch.ones(2, 3, device="cuda")
    tensor.untyped_storage().resize_(0)
    assert on_host(tensor).shape == (2, 3)


def test_a_gradient_is_not_asked_of_what_the_card_computes() -> None:
    assert not on_host(torch.ones(2, device="cuda", requires_grad=True)).requires_grad
