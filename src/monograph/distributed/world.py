"""Connect the processes that train one run together, which are called ranks.

They meet at a store, which is a server of keys and values. Then they pass values to each other, and sum
tensors. A collective is a call that all ranks must make, in the same order; it returns after all of them
have made it.

A launcher, torchrun or srun, starts the processes. When a process fails, torchrun ends all of them
and starts them again, which is a new attempt.
"""

import copy
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from monograph.errors import PeerLost, UsageError
from monograph.storage.reading import entries

T = TypeVar("T")

# The longest wait for work that rank 0 does alone, e.g. reading a text. It need not be short,
# because the launcher ends the other ranks if rank 0 dies.
RANK_0_TIMEOUT = timedelta(days=7)
# The longest wait for other ranks at the start.
START_TIMEOUT = timedelta(minutes=10)
# During this wait, the interval at which rank 0 prints which ranks are absent.
WAITING_NOTE_INTERVAL = timedelta(seconds=15)
POLL_S = 0.05  # the seconds between two checks of whether a wait is over
GLOO_TIMEOUT_S = 60.0  # the longest wait for gloo's threads at the end
# If no port is given to SLURM's tasks, one of the 10,000 ports from this one on is used. Operating
# systems use other ports for outgoing connections.
FIRST_PORT = 20_000


class Place(NamedTuple):
    """The place of a process among the others, as its launcher gives it.

    Attributes:
        rank: the process's number among all processes.
        size: the number of all processes.
        local_rank: the process's number on its machine.
        machine_size: the number of processes on its machine.
        attempt: how many times the launcher has restarted all processes.
        was_restarted: whether the launcher has restarted the processes, or SLURM the job.
        host: the host of the store.
        port: the port of the store.
        launcher_has_store: whether the store is in the launcher's process, and so outlives an attempt.
            Otherwise it is in the process of rank 0.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    machine_size: int = 1
    attempt: int = 0
    was_restarted: bool = False
    host: str = ""
    port: int = 0
    launcher_has_store: bool = False


def read_place(environment: Mapping[str, str] = os.environ, srun: bool = False) -> Place | None:
    """Read this process's place from the variables of torchrun or srun.

    Args:
        environment: the variables.
        srun: whether tasks that srun has started are the ranks of one run; False: each of them is a
            run of its own.

    Returns:
        The place; None if neither of the launchers started the process.

    Raises:
        UsageError: there are several machines, and a restart would read the addresses of the
            previous attempt.
    """
    requeued = int(environment.get("SLURM_RESTART_COUNT", 0)) > 0
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
        torchrun_place = Place(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
            machine_size=int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
            attempt=attempt,
            was_restarted=attempt > 0 or requeued,
            host=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            launcher_has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        several_machines = torchrun_place.machine_size < torchrun_place.size
        may_restart = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        if several_machines and torchrun_place.launcher_has_store and may_restart:
            raise UsageError(
                "restarts on several machines need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment, "
                "or a restart waits for processes that are gone"
            )
        return torchrun_place
    if srun and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        # For example "4(x2)" or "4,3": the first machine has 4 tasks.
        tasks_per_node = environment.get("SLURM_TASKS_PER_NODE", "1")
        port = environment.get("MASTER_PORT")
        if not port:
            port = str(FIRST_PORT + int(environment["SLURM_JOB_ID"]) % 10_000)
        host = environment.get("MASTER_ADDR")
        if not host:
            host = first_host(environment["SLURM_STEP_NODELIST"])
        return Place(
            rank=int(environment["SLURM_PROCID"]),
            size=int(environment["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environment["SLURM_LOCALID"]),
            machine_size=int(re.match("[0-9]+", tasks_per_node)[0]),  # type: ignore[index]
            was_restarted=requeued,
            host=host,
            port=int(port),
        )
    return None


def first_host(nodes: str) -> str:
    """Return the name of the first machine in SLURM's list, e.g. gpu03 for `gpu[03-05,9],big1`."""
    name, numbers = re.match(r"([^\[,]+)(?:\[([0-9]+))?", nodes).groups()  # type: ignore[union-attr]
    return f"{name}{numbers or ''}"


class World:
    """All processes of a run, and this process's place among them.

    For a single process each method returns what it is given, without waiting.

    Attributes:
        place: this process's place; None: it is a single process.
        alone: whether it is a single process.
        rank: the process's number among those that sum tensors, see `subgroup`.
        size: the number of processes that sum tensors.
        machine_size: the number of processes on its machine.
        attempt: how many times the launcher has restarted all processes.
        was_restarted: whether the launcher has restarted the processes, or SLURM the job.
        group: the processes that sum tensors; None: all.
        store: the store; a single process has none.
    """

    def __init__(self, place: Place | None = None, say: Callable[[str], None] = lambda line: None):
        """Meet the other processes.

        Args:
            place: this process's place; None: it is a single process.
            say: called on rank 0 with lines to print while it waits.

        Raises:
            PeerLost: some processes did not come.
        """
        self.place = place
        self.alone = place is None
        self._broadcast_count = 0  # how often `broadcast` was called
        if place is None:
            place = Place()
        self.rank = place.rank
        self.size = place.size
        self.machine_size = place.machine_size
        self.attempt = place.attempt
        self.was_restarted = place.was_restarted
        self.group: dist.ProcessGroup | None = None
        if self.alone:
            return
        has_store = place.rank == 0 and not place.launcher_has_store
        try:
            self.store = dist.TCPStore(
                place.host,
                place.port,
                place.size,
                is_master=has_store,
                wait_for_workers=False,
                timeout=START_TIMEOUT,
            )
        except dist.DistNetworkError as error:
            reason = str(error).split(". ")[0]
            raise PeerLost(
                f"rank {place.rank}: nobody was met at {place.host}:{place.port}: {reason}"
            ) from error
        # A launcher's store outlives an attempt and keeps addresses of processes that are gone
        # (dev/log.md), so the keys of each attempt have a prefix of their own. A store of rank 0 ends with
        # the attempt, so its prefix is always 0: the ranks may count attempts differently (`_meet`).
        prefix = place.attempt if place.launcher_has_store else 0
        self._attempt_store = dist.PrefixStore(f"monograph/{prefix}", self.store)
        self._meet(say)
        backend = "gloo"
        if torch.cuda.is_available():
            # Modulo, because SLURM may let each rank see its own device only.
            torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=self._attempt_store, rank=place.rank, world_size=place.size
        )

    def _meet(self, say: Callable[[str], None]) -> None:
        """Wait for all processes, and agree on the number of the attempt.

        The numbers may differ, because the torchrun of each machine counts only the restarts that
        its own ranks have caused. The largest number is taken.
        """
        keys = [f"there/{rank}" for rank in range(self.size)]
        self._attempt_store.set(keys[self.rank], str(self.attempt))
        began = time.monotonic()
        last_note = began  # when the absent ranks were printed last
        # The store is polled, because torch prints messages of its own when a wait times out.
        while not self._attempt_store.check(keys):
            now = time.monotonic()
            absent = [
                str(rank) for rank, key in enumerate(keys) if not self._attempt_store.check([key])
            ]
            if now - began > START_TIMEOUT.total_seconds():
                raise PeerLost(
                    f"rank {self.rank}: of {self.size} ranks {', '.join(absent)} did not come"
                )
            if self.leads and now - last_note > WAITING_NOTE_INTERVAL.total_seconds():
                say(f"waiting for {len(absent)} of {self.size} ranks: {', '.join(absent)}")
                last_note = now
            time.sleep(POLL_S)
        self.attempt = max(int(self._attempt_store.get(key)) for key in keys)
        self.was_restarted |= self.attempt > 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the only one that prints, logs and decides."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of tensors of the same shape and dtype; a collective."""
        if self.alone:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def subgroup(self, group: dist.ProcessGroup) -> Self:
        """Return a world that sums and exchanges tensors among the processes of a group only."""
        subgroup = copy.copy(self)
        subgroup.group = group
        subgroup.rank = dist.get_rank(group)
        subgroup.size = dist.get_world_size(group)
        return subgroup

    def sum_async(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Start to sum a tensor over ranks, in place; a collective.

        Returns:
            The future of the sum.
        """
        work = dist.all_reduce(tensor, async_op=True)
        # torch's future has a list of the summed tensors.
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    def all_to_all(
        self, tensor: Tensor, sent_sizes: list[int], received_sizes: list[int]
    ) -> Tensor:
        """Send a part of a flat tensor to each rank, and receive one from each; a collective.

        Args:
            tensor: the parts for rank 0, 1, ..., one after another.
            sent_sizes: the number of elements for each rank.
            received_sizes: the number of elements from each rank.

        Returns:
            The parts from rank 0, 1, ..., one after another.
        """
        result = tensor.new_empty(sum(received_sizes))
        dist.all_to_all_single(result, tensor, received_sizes, sent_sizes, group=self.group)
        return result

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is true on any rank; a collective."""
        if self.alone:
            return list(flags)
        counts = self.sum(torch.tensor([int(flag) for flag in flags]))
        return [count > 0 for count in counts.tolist()]

    def broadcast_int(self, value: int) -> int:
        """Return rank 0's whole number on all ranks; a collective.

        As a collective, it fails if a rank is gone. `broadcast` would not notice that.
        """
        return int(self.sum(torch.tensor(value if self.leads else 0)))

    def broadcast(self, value: object) -> Any:
        """Return rank 0's value on all ranks. It is passed as JSON.

        Rank 0 does not wait for the others. They wait for it, up to RANK_0_TIMEOUT.
        """
        if self.alone:
            return value
        self._broadcast_count += 1
        key = f"broadcast/{self._broadcast_count}"
        if self.leads:
            self._attempt_store.set(key, json.dumps(value))
        else:
            self._wait_for(key)
        return json.loads(self._attempt_store.get(key))

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 only, and return its value on all ranks, as `broadcast` does."""
        if self.alone:
            return work()
        value = work() if self.leads else None
        value_of_rank_0: T = self.broadcast(value)
        return value_of_rank_0

    def all_gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, in the ranks' order; a collective. They are passed as JSON."""
        if self.alone:
            return [value]
        own_text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        # The lengths of all texts are gathered by a sum of vectors that are 0 except at the rank's place.
        own_size = torch.zeros(self.size, dtype=torch.int64)
        own_size[self.rank] = own_text.numel()
        sizes = self.sum(own_size).tolist()
        # The texts are padded, because gathered tensors must have the same length.
        padded = torch.nn.functional.pad(own_text, (0, max(sizes) - own_text.numel()))
        texts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(texts, padded)
        return [
            json.loads(text[:size].numpy().tobytes())
            for text, size in zip(texts, sizes, strict=True)
        ]

    def split_over_ranks(
        self, work: Callable[[Sequence[T]], list[Any]], items: Sequence[T]
    ) -> list[Any]:
        """Share out items over the ranks, and return `work(items)` on all of them; a collective.

        Args:
            work: returns a value of JSON for each item.
            items: the items, the same on all ranks.
        """
        if self.alone:
            return work(items)
        # Item i is computed on rank i mod size.
        own_items = items[self.rank :: self.size]
        results_of_ranks = self.all_gather(work(own_items) if own_items else [])
        return [
            results_of_ranks[index % self.size][index // self.size] for index in range(len(items))
        ]

    def remember(self, name: str, text: str) -> None:
        """Keep a named text in the store, for later attempts if the launcher has the store."""
        if not self.alone:
            self.store.set(f"monograph/{name}", text)

    def recall(self, name: str) -> str | None:
        """Return the text of this name that this or an earlier attempt has kept; None: there is none."""
        key = f"monograph/{name}"
        if self.alone or not self.store.check([key]):
            return None
        return self.store.get(key).decode()

    @contextmanager
    def rank_0_first(self) -> Iterator[None]:
        """Run the `with` block on rank 0 first, and then on the other ranks.

        They can then read what rank 0 has written to disk.
        """
        # In `broadcast` the other ranks wait until rank 0 calls it, too, which it does after its block.
        if not self.leads:
            self.broadcast(None)
        yield
        if self.leads:
            self.broadcast(None)

    def rank_0_waits_for_others(self) -> None:
        """On rank 0, wait up to RANK_0_TIMEOUT until all other ranks have called this method, too.

        The other ranks do not wait.
        """
        if self.leads:
            self._wait_for(*(f"here/{rank}" for rank in range(1, self.size)))
        else:
            self._attempt_store.set(f"here/{self.rank}", "")

    def _wait_for(self, *keys: str) -> None:
        """Wait until these keys are in the store; without keys do nothing."""
        if keys:
            self._attempt_store.wait([*keys], RANK_0_TIMEOUT)

    def barrier(self) -> None:
        """Wait until all ranks have called this method; a collective."""
        if not self.alone:
            dist.barrier()

    def leave(self) -> None:
        """Leave the group of processes; a collective.

        All ranks leave together: if one ended earlier, the others would wait for it.
        """
        if not self.alone:
            dist.barrier()
            dist.destroy_process_group()
            _let_gloo_finish()


def _let_gloo_finish() -> None:
    """Wait until no thread of gloo is running, up to GLOO_TIMEOUT_S; on Linux only.

    Python aborts a process that ends while such a thread frees a tensor
    (https://github.com/pytorch/pytorch/issues/190489). torch would wait for these threads when it frees
    the group, but its caches of sharded tensors keep the group alive.
    """
    deadline = time.monotonic() + GLOO_TIMEOUT_S
    while time.monotonic() < deadline:
        # Sleeping also releases Python's global lock, for which such a thread may be waiting.
        time.sleep(POLL_S)
        if not any(_is_gloo_running(task) for task in entries("/proc/self/task")):
            return


def _is_gloo_running(task: Path) -> bool:
    """Return whether a thread, a folder in /proc/self/task, is a running thread of gloo."""
    with suppress(OSError):  # raised if the thread has just ended
        status = (task / "status").read_text()
        return "\tpt_gloo_runloop\n" in status and "\nState:\tR" in status
    return False


def is_rank_lost(error: BaseException | None) -> bool:
    """Return whether an error, or an error that caused it, means that another rank is not reachable."""
    if error is None:
        return False
    if isinstance(error, dist.DistError):
        return True
    if isinstance(error, RuntimeError) and ("gloo" in str(error).lower() or "NCCL" in str(error)):
        return True
    return is_rank_lost(error.__cause__)
