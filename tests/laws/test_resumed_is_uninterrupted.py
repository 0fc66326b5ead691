"""Run: pytest tests/laws/test_resumed_is_uninterrupted.py [-m slow] (law 10: resumed =
uninterrupted, in bits).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands.forked import PROGRAM, CommandServer
from laws.resumed import (
    LETTERS,
    LORA,
    MATCHED,
    OWN,
    PLAYED,
    PREFERRED,
    REWARDED,
    SETTINGS,
    cut_back,
    fingerprint,
    resume,
    start,
)
from monograph import checkpointing
from monograph.graph import capture
from monograph.planner import defaults
from monograph.resident import Resident
from monograph.rl.rollouts import Drawer
from monograph.run.folder import Run
from monograph.session import eager_start, warmup
from monograph.session import start as start_of_run
from monograph.session.reporting import Reporter

pytestmark = pytest.mark.usefixtures("here")


def slower_machine(reporter: Reporter, update: int) -> None:
    if update == 8 and not reporter.session.early_cool_down:
        reporter.session.cool_down_until(14)


CHANGES = {
    "padded": {"data.packing": "padded"},
    "a hybrid with mixtures": {"model.family": "qwen3_next", "model.preset": "nano", "model.num_hidden_layers": 2},
    "a hybrid of Mamba": {
        "model.family": "granitemoehybrid", "model.preset": "nano", "model.num_hidden_layers": 2,
    },
    "a hybrid of convolutions": {"model.family": "lfm2", "model.preset": "nano", "model.num_hidden_layers": 2},
    "a Gemma 4": {"model.family": "gemma4_text", "model.preset": "nano", "model.num_hidden_layers": 2},
    "a head for multi-token prediction": {"model.mtp_num_hidden_layers": 1, "train.mtp_weight": 2.0},
    "epochs": {"train.epochs": 2},
    "mixed": {"data.source": ["texts", "records.jsonl"], "data.weights": [0.5, 2.0], "data.bad_records": "skip"},
    "rounded": {
        "optim.name": "adamw", "optim.state": "bf16", "optim.master_weights": False, "train.precision": "bf16",
        "train.seed": 3,
    },
    "coded": {"optim.name": "muon", "optim.state": "8bit", "optim.ema": 0.9},
    "carried": {"optim.transfer": "width", "optim.transfer_base": 8, "optim.lr": 0.01, "optim.name": "muon"},
    "carried, padded, epochs": {
        "optim.transfer": "width", "optim.transfer_base": 8, "optim.lr": 0.01, "optim.name": "muon",
        "data.packing": "padded", "train.epochs": 2,
    },
    "aot": {"train.compile": "whole"},
    "streamed": {"train.memory": "stream"},
    "rewarded": {"data.packing": "packed"},
    "rewarded, three updates a draw": {"rl.updates": 3, "rl.kl": "k2", "rl.kl_coef": 0.05, "rl.advantage": "gspo"},
    "rewarded, near where it began": {"rl.kl": "k1", "rl.kl_coef": 0.1},
    "taught": {"rl.reward": "teacher", "rl.teacher": "taught"},
    "played": {},
    "preferred": {"data.held_out": 0.2},
    "adapters": {},
    "adapters, 4 bits": {
        "lora.base": "nf4", "train.precision": "bf16", "optim.name": "adamw", "optim.state": "8bit", "lora.rank": 3,
        "lora.dora": True, "lora.alpha": 8.0, "lora.rslora": True, "optim.lr": 0.001, "lora.lr_ratio": 4.0,
    },
}  # fmt: skip


# By day test_replayed_is_called.py resumes a run with a graph, tests/commands/test_stream.py a
# streamed one, and tests/test_narrow.py an engine with rounded moments; every change stands for
# what it changes, three updates a draw for all that is rewarded (its penalty has the reference,
# too), and a module of one's own, which has more state, for other families. Engines with adapters
# are resumed by test_lora.py.
AT_NIGHT = {
    "adapters, 4 bits", "played",
    "aot", "llama", "streamed", "rounded", "rewarded", "rewarded, near where it began", "taught", "adapters",
    "carried", "padded", "epochs", "a hybrid with mixtures", "a hybrid of Mamba",
    "a hybrid of convolutions", "a Gemma 4", "a head for multi-token prediction",
}  # fmt: skip
CASES = [
    pytest.param(case, marks=pytest.mark.slow if case in AT_NIGHT else ())
    for case in ("llama", "own", "cooled", *CHANGES)
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("apart", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_resumed_at_every_checkpoint(
    case: str, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {
        "own": OWN, "rewarded": REWARDED, "taught": REWARDED, "played": PLAYED, "preferred": PREFERRED,
    }  # fmt: skip
    settings = dict(
        others.get(case.partition(",")[0]) or (LORA if case.startswith("adapters") else SETTINGS)
    )
    settings |= {**CHANGES.get(case, {}), "train.save_every": apart}
    # Draws of one update: of more, only what lies between draws is saved, as after 12.
    soon = case in (
        "rewarded", "rewarded, near where it began", "taught", "played", "a hybrid with mixtures", "a hybrid of Mamba",
        "a hybrid of convolutions", "a Gemma 4",
    )  # fmt: skip
    # Past the second epoch's end, which comes after what is resumed; of prompts that are few soon.
    if case in CHANGES:
        settings["train.updates"] = 8 if soon and apart == 4 else 16
    if "epochs" in case:
        del settings["train.updates"]
    if case == "aot":
        monkeypatch.setattr(
            Resident, "capture", partialmethod(Resident.capture, backend="aot_eager")
        )
    if case == "cooled":
        monkeypatch.setattr(Reporter, "shorten_if_late", slower_machine)
    if case == "taught":
        start("taught", REWARDED | {"train.updates": 2})
    start("whole", settings)
    expected = fingerprint(Path("whole"))
    if case == "own":
        sizes = [
            json.loads(p.read_text())["micro_batch"]
            for p in sorted(Path("whole").rglob("state.json"))
        ]
        assert sizes[0] == 4 and sizes[-1] == 2 and sizes[4 // apart] == 4, (
            "memory must run out in the middle"
        )
    last = int(expected["newest"][5:])
    assert last == (
        {"cooled": 14, "epochs": 14, "carried, padded, epochs": 15}.get(case)
        or settings["train.updates"]
    )
    whole = "whole"
    few = (0, 4, 12) if case == "own" else (4 if soon else 12,)
    for update in range(0, last + 1) if apart == 1 else few:
        cut_back(whole, f"cut-{update}", update)
        resume(f"cut-{update}")
        assert fingerprint(Path(f"cut-{update}")) == expected, update
        if case == "own":  # a resume of a resume of ...
            whole = f"cut-{update}"


def rounding_otherwise(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
    """Stand for a compiler: the first of the results has other bits, as a graph's have."""

    def graph(*arguments: Any) -> Any:
        found = function(*arguments)
        if isinstance(found, tuple):
            return (found[0] * (1 + 1e-4), *found[1:])
        return found * (1 + 1e-4)

    return graph


@pytest.mark.parametrize(
    ("later", "settings", "compiled"),
    [
        ((), SETTINGS, False),
        pytest.param((), MATCHED, True, marks=pytest.mark.slow),
        pytest.param((), PREFERRED, True, marks=pytest.mark.slow),
        pytest.param((8,), SETTINGS, True, marks=pytest.mark.slow),
        pytest.param((9,), MATCHED | {"rl.updates": 3}, True, marks=pytest.mark.slow),
    ],
    ids=[
        "texts",
        "rewards, compiled",
        "preferences, compiled",
        "texts, later, compiled",
        "rewards, several updates of a draw, compiled",
    ],
)
def test_after_updates_without_a_graph(
    later: tuple[int, ...],
    settings: dict[str, Any],
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the clock says how many there are, so what is saved comes after them; what is killed
    before begins anew.
    """

    def compiling_for(updates: int, end: object = 0) -> None:
        def poll() -> object:
            nonlocal updates
            updates -= 1
            if not updates and end is KeyboardInterrupt:
                raise KeyboardInterrupt
            return None if updates > 0 else end

        monkeypatch.setattr(
            eager_start, "start_python", lambda *_: SimpleNamespace(poll=poll, kill=lambda: None)
        )

    monkeypatch.setattr(Resident, "capture", partialmethod(Resident.capture, backend="eager"))
    if not compiled:
        monkeypatch.setattr(capture, "compiled", rounding_otherwise)
    monkeypatch.setattr(eager_start, "should_begin_eagerly", lambda session, key: True)
    monkeypatch.setattr(warmup, "time_update", lambda session: 1.0)
    # Or a busy machine would end some of the runs early.
    monkeypatch.setattr(Reporter, "shorten_if_late", lambda *_: None)
    monkeypatch.setattr(defaults, "most_updates", lambda *_: 15)
    per_draw = settings.get("rl.updates", 1)
    eager = 5 if per_draw == 1 else 6  # what is drawn is used up before the run is saved
    in_all = eager + 10
    by_clock = {key: value for key, value in settings.items() if key != "train.updates"}
    by_clock |= {
        "train.minutes": 10 / 56,
        "train.compile": "whole",
        "train.save_every": 4,
        "optim.name": "adamw",
    }
    compiling_for(eager // per_draw)
    start("whole", by_clock)
    expected, rows = fingerprint(Path("whole")), Run(Path("whole")).rows()
    assert expected["newest"] == f"step-{in_all:08d}"
    early = [row["update"] for row in rows if eager_start.EAGER_KEY in row and "lr" in row]
    assert early == [*range(1, eager + 1)]
    saved = sorted(path.name for path in Path("whole/checkpoints").iterdir())
    assert saved[0] == f"step-{eager:08d}", "a checkpoint from before the graph"
    for update in (eager, *later):
        cut_back("whole", f"cut-{update}", update)
        resume(f"cut-{update}")
        assert fingerprint(Path(f"cut-{update}")) == expected, update
    compiling_for(3, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt, match="--resume"):
        start("killed", by_clock)
    assert Run(Path("killed")).rows()[-1]["update"] == 3 * per_draw
    compiling_for(eager // per_draw)
    resume("killed")
    again = fingerprint(Path("killed"))
    assert [row["update"] for row in again["rows"] if "lr" in row] == [*range(1, in_all + 1)], (
        "rows of before stayed"
    )


def test_answers_are_drawn_as_a_resumed_run_draws_them_where_the_compiler_is_never_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing is compiled, answers are drawn and scored by one arithmetic: from the update on
    that says so.
    """
    monkeypatch.setattr(
        eager_start,
        "start_python",
        lambda *_: SimpleNamespace(poll=lambda: None, kill=lambda: None),
    )
    monkeypatch.setattr(eager_start, "should_begin_eagerly", lambda session, key: True)
    monkeypatch.setattr(eager_start, "patience_s", lambda session: 0.0)
    monkeypatch.setattr(start_of_run, "why_uncompiled", lambda *_: "")
    monkeypatch.setattr(warmup, "time_update", lambda session: 1.0)
    monkeypatch.setattr(Reporter, "shorten_if_late", lambda *_: None)
    ways = []
    draw = Drawer.draw

    def noted(drawer: Drawer, *asked: Any) -> Any:
        ways.append(drawer.options.exact and drawer.model.attention == "cached")
        return draw(drawer, *asked)

    monkeypatch.setattr(Drawer, "draw", noted)
    by_clock = {
        key: value
        for key, value in MATCHED.items()
        if key not in ("train.updates", "train.compile")
    }
    start(
        "whole", by_clock | {"rl.temperature": 1.0, "train.save_every": 4, "train.minutes": 10 / 56}
    )
    rows = Run(Path("whole")).rows()
    assert [row["update"] for row in rows if eager_start.EAGER_KEY in row and "lr" in row] == [1]
    apart = [row["drawn_minus_scored_max"] for row in rows if "drawn_minus_scored_max" in row]
    assert len(apart) > 4 and not any(apart[1:]), "drawn = scored, to the bit"
    first = ways.index(True)
    assert first > 0 and all(ways[first:]), (
        "drawn one way by the compiler's patience, and another way from then on"
    )
    cut_back("whole", "cut", 4)
    resume("cut")
    assert fingerprint(Path("cut")) == fingerprint(Path("whole"))


def test_a_checkpoint_that_lacks_later_keys_of_the_shape_is_resumed() -> None:
    start("whole", SETTINGS | {"train.save_every": 12})
    expected = fingerprint(Path("whole"))
    cut_back("whole", "cut", 12)
    old = checkpointing.load(Path("cut/checkpoints/step-00000012"))
    later = ("attention_dropout", "pad_token_id")
    shape = {key: value for key, value in old.state["model_config"].items() if key not in later}
    checkpointing.save(
        Path("cut/checkpoints"), replace(old, state={**old.state, "model_config": shape}), keep=99
    )
    resume("cut")
    assert fingerprint(Path("cut")) == expected


# ---- killed at random moments --------------------------------------------------------------------


def phase(run: Path) -> str:
    """What a command that was killed had been doing, by what it left."""
    checkpoints = run / "checkpoints"
    if not checkpoints.is_dir() or not any(checkpoints.glob("step-*")):
        return "preparing"
    return "saving" if any(checkpoints.glob(".tmp-*")) else "training"


def kill_until_done(
    server: CommandServer, folder: Path, draws: random.Random, settings: list[str], span_s: float, kills: Counter[str],
    wanted: int, cache: dict[str, str], writes: bool,
) -> None:  # fmt: skip
    """One run, killed at random moments and resumed, to its end; nothing but the command line
    touches its folder.

    It is left alone once there were as many kills as are wanted.

    Figures are drawn now and then, but not if the run `writes` samples, which are shorter without
    figures.
    """
    run, saved = folder / "run", list[Path]()
    shutil.rmtree(run, ignore_errors=True)
    while True:
        begun = (run / "config.toml").is_file()
        arguments = ["--resume", "run"] if begun else [*settings, "--out", "run"]
        command = server.start(
            folder, "train", *arguments, env=cache, figures=draws.random() < 0.1 and not writes
        )
        if kills.total() < wanted:
            time.sleep(draws.uniform(0, span_s))
            command.signal(signal.SIGKILL)
        done = command.wait()
        if done.signal != signal.SIGKILL:
            assert done.code == 0, done.err
            return
        kills[phase(run)] += 1
        before, saved = saved, sorted(run.glob("checkpoints/step-*"))
        # Or a machine that is busier now would never come further.
        span_s *= 1.2 if saved == before else 1


def killed(
    server: CommandServer,
    folder: Path,
    wanted: int,
    given: dict[str, Any] = OWN,
    cached: bool = False,
) -> None:
    """With `cached`, what is tokenised and compiled is there already, and a kill rarely comes
    before training.
    """
    draws, kills, runs = random.Random(wanted), Counter[str](), 0
    settings, kept = (
        [f"{key}={value}" for key, value in given.items()],
        {"MONOGRAPH_HOME": str(folder / "home")},
    )
    for name in ["first", "whole"] if cached else ["whole"]:
        began = time.monotonic()
        assert server.run(folder, "train", *settings, "--out", name, env=kept, figures=0).code == 0
        span_s = 0.6 * (time.monotonic() - began)
    expected = fingerprint(folder / "whole")
    while kills.total() < wanted:
        cache = kept if cached else {"MONOGRAPH_HOME": str(folder / f"home-{kills.total()}")}
        kill_until_done(
            server, folder, draws, settings, span_s, kills, wanted, cache, writes=given is not OWN
        )
        assert fingerprint(folder / "run") == expected, kills
        runs += 1
    print(f"{kills.total()} kills ({dict(kills)}) in {runs} runs: the same bits")
    assert len(kills) == 3 or wanted < 100, "not all of preparing, training and saving were hit"


@pytest.mark.slow  # by day tests/test_story.py kills a run three times
def test_two_kills(server: CommandServer, here: Path) -> None:
    killed(server, here, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["own", "rewarded", "preferred"])
def test_a_hundred_kills(kind: str, server: CommandServer, here: Path) -> None:
    """Killed also while answers are drawn, rewarded (which takes most of the time here), scored and
    learned from.
    """
    (here / "slowly.py").write_text(
        "import time\n" + LETTERS.replace("    return", "    time.sleep(0.01)\n    return")
    )
    off_policy = {
        "rl.reward": "slowly.py:score",
        "rl.updates": 3,
        "rl.kl": "k2",
        "rl.kl_coef": 0.05,
        "rl.draws": 2,
    }
    # A command begins so fast that a shorter run is hardly ever killed in a save.
    off_policy["train.updates"] = 60
    killed(
        server,
        here,
        100,
        {"own": OWN, "rewarded": REWARDED | off_policy, "preferred": PREFERRED}[kind],
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("memory", ["device", "stream"])
@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("compiled", ["none", "blocks"])
def test_killed_on_every_way(
    server: CommandServer, here: Path, compiled: str, packing: str, memory: str
) -> None:
    ways = {"train.compile": compiled, "data.packing": packing, "train.memory": memory}
    # So that not all kills come while it is prepared.
    long = {"train.updates": 150} if compiled != "none" else {}
    killed(server, here, 5, SETTINGS | ways | long, cached=True)


# ---- compiled, on several threads ----------------------------------------------------------------


@pytest.mark.slow
def test_compiled_on_two_threads(here: Path) -> None:
    """Inductor's own embedding backward adds atomically: without the deterministic mode, no two
    runs agree.
    """
    settings = SETTINGS | {
        "train.compile": "whole",
        "train.tokens_per_update": 2048,
        "train.micro_batch": 64,
    }
    environment = os.environ | {
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }

    def run(*arguments: str) -> None:
        subprocess.run(
            [sys.executable, PROGRAM, "train", *arguments], cwd=here, env=environment, check=True
        )

    run(*(f"{key}={value}" for key, value in settings.items()), "--out", "whole")
    expected = fingerprint(here / "whole")
    cut_back("whole", "cut", 9)
    run("--resume", "cut")
    assert fingerprint(here / "cut") == expected
