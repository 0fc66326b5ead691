# Run: pytest tests/graph/test_trial.py
"""The trial step names what is wrong, and leaves nothing behind when all is well."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from batches import VOCABULARY, ragged, tiny_llama
from monograph.errors import InputRefused, Stopped, UsageError
from monograph.graph.lora import Lora
from monograph.graph.trial import refusal_of_user_error, trial
from monograph.loss import token_loss


def of(model, loss=token_loss):
    return trial(model, lambda: loss(model, ragged(8)))


def test_a_fresh_model_starts_near_the_log_of_its_vocabulary():
    model = tiny_llama()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = of(model)
    assert result.loss == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert result.without_gradient == () and result.gradient_count == len(list(model.parameters()))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(p.grad.any() for p in model.parameters())


def test_an_error_names_the_innermost_module():
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj = nn.Linear(5, 5)
    with pytest.raises(
        InputRefused, match=r"model\.layers\.1\.mlp\.down_proj \(Linear\): RuntimeError"
    ):
        of(model)


class Unsaid(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize("error", [Unsaid(), Stopped("x"), InputRefused("x"), SystemExit(0)])
def test_whatever_a_module_raises_names_it_even_an_error_of_ours_or_one_without_text(error):
    class Own(nn.Module):
        def forward(self, x):
            raise error

    with pytest.raises(BaseException) as caught:
        Own()(1)
    assert "Own failed (" in str(refused := refusal_of_user_error(caught.value)), refused
    assert type(error).__name__ in str(refused) and "test_trial.py" in str(refused)


def test_an_error_of_ours_that_a_module_ran_into_is_told_as_it_is():
    class Own(nn.Module):
        def forward(self, x):
            Lora(rank=0)

    with pytest.raises(UsageError) as caught:
        Own()(1)
    assert refusal_of_user_error(caught.value) is None


def test_a_non_finite_output_names_the_first_module():
    model = nn.Sequential(
        nn.Linear(3, 3), nn.LogSigmoid(), nn.Threshold(0.0, float("inf")), nn.Linear(3, 1)
    )
    with pytest.raises(InputRefused, match=r"2 \(Threshold\) is the first module"):
        trial(model, lambda: (model(torch.ones(2, 3)).sum(), torch.tensor(2)))


def test_a_poisoned_parameter_is_named():
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(InputRefused, match=r"parameter model\.layers\.0\.mlp\.up_proj\.weight"):
        of(model)


def test_a_non_finite_gradient_is_named():
    model = nn.Linear(2, 1, bias=False)
    with pytest.raises(InputRefused, match=r"gradient of weight is not finite"):
        trial(model, lambda: ((model.weight * 0).sqrt().sum(), torch.tensor(1)))


def test_an_unused_parameter_is_reported():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    result = trial(model, lambda: (model["used"](torch.ones(1, 2)).sum(), torch.tensor(1)))
    assert set(result.without_gradient) == {"unused.weight", "unused.bias"}
