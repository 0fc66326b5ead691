"""Run: pytest tests/ops/test_fused_gradients.py

Products that add the gradients of weights to a step's planes: they are those that autograd adds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import monograph.step.on_device
import monograph.stream.engine
import monograph.stream.parameters
from batches import captured_to_train, packed, ragged, tiny_config, tiny_llama
from monograph.graph.lora import Lora, adapt
from monograph.graph.precision import Precision
from monograph.graph.remat import Remat
from monograph.graph.siblings import families, fuse_known, fuse_siblings
from monograph.laws.comparisons import error_within, relative_error
from monograph.loss import TokenLoss, token_loss
from monograph.model.llama import Llama
from monograph.model.rope import rotate
from monograph.ops.cross_entropy import (
    HeadWeight,
    _traced_gradients,
    _traced_gradients_on_cuda,
    linear_cross_entropy,
)
from monograph.ops.fused_gradients import (
    FusedGradient,
    add_product_,
    add_scaled_,
    embedding,
    fused_gradients,
    linear,
    product,
)
from monograph.ops.rotation import rotate_by_operators
from monograph.ops.unwritten import unwritten
from monograph.optim import AdamW, Plane, added_at_once
from monograph.resident import Resident
from monograph.stream import Streamed
from streamed import other_bits

ROUNDS_IN_UPDATE = functools.partial(Resident, rounds_in_update=True)


def engine(
    fused: bool = False,
    precision: str = "fp32",
    remat: Any = None,
    dtype: torch.dtype = torch.float32,
    kind: Callable[..., Any] = Resident,
    optim: Any = None,
    **sizes: Any,
) -> Any:
    """An engine of two rows a micro-batch; fused as on a GPU, or separate as on a CPU."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (monograph.step.on_device, monograph.stream.parameters):
            patched.setattr(module, "can_fuse_gradients", lambda *_: fused)
        return kind(
            tiny_llama(dtype, **sizes), precision=Precision(precision), remat=remat, micro_batch=2,
            **{} if optim is None else {"optim": optim},
        )  # fmt: skip


def gradient(made: Resident, window: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradient of a window, by parameter."""
    made.accumulate(window)
    return {
        name: view.clone() for plane in made.step.planes for name, view in plane.views(plane.grad)
    }


def crossed(*axes: Sequence[Any], day: Sequence[tuple[Any, ...]]) -> list[Any]:
    """All combinations, those that are not in `day` at night."""
    every = itertools.product(*axes)
    return [pytest.param(*each, marks=() if each in day else pytest.mark.slow) for each in every]


STORED, RECOMPUTED, BUDGET = None, Remat.Full(), Remat.Budget(0.5)


@pytest.mark.parametrize(
    ("scope", "remat", "tied"),
    crossed(
        ("none", "whole", "blocks"), (STORED, RECOMPUTED, BUDGET), (False, True),
        day=[("none", STORED, True), ("none", BUDGET, False)],
    ),
)  # fmt: skip
def test_added_in_products_equals_added_by_autograd(scope, remat, tied):
    window = packed(5)  # the last micro-batch is filled up
    found = []
    for options in ({"fused": True}, {}, {"dtype": torch.float64}):
        made = engine(remat=remat, tie_word_embeddings=tied, pad_token_id=3, **options)
        if scope != "none" and "fused" in options:
            captured_to_train(made, window, scope=scope)
        gradient(made, window)
        found.append(gradient(made, window))  # on top of the first
    for name, ours in found[0].items():
        assert error_within(ours, found[1][name], found[2][name]), name


def test_biases_are_part_of_the_product():
    """As in Qwen 2: with a sum of its own the output would be rounded twice."""
    drawn = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    bias, plain = (torch.linspace(-3, 3, 6).requires_grad_() for _ in range(2))
    weight.fused_gradient = FusedGradient(weight.detach(), torch.zeros(6, 8))  # type: ignore[attr-defined]
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(drawn, weight, plain)
        with fused_gradients():
            ours = linear(drawn, weight, bias)
    assert torch.equal(ours, expected)
    (ours * drawn[..., :6]).sum().backward()
    (expected * drawn[..., :6]).sum().backward()
    assert torch.equal(bias.grad, plain.grad) and torch.equal(
        weight.fused_gradient.total, weight.grad
    )


def test_weights_are_rounded_again_in_each_window():
    made, separate, exact = (
        engine(True, "bf16"),
        engine(precision="bf16"),
        engine(dtype=torch.float64),
    )
    for seed in range(3):
        for each in (separate, exact):
            for plane, ours in zip(each.step.planes, made.step.planes, strict=True):
                for (_, target), (_, source) in zip(
                    plane.views(plane.param), ours.views(ours.param), strict=True
                ):
                    target.copy_(source)
        window = ragged(4, seed)
        ours, theirs, expected = (gradient(each, window) for each in (made, separate, exact))
        for name in ours:
            # Where products are not rounded before they are added, gradients are more exact, but
            # the CPU rounds them.
            assert error_within(ours[name].bfloat16(), theirs[name].bfloat16(), expected[name]), (
                seed,
                name,
            )
        rounded = [plane for plane in made.step.planes if plane.rounded is not None]
        assert rounded and all(
            torch.equal(plane.rounded, plane.param.bfloat16()) for plane in rounded
        )
        made.update()
        separate.step.discard()
        exact.step.discard()


def written_in_place(made: Resident) -> None:
    with torch.no_grad():
        made.model.lm_head.weight.mul_(2)


def written_by_its_plane(made: Resident) -> None:
    made.step.planes[0].param.mul_(2)


def written_by_its_state(made: Resident) -> None:
    made.state().model["lm_head.weight"].mul_(2)


def loaded_by_the_module(made: Resident) -> None:
    made.model.load_state_dict({name: 2 * t for name, t in made.model.state_dict().items()})


def loaded_by_the_engine(made: Resident) -> None:
    state = made.state()
    made.load_state(replace(state, model={name: 2 * t for name, t in state.model.items()}))


@pytest.mark.parametrize(
    ("scope", "write"),
    [
        ("none", written_in_place),
        ("none", written_by_its_plane),
        ("none", written_by_its_state),
        ("none", loaded_by_the_module),
        ("none", loaded_by_the_engine),
        ("blocks", written_in_place),
    ],
)
def test_weights_that_somebody_writes_after_an_update_are_rounded_again(scope, write):
    """An update rounds the weights that it writes, and a window rounds those that others wrote."""
    made, window = engine(True, "bf16", kind=ROUNDS_IN_UPDATE), packed(4)
    if scope != "none":
        assert made.capture(window, "aot_eager", scope) is None
    rounded = [plane for plane in made.step.planes if plane.rounded is not None]
    for _ in range(2):
        made.accumulate(window)
        made.update()
        assert all(torch.equal(plane.rounded, plane.param.bfloat16()) for plane in rounded)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Plane, "round", lambda _: pytest.fail("rounded a second time"))
        made.evaluate(window)
        made.accumulate(window)  # nobody has written them
    made.update()
    write(made)
    assert not all(torch.equal(plane.rounded, plane.param.bfloat16()) for plane in rounded)
    made.accumulate(window)
    assert all(torch.equal(plane.rounded, plane.param.bfloat16()) for plane in rounded)


def test_an_engine_in_python_sees_weights_that_are_written_through_data():
    """torch does not count such writes, so each window rounds all weights unless the caller forgoes them."""
    made, window = engine(True, "bf16"), packed(4)
    made.accumulate(window)
    made.update()
    made.model.lm_head.weight.data.mul_(2)
    made.accumulate(window)
    rounded = [plane for plane in made.step.planes if plane.rounded is not None]
    assert all(torch.equal(plane.rounded, plane.param.bfloat16()) for plane in rounded)


@pytest.mark.parametrize(
    ("scope", "precision", "tied"),
    crossed(
        ("none", "blocks"), ("bf16", "fp16"), (False, True),
        # By day stream/test_cuda.py captures what is streamed.
        day=[("none", "fp16", True), ("none", "bf16", False)],
    ),
)  # fmt: skip
def test_fused_is_streamed_in_bits(scope, precision, tied):
    """Law 4 as it stands on a GPU; its own test is of a CPU's steps, which are not fused."""
    # Two stages add to a tied gradient, in another order if there are several micro-batches.
    rows = 2 if tied else 5
    left = []
    for kind in (ROUNDS_IN_UPDATE, Streamed):
        made = engine(True, precision, kind=kind, tie_word_embeddings=tied)
        assert families(made.model) and not isinstance(
            made.step.parameters.fused_gradients(), nullcontext
        )
        if scope != "none":
            assert made.capture(packed(rows), "aot_eager", scope) is None
        for seed in range(2):
            made.accumulate(packed(rows, seed))
            made.update()
        loss, _ = made.evaluate(packed(5, 3))
        left.append(made.state().model | {"loss": loss})
    assert not other_bits(*left)


def test_only_matrices_are_fused_and_only_in_a_micro_step():
    made = engine(True, "bf16")
    assert all((plane.rounded is None) == plane.kind.is_vector for plane in made.step.planes)
    weight = made.model.lm_head.weight
    loss, _ = linear_cross_entropy(torch.ones(1, weight.shape[1]), weight, torch.tensor([3]))
    (grad,) = torch.autograd.grad(loss, weight)  # outside of a step autograd returns gradients
    assert bool(grad.any()) and not bool(weight.grad.any())
    F.linear(torch.ones(1, weight.shape[1]), weight).sum().backward()  # and adds them, once
    assert torch.equal(weight.grad, torch.ones_like(weight))
    with fused_gradients():
        linear(torch.ones(1, weight.shape[1]), weight).sum().backward()  # and here the product
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))


def test_rows_of_padding_and_repeated_tokens():
    tokens, weight = torch.tensor([[0, 2, 2], [1, 0, 4]]), torch.randn(5, 3, requires_grad=True)
    factor = torch.arange(18.0).view(2, 3, 3)
    (F.embedding(tokens, weight, 0) * factor).sum().backward()
    total = torch.ones(5, 3)
    weight.fused_gradient = FusedGradient(weight.detach(), total)
    with fused_gradients():
        (embedding(tokens, weight, 0) * factor).sum().backward()
    assert torch.equal(total, weight.grad + 1)


def test_gradients_of_weights_without_masters_are_added_once():
    """Their `.grad`, in another dtype, is taken away for the forward pass."""
    no_masters = {"precision": "bf16", "optim": AdamW(state="bf16", master_weights=False)}
    fused, separate = engine(True, **no_masters), engine(**no_masters)
    exact = engine(dtype=torch.float64)
    for name, weight in exact.state().model.items():
        weight.copy_(fused.state().model[name])  # which are rounded
    ours, theirs, expected = (gradient(made, packed(4)) for made in (fused, separate, exact))
    for name in ours:
        # The CPU rounds products before it adds them.
        assert error_within(ours[name].bfloat16(), theirs[name].bfloat16(), expected[name]), name


def test_siblings_of_a_llama_are_known():
    known, watched = tiny_llama(), tiny_llama()
    fuse_known(known)
    fuse_siblings(watched, torch.zeros(1, 8, dtype=torch.int64))
    sizes = [[family.sizes for family in families(model)] for model in (known, watched)]
    assert sizes[0] == sizes[1] == [[32, 16, 16], [48, 48]] * 2
    hooked = tiny_llama()
    hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    fuse_known(hooked)
    assert [family.sizes for family in families(hooked)] == [[32, 16, 16], [32, 16, 16], [48, 48]]


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_layers_with_a_narrow_base_and_adapters_stay_separate(base):
    model = tiny_llama()
    adapt(model, Lora(4, base=base))
    fuse_known(model)
    assert families(model) == []


def test_forms_for_a_gpu_equal_those_for_a_cpu():
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads, angles = drawn(2, 3, 5, 8), drawn(2, 1, 5, 4)
    turned = [tensor.transpose(1, 2) for tensor in (angles.cos(), angles.sin())]
    ours = rotate_by_operators(heads.transpose(1, 2), *turned).transpose(1, 2)
    assert torch.equal(ours, rotate(heads, (angles.cos(), angles.sin())))
    hidden, weight, targets = drawn(6, 4), drawn(9, 4), torch.tensor([0, 8, 3, 3, 0, 1])
    weights = torch.tensor([1.0, 1, 1, 0, 1, 1], dtype=torch.float64)
    # fp32 is replaced in place by an operator.
    for dtype, cap in itertools.product((torch.float64, torch.float32), (None, 2.0)):
        exact_head, head = HeadWeight(weight, cap=cap), HeadWeight(weight.to(dtype), cap=cap)
        losses, grad = _traced_gradients(hidden, exact_head, targets, torch.float64, None)
        our_losses, our_grad = _traced_gradients_on_cuda(
            hidden.to(dtype), head, targets, weights.to(dtype)
        )
        # The sums have at most nine terms near 1, and what is rounded are numbers of this dtype.
        bound = 32 * torch.finfo(dtype).eps
        assert relative_error(our_losses, losses * weights) < bound
        assert relative_error(our_grad, grad * weights[:, None]) < bound


def test_who_is_fused_on_a_gpu():
    """Code of others may ask for gradients that autograd does not see then."""

    class OwnLoss(TokenLoss):
        pass

    class OwnLlama(Llama):
        pass

    def fuses(
        model: Any = None, precision: str = "bf16", loss: Any = token_loss, on_cuda: bool = True
    ) -> bool:
        made = Resident(model or tiny_llama(), loss=loss, precision=Precision(precision))
        return monograph.step.on_device.can_fuse_gradients(made.step, on_cuda)

    hooked, told = tiny_llama(), tiny_llama()
    hooked.lm_head.weight.register_hook(lambda gradient: gradient)
    told.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert fuses() and fuses(precision="fp16")
    assert not any([
        fuses(on_cuda=False), fuses(precision="fp32"), fuses(precision="fp8"), fuses(loss=OwnLoss()),
        fuses(OwnLlama(tiny_config())), fuses(hooked), fuses(told),
    ])  # fmt: skip


def test_gradients_of_vectors_are_added_at_once_to_where_they_were():
    planes = engine(True).step.planes
    parameters = [
        placed.parameter for plane in planes if plane.kind.is_vector for placed in plane.placed
    ]
    for plane in planes:
        plane.link()
        plane.grad.fill_(1.0)
    totals = [parameter.grad for parameter in parameters]
    with added_at_once(planes):
        (parameters[0] * 2).sum().backward()
    assert all(parameter.grad is total for parameter, total in zip(parameters, totals, strict=True))
    assert [float(total.mean()) for total in totals] == [3.0, *[1.0] * (len(totals) - 1)]
    with pytest.raises(RuntimeError, match="stopped"), added_at_once(planes):
        raise RuntimeError("stopped")
    assert all(parameter.grad is total for parameter, total in zip(parameters, totals, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_product_is_added_or_begins_a_total(
    batch: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    draws = torch.Generator().manual_seed(0)
    total, left, right = (
        torch.randn(*batch, *size, generator=draws) for size in ((6, 5), (40, 6), (40, 5))
    )
    left, right = left.to(dtype), right.to(dtype)
    exact = left.double().mT @ right.double()
    before = total.double()
    total, left, right = (tensor.to(device) for tensor in (total, left, right))
    add_product_(total, left, right)
    written, weight = torch.full_like(total, torch.nan), torch.zeros_like(total)
    with unwritten([(weight, written)]):
        add_product_(written, left, right, weight)
    # Which has no product of bf16 with an fp32 result.
    rounded = dtype == torch.bfloat16 and device == "cpu"
    for found, expected in ((total, before + exact), (written, exact)):
        torch.testing.assert_close(
            found.cpu().double(), expected, rtol=0, atol=0.05 if rounded else 1e-5
        )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_begins_with_a_product(dtype: torch.dtype, device: str) -> None:
    draws = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*size, generator=draws).to(dtype) for size in ((40, 6), (40, 5)))
    exact = left.double().T @ right.double()
    found = product(left.to(device), right.to(device), torch.float32)
    assert found.dtype == torch.float32
    rounded = dtype == torch.bfloat16 and device == "cpu"
    torch.testing.assert_close(found.cpu().double(), exact, rtol=0, atol=0.05 if rounded else 1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(0, 1), (1, 1), (3, 2048), (33, 129)])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_scaled_tensor_is_added_or_begins_a_total(
    shape: tuple[int, int], device: str, is_contiguous: bool
) -> None:
    draws = torch.Generator().manual_seed(0)
    total, grad = (torch.randn(shape, generator=draws) for _ in range(2))
    factor = torch.tensor(0.3)
    exact = total.double() + grad.double() * factor.double()
    # A number behind the total, which must not change.
    memory = torch.full((total.numel() + 1,), 7.0, device=device)
    placed = memory[:-1].view(shape if is_contiguous else shape[::-1])
    placed = placed if is_contiguous else placed.T
    placed.copy_(total)
    add_scaled_(placed, grad.to(device), factor.to(device))
    torch.testing.assert_close(placed.cpu().double(), exact, rtol=0, atol=1e-6)
    if is_contiguous:
        placed.fill_(torch.nan)
        with unwritten([(grad, placed)]):
            add_scaled_(placed, grad.to(device), factor.to(device), grad)
        torch.testing.assert_close(placed.cpu(), grad * factor, rtol=0, atol=1e-6)
    assert float(memory[-1]) == 7.0
