"""Run: pytest tests/run/test_models.py"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from batches import tiny_llama
from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.errors import InputRefused, NoValidCheckpoint, UsageError, join_with_or
from monograph.graph.inspect import unique_state
from monograph.loss import Loss, token_loss
from monograph.model.exports import EXPORTS
from monograph.model.llama import Llama
from monograph.run.folder import Run
from monograph.run.models import build, load, load_trained, load_weights, save
from monograph.run.recipe import ModelRecipe, require_tokenizer
from monograph.run.source import ModelSource, checked_recipe
from monograph.run.trust import with_mark
from monograph.storage.code import digests
from monograph.text.tokenizer import Tokenizer
from recorded import recorded

MODULE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Sizes:
    width: int = 4

def build(vocab_size, seed):
    torch.manual_seed(seed)
    return nn.Embedding(vocab_size, Sizes().width)

def unseeded():
    return nn.Linear(3, 3)

def loss(model, batch):
    return model(batch).sum(), torch.tensor(1)
"""
SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(MODULE)
    return path


def built(recipe: ModelRecipe) -> tuple[torch.nn.Module, Loss]:
    """What a recipe builds whose program may run as it is."""
    return build(recipe._replace(vouched=digests([recipe.init])))


def saved_run(folder: Path, recipe: ModelRecipe, model: torch.nn.Module) -> Run:
    run = Run.create(folder)
    config = model.config.to_hf() if isinstance(model, Llama) else None
    state = recorded(recipe.entries(), config, 3) | {"tokenizer": Tokenizer.bytes().digest}
    checkpointing.save(run.checkpoints, Checkpoint(3, unique_state(model), {}, state))
    run.config.write_text(with_mark("", digests([recipe.init])))
    Tokenizer.bytes().save(run.tokenizer)
    return run


def test_a_preset_with_sizes_over_it() -> None:
    model, loss = build(ModelRecipe(None, "nano", {"vocab_size": 300, "num_hidden_layers": 3}, 0))
    assert isinstance(model, Llama) and loss is token_loss
    assert (model.config.vocab_size, model.config.num_hidden_layers, model.config.hidden_size) == (
        300,
        3,
        64,
    )


def test_a_shape_by_its_sizes_alone() -> None:
    shape = ModelRecipe(None, "auto", SIZES | {"vocab_size": 300}, 0).shape()
    assert (shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads) == (24, 64, 3)


@pytest.mark.parametrize("number", [0, 1])
def test_one_seed_one_model(number: int, file: Path) -> None:
    for recipe in (
        ModelRecipe(None, "nano", {"vocab_size": 300}, number),
        ModelRecipe(f"{file}:build", "auto", {"vocab_size": 9}, number),
        ModelRecipe(f"{file}:unseeded", "auto", {}, number),
    ):
        models = []
        for _ in range(2):
            torch.rand(3)
            models.append(built(recipe)[0].state_dict())
        other = built(recipe._replace(seed=number + 7))[0].state_dict()
        assert all(torch.equal(models[0][name], models[1][name]) for name in other)
        assert not all(torch.equal(models[0][name], other[name]) for name in other)


def test_a_file_brings_its_loss_and_its_dataclasses(file: Path) -> None:
    model, loss = built(ModelRecipe(f"{file}:build", "auto", {"vocab_size": 9}, 0))
    assert model.weight.shape == (9, 4) and loss.__name__ == "loss"
    assert "own" not in sys.modules, "its name stays free for others"


def test_a_file_may_return_a_compiled_module_and_its_loss_knows_rows_without_targets(
    file: Path,
) -> None:
    text = MODULE.replace(
        "return nn.Embedding(vocab_size, Sizes().width)", "return torch.compile(nn.Embedding(9, 4))"
    )
    file.write_text(text)
    model, loss = built(ModelRecipe(f"{file}:build", "auto", {"vocab_size": 9}, 0))
    assert list(model.state_dict()) == ["weight"] and loss.fill == token_loss.fill
    file.write_text(text + "loss.fill = None\n")
    assert built(ModelRecipe(f"{file}:build", "auto", {"vocab_size": 9}, 0))[1].fill is None


def test_two_files_of_one_name(tmp_path: Path) -> None:
    kinds = []
    for folder, made in (("a", "Linear(1, 1)"), ("b", "Identity()")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(
            f"from torch import nn\nloss = print\ndef build():\n    return nn.{made}\n"
        )
        kinds.append(
            type(built(ModelRecipe(f"{tmp_path / folder}/own.py:build", "auto", {}, 0))[0]).__name__
        )
    assert kinds == ["Linear", "Identity"]


def test_a_file_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "monograph_test_neighbour.py").write_text("WIDTH = 5\n")
    (tmp_path / "own.py").write_text(
        "from monograph_test_neighbour import WIDTH\nfrom torch import nn\nloss = print\n\ndef build():\n"
        "    return nn.Linear(WIDTH, 1)\n"
    )
    assert built(ModelRecipe(f"{tmp_path}/own.py:build", "auto", {}, 0))[0].in_features == 5


def test_a_recipe_knows_its_file_by_its_bytes(file: Path) -> None:
    recipe = ModelRecipe(f"{file}:build", "auto", {}, 0)
    source = ModelSource.open(f"{file}:build")
    first = checked_recipe(recipe, source)
    assert (
        first == checked_recipe(recipe, source)
        and ModelRecipe.recorded(first._asdict()).entries() == first.entries()
    )
    file.write_text(MODULE + "\n")
    assert checked_recipe(recipe, source) != first


@pytest.mark.parametrize("text", ["folder", "last", "a:b", "own.pyc:x"])
def test_what_is_no_file(text: str) -> None:
    assert ModelRecipe(text, "auto", {}, 0).code is None


def test_a_run_of_an_own_module(file: Path, tmp_path: Path) -> None:
    recipe = checked_recipe(
        ModelRecipe(f"{file}:build", "auto", {"vocab_size": 9}, 0),
        ModelSource.open(f"{file}:build"),
    )
    model, _ = built(recipe)
    with torch.no_grad():
        model.weight.fill_(2.0)
    run = saved_run(tmp_path / "run", recipe, model)
    found = load_trained(run, print, code_values=[str(recipe.init)])
    assert torch.equal(found.model.weight, model.weight) and found.loss.__name__ == "loss"
    with pytest.raises(
        InputRefused, match=r"holds a module of its own \(.*own\.py:build\), not a Llama"
    ):
        load(run.folder)
    file.write_text(MODULE + "\n")
    with pytest.raises(InputRefused, match="not the file that"):
        load_trained(run, print, code_values=[str(recipe.init)])


def test_a_run_of_a_llama_and_its_export(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=259, tie_word_embeddings=True)
    run = saved_run(tmp_path / "run", ModelRecipe(None, "auto", {}, 0), model)
    mine, tokenizer = load(run.folder)
    save(mine, tmp_path / "hf", tokenizer)
    theirs, _ = load(tmp_path / "hf")
    for other in (mine, theirs, load_trained(run, print).model):
        assert all(
            torch.equal(tensor, other.state_dict()[name])
            for name, tensor in model.state_dict().items()
        )
    assert require_tokenizer(tmp_path / "hf") == tmp_path / "hf/tokenizer.json"
    with pytest.raises(UsageError, match=f"--format onnx: expected {join_with_or(EXPORTS)}"):
        save(mine, tmp_path / "b", tokenizer, format="onnx")
    model_from_folder, _ = build(ModelRecipe(str(tmp_path / "hf"), "auto", {}, 0))
    assert torch.equal(model_from_folder.lm_head.weight, model.lm_head.weight)


def test_a_program_that_loads_an_unknown_type_is_warned(tmp_path: Path) -> None:
    model = tiny_llama()
    save(model, tmp_path / "new", Tokenizer.bytes())
    config = tmp_path / "new" / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "new"'))
    with pytest.warns(UserWarning, match="model_type = 'new' is unknown: computed as llama"):
        loaded, _ = load(tmp_path / "new")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    with pytest.raises(NoValidCheckpoint):
        load(run.folder)
    with pytest.raises(InputRefused, match="no tokenizer.json"):
        require_tokenizer(run.folder)


def test_tied_weights_are_stored_once_and_loaded_into_both(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    state = unique_state(model)
    assert "lm_head.weight" not in state and len(state) == len(model.state_dict()) - 1
    load_weights(model, {name: torch.ones_like(tensor) for name, tensor in state.items()})
    assert bool((model.lm_head.weight == 1).all())


@pytest.mark.parametrize(
    ("change", "said"), [("drop", "missing"), ("add", "unknown"), ("reshape", r"is \[3\], not")]
)
def test_weights_that_do_not_fit_are_refused_by_name(change: str, said: str) -> None:
    model = tiny_llama()
    tensors = dict(unique_state(model))
    if change == "drop":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.weight" if change == "reshape" else "model.norm.bias"] = torch.zeros(3)
    with pytest.raises(
        InputRefused, match=rf"model\.norm\.\w+ {'is ' if change != 'reshape' else ''}{said}"
    ):
        load_weights(model, tensors)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def build():\n    raise SystemExit(0)\n", "failed: SystemExit: 0"),
        (
            "from torch import nn\ndef build():\n    return nn.Linear(1, 1)\n",
            "no loss.model, batch.",
        ),
        (
            "from torch import nn\ndef build():\n    return nn.Linear(1, 1, device='meta')\n",
            "weight is on the meta device",
        ),
    ],
)
def test_a_file_that_builds_nothing_to_train_is_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(InputRefused, match=said):
        built(ModelRecipe(f"{tmp_path}/own.py:build", "auto", {}, 0))


def test_a_file_without_its_function_is_told_to_name_one() -> None:
    with pytest.raises(InputRefused, match="name the function .* own.py:NAME"):
        build(ModelRecipe("own.py", "auto", {}, 0))
