"""Run: pytest tests/test_modules.py (modules that an engine takes or refuses, and what it may and
must not change).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import monograph as mono
from batches import ENGINES, of_rows, ragged, tiny_llama
from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.checkpointing.folder import LargeFile
from monograph.errors import InputRefused, UsageError
from monograph.graph.capture import capture
from monograph.loop import EngineState
from monograph.step import Step


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def hold(name: str, value: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda model: setattr(model[0], name, value(model))


def halves(model: Any) -> None:
    """Two parameters are columns of one table, and share no number of it."""
    table = torch.randn(4, 5)
    model[0].weight, model[0].rest = nn.Parameter(table[:, :3]), nn.Parameter(table[:, 3:])


def beyond_a_third(model: Any) -> None:
    """A frozen table of rows, of which the last ones are trained; others that lie between them are
    frozen, too.
    """
    table = torch.randn(6, 4)
    model[2].table, model[2].few = nn.Parameter(table, False), nn.Parameter(table[1:3], False)
    model[2].last = nn.Parameter(table[3:])


def beside_a_list(model: Any) -> None:
    """The list of all weights is met before the weights themselves."""
    table = torch.randn(6, 4)
    model[2].first, model[2].more = nn.Parameter(table[:4]), nn.Parameter(table[3:])
    model.all = [model[2].first, model[2].more]


SHARED: dict[str, tuple[Callable[[Any], None], str]] = {
    "another shape": (
        hold("turned", lambda model: nn.Parameter(model[0].weight.data.t())),
        "0.turned and 0.weight",
    ),
    "a part": (
        hold("few", lambda model: nn.Parameter(model[0].weight.data[1:])),
        "0.weight and 0.few",
    ),
    "frozen": (
        hold("few", lambda model: nn.Parameter(model[0].bias.data[1:], False)),
        "0.bias and 0.few",
    ),
    "a list": (
        hold("held", lambda model: {"two": [model[2].weight.data]}),
        "0.held.two and 2.weight",
    ),
    "a list of all": (beside_a_list, "2.first and 2.more"),
    "beyond a third": (beyond_a_third, "2.table and 2.last"),
    "a view": (hold("view", lambda model: model[2].weight.view(-1)), "0.view and 2.weight"),
}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("how", SHARED)
def test_a_weight_in_the_memory_of_another_tensor_is_refused(how: str, kind: str) -> None:
    model = layers()
    SHARED[how][0](model)
    with pytest.raises(
        UsageError, match=rf"{SHARED[how][1]}.* lie in the same memory, and would come apart"
    ):
        assert ENGINES[kind](model, loss=of_rows).step


def test_what_shares_no_number_is_trained() -> None:
    model = layers()
    halves(model)
    # A tie, and no parameter.
    model[0].again, model[2].mean = model[2].bias, model[1].running_mean[1:]
    nn.utils.spectral_norm(model[2])  # until its first call it holds the weight under two names
    model.own: dict[str, Any] = {}
    model.own["own"] = [model.own]
    assert mono.Resident(model, loss=of_rows).step


def test_a_parameter_that_cannot_be_trained_is_refused_in_words() -> None:
    for module, words in (
        (nn.LazyLinear(3), "weight has no shape yet: call the module once"),
        (
            nn.Linear(3, 3, dtype=torch.complex64),
            "weight is torch.complex64: expected float32, float64 or bfloat16",
        ),
        (
            nn.Linear(3, 3, dtype=torch.float16),
            "weight is torch.float16: expected float32, float64 or bfloat16",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            assert mono.Resident(module, loss=of_rows).step


class Versioned(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}


def test_a_state_dict_of_copies_or_other_data_is_refused() -> None:
    """What a checkpoint brings would be written into the copies, and the module would stay as it
    was.
    """
    cloning = nn.Linear(3, 2)
    cloning.register_state_dict_post_hook(
        lambda _module, state, *_: state.update(weight=state["weight"].clone())
    )
    complex_, sparse = nn.Linear(3, 2), nn.Linear(3, 2)
    complex_.register_buffer("turns", torch.zeros(3, dtype=torch.complex64))
    sparse.register_buffer("few", torch.eye(3).to_sparse())
    for engine in ENGINES.values():
        for module, words in (
            (cloning, "state_dict has 'weight', which is not a parameter or buffer"),
            (Versioned(3, 2), "state_dict has '_extra_state', which is not a parameter or buffer"),
            (complex_, "turns is complex, which a checkpoint cannot hold"),
            (sparse, "few is sparse, which a checkpoint cannot hold"),
        ):
            with pytest.raises(UsageError, match=words):
                assert engine(module, loss=of_rows).step


@pytest.mark.parametrize("large", [False, True])
def test_a_state_that_does_not_fit_changes_nothing(large: bool, tmp_path: Path) -> None:
    engine = mono.Resident(layers(), loss=of_rows)
    engine.accumulate({"x": torch.randn(4, 3)})
    engine.update()
    state = copy.deepcopy(engine.state())
    ones = {name: torch.ones_like(tensor) for name, tensor in state.model.items()}
    scalars: list[dict[str, Any]] = [
        {**state.scalars, "index": "abc"},
        {**state.scalars, "tokens": None},
        {},
    ]
    models = [
        ones | {"2.bias": torch.ones(2)},
        ones | {"2.bias": ones["2.bias"] + 1j},
        ones | {"more": ones["2.bias"]},
    ]
    wrong = [EngineState(ones, state.optimizer, each) for each in scalars]
    wrong += [EngineState(each, state.optimizer, state.scalars) for each in models]
    if large:  # read tensor by tensor
        folder = checkpointing.save(
            tmp_path, Checkpoint(1, ones | {"2.bias": torch.ones(2)}, dict(state.optimizer))
        )
        with patch.object(checkpointing.folder, "LARGE_BYTES", 0):
            read = checkpointing.load(folder)
        assert isinstance(read.model, LargeFile)
        wrong = [EngineState(read.model, read.optimizer, state.scalars)]
    for each in wrong:
        with pytest.raises(InputRefused, match=r"does not fit|lacks"):
            engine.load_state(each)
        now = engine.state()
        assert (
            all(torch.equal(now.model[name], state.model[name]) for name in ones)
            and now.scalars == state.scalars
        )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(copied: Callable[[Any], object]) -> None:
    with pytest.raises(UsageError, match="a Resident cannot be copied: make another"):
        copied(mono.Resident(layers(), loss=of_rows))


def replace(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.ones(1, 4))


def replace_module(model: Any) -> None:
    model[2] = nn.Linear(4, 1)


def exchange(one: Any, other: Any) -> None:
    one.data, other.data = other.data, one.data


def turn(model: Any) -> None:
    """Read the same memory in another order."""
    model[0].weight.data = model[0].weight.data.view(3, 4).t()


def exchange_parameters(model: Any) -> None:
    model[0].bias, model[2].bias = model[2].bias, model[0].bias


def unfreeze(model: Any) -> None:
    model[1].register_parameter("scale", nn.Parameter(torch.ones(1)))


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "replaced": (replace, "2.weight was replaced"),
    "module replaced": (replace_module, "2.weight was replaced"),
    "frozen": (lambda model: model[2].bias.requires_grad_(False), "2.bias was frozen"),
    "taken out": (lambda model: model[2].register_parameter("bias", None), "2.bias was taken out"),
    "added": (unfreeze, "1.scale became trainable"),
    "cast": (lambda model: model.double(), "was moved, cast or given other memory"),
    "tied": (
        lambda model: setattr(model[2].bias, "data", model[0].bias.data[:1]),
        "2.bias was moved",
    ),
    "exchanged": (lambda model: exchange(model[0].bias, model[1].bias), "0.bias was moved"),
    "turned": (turn, "0.weight was moved"),
    "loaded": (
        lambda model: model.load_state_dict(layers().state_dict(), assign=True),
        "0.weight was replaced",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_was_changed_after_its_step_was_made_is_noticed_at_the_next_call(
    change: str,
) -> None:
    window, (alter, words) = {"x": torch.randn(4, 3)}, CHANGES[change]
    for make in (
        lambda model: mono.Resident(model, loss=of_rows),
        lambda model: Step(model, loss=of_rows),
    ):
        model = layers()
        engine: Any = make(model)
        alter(model)
        with pytest.raises(
            UsageError, match=rf"{words}.* after the step was made: .*make a new step or engine"
        ):
            engine.accumulate(window) if isinstance(engine, mono.Resident) else engine([window])


MEMBER_CHANGES = {
    "2.weight": CHANGES["replaced"][0],
    "2.bias": CHANGES["frozen"][0],
    "0.weight": CHANGES["cast"][0],
    "0.bias": lambda model: exchange(model[0].bias, model[2].weight),
    "2.bias ": lambda model: setattr(model[2].bias, "data", model[0].bias.data[:1]),
    "a part or parameter": replace_module,
    "a part or parameter ": lambda model: model[1].register_parameter(
        "scale", nn.Parameter(torch.ones(1))
    ),
    "0.weight ": turn,
    "2.weight ": lambda model: setattr(model[2], "weight", model[0].weight),
    "1.table": lambda model: setattr(model[1], "table", torch.ones(2)),
    # A smaller view of the same place, as a member with a lower rank of adapters has.
    "0.weight  ": lambda model: setattr(model[0].weight, "data", model[0].weight.data[:2]),
}


@pytest.mark.parametrize("what", MEMBER_CHANGES)
def test_so_is_a_member_of_an_ensemble(what: str) -> None:
    members = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(3)]
    for member in members:
        member[1].register_buffer("table", torch.zeros(2))
    engine = mono.Ensemble(members, loss=of_rows)
    window = {"x": torch.randn(4, 3)}
    engine.accumulate(window)
    engine.update()
    MEMBER_CHANGES[what](members[1])
    with pytest.raises(
        UsageError, match=f"{what.strip()} of member 1 was added, replaced, frozen, moved or cast"
    ):
        engine.accumulate(window)


def test_what_a_step_may_stand_is_no_change() -> None:
    model = layers()
    engine = mono.Resident(model, loss=of_rows, optim=mono.AdamW(ema=0.9))
    window = {"x": torch.randn(4, 3)}
    for harmless in (
        lambda: model.float(),  # it is fp32
        lambda: model.load_state_dict(layers().state_dict()),
        lambda: model.zero_grad(set_to_none=True),
        lambda: engine.evaluate(window),
        lambda: engine.load_state(engine.state()),
    ):
        harmless()
        engine.accumulate(window)
        assert int(engine.update().skipped) == 0


@pytest.mark.parametrize("kind", ENGINES)
def test_a_part_in_evaluation_mode_stays_there(kind: str) -> None:
    model = layers()
    model[1].eval()
    engine = ENGINES[kind](model, loss=of_rows)
    kept, window = copy.deepcopy(engine.model[1].state_dict()), {"x": torch.randn(4, 3)}
    for act in (
        engine.accumulate,
        engine.evaluate,
        lambda window: engine.capture(window, "eager"),
        engine.accumulate,
    ):
        act(window)
    assert [part.training for part in engine.model] == [True, False, True]
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(engine.model[1], name), kept[name])


def test_a_buffer_may_be_expanded() -> None:
    model = layers()
    model[0].register_buffer("mask", torch.zeros(1, 2).expand(3, 2))
    engine, window = mono.Resident(model, loss=of_rows), {"x": torch.randn(4, 3)}
    engine.trial(window)
    engine.load_state(engine.state())
    state = engine.state()
    engine.load_state(
        EngineState(
            {**state.model, "0.mask": torch.tensor([[5.0, 6.0]] * 3)},
            state.optimizer,
            state.scalars,
        )
    )
    assert model[0].mask.tolist() == [[5.0, 6.0]] * 3


# ---- torch.compile's wrappers --------------------------------------------------------------------


def wrapped(model: nn.Module) -> nn.Module:
    """What torch.compile returns; it compiles nothing before a call."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def test_a_compiled_module_is_trained_by_its_own_names() -> None:
    bare = tiny_llama()
    bare.model.layers[1] = wrapped(bare.model.layers[1])  # of a part alone, too
    engine, step = mono.Resident(wrapped(bare)), Step(wrapped(tiny_llama()))
    together = mono.Ensemble([wrapped(tiny_llama()), tiny_llama()])
    names = list(tiny_llama().state_dict())
    assert engine.model is bare and list(engine.state().model) == names
    assert list(step.model.state_dict()) == names and list(together.member_state(0).model) == names
    assert capture(step, "eager") is step
    window = ragged(2)
    plain = mono.Resident(tiny_llama())
    for each in (engine, plain):
        each.accumulate(window)
        each.update()
    assert all(
        torch.equal(a, b)
        for a, b in zip(engine.state().model.values(), plain.state().model.values(), strict=True)
    )


def test_who_only_reads_a_module_leaves_it_compiled(tmp_path: Path) -> None:
    data = mono.corpus([__file__], tokenizer="bytes", sequence_length=32, held_out=0.0)
    shape = mono.LlamaConfig.preset("nano", vocab_size=data.vocab_size)
    plain, model = mono.Llama(shape, seed=1), mono.Llama(shape, seed=1)
    block = model.model.layers[0] = wrapped(model.model.layers[0])  # type: ignore[assignment]
    texts = [
        [c.text for c in mono.generate(of, data.tokenizer, ["a"], max_tokens=4)]
        for of in (plain, model)
    ]
    assert texts[0] == texts[1] and not any(part.training for part in model.modules())
    mono.save(model, tmp_path / "saved", data.tokenizer)
    mono.trial(model.train(), lambda: mono.token_loss(model, ragged(2)))
    assert model.model.layers[0] is block and list(model.model.layers.children())[0] is block


def test_what_torch_compile_makes_of_a_compiled_module_is_refused(tmp_path: Path) -> None:
    twice: Any = wrapped(wrapped(tiny_llama()))
    tokenizer = mono.corpus(
        [__file__], tokenizer="bytes", sequence_length=32, held_out=0.0
    ).tokenizer
    for use in (
        Step,
        mono.Resident,
        lambda model: mono.Ensemble([model]),
        lambda model: mono.adapt(model, mono.Lora(rank=2)),
        lambda model: mono.fuse_siblings(model, torch.zeros(1, 4, dtype=torch.int64)),
        lambda model: mono.save(model, tmp_path / "saved"),
        lambda model: mono.generate(model, tokenizer, ["a"]),
        lambda model: mono.trial(model, lambda: (torch.ones(()), torch.ones(()))),
    ):
        with pytest.raises(UsageError, match="is a function: expected a torch.nn.Module"):
            use(twice)


def test_adapters_and_fusion_take_a_compiled_module() -> None:
    adapted = tiny_llama()
    assert all("_orig_mod" not in name for name in mono.adapt(wrapped(adapted), mono.Lora(rank=2)))
    fused = tiny_llama()
    families = mono.fuse_siblings(wrapped(fused), torch.zeros(1, 4, dtype=torch.int64)).families
    assert families and all("_orig_mod" not in name for family in families for name in family)
