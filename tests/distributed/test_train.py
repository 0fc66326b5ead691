"""Run: pytest tests/distributed/test_train.py (the command line under torchrun, and what it refuses
without).
"""

from __future__ import annotations

import json
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from commands.forked import CommandServer, Done
from commands.inputs import LONG, OWN, POISON, SLOW, TINY, over, rows, sound, with_texts
from distributed.launched import Torchrun, free_port, ranks, started
from monograph import checkpointing
from monograph.checkpointing import Checkpoint
from monograph.distributed import world
from monograph.distributed.world import Place, first_host, read_place
from monograph.errors import PeerLost, UsageError

LAUNCHED = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2"}


def test_two_ranks_make_the_run_that_one_makes(server: CommandServer, tmp_path: Path) -> None:
    """One log, one JSON, and every other command takes the run as it takes any."""
    with_texts(tmp_path)
    settings = over(TINY, "optim.name=adamw", "train.eval_every=2", "train.updates=4")
    assert server.run(tmp_path, "train", *settings, "--out", "alone", figures=0).code == 0
    first, second = ranks(
        server, tmp_path, 2, "train", *settings, "train.parallel=fsdp", "--out", "shared", "--json"
    )
    assert first.code == second.code == 0, first.err + second.err
    [line] = (first.out + second.out).splitlines()
    assert json.loads(line)["update"] == 4
    alone, shared = rows(tmp_path / "alone"), rows(tmp_path / "shared")
    assert [row["update"] for row in shared] == [*range(1, 5)]
    for one, other in zip(alone, shared, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-6)
    for one, other in zip(
        *(rows(tmp_path / name, "eval_loss") for name in ("alone", "shared")), strict=True
    ):
        assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-6)
    assert len(rows(tmp_path / "shared", "sample")) == len(rows(tmp_path / "alone", "sample")) == 3
    for command in (["check"], ["evaluate"], ["generate"]):
        done = server.run(
            tmp_path,
            *command,
            "shared",
            *(["alpha", "--max-tokens", "4"] * (command == ["generate"])),
        )
        assert done.code == 0, done.err
    over_already = server.run(tmp_path, "train", "--resume", "shared")
    assert over_already.code == 0 and "has already finished, after 4 updates" in over_already.err, (
        over_already.err
    )


def test_stopped_ranks_save_and_the_run_goes_on_alone(
    server: CommandServer, tmp_path: Path
) -> None:
    """As below, without the launcher: both ranks get its signal."""
    with_texts(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    running = started(server, tmp_path, 2, "train", *LONG, "train.parallel=ddp")
    running[0].until(lambda: len(rows(tmp_path / "run")) > 3)
    for rank in running:
        rank.signal(signal.SIGTERM)
    done = [rank.wait() for rank in running]
    assert [each.code for each in done] == [75, 75], done
    assert "".join(each.err for each in done).count("saved at update") == 1
    assert json.loads((tmp_path / "run/exit.json").read_text())["exit_code"] == 75
    saved = sound(tmp_path / "run")
    assert 0 < saved == len(rows(tmp_path / "run")) < 400
    alone = server.start(tmp_path, "train", "--resume", "run", "train.parallel=none")
    alone.until(lambda: len(rows(tmp_path / "run")) > saved + 2)
    alone.signal(signal.SIGTERM)
    assert alone.wait().code == 75
    assert [row["update"] for row in rows(tmp_path / "run")] == [
        *range(1, sound(tmp_path / "run") + 1)
    ]


@pytest.mark.slow
def test_a_stopped_run_is_saved_and_goes_on_alone(server: CommandServer, tmp_path: Path) -> None:
    with_texts(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    launch = Torchrun(2, tmp_path, "train", *LONG, "train.parallel=ddp", restarts=20)
    launch.until(lambda: len(rows(tmp_path / "run")) > 3)
    began = time.monotonic()
    launch.process.send_signal(signal.SIGTERM)
    launch.wait()
    said = launch.err.read_text()
    assert time.monotonic() - began < 20, said  # torchrun kills after 30 s
    assert "forcefully" not in said
    assert (
        said.count("saved at update")
        == said.count("--nproc-per-node 2 --max-restarts 20 -m monograph train")
        == 1
    )
    assert json.loads((tmp_path / "run/exit.json").read_text())["exit_code"] == 75
    saved = sound(tmp_path / "run")
    assert 0 < saved == len(rows(tmp_path / "run")) < 400
    refused = server.run(tmp_path, "train", "--resume", "run")
    assert (
        refused.code == 2
        and 'train.parallel = "ddp" needs a process for each device: torchrun' in refused.err
    )
    alone = server.start(tmp_path, "train", "--resume", "run", "train.parallel=none", figures=0)
    alone.until(lambda: len(rows(tmp_path / "run")) > saved + 2)
    alone.signal(signal.SIGTERM)
    assert alone.wait().code == 75
    assert [row["update"] for row in rows(tmp_path / "run")] == [
        *range(1, sound(tmp_path / "run") + 1)
    ]


def test_an_error_that_a_restart_does_not_mend_is_said_once_and_kept(
    server: CommandServer, tmp_path: Path
) -> None:
    """torchrun itself ends with 1 whatever the code was, and starts what failed again."""
    with_texts(tmp_path)
    (tmp_path / "own.py").write_text(POISON)
    settings = over(OWN, "train.updates=100", "model.init=own.py:build", "train.parallel=ddp")
    for attempt, said in enumerate(
        ("error: 20 updates in a row", "error: ended before with exit code 5: 20 updates")
    ):
        done = ranks(
            server, tmp_path, 2, "train", *settings, "--out", "run", TORCHELASTIC_RESTART_COUNT=str(attempt)
        )  # fmt: skip
        assert 5 in [each.code for each in done]
        assert said in the_error_of(done)
        assert json.loads((tmp_path / "run/exit.json").read_text())["exit_code"] == 5


def test_sharded_ranks_that_ran_out_of_memory_are_restarted_with_half_the_rows(
    server: CommandServer, tmp_path: Path
) -> None:
    with_texts(tmp_path)
    full = "calls.append(1)\n    if os.environ['RANK'] == '1' and len(calls) > 14 and len(batch['tokens']) > 1:"
    full += "\n        raise torch.OutOfMemoryError('no room\\nat all')"
    own = SLOW.replace("time.sleep(0.05)", full).replace("def build", "calls = []\n\ndef build")
    (tmp_path / "own.py").write_text("import os\n" + own)
    settings = over(OWN, "model.init=own.py:build", "train.parallel=fsdp", "train.save_every=1")
    first = ranks(server, tmp_path, 2, "train", *settings, "--out", "run")
    assert 6 in [each.code for each in first]
    assert (
        "rank 1: out of memory at micro_batch = 2: no room; let torchrun restart it"
        in the_error_of(first)
    )
    saved = sound(tmp_path / "run")
    assert 0 < saved < 8
    # The launcher of another machine has not counted this restart, for which its rank was not the
    # reason.
    counts = ["0", "1"]
    again = ranks(
        server, tmp_path, 2, "train", *settings, "--out", "run", TORCHELASTIC_RESTART_COUNT=counts
    )
    assert [each.code for each in again] == [0, 0], the_error_of(again)
    assert "ran out of memory: micro_batch is now 1, the update stays the same" in again[0].err
    assert [row["update"] for row in rows(tmp_path / "run")] == [*range(1, 9)]


def the_error_of(done: list[Done]) -> str:
    lines = [line for each in done for line in each.err.splitlines() if line.startswith("error:")]
    # Where a busy machine takes long to end the others, one of them says after 30 s that it waits
    # no more.
    [said] = [line for line in lines if "another rank has ended" not in line]
    return said


REFUSALS = {
    "train.parallel=ddp": "torchrun --standalone --nproc-per-node 2 -m monograph train ... train.parallel=ddp",
    "train.parallel=two": "expected none, ddp, fsdp or hsdp",
}


@pytest.mark.parametrize("setting", REFUSALS)
def test_one_process_is_refused(setting: str, server: CommandServer, tmp_path: Path) -> None:
    with_texts(tmp_path)
    done = server.run(tmp_path, "train", *TINY, setting)
    assert done.code == 2 and REFUSALS[setting] in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (TINY, "2 processes were started, which would each train the same run: add train.parallel=ddp"),
        ([*over(TINY, "train.compile=whole"), "train.parallel=fsdp"],
         "train.parallel = fsdp does not go with train.compile = whole"),
    ],
)  # fmt: skip
def test_several_processes_are_refused_once(
    settings: list[str], said: str, server: CommandServer, tmp_path: Path
) -> None:
    with_texts(tmp_path)
    done = ranks(server, tmp_path, 2, "train", *settings, "--out", "run")
    assert done[0].code == 2 and said in the_error_of(done)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["profile", "plan", "sweep"])
def test_what_uses_one_device_says_so(command: str, server: CommandServer, tmp_path: Path) -> None:
    with_texts(tmp_path)
    done = server.run(tmp_path, command, *TINY, "train.parallel=fsdp")
    assert done.code == 2 and f"`monograph {command}` uses one device" in done.err


@pytest.mark.parametrize(
    "command", [["check"], ["generate", "text"], ["plan"], ["data", "show"], ["compare", "a", "b"]]
)
def test_what_one_process_does_is_refused_to_several(
    command: list[str], server: CommandServer, tmp_path: Path
) -> None:
    done = server.run(tmp_path, *command, env=LAUNCHED | {"RANK": "0"})
    assert done.code == 2 and f"`monograph {command[0]}` runs in one" in done.err


@pytest.mark.parametrize(
    "command", [["check"], ["train", "train.parallell=ddp"], ["train", "--owt", "run"]]
)
def test_who_has_nothing_to_say_waits_for_who_has(
    command: list[str], server: CommandServer, tmp_path: Path
) -> None:
    """A launcher ends all with the first that ends, which may be before rank 0 has said why."""
    silent = server.start(tmp_path, *command, env=LAUNCHED | {"RANK": "1"})
    time.sleep(2)
    silent.signal(signal.SIGTERM)
    done = silent.wait()
    assert (done.signal, done.err) == (signal.SIGTERM, "")


def test_a_rank_that_does_not_come_is_waited_for_aloud_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "START_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(world, "WAITING_NOTE_INTERVAL", timedelta(seconds=0.3))
    said = list[str]()
    with pytest.raises(PeerLost, match="rank 0: of 3 ranks 1, 2 did not come"):
        world.World(Place(0, 3, host="127.0.0.1", port=free_port()), said.append)
    assert set(said) == {"waiting for 2 of 3 ranks: 1, 2"} and 1 <= len(said) <= 3
    port = free_port()
    with pytest.raises(PeerLost, match=f"rank 1: nobody was met at 127.0.0.1:{port}: "):
        world.World(Place(1, 3, host="127.0.0.1", port=port))


def test_who_this_is_comes_from_torchrun_or_slurm() -> None:
    torchrun = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
        "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    assert read_place(torchrun) == Place(3, 4, 1, 2, 2, True, "a", 1, False)
    slurm = {
        "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[03-04,9]",
        "SLURM_JOB_ID": "123456", "SLURM_RESTART_COUNT": "1", "SLURM_TASKS_PER_NODE": "6(x2),4",
    }  # fmt: skip
    assert read_place(slurm) is None  # four tasks may be four runs
    assert read_place(slurm, srun=True) == Place(5, 16, 1, 6, 0, True, "gpu03", 23456)
    assert read_place(slurm | torchrun, srun=True) == read_place(torchrun)
    assert (
        read_place({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, srun=True) is None
        and read_place({}) is None
    )
    shared = torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    with pytest.raises(UsageError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        read_place(shared)
    assert read_place(shared | {"LOCAL_WORLD_SIZE": "4"}) is not None
    assert [first_host(nodes) for nodes in ("big1,gpu[1-2]", "gpu[007,009]", "one")] == [
        "big1",
        "gpu007",
        "one",
    ]


@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="threads are looked at through /proc"
)
def test_a_rank_does_not_end_while_a_thread_of_gloo_works() -> None:
    """Python would abort the process where that thread lets go of a tensor meanwhile."""
    began, over = threading.Event(), list[float]()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        began.set()
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            pass
        over.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    world._let_gloo_finish()
    assert over
    thread.join()


def test_a_rank_that_cannot_write_leaves_the_checkpoint_before(
    server: CommandServer, tmp_path: Path
) -> None:
    first, second = ranks(server, tmp_path, 2, tmp_path, call="distributed.failing:main")
    assert first.code == second.code == 0, first.err + second.err
    assert second.out.splitlines()[-1] == (
        f"{tmp_path}/.tmp-step-00000002/model.safetensors: rank 1 cannot save its part of the checkpoint of update 2: "
        "No space left on device; make room, then resume"
    )
    assert first.out.splitlines()[-1] == "lost"
    last = checkpointing.load_newest(tmp_path, pytest.fail)
    assert last.update == 1
    checkpointing.save(tmp_path, Checkpoint(2, last.model, last.optimizer))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000002"]
