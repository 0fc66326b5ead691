# Run: pytest tests/ensemble/test_dropout.py
"""Dropout by counter: the words are Philox's, rates are kept, members and passes are independent."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from monograph import compat
from monograph.ensemble import Ensemble
from monograph.ensemble.dropout import Dropout
from monograph.loop import train
from monograph.optim import AdamW
from zoo import of_classes

MASK = 0xFFFFFFFF


def philox(counter, key):
    """Philox4x32-10 in Python's whole numbers (Salmon et al. 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        one, two = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(two >> 32) ^ c[1] ^ k[0], two & MASK, (one >> 32) ^ c[3] ^ k[1], one & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def counter(seed, draw=0):
    return SimpleNamespace(seed=torch.tensor(seed), draw=torch.tensor(draw))


@pytest.mark.parametrize(("seed", "draw"), [(0, 0), (7, 3), (2**40 + 5, 2**33 + 1)])
def test_the_words_are_philox_of_element_pass_and_site(seed, draw):
    dropout = Dropout(counter(seed, draw))
    for site in range(2):
        kept = dropout.keep_mask((3, 5), 0.3).flatten().tolist()
        key = (seed & MASK, seed >> 32)
        words = [philox((i // 4, draw & MASK, site, draw >> 32), key)[i % 4] for i in range(15)]
        assert kept == [word >= int(0.3 * 2**32) for word in words]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("name", ["dropout", "dropout1d", "dropout2d"])
def test_the_rate_is_kept_and_the_rest_scaled(name, rate):
    shape = (400, 40, 3, 2) if name == "dropout2d" else (400, 40, 6)
    out = Dropout(counter(1)).functions()[name](torch.ones(shape, dtype=torch.float64), rate)
    count = out.numel() if name == "dropout" else shape[0] * shape[1]
    zeros = float((out == 0).double().mean())
    assert abs(zeros - rate) <= 4 * (rate * (1 - rate) / count) ** 0.5
    assert rate == 1 or torch.allclose(
        out[out != 0], torch.tensor(1 / (1 - rate), dtype=torch.float64)
    )
    if name != "dropout":
        flat = out.flatten(2)
        assert bool((flat == flat[..., :1]).all())


@pytest.mark.parametrize(
    ("name", "shape"), [("1d", (9, 7)), ("2d", (9, 7, 6)), ("3d", (9, 7, 6, 5))]
)
def test_one_dimension_fewer_is_read_as_torch_reads_it(name, shape):
    """In dropout2d as [N, C, L]; in the others as a batch of one."""
    theirs, ours = (
        getattr(nn.functional, f"dropout{name}"),
        Dropout(counter(1)).functions()[f"dropout{name}"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = [(drop(torch.ones(shape)) != 0) for drop in (theirs, ours)]
    channels = 2 if name == "2d" else 1
    for mask in kept:
        flat = mask.flatten(channels)
        assert (
            bool((flat == flat[..., :1]).all())
            and 0 < int(flat[..., 0].sum()) < flat[..., 0].numel()
        )
        assert channels == 1 or not bool((mask == mask[:, :1]).all())


class Dropping(nn.Module):
    def __init__(self, rate=0.5):
        super().__init__()
        self.head, self.drop, self.again = (
            nn.Linear(64, 5),
            nn.Dropout(rate),
            nn.Dropout(0.25, inplace=True),
        )

    def forward(self, x):
        return self.head(self.again(self.drop(x)))


def masks(ensemble, x):
    """Which inputs reach the head of each member."""
    seen = {}
    ensemble.model.head.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0]))

    def look(module, x):
        module(x)
        return seen["x"]

    with ensemble._caller.context():
        return ensemble._caller(look, x, each=False) != 0


def test_each_member_drops_what_it_drops_alone_bit_by_bit():
    torch.manual_seed(0)
    x, rates = torch.ones(16, 64), [0.0, 0.1, 0.5, 0.9]
    ensemble = Ensemble(
        [Dropping(rate) for rate in rates], [{"seed": 5 + i} for i in range(4)], loss=of_classes
    )
    found = masks(ensemble, x)
    for i, rate in enumerate(rates):
        functions = Dropout(counter(5 + i)).functions()
        with compat.replace_functional(functions):
            alone = functions["dropout"](functions["dropout"](x, rate), 0.25)
        assert torch.equal(found[i], alone != 0)


def test_passes_members_and_sites_drop_others():
    ensemble = Ensemble([Dropping() for _ in range(3)], loss=of_classes, optim=AdamW(lr=0.0))
    batch = {"inputs": torch.ones(16, 64), "labels": torch.zeros(16, dtype=torch.int64)}
    losses = torch.stack([update.loss for update in train(ensemble, [batch] * 4)])
    assert len(losses.unique()) == losses.numel()
    assert not torch.equal(*masks(ensemble, batch["inputs"])[:2])
    ensemble.model.eval()
    assert bool(masks(ensemble, batch["inputs"]).all())
