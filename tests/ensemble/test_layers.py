"""Run: pytest tests/ensemble/test_layers.py

Every layer of torch.nn, and what people wrap around layers, is in an ensemble what it is alone, or
refused in words.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import rnn as sequences
from torch.nn.utils.spectral_norm import spectral_norm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from alone import Alone, stacked
from batches import captured_to_train
from daily import nightly
from layers import PLANE, ROWS, VECTOR, Case, Scaled, drawn, layers, weighted
from monograph.ensemble import Ensemble
from monograph.errors import InputRefused, MonographError
from monograph.laws.comparisons import relative_error
from monograph.loop import train
from monograph.optim import AdamW
from monograph.resident import Resident

N, BOUND = 2, 1e-10
# Or a gradient of 0, which is a rounding error, would be a step of 1e-2.
OPTIM = AdamW(lr=1e-2, eps=1.0)
SEQUENCE = (ROWS, 7, 6)
ABSTRACT = {"Container", "Module", "RNNBase", "RNNCellBase"}  # nothing to call
LAZY = [name for name in layers() if name.startswith("Lazy")]
RANDOM = r"draws random numbers by torch's generator"
REFUSED = dict.fromkeys(LAZY, r"no shape yet: call the module once") | {
    "RReLU": RANDOM,
    "FractionalMaxPool2d": RANDOM,
    "FractionalMaxPool3d": RANDOM,
    "AdaptiveLogSoftmaxWithLoss": r"the shape of what it computes depends on values",
    "CrossMapLRN2d": r"its autograd\.Function lacks what torch\.func needs: write setup_context",
    "GaussianNLLLoss": r"it decides by a tensor's value",
}
LOOPED = {
    "Bilinear": "bilinear",
    "CTCLoss": "ctc_loss",
    "EmbeddingBag": "embedding_bag",
    "KLDivLoss": "kl_div",
    "MarginRankingLoss": "margin_ranking_loss",
    "MaxUnpool1d": "max_unpool2d",
    "MaxUnpool2d": "max_unpool2d",
    "MaxUnpool3d": "max_unpool3d",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
    "MultiMarginLoss": "multi_margin_loss",
    "SoftMarginLoss": "soft_margin_loss",
    "TripletMarginLoss": "triplet_margin_loss",
}
ALONE = [
    "LSTM",
    "CTCLoss",
    "orthogonal, by exponential",
    "spectral norm",
    "batch norm of all batches",
]
LOOPS = "ignore:layer .* is looped over the members"
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*'batchmean' divides only by the batch size", LOOPS
)


class Symmetric(nn.Module):
    """A parametrization of one's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def custom() -> nn.Module:
    return parametrize.register_parametrization(linear(), "weight", Symmetric())


def older_weight_norm() -> nn.Module:
    layer = linear()
    WeightNorm.apply.__wrapped__(layer, "weight", 0)  # deprecated, and still in many models
    return layer


def pruned() -> nn.Module:
    return prune.random_unstructured(linear(), "weight", amount=0.3)


def convolved(wrap) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 3)), wrap(nn.Conv1d(2, 4, 2)), nn.Flatten())


def with_states(layer, x, hidden, cell):
    return layer(x, (hidden.transpose(0, 1), cell.transpose(0, 1)))


def recurrent() -> dict[str, Case]:
    """What recurrent layers can be told."""
    two = {"num_layers": 2, "batch_first": True}
    found = {}
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        variants = {
            "two layers both ways": (two | {"bidirectional": True}, SEQUENCE),
            "no bias, time first": ({"bias": False}, SEQUENCE),
            "one sequence": ({}, (7, 6)),
        }
        for name, (options, shape) in variants.items():
            found[f"{kind.__name__}, {name}"] = Case(
                lambda kind=kind, options=options: kind(6, 5, **options), (shape,)
            )
    return found | {
        "RNN of relu": Case(lambda: nn.RNN(6, 5, nonlinearity="relu", **two), (SEQUENCE,)),
        "LSTM, projected": Case(
            lambda: nn.LSTM(6, 5, proj_size=3, bidirectional=True, **two), (SEQUENCE,)
        ),
        "LSTM, projected, no bias": Case(
            lambda: nn.LSTM(6, 5, proj_size=3, bias=False, **two), (SEQUENCE,)
        ),
        "LSTM, given states": Case(
            lambda: nn.LSTM(6, 5, batch_first=True),
            (SEQUENCE, (ROWS, 1, 5), (ROWS, 1, 5)),
            with_states,
        ),
        "LSTM, weight norm": Case(
            lambda: parametrizations.weight_norm(nn.LSTM(6, 5, batch_first=True), "weight_hh_l0"),
            (SEQUENCE,),
        ),
        "LSTM, orthogonal": Case(
            lambda: parametrizations.orthogonal(nn.LSTM(6, 5, batch_first=True), "weight_hh_l0"),
            (SEQUENCE,),
        ),
        "LSTM of two steps": Case(
            lambda: nn.LSTM(6, 5, batch_first=True, bidirectional=True), ((ROWS, 2, 6),)
        ),
        "LSTMCell, no bias": Case(lambda: nn.LSTMCell(6, 5, bias=False), (VECTOR,)),
        "RNNCell of relu": Case(lambda: nn.RNNCell(6, 5, nonlinearity="relu"), (VECTOR,)),
        "GRUCell of one row": Case(lambda: nn.GRUCell(6, 5), ((6,),)),
    }


def wrapped() -> dict[str, Case]:
    """What is put around layers, and what they are told that changes how they run."""
    vectors = {
        "weight norm": lambda: parametrizations.weight_norm(linear()),
        "weight norm of all": lambda: parametrizations.weight_norm(linear(), dim=None),
        "weight norm of columns": lambda: parametrizations.weight_norm(linear(), dim=1),
        "weight norm, older": older_weight_norm,
        "orthogonal": lambda: parametrizations.orthogonal(linear()),
        "orthogonal, by exponential": lambda: parametrizations.orthogonal(
            linear(), orthogonal_map="matrix_exp"
        ),
        "orthogonal, rectangular": lambda: parametrizations.orthogonal(
            nn.Linear(6, 4), use_trivialization=False
        ),
        "spectral norm": lambda: parametrizations.spectral_norm(linear()),
        "spectral norm, older": lambda: spectral_norm(linear()),
        "parametrized by oneself": custom,
        "pruned": pruned,
        "convolution, weight norm": lambda: convolved(parametrizations.weight_norm),
        "convolution, spectral norm": lambda: convolved(parametrizations.spectral_norm),
        "batch norm of all batches": lambda: nn.BatchNorm1d(6, momentum=None),
        "batch norm of no statistics": lambda: nn.BatchNorm1d(
            6, momentum=None, track_running_stats=False
        ),
        "averaged": lambda: torch.optim.swa_utils.AveragedModel(linear()),
    }
    images = {"batch norm of all images": lambda: nn.BatchNorm2d(4, momentum=None)}
    found = {name: Case(build, (VECTOR,)) for name, build in vectors.items()}
    return found | {name: Case(build, (PLANE,)) for name, build in images.items()}


CASES = layers() | recurrent() | wrapped()


def built(case: Case, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Scaled(case).double()


def trained(
    case: Case, members: list[nn.Module], updates: int = 2
) -> tuple[Ensemble, list[Tensor]]:
    windows = [stacked([drawn(case, 10 * i + step) for i in range(N)]) for step in range(updates)]
    engine = Ensemble(
        members,
        [SimpleNamespace(seed=5 + i) for i in range(N)],
        loss=weighted,
        optim=OPTIM,
        each=True,
    )
    return engine, [update.loss for update in train(engine, windows)]


def test_every_layer_of_torch_is_tried():
    kinds = {
        name
        for name in dir(nn)
        if isinstance(kind := getattr(nn, name), type) and issubclass(kind, nn.Module)
    }
    assert kinds == layers().keys() | ABSTRACT


@pytest.mark.parametrize(
    "name", nightly((name for name in CASES if name not in REFUSED), [*CASES][::4] + ALONE)
)
def test_a_layer_is_what_it_is_alone(name):
    """Its losses and weights as it trains, and then all that it says."""
    case = CASES[name]
    engine, losses = trained(case, [built(case, seed) for seed in range(N)])
    table = engine.layers(*drawn(case, 99).values())
    assert {operator for layer in table for operator in layer.looped} == (
        {f"aten::{LOOPED[name]}"} if name in LOOPED else set()
    )
    engine.model.eval()
    said = tree_leaves(engine(*drawn(case, 99).values()))
    for i in range(N):
        solo = Alone(built(case, i), weighted, 5 + i, optim=OPTIM)
        for step, update in enumerate(
            train(solo.engine, [drawn(case, 10 * i + step) for step in range(2)])
        ):
            assert abs(losses[step][i] - update.loss) <= BOUND * max(1, abs(update.loss))
        state = solo.engine.state().model
        assert engine.member_state(i).model.keys() == state.keys()
        for path, tensor in engine.member_state(i).model.items():
            assert torch.allclose(tensor, state[path], rtol=BOUND, atol=BOUND), path
        alone = tree_leaves(solo.engine.model.eval()(*drawn(case, 99).values()))
        for mine, theirs in zip(said, alone, strict=True):
            assert not isinstance(theirs, Tensor) or torch.allclose(
                mine[i], theirs, rtol=BOUND, atol=BOUND
            )


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_cannot_be_batched_is_refused_by_name(name):
    case = CASES[name]
    place = r"layer\.\w+" if name in LAZY else rf"layer \({name}\)"
    with pytest.raises(MonographError, match=rf"{place}:? .*{REFUSED[name]}") as refusal:
        trained(case, [built(case, seed) for seed in range(N)])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ALONE)
def test_a_layer_does_not_feel_another_members(name):
    """The first member's bits where the second one's numbers are large, and then none."""
    found = []
    for harm in (1.0, 1e3, torch.nan):
        members = [built(CASES[name], seed) for seed in range(N)]
        with torch.no_grad():
            for parameter in members[1].parameters():
                parameter.mul_(harm)
        engine, losses = trained(CASES[name], members)
        found.append([*(loss[0] for loss in losses), *engine.member_state(0).model.values()])
    for harmed in found[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0], harmed, strict=True))


class Slow(nn.Module):
    """A recurrent layer with dropout written out: one layer after another, and dropout between
    them.
    """

    def __init__(self, layer: nn.LSTM) -> None:
        super().__init__()
        self.rate = layer.dropout
        self.layers = nn.ModuleList(nn.LSTM(5, 5) for _ in range(layer.num_layers)).double()
        for number, one in enumerate(self.layers):
            one.load_state_dict(
                {name: getattr(layer, f"{name[:-1]}{number}") for name in one.state_dict()}
            )

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(nn.functional.dropout(x, self.rate) if number else x)[0]
        return x


class Outputs(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def test_a_recurrent_layer_drops_between_its_layers_what_it_drops_alone():
    members = [Outputs(5, 5, 3, dropout=0.4).double() for _ in range(N)]
    alone = [Slow(member) for member in members]
    batch = {"x": torch.randn(ROWS, 7, 5, dtype=torch.float64)}
    engine = Ensemble(
        members, [SimpleNamespace(seed=i) for i in range(N)], loss=weighted, optim=OPTIM
    )
    losses = [update.loss for update in train(engine, [batch] * 3)]
    for i, model in enumerate(alone):
        solo = Alone(model, weighted, i, optim=OPTIM)
        for step, update in enumerate(train(solo.engine, [batch] * 3)):
            assert relative_error(losses[step][i], update.loss) < BOUND


class Wrong(nn.Module):
    """What an ensemble would have got wrong silently, or said in torch's words."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.lstm, self.gain = (
            linear(),
            nn.LSTM(6, 6, batch_first=True),
            nn.Parameter(torch.ones(6)),
        )
        self.how = how
        if how == "list":
            self.gains = [self.gain]
        if how == "closure":
            self.act = lambda x: x * self.gain
        if how == "hook":
            self.layer.register_forward_hook(lambda _module, _inputs, output: output * self.gain)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "packed":
            return self.lstm(
                sequences.pack_padded_sequence(x, torch.tensor([3, 2, 1]), batch_first=True)
            )[0].data
        if self.how == "checkpoint":
            return checkpoint(self.layer, x, use_reentrant=False)
        return self.act(x) if self.how == "closure" else self.layer(x)


def normed(kind: type[nn.RNNBase]) -> nn.Module:
    return parametrizations.spectral_norm(kind(6, 6, batch_first=True), "weight_hh_l0")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda: Wrong("list"),
            r"the module\.gains reaches the member's own tensors past their names",
        ),
        (
            lambda: Wrong("closure"),
            r"the module\.act reaches the member's own tensors past their names",
        ),
        (lambda: Wrong("hook"), r"layer\.hooks reaches the member's own tensors past their names"),
        (
            lambda: Wrong("packed"),
            r"in lstm \(LSTM\): it is given a packed sequence, .*: give it the padded rows",
        ),
        (
            lambda: Wrong("checkpoint"),
            r"in Wrong \(Wrong\): it recomputes by .*remat=Remat\.Budget",
        ),
        (
            lambda: nn.Sequential(torch.jit.script(linear())),
            r"0 \(RecursiveScriptModule\) is TorchScript",
        ),
        (
            lambda: nn.Sequential(normed(nn.LSTM)),
            r"0 \(ParametrizedLSTM\) has a parametrization that writes its own",
        ),
        (
            lambda: nn.Sequential(normed(nn.GRU).eval()),
            r"0 \(ParametrizedGRU\) has a parametrization that writes",
        ),
    ],
)
def test_what_goes_past_the_members_is_refused(build, said):
    x = torch.randn(3, 4, 6)
    with pytest.raises(InputRefused, match=said) as refusal:
        Ensemble([build().train() for _ in range(N)])(x)
    assert "\n" not in str(refusal.value)


def test_layers_that_no_path_leads_to_are_compared():
    """Layers in a plain list are no parts of the module: one copy would have stood for all
    members'.
    """
    members = [Wrong("none") for _ in range(N)]
    for member in members:
        member.hidden = [linear()]
    with pytest.raises(InputRefused, match=r"hidden is \[Linear"):
        Ensemble(members)
    members[1].hidden[0].load_state_dict(members[0].hidden[0].state_dict())
    Ensemble(members)


def test_parametrized_members_that_differ_are_refused_with_the_path():
    members = [linear(), custom()]
    with pytest.raises(
        InputRefused, match=r"weight is \[6, 6\] float32 on cpu in one and absent in the other"
    ):
        Ensemble(members)
    with pytest.raises(
        InputRefused, match=r"parametrizations\.weight\.0 is Symmetric in one and Identity"
    ):
        Ensemble(
            [custom(), parametrize.register_parametrization(linear(), "weight", nn.Identity())]
        )


def test_a_members_own_mistake_is_said_as_it_is():
    with pytest.raises(RuntimeError, match="mat1 and mat2") as said:
        Ensemble([linear() for _ in range(N)])(torch.randn(3, 5))
    assert "batched" not in str(said.value)


class Mixed(nn.Module):
    """A layer that is batched, one that torch loops, one that is not called; a number and no loss
    beside its scores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.pair, self.unused = (
            nn.LSTM(6, 6, batch_first=True),
            nn.Bilinear(6, 6, 5),
            linear(),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None, int]:
        hidden = self.lstm(x)[0]
        return self.pair(hidden, hidden), None, 3


def test_a_table_says_which_layers_are_looped_and_why():
    engine = Ensemble([Mixed() for _ in range(N)])
    x = torch.randn(3, 4, 6)
    table = engine.layers(x)
    assert str(table).splitlines() == [
        "lstm (LSTM)      batched, step by step in time",
        "pair (Bilinear)  looped over the members, because torch has no batched form of aten::bilinear",
        "unused (Linear)  not called",
    ]
    with pytest.warns(
        UserWarning, match=r"^pair \(Bilinear\) is looped over the members, because torch has no"
    ) as said:
        engine(x)
        outputs, nothing, number = engine(x)
    assert len(said) == 1 and outputs.shape == (N, 3, 4, 5) and nothing is None and number == 3


@pytest.mark.slow
def test_inference_is_compiled_to_what_it_was():
    case = CASES["LSTM of two steps"]
    engine = Ensemble([built(case, seed).eval() for seed in range(N)])
    x = drawn(case, 1)["0"]
    with torch.no_grad():
        expected = tree_leaves(engine(x))
        assert engine.compile("aot_eager") is engine
        for mine, theirs in zip(tree_leaves(engine(x)), expected, strict=True):
            assert relative_error(mine, theirs) < BOUND
        for parameter in engine.members[1].parameters():
            parameter.mul_(2)
        assert relative_error(engine(x)[0][1], engine.members[1](x)[0]) < BOUND


@pytest.mark.slow
def test_what_is_captured_trains_as_alone():
    """A weight that is computed, a buffer that a parametrization writes, and steps in time, in one
    graph.
    """

    def build() -> nn.Module:
        lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)
        return nn.Sequential(older_weight_norm(), parametrizations.spectral_norm(linear()), lstm)

    case = Case(build, ((ROWS, 2, 6),))
    engine = Ensemble([built(case, seed) for seed in range(N)], loss=weighted, optim=OPTIM)
    windows = [drawn(case, step) for step in range(2)]
    captured_to_train(engine, windows[0])
    losses = [update.loss for update in train(engine, windows)]
    for i in range(N):
        solo = Resident(built(case, i), loss=weighted, optim=OPTIM)
        for step, update in enumerate(train(solo, windows)):
            assert relative_error(losses[step][i], update.loss) < BOUND
        for path, tensor in solo.state().model.items():
            assert torch.allclose(
                engine.member_state(i).model[path], tensor, rtol=BOUND, atol=BOUND
            ), path
