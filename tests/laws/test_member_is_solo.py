# Run: pytest tests/laws/test_member_is_solo.py
"""Law 5: a member of an ensemble is the same model alone, in what it says and in how it trains."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from alone import Alone, stacked
from batches import captured_to_train, copied, ragged, tiny_llama
from monograph import compat
from monograph.ensemble import Ensemble
from monograph.ensemble.variations import DROPOUTS
from monograph.laws.comparisons import MEMBER_BOUND, member_is_alone, outcome, relative_error
from monograph.loop import train
from monograph.optim import AdamW, Muon
from monograph.resident import Resident
from monograph.schedule import warmup_cosine
from zoo import ROWS, zoo

ZOO = zoo()
N, UPDATES = 3, 3
KNOBS = [
    SimpleNamespace(
        seed=10 + i,
        lr=1e-3 * 2**i,
        weight_decay=0.1 * i,
        betas=(0.9 - 0.1 * i, 0.95),
        eps=10.0 ** (-8 + i),
    )
    for i in range(N)
]
STEPS_IN_TIME = pytest.mark.slow(
    reason="compiles every step in time; tests/ensemble/test_layers.py has two"
)
COMPILED = (
    "mlp",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("llama, padded", "our llama", "conv", "t5")
    ),
    pytest.param("lstm", marks=STEPS_IN_TIME),
)


def compared(kind, each: bool, backend: str | None, micro_batch: int = ROWS // 2, clip=1.0) -> None:
    """Train both ways, and compare all there is to see."""
    own = [[kind.batch(100 * i * each + step) for i in range(N)] for step in range(UPDATES)]
    windows = [stacked(batches) if each else batches[0] for batches in own]
    members = [kind.build(of.seed).train() for of in KNOBS]
    alone = [kind.build(of.seed).train() for of in KNOBS]
    schedule = warmup_cosine(2, 5)
    engine = Ensemble(
        members,
        KNOBS,
        loss=kind.loss,
        optim=AdamW,
        schedule=schedule,
        clip=clip,
        micro_batch=micro_batch,
        each=each,
    )
    if backend:
        captured_to_train(engine, windows[0], backend)
    graphs = compat.captured_graphs()
    seen = list(train(engine, windows))
    assert compat.captured_graphs() == graphs
    for i, (of, model) in enumerate(zip(KNOBS, alone, strict=True)):
        options = {name: value for name, value in vars(of).items() if name != "seed"}
        solo = Alone(
            model,
            kind.loss,
            of.seed,
            optim=AdamW(**options),
            schedule=schedule,
            clip=clip,
            micro_batch=micro_batch,
        )
        updates = list(train(solo.engine, [batches[i] for batches in own]))
        assert member_is_alone(
            outcome(engine.member_state(i), seen, member=i),
            outcome(solo.engine.state(), updates),
            least=1.0,
        )


# By day rows that all members share are trained on by one kind for each kind of first layer, which
# alone sees them as they are: from there on numbers are each member's own, as with rows of their
# own.
SHARED = {"our llama", "mlp", "conv", "vit"}
# And rows of their own by one of the kinds that are made of the same layers.
OWN_AT_NIGHT = {"our llama", "our gemma", "llama", "llama, padded", "gpt2", "qwen2", "bert", "t5"}


@pytest.mark.parametrize(
    ("name", "each"),
    [
        *(
            pytest.param(name, True, marks=pytest.mark.slow if name in OWN_AT_NIGHT else ())
            for name in ZOO
        ),
        *(
            pytest.param(name, False, marks=() if name in SHARED else pytest.mark.slow)
            for name in ZOO
        ),
    ],
)
def test_it_trains_as_alone(name, each):
    compared(ZOO[name], each, None)


@pytest.mark.parametrize("name", COMPILED)
def test_it_trains_as_alone_captured(name):
    compared(ZOO[name], True, "aot_eager")


@pytest.mark.slow(
    reason="by day nobody_feels below and tests/ensemble capture windows of one micro-batch"
)
@pytest.mark.parametrize("name", ["our llama", "conv", "bert, padded"])
def test_it_trains_as_alone_with_the_update_in_the_same_graph(name):
    compared(ZOO[name], False, "aot_eager", micro_batch=ROWS)


# By day every kind with rows of its own, from which those that all members share differ before the
# first layer alone.
@pytest.mark.parametrize(
    ("name", "each"),
    [
        *(pytest.param(name, True) for name in ZOO),
        *(
            pytest.param(name, False, marks=() if name in SHARED else pytest.mark.slow)
            for name in ZOO
        ),
    ],
)
def test_it_says_what_it_says_alone(name, each):
    kind = ZOO[name]
    members = [kind.build(seed).eval() for seed in range(N)]
    batches = [kind.batch(i * each) for i in range(N)]
    inputs = [
        {k: v for k, v in batch.items() if k not in ("labels", "targets")} for batch in batches
    ]
    if "inputs" in inputs[0] or "tokens" in inputs[0]:
        inputs = [{"": next(iter(of.values()))} for of in inputs]
    call = lambda model, of: model(of[""]) if "" in of else model(**of)  # noqa: E731
    with torch.no_grad():
        expected = [call(member, of) for member, of in zip(members, inputs, strict=True)]
        ensemble = Ensemble(members)
        given = stacked(inputs) if each else inputs[0]
        out = ensemble(given[""], each=each) if "" in given else ensemble(**given, each=each)
    out, expected = (
        ((v if isinstance(v, Tensor) else v[0]) for v in (out, expected))
        if isinstance(expected, Tensor)
        else (
            out if isinstance(out, Tensor) else out[0],
            [v if isinstance(v, Tensor) else v[0] for v in expected],
        )
    )
    assert all(
        relative_error(mine, theirs) <= MEMBER_BOUND
        for mine, theirs in zip(out, expected, strict=True)
    )


def muon_and_groups(i):
    return Muon(lr=1e-3 * 2**i, momentum=0.9 + 0.02 * i, weight_decay=0.1 * i, ema=0.9)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        pytest.param(
            {
                "model_type": "olmoe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "output_router_logits": True,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_muon_averages_and_schedules_of_their_own(sizes):
    models = [tiny_llama(torch.float64, seed, **sizes) for seed in range(N)]
    alone, windows = copy.deepcopy(models), [ragged(ROWS, step) for step in range(UPDATES)]
    schedules = [warmup_cosine(1 + i, 5 + i) for i in range(N)]
    optims = [muon_and_groups(i) for i in range(N)]
    engine = Ensemble(models, optim=optims, schedule=schedules, clip=0.5)
    seen = list(train(engine, windows))
    scored = engine.evaluate(windows[0])[0]
    for i, model in enumerate(alone):
        solo = Resident(model, optim=optims[i], schedule=schedules[i], clip=0.5)
        updates = list(train(solo, windows))
        assert relative_error(scored[i], solo.evaluate(windows[0])[0]) <= MEMBER_BOUND
        assert member_is_alone(
            outcome(engine.member_state(i), seen, member=i), outcome(solo.state(), updates)
        )


def single(kind):
    """A kind in fp32, without dropout: what torch drops alone is not what a member drops."""

    def build(seed: int) -> nn.Module:
        model = kind.build(seed).float().train()
        for module in model.modules():
            if isinstance(module, DROPOUTS):
                module.p = 0.0
        return model

    def batch(seed: int):
        return {
            name: t.float() if t.is_floating_point() else t for name, t in kind.batch(seed).items()
        }

    return kind._replace(build=build, batch=batch)


@pytest.mark.slow(reason="compiles each twice with generated code")
@pytest.mark.parametrize("name", ["our llama", "conv", "qwen2"])
def test_losses_in_fp32_are_as_near_as_compiled_is_to_eager(name):
    """Four times the difference that compiling makes alone, and where that is none, rounding."""
    kind = single(ZOO[name])
    windows = [kind.batch(seed) for seed in range(4)]
    options = {"loss": kind.loss, "optim": AdamW(lr=1e-2), "clip": 1.0}

    def losses(engine, backend=None):
        if backend:
            assert engine.capture(windows[0], backend) is None
        return torch.stack([update.loss for update in train(engine, windows)])

    members = losses(Ensemble([kind.build(seed) for seed in range(N)], **options), "inductor")
    eager = [losses(Resident(kind.build(seed), **options)) for seed in range(N)]
    compiled = losses(Resident(kind.build(0), **options), "inductor")
    noise = max(
        float((compiled - eager[0]).abs().max()),
        float(eager[0].max()) * torch.finfo(torch.float32).eps,
    )
    worst = max(float((members[:, i] - eager[i]).abs().max()) for i in range(N))
    print(f"{name}: members are within {worst / noise:.2f} x {noise:.2g}")
    assert worst <= 4 * noise


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_nobody_feels_what_another_does(backend):
    """The bits of the others when one is poisoned, one exploded and one frozen; captured as eager."""
    kind = ZOO["conv"]
    windows = [kind.batch(step) for step in range(UPDATES)]
    eager, captured = (
        Ensemble(
            [kind.build(seed).train() for seed in range(5)],
            loss=kind.loss,
            optim=AdamW(lr=1e-2),
            clip=0.5,
        )
        for _ in range(2)
    )
    start = copied(eager.state())
    if backend:
        captured_to_train(captured, windows[0], backend)

    def trained(engine, harm):
        engine.load_state(start)
        if harm:
            with torch.no_grad():
                next(engine.members[1].parameters()).fill_(torch.nan)
                for parameter in engine.members[3].parameters():
                    parameter *= 1e200
            engine.freeze([4])
        losses = torch.stack([update.loss for update in train(engine, windows)])
        return losses, [engine.member_state(i) for i in range(5)]

    undisturbed = []
    for engine in (eager, captured) if backend else (eager,):
        (losses, sound), (others, harmed) = trained(engine, False), trained(engine, True)
        for i in (0, 2):
            assert torch.equal(losses[:, i], others[:, i])
            for mine, theirs in (
                (sound[i].model, harmed[i].model),
                (sound[i].optimizer, harmed[i].optimizer),
            ):
                assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
        assert engine.step.applied.tolist() == [UPDATES, 0, UPDATES, 0, 0]
        fresh = kind.build(4)
        assert all(
            torch.equal(p, q)
            for p, q in zip(engine.members[4].parameters(), fresh.parameters(), strict=True)
        )
        undisturbed.append([losses, *(state.model for state in sound)])
    (losses, *models), (others, *their) = undisturbed[0], undisturbed[-1]
    assert relative_error(others, losses) <= MEMBER_BOUND
    for mine, theirs in zip(models, their, strict=True):
        assert all(
            (mine[name] - tensor).abs().max() <= MEMBER_BOUND for name, tensor in theirs.items()
        )


def test_a_member_goes_on_alone_and_an_ensemble_from_its_state():
    windows = [ragged(ROWS, step) for step in range(5)]
    models = [tiny_llama(torch.float64, seed) for seed in range(N)]
    engine = Ensemble(models, optim=AdamW(lr=1e-2), clip=1.0)
    list(train(engine, windows[:2]))
    held = engine.state()
    kept = copied(held)
    solo = Resident(tiny_llama(torch.float64), optim=AdamW(lr=1e-2), clip=1.0)
    solo.load_state(engine.member_state(1))
    alone = torch.stack([update.loss for update in train(solo, windows[2:])])
    losses = torch.stack([update.loss for update in train(engine, windows[2:])])
    assert relative_error(losses[:, 1], alone) <= MEMBER_BOUND
    again = Ensemble([tiny_llama(torch.float64) for _ in range(N)], optim=AdamW(lr=1e-2), clip=1.0)
    again.load_state(kept)
    assert torch.equal(torch.stack([update.loss for update in train(again, windows[2:])]), losses)
