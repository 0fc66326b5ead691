"""Run: pytest tests/run/test_recorded_state.py (a state that was altered and sealed again is
refused by its entry).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.config.keys import ModelSection
from monograph.errors import InputRefused
from monograph.model.config import LlamaConfig
from monograph.run.folder import Run
from monograph.run.recipe import ModelRecipe
from monograph.run.recorded_state import (
    MAX_COUNT,
    load_newest,
    recorded_file_digests,
    require_valid,
)
from recorded import recorded

UPDATE = 3
SHAPE = LlamaConfig.preset("nano", vocab_size=300)
SIZES = ModelSection(
    **{
        key: {"tie_word_embeddings": True, "mtp_num_hidden_layers": 1}.get(key, 8)
        for key in ModelSection.model_fields
        if key not in ("preset", "family", "init")
    }
).sizes()
WRONG: dict[type, list[Any]] = {
    int: [None, True, -1, 2**70, 1.5, "x", "1", [], {}, [[[1]]]],
    float: [True, math.nan, math.inf, "x", [], {}],
    str: [0, True, [], {}, [[[1]]]],
    list: [0, "x", {}, [[[1]]], [None], ["x"]],
    dict: [None, 0, "x", [], [[[1]]]],
    type(None): [True, -1, "x", [], {}, [1]],
}
ELSEWHERE = {"recipe", "model_config"}  # below
MAY_BE_NULL = {"micro_batch", "cooled", "metrics_sha256", "attention", "tokenizer_files"}


def whole() -> dict[str, Any]:
    state = recorded(ModelRecipe(None, "nano", SIZES, 7).entries(), SHAPE.to_hf(), UPDATE)
    state["engine"] |= {"loss_scale": 1024.0, "good": 3, "recent": [[2.5, 0.0], [0.5, 0.0]]}
    state["data"]["skip"] = [[2, 4]]
    return state | {
        "cooled": [2, 9],
        "metrics_sha256": "0" * 64,
        "attention": "flash",
        "tokenizer_files": {},
        "files": {"teachers.json": "0" * 64},
    }


def entries(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every entry with its path, of a long list the first two."""
    if path:
        yield path, value
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2])
        if isinstance(value, list)
        else ()
    )
    for key, item in inner:
        if not (path == () and key in ELSEWHERE):
            yield from entries(item, (*path, key))


def altered(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    state: Any = deepcopy(whole())
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return state


RUN = Run(Path("run"))


def test_every_entry_of_another_type_or_range_is_refused_by_name() -> None:
    require_valid(whole(), UPDATE, RUN)
    for path, value in entries(whole()):
        name = ".".join(map(str, path))
        for wrong in WRONG[type(value)]:
            if wrong is None and name in MAY_BE_NULL:
                continue
            with pytest.raises(InputRefused) as refused:
                require_valid(altered(path, wrong), UPDATE, RUN)
            said = str(refused.value)
            first = name.split(".")[0]
            assert said.startswith(f"run/checkpoints/step-00000003/state.json: {first}"), (
                name,
                wrong,
                said,
            )
            assert len(said) < 400 and "\n" not in said, said


def test_a_missing_entry_is_named() -> None:
    optional = {"metrics_sha256", "attention", "tokenizer_files", "files"}
    for name in whole().keys() - optional:
        state = whole()
        del state[name]
        with pytest.raises(
            InputRefused, match=rf"state\.json: {name} is missing; put the file back"
        ):
            require_valid(state, UPDATE, RUN)
    require_valid(
        {name: value for name, value in whole().items() if name not in optional}, UPDATE, RUN
    )


def test_files_that_a_run_learns_from_are_in_its_own_folder_and_an_earlier_version_had_one() -> (
    None
):
    assert recorded_file_digests(whole()) == {"teachers.json": "0" * 64}
    assert recorded_file_digests({"teachers": "1" * 64}) == {"teachers.json": "1" * 64}
    for name in ("../teachers.json", "/etc/passwd", "a/b.json", ""):
        with pytest.raises(InputRefused, match="files"):
            require_valid(whole() | {"files": {name: "0" * 64}}, UPDATE, RUN)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("engine", "index"), 4, r"engine\.index = 4: expected 3, as in MANIFEST\.json"),
        (("data", "seed"), 8, r"data\.seed = 8: expected 7, as in its recipe"),
        (
            ("length",),
            MAX_COUNT + 1,
            r"length = 1000000000000001: it should be less than or equal to 1000000000000000",
        ),
        (
            ("model_config", "num_hidden_layers"),
            True,
            "model_config: num_hidden_layers = True: expected a whole",
        ),
        (
            ("model_config", "rms_norm_eps"),
            2**70,
            "model_config: rms_norm_eps = 1180591620717411303424: expected",
        ),
        (("recipe", "seed"), -1, r"recipe\.seed = -1: it should be greater than or equal to 0"),
        (("random", "python", 1), [2**70] * 625, "random: not the state of random generators"),
        (("random", "torch"), "00", "random: not the state of random generators"),
        (
            ("random", "numpy", 2),
            625,
            r"random\.numpy\.2 = 625: it should be less than or equal to 624",
        ),
        (
            ("random", "numpy", 2),
            -1,
            r"random\.numpy\.2 = -1: it should be greater than or equal to 0",
        ),
        (("random", "numpy", 0), "PCG64", r"random\.numpy\.0 = \"PCG64\": it should be 'MT19937'"),
        (("random", "numpy", 1), [0] * 623, r"random\.numpy\.1 = "),
        (("length",), 0, "length = 0: it should be greater than or equal to 1"),
        (("cooled",), [2, 2], r"cooled = \[2, 2\]: they end before update 3"),
        (("cooled",), [9, 8], r"cooled = \[9, 8\]: they end before"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_parts_that_do_not_agree_are_refused(path: tuple[Any, ...], value: Any, said: str) -> None:
    with pytest.raises(InputRefused, match=said):
        require_valid(altered(path, value), UPDATE, RUN)


LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj"], "dropout": 0.0, "base": "auto"}


@pytest.mark.parametrize(
    "forged",
    [
        {"lora": 5},
        {"lora": LORA},
        *(
            {"init": "base", "lora": change}
            for change in ({"rank": -1}, {**LORA, "rank": -1}, {**LORA, "targets": 5})
        ),
        {"init": "base", "lora": {**LORA, "tokens": ["a"]}},
        {"init": "base", "lora": {**LORA, "dora": 1}},
        {"init": "base", "lora": {**LORA, "targets": [5]}},
        *({"vocabulary": each} for each in (5, [1], [1, 2, 3], ["a", "b"], [5, 2], [1, 2**40])),
        *({name: 5} for name in ("init", "sha256", "adapter", "base_sha256", "preset", "sizes")),
        {"init": "a\0b.py:build"},
        {"seed": 2**70},
        {"sizes": {"vocab_size": "5"}},
    ],
    ids=str,
)
def test_a_forged_recipe_is_refused(forged: dict[str, Any]) -> None:
    require_valid(
        altered(("recipe",), whole()["recipe"] | {"init": "base", "lora": LORA}), UPDATE, RUN
    )
    with pytest.raises(InputRefused, match=r"state\.json: recipe\."):
        require_valid(altered(("recipe",), whole()["recipe"] | forged), UPDATE, RUN)


def test_it_is_required_of_what_is_read(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    checkpointing.save(run.checkpoints, Checkpoint(UPDATE, {}, {}, whole()))
    assert load_newest(run, print).state == json.loads(json.dumps(whole()))
    checkpointing.save(run.checkpoints, Checkpoint(UPDATE, {}, {}, altered(("length",), None)))
    with pytest.raises(
        InputRefused, match=r"length = null: it should be a valid integer; .* move step-00000003"
    ):
        load_newest(run, print)
