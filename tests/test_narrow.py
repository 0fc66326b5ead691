# Run: pytest tests/test_narrow.py
"""Optimizer state and weights in fewer bits: codes, rounding and updates against float64, resumed,
compiled, refused.

What an update stores is compared with the exact update of what was stored before, so nothing adds
up.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batches import flat_gradient, large_batch_gradient, ragged, tiny_llama
from four_bits import FOUR_BITS
from monograph.config import load
from monograph.device import describe
from monograph.errors import InputRefused, UsageError, join_with_or
from monograph.graph.capture import compiled
from monograph.graph.precision import Precision
from monograph.laws.comparisons import error_within, relative_error
from monograph.ops.philox import philox
from monograph.optim import AdamW, Group, Muon
from monograph.optim.formats import FORMATS
from monograph.optim.narrow import (
    join,
    pack_8bit,
    random_words,
    round_stochastically,
    split,
    splittable,
    unpack_8bit,
)
from monograph.optim.state_format import Moment, PackingContext
from monograph.resident import Resident
from monograph.session.resolve import resolve
from monograph.step import Step
from monograph.stream import chunked_update, updates
from reference import optimizers as reference

EPS = torch.finfo(torch.float32).eps
FORMS = {
    "fp32": {"state": "fp32"},
    "bf16": {"state": "bf16"},
    "8bit": {"state": "8bit"},
    "no masters": {"state": "bf16", "master_weights": False},
}
NARROW = ("bf16", "8bit", "no masters")
YES = torch.tensor(True)
TOY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


class Given(nn.Module):
    """Two matrices of one shape and a vector, none a whole number of blocks."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.gain = (
            nn.Parameter(torch.randn(*size)) for size in ((9, 5), (9, 5), (300,))
        )


def given_gradient(model, batch):
    """A loss whose gradient is the batch, whatever the weights are."""
    return sum(
        (p * batch[name].to(p.dtype)).sum() for name, p in model.named_parameters()
    ), torch.tensor(1)


def optimizer(rule, state, **more):
    more |= {"matrices": ["left", "right"]} if rule is Muon else {}
    return rule(lr=0.01, **FORMS.get(state, {"state": state}), **more)


def step_of(rule, state, **more):
    torch.manual_seed(0)
    precision = Precision("bf16" if state == "no masters" else "fp32")
    return Step(
        Given(), loss=given_gradient, optim=optimizer(rule, state, **more), precision=precision
    )


def gradients(seed):
    """Of very different sizes, exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"left": (9, 5), "right": (9, 5), "gain": (300,)}
    draw = {n: torch.randn(*s, generator=generator) for n, s in sizes.items()}
    return {
        n: (g * 10.0 ** (-4 * torch.rand(g.shape, generator=generator))).bfloat16().float()
        for n, g in draw.items()
    }


# ---- codes and rounding --------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), decades=st.integers(0, 12), signed=st.booleans())
@settings(max_examples=25)
def test_codes_are_the_nearest_and_stand_for_what_they_say(seed, decades, signed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 256, generator=generator) * 10.0 ** (
        -decades * torch.rand(3, 256, generator=generator)
    )
    values[1] = 0
    values[2, ::3] = 0
    values = values.flatten() if signed else values.flatten().square()
    packing = PackingContext(len(values), signed)
    codes, scale = pack_8bit(values, packing)
    exact = reference.steps(values, signed)
    exact = exact if signed else torch.where(values > 0, exact.clamp_min(1), 0)
    # A quotient, a product and two roots, each rounded once.
    assert (codes - exact).abs().max() <= 0.5 + 255 * 2 * EPS
    assert torch.equal(scale, values.view(3, 256).abs().amax(-1))
    truth = reference.decoded(codes, scale)
    assert ((unpack_8bit((codes, scale), packing) - truth).abs() <= 8 * EPS * truth.abs()).all()


def test_rounding_is_to_a_neighbour_and_right_on_average():
    draws, updates = 2**14, torch.tensor(3)
    for value in (1.0 + 2**-9, -3.1415, 1e-30, 7.3e20):
        x = torch.full((draws,), value)
        found = round_stochastically(
            x, random_words(x, seed=5, update=updates, plane=1)[0]
        ).double()
        low, high = found.min(), found.max()
        gap = float(high - low)
        assert low < x[0].double() < high and gap <= 2**-7 * abs(value), (
            "the two neighbours in bf16"
        )
        share = float((x[0].double() - low) / gap)
        spread = gap * (share * (1 - share) / draws) ** 0.5
        assert abs(float(found.mean() - x[0].double())) <= 4 * spread
    exact = torch.randn(500).bfloat16()
    assert torch.equal(
        round_stochastically(exact.float(), random_words(exact, 0, updates, 0)[1]), exact
    )


def test_noise_is_a_function_of_seed_update_plane_and_index_alone():
    like, t = torch.zeros(64), torch.tensor(7)
    words = random_words(like, 1, t, 0)
    assert all(
        torch.equal(a, b) for a, b in zip(words, random_words(like, 1, t.clone(), 0), strict=True)
    )
    assert torch.equal(words[0][:10], random_words(like[:10], 1, t, 0)[0])
    others = [
        *words[1:],
        random_words(like, 2, t, 0)[0],
        random_words(like, 1, t + 1, 0)[0],
        random_words(like, 1, t, 1)[0],
    ]
    others.append(random_words(like, 1 + 2**40, t, 0)[0])
    assert all(int((words[0] == other).sum()) == 0 for other in others)


@pytest.mark.parametrize("never_negative", [False, True])
@pytest.mark.parametrize("state", ["bf16", "8bit", "4bit"])
def test_rows_that_ranks_share_out_are_packed_as_in_one_process(state, never_negative):
    """Of 700 numbers a rank has 330, and another the rest of their last block, too."""
    form = FOUR_BITS if state == "4bit" else FORMATS[state]
    assert form.rows_multiple == (2 if state == "4bit" else 1)  # two codes are one byte
    moment = Moment("m", never_negative)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(700, generator=generator)
    values = values.square() if never_negative else values
    words = torch.randint(0, 2**32, (700,), generator=generator)
    rest, cut, block = -700 % form.block, 330, form.block
    largest = torch.nn.functional.pad(values, (0, rest)).view(-1, block).abs().amax(-1)

    def stored(place, ends):
        """The buffers and the numbers of these elements."""
        own, before = values[place], (place.start or 0) % block
        buffers = form.zeros(own, moment, before)
        assert not form.read(buffers, moment, own, before).any(), "zeros are numbers of zero"
        form.write_(
            buffers,
            moment,
            own,
            YES,
            word_N=words[place],
            block_offset=before,
            edge_maxima_2=largest[ends],
        )
        return buffers, form.read(buffers, moment, own, before)

    whole, numbers = stored(slice(None), [0, -1])
    ones, first = stored(slice(0, cut), [0, (cut - 1) // block])
    others, second = stored(slice(cut, None), [cut // block, -1])
    assert torch.equal(torch.cat([first, second]), numbers)
    for part in form.parts:
        name, each = part.buffer_name(moment), part.numbers_per_element
        assert torch.equal(ones[name], whole[name][: -(-cut // each)])
        assert torch.equal(others[name], whole[name][cut // each :])


def test_chunks_of_streamed_planes_are_whole_blocks():
    blocks = [form.block for form in (*FORMATS.values(), FOUR_BITS)]
    assert not any(
        most % block
        for most in (chunked_update.MAX_CHUNK_ELEMENTS, updates.MAX_HOST_CHUNK_ELEMENTS)
        for block in blocks
    )


# ---- updates -------------------------------------------------------------------------------------


def exact_update(plane, optim, grad, t, dtype):
    """(parameters, moments by name) after the update of what the plane holds, by the reference in
    `dtype`.
    """
    form = FORMATS[optim.state]
    like = torch.zeros(len(plane.param))
    held = {
        moment.name: form.read(plane.state, moment, like, 0).to(dtype)
        for moment in plane.kind.rule.moments
    }
    params, moments = [], {name: torch.zeros(len(plane.param), dtype=dtype) for name in held}
    for placed in plane.placed:
        part = slice(placed.offset, placed.offset + placed.parameter.numel())
        shape, decay = placed.parameter.shape, plane.kind.weight_decay
        if plane.kind.matrix_shape:
            one = reference.Muon(
                plane.param[part].to(dtype).view(shape), optim.lr, optim.momentum, decay
            )
            one.m = held["momentum_buffer"][part].view(shape)
        else:
            one = reference.AdamW(
                plane.param[part].to(dtype).view(shape), optim.lr, optim.betas, optim.eps, decay
            )
            one.t, one.m, one.v = (
                t,
                held["exp_avg"][part].view(shape),
                held["exp_avg_sq"][part].view(shape),
            )
        one.update(grad[placed.name].to(dtype))
        params.append(one.param.flatten())
        for name, moment in zip(moments, (one.m, getattr(one, "v", None)), strict=False):
            moments[name][part] = moment.flatten()
    return torch.cat(params), moments


def packed(plane):
    return torch.cat([view.flatten() for _, view in plane.views(plane.param)])


@pytest.mark.parametrize("rule", [AdamW, Muon])
@pytest.mark.parametrize("state", NARROW)
def test_each_update_stores_the_exact_one_s_neighbour(rule, state):
    step = step_of(rule, state)
    for t in range(5):
        grads = gradients(t)
        exact, naive, low = (
            [exact_update(plane, step.optim, grads, t, dtype) for plane in step.planes]
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
        )
        step([grads])
        for plane, (param, moments), (naive_param, _), (low_param, _) in zip(
            step.planes, exact, naive, low, strict=True
        ):
            if rule is Muon and state == "no masters":  # whose products are in bf16, too
                assert error_within(packed(plane), low_param, param)
            elif state == "no masters":  # one of the neighbours: less than a unit in the last place
                slack = 1e-5 * param.abs().max()  # of the update's own arithmetic in fp32
                assert ((packed(plane).double() - param).abs() <= 2**-7 * param.abs() + slack).all()
            else:
                assert error_within(packed(plane), naive_param, param)
            for name, moment in moments.items():
                stored = plane.state[name]
                if state == "8bit":
                    steps = reference.steps(moment, stored.dtype == torch.int8)
                    steps = (
                        steps
                        if stored.dtype == torch.int8
                        else torch.where(moment > 0, steps.clamp_min(1), 0)
                    )
                    assert (stored - steps).abs().max() <= 0.5 + 255 * 4 * EPS, name
                else:
                    slack = 4 * EPS * moment.abs().max()
                    assert (
                        (stored.double() - moment).abs() <= 2**-7 * moment.abs() + slack
                    ).all(), name


def test_codes_drift_from_the_exact_moment_by_what_their_steps_allow():
    """e <- b1 e + d (A + b1 e), with A the largest moment and d = (1 + h)^2 - 1 for half a step h
    of the root.
    """
    step, exact, bound = step_of(AdamW, "8bit"), torch.zeros(300, dtype=torch.float64), 0.0
    half = (1 + 1 / 254) ** 2 - 1
    for seed in range(40):
        grads = gradients(seed)
        step([grads])
        exact = 0.9 * exact + 0.1 * grads["gain"].double()
        bound = 0.9 * bound + half * (float(exact.abs().max()) + 0.9 * bound)
        plane = next(plane for plane in step.planes if plane.placed[0].name == "gain")
        like = torch.zeros(len(plane.param), dtype=torch.float64)
        found = FORMATS["8bit"].read(plane.state, plane.kind.rule.moments[0], like, 0)
        error = (found[:300] - exact).abs().max()
        assert 0 < float(error) <= bound * (1 + 1e-4)


def test_a_gradient_that_is_tiny_beside_its_block_makes_no_large_step():
    """m' <= 4 m, sqrt(v') >= (2 / 3)^2 sqrt(v) and |m| <= 1.17 sqrt(v) at betas of 0.9 and 0.95: 10.6 lr at most."""
    generator = torch.Generator().manual_seed(0)
    size, worst = 10.0 ** (-9 * torch.rand(300, generator=generator)), 0.0
    step = step_of(AdamW, "8bit", weight_decay=0.0)
    zeros = {"left": torch.zeros(9, 5), "right": torch.zeros(9, 5)}
    for _ in range(30):
        before = step.model.gain.detach().clone()
        step([zeros | {"gain": size * torch.randn(300, generator=generator)}])
        worst = max(worst, float((step.model.gain.detach() - before).abs().max()))
    assert 0.01 < worst <= 10.6 * 0.01


@pytest.mark.parametrize("state", NARROW)
def test_a_skipped_update_changes_no_bit(state):
    step = step_of(AdamW, state, ema=0.9)
    step([gradients(0)])
    before = copy.deepcopy([(plane.param, plane.state) for plane in step.planes])
    assert int(step([gradients(1) | {"left": torch.full((9, 5), float("nan"))}]).skipped) == 1
    for plane, (param, held) in zip(step.planes, before, strict=True):
        assert torch.equal(plane.param, param) and all(
            torch.equal(plane.state[n], held[n]) for n in held
        )


def test_gradients_of_bf16_weights_add_up_in_fp32():
    step = step_of(AdamW, "no masters")
    parts = [
        {n: torch.full_like(g, size) for n, g in gradients(0).items()} for size in (1.0, 2.0**-10)
    ]
    mean = (1 + 2**-10) / 2  # no number of bf16
    assert float(step(parts).grad_norm) == pytest.approx(mean * 390**0.5, rel=1e-7)
    assert step.model.left.dtype == torch.bfloat16 and step.model.left.grad.dtype == torch.float32


def test_bf16_weights_have_no_grad_in_a_forward_pass():
    # torch traces no graph in which a gradient has another dtype than its weight.
    found = []

    def loss(model, batch):
        found.append([p.grad for p in model.parameters()])
        return given_gradient(model, batch)

    optim = AdamW(state="bf16", master_weights=False)
    step = Step(Given(), loss=loss, optim=optim, precision=Precision("bf16"))
    step([gradients(0), gradients(1)])
    assert found == [[None] * 3] * 2
    assert all(p.grad.dtype == torch.float32 for p in step.model.parameters())


@pytest.mark.slow
def test_bf16_weights_train_in_a_graph():
    """torch traces no graph around a weight and a gradient of another dtype: the gradient is off
    meanwhile.
    """
    batch, errors = ragged(2, length=8), []
    truth = large_batch_gradient(tiny_llama(torch.float64, **TOY), batch)
    for backend in (None, "eager"):
        engine = Resident(
            tiny_llama(**TOY),
            optim=AdamW(state="bf16", master_weights=False),
            precision=Precision("bf16"),
        )
        if backend:
            engine.step.forward.function = compiled(engine.step.forward.function, backend)
        for _ in range(2):  # the second time a gradient is there
            engine.step.discard()
            engine.accumulate(batch)
        errors.append(relative_error(flat_gradient(engine.model), truth))
    assert 0 < errors[1] <= 2 * errors[0]


# ---- as a whole ----------------------------------------------------------------------------------

RULES = {
    "adamw": AdamW(lr=0.01, ema=0.9, groups=[Group("*norm*", lr=2.0)]),
    "muon": Muon(lr=0.01, betas=(0.8, 0.99)),
}


def engine_of(rule, state, seed=0):
    optim = replace(RULES[rule], **FORMS[state], seed=3)
    return Resident(
        tiny_llama(seed=seed, **TOY), optim=optim, precision=Precision("bf16"), micro_batch=2
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("state", NARROW)
def test_resumed_is_uninterrupted_and_names_are_the_parameters(rule, state):
    whole, resumed = engine_of(rule, state), engine_of(rule, state, seed=1)
    for update in range(4):
        if update == 2:
            resumed.load_state(copy.deepcopy(whole.state()))
        for engine in (whole, resumed) if update >= 2 else (whole,):
            engine.accumulate(ragged(4, seed=update, length=8))
            engine.update()
    mine, its = resumed.state(), whole.state()
    assert mine.scalars == its.scalars and list(mine.model) == list(tiny_llama(**TOY).state_dict())
    for ours, theirs in ((mine.model, its.model), (mine.optimizer, its.optimizer)):
        assert all(torch.equal(ours[n], t) and t.dtype == ours[n].dtype for n, t in theirs.items())
    assert {name.partition(".")[2] for name in its.optimizer} == set(its.model)
    with pytest.raises(InputRefused, match=r"does not fit: .*optim.name"):
        engine_of(rule, "fp32" if state == "8bit" else "8bit").load_state(its)


def test_what_a_parameter_takes():
    expected = {"fp32": (4, 8), "bf16": (4, 4), "8bit": (4, 2 + 8 / 256), "no masters": (2, 4)}
    for state, (weight, moments) in expected.items():
        model = nn.Linear(64, 64, bias=False)
        plane = Step(model, optim=AdamW(**FORMS[state]), precision=Precision("bf16")).planes[0]
        held = sum(t.nbytes for t in plane.state.values())
        assert (plane.param.nbytes / 64**2, held / 64**2) == (weight, moments)
        planned = FORMATS[FORMS[state]["state"]].bytes_each
        assert planned * len(plane.kind.rule.moments) == moments


@pytest.mark.parametrize(
    "backend",
    ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))],
)
def test_compiled_is_eager(backend):
    """The update alone, of both kinds of narrow state in one graph."""
    grads = gradients(0)
    exact, eager, fast = (
        [step_of(AdamW, state) for state in ("8bit", "no masters")] for _ in range(3)
    )
    both = compiled(lambda: [step.apply() for step in fast], backend)
    for pair in (exact, eager, fast):
        for step in pair:
            for plane in step.planes:
                for name, view in plane.views(plane.grad):
                    view.copy_(grads[name])
            step.lr.fill_(0.01)
            step.count.fill_(1)
    truth = [
        [exact_update(p, s.optim, grads, 0, torch.float64)[0] for p in s.planes] for s in exact
    ]
    both()
    for step in eager:
        step.apply()
    for mine, naive, true in zip(fast, eager, truth, strict=True):
        for ours, its, param in zip(mine.planes, naive.planes, true, strict=True):
            assert error_within(packed(ours), packed(its), param)
            for name in its.state:
                different = int((ours.state[name] != its.state[name]).sum())
                assert different <= 0.01 * len(its.state[name]), (
                    "a rounding that fell on a border, no more"
                )


def test_between_parameters_that_begin_at_blocks_are_zeros():
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote is NaN then
    planes = step_of(AdamW, "8bit").planes
    assert all(plane.param.isfinite().all() for plane in planes)
    assert sum(len(plane.param) for plane in planes) > sum(p.numel() for p in Given().parameters())


def test_a_split_number_is_joined_to_the_same_bits_and_only_a_tie_that_rounds_down_is_moved():
    """Every pattern of the 17 lowest bits, below three signs and exponents."""
    low = torch.arange(2**17, dtype=torch.int32)
    for high in (0, 0x3F800000, -0x40000000):
        master = (low | high).view(torch.float32)
        ours = splittable(master)
        hi, lo = split(ours)
        assert torch.equal(hi, master.to(torch.bfloat16)) and torch.equal(join(hi, lo), ours)
        moved = (ours.view(torch.int32) - master.view(torch.int32)).nonzero().flatten()
        assert moved.tolist() == [0x8000] and ours[0x8000] == torch.nextafter(
            master[0x8000], torch.zeros(())
        )


def test_names_on_the_command_line():
    for name, state, rule in (
        ("adamw", "fp32", AdamW),
        ("adamw", "8bit", AdamW),
        ("muon", "bf16", Muon),
    ):
        given = {"optim.name": name, "optim.state": state, "optim.lr": 0.1, "train.seed": 4}
        found = resolve(load(None, given, {}), describe()).training.optim
        assert (type(found), found.state, found.master_weights, found.seed) == (
            rule,
            state,
            True,
            4,
        )
    for wrong, meant in (("8bits", "8bit"), ("b16", "bf16")):
        with pytest.raises(
            UsageError, match=f"{wrong}.*expected {join_with_or(FORMATS)}; did you mean {meant}[?]"
        ):
            load(None, {"optim.state": wrong}, {})
    with pytest.raises(UsageError, match=r"state = '4bit': expected one of fp32, bf16, 8bit"):
        step_of(AdamW, "4bit")
    with pytest.raises(
        UsageError,
        match="master_weights = False keeps weights in bf16: its state is bf16, not 8bit",
    ):
        AdamW(state="8bit", master_weights=False)
    with pytest.raises(
        UsageError,
        match="master_weights = False keeps the weights in bf16, which precision fp32 cannot use",
    ):
        Step(Given(), loss=given_gradient, optim=AdamW(state="bf16", master_weights=False))


def test_noise_is_philox_of_element_update_plane_and_seed():
    start, seed = 2**32 - 2, 3 + (5 << 32)  # indices on both sides of the lower word's end
    words = random_words(torch.zeros(4), seed, torch.tensor(7), 2, start)
    for place, index in enumerate(range(start, start + 4)):
        low, high = divmod(index, 2**32)[::-1]
        expected = philox(
            tuple(map(torch.tensor, (low, 7, 2, high))), (torch.tensor(3), torch.tensor(5))
        )[:3]
        assert [int(word[place]) for word in words] == [int(word) for word in expected]
