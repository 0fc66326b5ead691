# Run: pytest tests/ops/test_cross_entropy.py
"""Chunked linear cross-entropy against dense logits in float64: eager, captured, under vmap, in
bf16, and how much memory it holds.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monograph.laws.comparisons import error_within
from monograph.ops import cross_entropy
from monograph.ops.cross_entropy import MAX_CHUNKS, chunk_count, linear_cross_entropy
from monograph.profiling.memory import LiveBytes

N, D, V = 37, 16, 101


def inputs(dtype=torch.float32, seed=0, ignored=0.3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def run(function, hidden, weight, targets, **options):
    loss, count = function(hidden, weight, targets, **options)
    grads = torch.autograd.grad(loss / count.clamp_min(1), (hidden, weight))
    return loss.detach(), *grads


def as_double(tensors):
    return [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]


@pytest.mark.parametrize("chunks", [1, 2, 5, N])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_within_the_naive_path_s_own_error(dtype, chunks):
    args = inputs(dtype)
    ours = run(linear_cross_entropy, *args, chunks=chunks)
    naive = run(linear_cross_entropy, *args, impl="reference")
    exact = run(linear_cross_entropy, *as_double(args), impl="reference")
    for mine, theirs, truth in zip(ours, naive, exact, strict=True):
        assert error_within(mine, theirs, truth)


def test_float64_is_exact_and_the_count_is_right():
    hidden, weight, targets = inputs(torch.float64)
    loss, count = linear_cross_entropy(hidden, weight, targets, chunks=4)
    kept = targets != -100
    logp = (hidden @ weight.T).log_softmax(-1)
    torch.testing.assert_close(loss, -logp[kept, targets[kept]].sum(), rtol=1e-14, atol=0)
    assert int(count) == int(kept.sum())
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(hidden, weight, targets, chunks=4)[0], loss, rtol=1e-14, atol=0
        )


def test_gradcheck():
    hidden, weight, targets = inputs(torch.float64)
    few = [tensor.detach()[:count].requires_grad_() for tensor, count in ((hidden, 6), (weight, 9))]
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets[:6].clamp(max=8), chunks=3)[0], few
    )


def test_nothing_to_predict():
    hidden, weight, targets = inputs(ignored=2.0)
    loss, *grads = run(linear_cross_entropy, hidden, weight, targets)
    assert loss == 0 and not any(g.any() for g in grads)


class _Ignored(torch.autograd.Function):
    """Pass a value on, and no gradient back."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, _grad):
        return None


@pytest.mark.parametrize("members", [False, True], ids=["one", "members"])
def test_a_loss_on_which_nothing_depends_gives_no_gradient(members):
    hidden, weight, targets = inputs()
    if members:
        frozen = torch.nn.Parameter(weight.detach(), requires_grad=False)
        hidden = hidden.detach()[None].requires_grad_()
        loss, _ = torch.vmap(lambda h, t: linear_cross_entropy(h, frozen, t))(hidden, targets[None])
    else:
        loss, _ = linear_cross_entropy(hidden, weight, targets)
    (grad,) = torch.autograd.grad(_Ignored.apply(loss).sum(), (hidden,), allow_unused=True)
    assert grad is None


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_captured(backend):
    args = inputs()
    captured = torch.compile(
        lambda h, w, t: linear_cross_entropy(h, w, t, chunks=3), fullgraph=True, backend=backend
    )
    ours, naive = run(captured, *args), run(linear_cross_entropy, *args, impl="reference")
    exact = run(linear_cross_entropy, *as_double(args), impl="reference")
    for mine, theirs, truth in zip(ours, naive, exact, strict=True):
        assert error_within(mine, theirs, truth)


@pytest.mark.parametrize("shared_weight", [False, True])
def test_under_vmap_members_equal_their_solo_runs(shared_weight):
    members = [inputs(torch.float64, seed=s) for s in range(3)]
    hidden, targets = (
        torch.stack([m[0].detach() for m in members]).requires_grad_(),
        torch.stack([m[2] for m in members]),
    )
    weight = (
        members[0][1].detach() if shared_weight else torch.stack([m[1].detach() for m in members])
    ).requires_grad_()
    dims = (0, None if shared_weight else 0, 0)
    losses = torch.vmap(lambda h, w, t: linear_cross_entropy(h, w, t, chunks=4)[0], in_dims=dims)(
        hidden, weight, targets
    )
    grad_h, grad_w = torch.autograd.grad(losses.sum(), (hidden, weight))
    solo = []
    for i, (h, w, t) in enumerate(members):
        w = members[0][1] if shared_weight else w
        loss, _ = linear_cross_entropy(h, w, t, impl="reference")
        torch.testing.assert_close(losses[i], loss, rtol=1e-13, atol=0)
        solo.append(torch.autograd.grad(loss, (h, w)))
        torch.testing.assert_close(grad_h[i], solo[-1][0], rtol=1e-12, atol=1e-13)
    expected = sum(g[1] for g in solo) if shared_weight else torch.stack([g[1] for g in solo])
    torch.testing.assert_close(grad_w, expected, rtol=1e-12, atol=1e-13)


def test_autocast_computes_in_bf16_and_returns_fp32_gradients():
    hidden, weight, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss, grad_h, grad_w = run(linear_cross_entropy, hidden, weight, targets)
    exact = run(linear_cross_entropy, *as_double((hidden, weight, targets)), impl="reference")
    assert loss.dtype == grad_h.dtype == grad_w.dtype == torch.float32
    error = float((grad_w.double() - exact[2]).norm() / exact[2].norm())
    assert 1e-4 < error < 2e-2


def test_chunk_count_is_bounded():
    assert chunk_count(10, 50, "cpu") == 1
    # 40 MiB, by 16 or 512.
    assert chunk_count(1280, 2**13, "cpu") == 3 and chunk_count(1280, 2**13, "cuda") == 1
    assert chunk_count(4096, 128_256, "cpu") == MAX_CHUNKS
    assert chunk_count(3, 10**9, "cpu") == 3
    assert chunk_count(0, 50, "cpu") == 1  # no rows at all still make a sum of 0


def test_an_unknown_impl_is_named():
    with pytest.raises(ValueError, match="'chunked' or 'reference', not 'fast'"):
        linear_cross_entropy(*inputs(), impl="fast")  # type: ignore[arg-type]


def test_holds_an_eighth_of_the_dense_logits():
    tokens, vocabulary = 256, 20_000
    hidden, weight = (
        torch.randn(tokens, 8, requires_grad=True),
        torch.randn(vocabulary, 8, requires_grad=True),
    )
    targets = torch.randint(vocabulary, (tokens,))
    peaks = []
    for options in ({"impl": "reference"}, {"chunks": MAX_CHUNKS}):
        with LiveBytes() as live:
            run(linear_cross_entropy, hidden, weight, targets, **options)
        peaks.append(live.peak_bytes)
    assert peaks[0] > 2 * tokens * vocabulary * 4
    assert peaks[1] <= peaks[0] / 8


@pytest.mark.slow
def test_captured_in_bf16_holds_about_what_eager_holds():
    hidden, weight = (
        torch.randn(256, 128, dtype=torch.bfloat16, requires_grad=True),
        torch.randn(8192, 128),
    )
    args = (hidden, weight.requires_grad_(), torch.randint(8192, (256,)))
    loss = lambda h, w, t: linear_cross_entropy(h, w, t, chunks=MAX_CHUNKS)  # noqa: E731
    peaks = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        run(function, *args)  # the first call compiles
        with LiveBytes() as live:
            run(function, *args)
        peaks.append(live.peak_bytes)
    assert peaks[1] < 1.5 * peaks[0]  # with all chunks' products alive it is over 3 times as much


@pytest.mark.parametrize("has_same_targets", [False, True])
def test_members_with_one_frozen_weight_equal_each_alone(has_same_targets, monkeypatch):
    """Their tokens are cut together, into chunks no larger than those of one member."""
    chunk_tokens = 16
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 4 * chunk_tokens * V)
    members = [inputs(torch.float64, seed) for seed in range(3)]
    weight = torch.nn.Parameter(members[0][1].detach(), requires_grad=False)
    hidden = torch.stack([each.detach() for each, _, _ in members]).requires_grad_()
    targets = torch.stack([each for _, _, each in members])
    if has_same_targets:
        targets = targets[0]
    factors = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    rows = []

    def logits(head, hidden_CD):
        rows.append(len(hidden_CD))
        return hidden_CD @ head.weight_VD.T

    monkeypatch.setattr(cross_entropy.HeadWeight, "logits", logits)
    dims = (0, None if has_same_targets else 0)
    losses, counts = torch.vmap(lambda h, t: linear_cross_entropy(h, weight, t), dims)(
        hidden, targets
    )
    (grads,) = torch.autograd.grad((losses * factors).sum(), hidden)
    assert sum(rows) == 3 * N and max(rows) <= chunk_tokens
    for i in range(3):
        own = hidden[i].detach().requires_grad_()
        of_member = targets if has_same_targets else targets[i]
        loss, count = linear_cross_entropy(own, weight, of_member, impl="reference")
        (grad,) = torch.autograd.grad(loss * factors[i], own)
        assert losses[i].item() == pytest.approx(loss.item(), rel=1e-13)
        assert counts.expand(3)[i] == count
        assert torch.allclose(grads[i], grad, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_captured_under_vmap():
    hidden, weight, targets = inputs(torch.float64)
    hidden, weight, targets = (
        torch.stack([t.detach(), t.detach().flip(0)]) for t in (hidden, weight, targets)
    )
    members = torch.vmap(lambda h, w, t: linear_cross_entropy(h, w, t, chunks=4))
    args = (hidden.requires_grad_(), weight.requires_grad_(), targets)
    captured = torch.compile(
        lambda h, w, t: members(h, w, t)[0].sum(), fullgraph=True, backend="aot_eager"
    )
    ours = torch.autograd.grad(captured(*args), args[:2])
    theirs = torch.autograd.grad(members(*args)[0].sum(), args[:2])
    for mine, theirs_ in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, theirs_, rtol=1e-12, atol=1e-13)
