"""Run: pytest tests/session/test_recorded.py"""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monograph.config import Settings, load
from monograph.device import describe
from monograph.distributed.world import World
from monograph.errors import InputRefused, UsageError
from monograph.run.folder import Run
from monograph.run.trust import is_ours
from monograph.run.writing import record_parent, recorded_parent, repair_tokenizer, write_tokenizer
from monograph.session import ranks, recorded, warmup
from monograph.session.objectives.texts import TextTask
from monograph.session.record import write_config
from monograph.session.recorded import (
    command_line_settings,
    parent_named,
    settings_from_parent,
    settings_to_resume,
)
from monograph.session.resolve import resolve
from monograph.storage.code import digests
from monograph.text.tokenizer import Tokenizer

SHAPE = {"model.hidden_size": 16, "model.num_hidden_layers": 1, "model.num_attention_heads": 2}
FIXED = {
    "train.updates": 50, "train.tokens_per_update": 512, "optim.lr": 1e-3, "optim.warmup_updates": 5,
    "train.eval_every": 5, "train.save_every": 9, "data.tokenizer": "bytes", "data.sequence_length": 256,
}  # fmt: skip


def settings(values: dict[str, Any], toml: Path | None = None) -> Settings:
    return load(toml, values, {})


def sized(given: Settings) -> Settings:
    return resolve(given, describe()).record.settings


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.create(tmp_path / "run")
    write_config(run, settings(SHAPE | FIXED))
    return run


def test_the_settings_that_were_written_are_read_back(run: Run) -> None:
    assert settings_to_resume(run, settings({})).values() == settings(SHAPE | FIXED).values()
    assert settings_to_resume(run, settings({})).fingerprint == settings(SHAPE | FIXED).fingerprint
    assert not list(run.folder.glob("*.partial"))


@pytest.mark.parametrize(
    ("taken", "compile"),
    [
        ({"train.memory": "stream"}, "blocks"),
        ({"train.parallel": "hsdp", "train.gather_dtype": "bf16"}, "blocks"),
        ({"train.parallel": "ddp"}, "whole"),
    ],
)
def test_a_step_of_one_graph_goes_on_block_by_block_where_weights_come_so(
    taken: dict[str, Any], compile: str, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "whole")
    write_config(run, settings(SHAPE | FIXED | {"train.compile": "whole"}))
    assert settings_to_resume(run, settings(taken)).train.compile == compile


def test_a_run_that_builds_its_model_from_a_file(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "own")
    (tmp_path / "own.py").write_text("")
    init = f"{tmp_path}/own.py:build"
    write_config(run, settings({"model.init": init} | FIXED).vouching(digests([init])))
    assert settings_to_resume(run, settings({})).model.init == init


def test_what_nobody_vouched_for_gets_no_mark(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "own")
    (tmp_path / "own.py").write_text("")
    init = f"{tmp_path}/own.py:build"
    named = settings({"model.init": init} | FIXED)
    write_config(run, named)
    assert "# mark" not in run.config.read_text()
    write_config(
        run, named.vouching(digests([init])), sweep_programs=[f"{tmp_path}/other.py:build"]
    )
    assert "# mark" not in run.config.read_text()
    write_config(run, named.vouching(digests([init])))
    assert is_ours(run.config, [init]) and settings_to_resume(run, settings({})).vouched == digests(
        [init]
    )


@pytest.mark.parametrize("where", ["a run's own", "beside a run"])
def test_settings_that_change_while_they_are_read_name_nothing_new(
    where: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read once to be judged, and once for their values."""
    (tmp_path / "evil.py").write_text("")
    toml = run.config
    if where == "beside a run":
        toml = Path(shutil.copy(run.config, tmp_path / "copy.toml"))
    true = recorded.load

    def load_and_change(path: Path, *others: Any, **how: Any) -> Settings:
        found = true(path, *others, **how)
        toml.write_text(f'[model]\ninit = "{tmp_path}/evil.py:build"\n')
        return found

    monkeypatch.setattr(recorded, "load", load_and_change)
    with pytest.raises(
        InputRefused, match="changed while it was read, and now names .*evil.py:build"
    ):
        command_line_settings(toml, {}, runs_code=True)


@pytest.mark.parametrize(
    "same",
    [
        {},
        SHAPE,
        FIXED,
        {"optim.lr": "auto"},
        {"data.tokenizer": "auto"},
        {"train.tokens": 50 * 512},
    ],
    ids=lambda values: " ".join(values),
)
def test_what_agrees_may_be_said_again(same: dict[str, Any], run: Run) -> None:
    assert settings_to_resume(run, settings(same)).train.updates == 50


def test_a_resumed_run_may_name_keys_that_an_earlier_version_took(run: Run) -> None:
    own = settings_to_resume(run, settings({}))
    named = settings_to_resume(run, settings({"data.ignore_keys": ["margin"]}))
    assert named.data.ignore_keys == ["margin"] and named.fingerprint == own.fingerprint


def test_the_file_of_settings_may_be_given_again(run: Run, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[train]\nminutes = 3\ntokens_per_update = 512\n")
    assert settings_to_resume(run, settings({}, toml)).train.updates == 50


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"optim.lr": 2e-3},
            "optim.lr = 0.002 (command line), but .* was started with 0.001; leave it out",
        ),
        ({"train.updates": 60}, "was started with 50 updates"),
        ({"train.minutes": 3.0}, "was started with 50 updates"),
        ({"train.epochs": 3}, "was started with 50 updates"),
        ({"train.tokens": 999999}, "was started with 50 updates"),
        ({"data.source": "other"}, "was started with stdlib"),
        ({"model.preset": "nano"}, "was started with auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_contradicts_the_run_is_refused(other: dict[str, Any], said: str, run: Run) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(").replace(")", r"\)")):
        settings_to_resume(run, settings(other))


def test_a_branch_takes_over_what_was_not_given_but_for_its_length(run: Run) -> None:
    child = settings_from_parent(run, settings({"optim.lr": 5e-4, "train.updates": 7}))
    assert (child.optim.lr, child.train.updates, child.model.hidden_size) == (5e-4, 7, 16)
    assert (child.train.tokens_per_update, child.optim.warmup_updates) == (512, "auto")
    assert (child.train.eval_every, child.train.save_every) == ("auto", "auto")
    assert child.data.tokenizer == str(run.tokenizer) and child.origins["model.hidden_size"] == str(
        run.config
    )


@pytest.mark.parametrize("length", [{"train.minutes": 1.0}, {"train.epochs": 2}, {}], ids=str)
def test_a_branch_has_one_length(length: dict[str, Any], run: Run) -> None:
    train = settings_from_parent(run, settings(length)).train
    assert (train.updates, train.tokens) == (None, None)
    assert (train.epochs, train.minutes) == (
        length.get("train.epochs"),
        None if "train.epochs" in length else train.minutes,
    )


def test_a_branch_may_have_another_tokenizer_or_model(run: Run) -> None:
    assert (
        settings_from_parent(run, settings({"data.tokenizer": "bytes"})).data.tokenizer == "bytes"
    )
    assert settings_from_parent(run, settings({"model.init": "x.py:build"})).model.preset == "auto"


@pytest.mark.parametrize(
    ("of_parent", "given"),
    [
        ({"data.source": ["a", "b"], "data.weights": [2.0, 1.0]}, {"data.source": "c"}),
        ({"optim.schedule": "wsd", "optim.min_lr_ratio": 0.1}, {"optim.schedule": "constant"}),
        ({"rl.reward": "regex", "rl.reward_regex": "a"}, {"rl.reward": "number"}),
        (
            {"rl.reward": "json-schema", "rl.reward_schema": "s.json"},
            {"rl.reward": "teacher", "rl.teacher": "t"},
        ),
        ({"rl.answer_regex": "a"}, {"rl.answer_schema": "s.json"}),
        ({"rl.kl": "k2", "rl.kl_coef": 0.1}, {"rl.kl": "none"}),
        ({"prefer.loss": "simpo", "prefer.gamma": 0.5}, {"prefer.loss": "dpo"}),
    ],
    ids=str,
)
def test_a_branch_with_another_value_takes_over_nothing_that_is_said_of_the_parent_s(
    of_parent: dict[str, Any], given: dict[str, Any], tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run")
    write_config(run, settings(SHAPE | FIXED | of_parent))
    child = settings_from_parent(run, settings(given)).given_values()
    assert {key: child.get(key) for key in of_parent | given} == dict.fromkeys(of_parent) | given
    kept = settings_from_parent(run, settings({})).given_values()
    assert {key: kept.get(key) for key in of_parent} == of_parent


@pytest.mark.parametrize("at", [None, 40])
def test_where_a_branch_begins_is_written_down(at: int | None, run: Run, tmp_path: Path) -> None:
    child = Run.create(tmp_path / "child")
    assert recorded_parent(child) is None
    record_parent(child, run, at)
    found = recorded_parent(child)
    assert found and (found[0].folder, found[1]) == (run.folder.resolve(), at)


def test_the_name_of_a_parent(run: Run, tmp_path: Path) -> None:
    assert parent_named(f"{run.folder}@12")[1] == 12 and parent_named(str(run.folder))[1] is None
    other = Run.create(tmp_path / "a@b")
    assert parent_named(str(other.folder))[0].folder == other.folder
    with pytest.raises(InputRefused, match="nothing is not a run"):
        parent_named("nothing@3")
    for update in ("x", "", "9" * 99, "²"):
        with pytest.raises(UsageError, match="a whole number after the @, not '"):
            parent_named(f"nothing@{update}")


def test_a_run_whose_name_ends_like_an_update_is_that_run(run: Run, tmp_path: Path) -> None:
    """Also beside a run of the name before the @, whose update 5 is then named by its checkpoint."""
    other = Run.create(tmp_path / "run@5")
    found, update = parent_named(str(other.folder))
    assert (found.folder, update) == (other.folder, None)
    (tmp_path / "run@6").write_text("no run")
    found, update = parent_named(f"{run.folder}@6")
    assert (found.folder, update) == (run.folder, 6)
    found, update = parent_named(f"{other.folder}@7")
    assert (found.folder, update) == (other.folder, 7)


def test_a_run_without_settings_is_said(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "bare")
    for asked in (
        lambda: settings_to_resume(run, settings({})),
        lambda: settings_from_parent(run, settings({})),
    ):
        with pytest.raises(InputRefused, match="stopped before it began"):
            asked()


def test_a_shape_by_its_sizes_is_not_sized_again() -> None:
    chosen = sized(settings(SHAPE))
    assert chosen.model.preset == "auto" and (chosen.data.tokenizer, chosen.data.vocab_size) == (
        "bpe",
        4096,
    )
    with pytest.raises(InputRefused, match="not a multiple"):
        sized(settings(SHAPE | {"model.num_attention_heads": 3}))


def test_the_last_run_is_named_by_its_folder_before_another_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parent = Run.create()
    write_config(parent, settings(SHAPE | FIXED))
    parent.tokenizer.touch()
    chosen = sized(settings({"model.init": "last"}))
    child = Run.create()
    write_config(child, chosen)
    assert Run.open("last").folder == child.folder
    assert settings_to_resume(child, settings({})).model.init == str(parent.folder)
    assert sized(chosen) == chosen and chosen.data.tokenizer == str(parent.tokenizer)


@pytest.mark.parametrize(
    ("per_epoch", "updates", "said"),
    [
        (10, 80, "limited to 8 epochs (train.epochs=N for more), about 16 s"),
        (10_000, 285, "about 1 min 00 s"),
        (1, 8, "for more), about 1.6 s"),
    ],
)
def test_a_small_text_ends_before_the_time_does(
    per_epoch: int, updates: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seconds, line = planned(per_epoch, 0.2, monkeypatch)
    assert (found, seconds) == (updates, 60) and line.endswith(said), line


def test_a_run_by_the_clock_has_as_many_updates_as_fit_and_says_how_long_one_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for update_s, expected, said in (
        (25.0, (2, 60), "about 1 min 00 s"),
        (100.0, (1, 100), "about 1 min 40 s"),
    ):
        *found, line = planned(10_000, update_s, monkeypatch)
        assert tuple(found) == expected and line.endswith(said), line


def planned(
    per_epoch: int, update_s: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, float, str]:
    """The updates of a run of a minute on a text with so many windows, its seconds, and its plan's
    line.
    """
    monkeypatch.setattr(warmup, "time_update", lambda _: update_s)
    monkeypatch.setattr(warmup, "store_seconds", lambda *_: None)
    told: dict[str, str] = {}
    progress: Any = SimpleNamespace(
        line=told.__setitem__, stage=lambda *_: nullcontext(SimpleNamespace())
    )
    task: Any = TextTask(SimpleNamespace(train=SimpleNamespace(per_epoch=2 * per_epoch)))  # type: ignore[arg-type]
    session: Any = SimpleNamespace(
        plan=resolve(settings({"train.minutes": 1, "train.tokens_per_update": 512}), describe()),
        batches=SimpleNamespace(rows_per_window=2),
        task=task,
        engine=SimpleNamespace(index=0),
        recipe=SimpleNamespace(lora=None),
        elapsed_s=0.0,
        deadline_s=None,
        left_s=math.inf,
        params=1000,
    )
    session.set_plan = partial(setattr, session, "plan")
    task.current_plan = lambda: session.plan
    warmup.fix_length(session, progress)
    return session.plan.updates, session.budget_s, told["plan"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_tokenizer_that_is_damaged_is_written_again(run: Run, damage: str) -> None:
    tokenizer = Tokenizer.bytes()
    write_tokenizer(run, tokenizer)
    whole = run.tokenizer.read_bytes()
    assert not repair_tokenizer(run, tokenizer) and run.tokenizer.read_bytes() == whole
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    changed = {"flipped": bytes(flipped), "cut": whole[:99], "gone": None}[damage]
    run.tokenizer.unlink()
    if changed is not None:
        run.tokenizer.write_bytes(changed)
    assert changed != whole and repair_tokenizer(run, tokenizer)
    assert Tokenizer.from_file(run.tokenizer).digest == tokenizer.digest


def test_the_line_that_goes_on_says_in_which_way(run: Run) -> None:
    alone, two = World(), SimpleNamespace(alone=False, size=2)
    shared = settings(SHAPE | FIXED | {"train.parallel": "ddp"})
    assert ranks.resume_command(alone, run, "none").endswith(f"train --resume {run.folder}")
    assert ranks.resume_command(two, run, "ddp").endswith(
        f"monograph train --resume {run.folder} train.parallel=ddp"
    )
    write_config(run, shared)
    assert ranks.resume_command(two, run, "ddp").endswith(f"monograph train --resume {run.folder}")
    assert ranks.resume_command(alone, run, "none").endswith(
        f"train --resume {run.folder} train.parallel=none"
    )
