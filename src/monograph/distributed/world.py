"""Connect the processes (ranks) that train one run together: they meet, agree on values and sum
tensors.
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

# The longest that a rank waits for work that rank 0 does alone, such as reading a text. A launcher
# ends the others if rank 0 dies, so this limit need not be short.
PATIENCE = timedelta(days=7)
# The longest that ranks wait for each other at the start, and the interval at which rank 0 names
# the absent ones.
COMING = timedelta(minutes=10)
SAYING = timedelta(seconds=15)
POLL_S = 0.05
FINISHING_S = 60.0
# The first of 10,000 ports used where SLURM names none; systems use others for outgoing
# connections.
PORTS = 20_000


class Place(NamedTuple):
    """The place of a process among the others, as its launcher gives it.

    Attributes:
        rank: the process's number among all processes; size: the number of processes; local: its
            number on its machine.
        near: the number of processes on its machine.
        attempt: how often the launcher has restarted all processes; again: whether the launcher or
            SLURM has.
        host, port: the address of the store where the processes meet; shared: whether the launcher
            itself holds that store, for all attempts.
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    near: int = 1
    attempt: int = 0
    again: bool = False
    host: str = ""
    port: int = 0
    shared: bool = False


def place(environment: Mapping[str, str] = os.environ, srun: bool = False) -> Place | None:
    """Read this process's place from torchrun's or srun's variables; return None where neither
    started it.

    Args:
        environment: the variables.
        srun: whether tasks started by srun are ranks; otherwise they are taken for independent
            runs.

    Raises:
        UsageError: there are several machines, and a restart would read the addresses of the
            previous attempt.
    """
    requeued = int(environment.get("SLURM_RESTART_COUNT", 0)) > 0
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
        near = int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))
        here = Place(
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment.get("LOCAL_RANK", 0)),
            near,
            attempt,
            attempt > 0 or requeued,
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        if (
            near < here.size
            and here.shared
            and environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        ):
            raise UsageError(
                "restarts on several machines need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment, "
                "or a restart waits for processes that are gone"
            )
        return here
    if srun and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return Place(
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment["SLURM_LOCALID"]),
            int(re.match("[0-9]+", environment.get("SLURM_TASKS_PER_NODE", "1"))[0]),  # type: ignore[index]
            again=requeued,
            host=environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
            port=int(
                environment.get("MASTER_PORT") or PORTS + int(environment["SLURM_JOB_ID"]) % 10_000
            ),
        )
    return None


def first_host(nodes: str) -> str:
    """Return the name of the first machine in SLURM's list, such as gpu03 for `gpu[03-05,9],big1`."""
    name, numbers = re.match(r"([^\[,]+)(?:\[([0-9]+))?", nodes).groups()  # type: ignore[union-attr]
    return f"{name}{numbers or ''}"


class World:
    """All processes of a run, and this one's place among them. For a single process every method is
    the identity.
    """

    def __init__(self, own: Place | None = None, say: Callable[[str], None] = lambda line: None):
        """Meet the other processes.

        Args:
            own: this process's place; None for a single process.
            say: called on rank 0 with lines to print while it waits.

        Raises:
            PeerLost: some processes did not come.
        """
        self.own = own
        self.alone = own is None
        self._asked = 0
        own = own or Place()
        self.rank = own.rank
        self.size = own.size
        self.near = own.near
        self.attempt = own.attempt
        self.again = own.again
        # The processes among which tensors are summed; None: all.
        self.group: dist.ProcessGroup | None = None
        if self.alone:
            return
        listens = not own.shared and own.rank == 0
        try:
            self.store = dist.TCPStore(
                own.host,
                own.port,
                own.size,
                is_master=listens,
                wait_for_workers=False,
                timeout=COMING,
            )
        except dist.DistNetworkError as error:
            reason = str(error).split(". ")[0]
            raise PeerLost(
                f"rank {own.rank}: nobody was met at {own.host}:{own.port}: {reason}"
            ) from error
        # torchrun's store outlives an attempt and keeps addresses of processes that are gone
        # (dev/log.md), so each attempt has its own prefix. Rank 0's own store does not, and is for
        # launchers that count differently.
        self._of_attempt = dist.PrefixStore(
            f"monograph/{own.attempt if own.shared else 0}", self.store
        )
        self._meet(say)
        backend = "gloo"
        if torch.cuda.is_available():
            # SLURM may show each rank only its own.
            torch.cuda.set_device(own.local % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=self._of_attempt, rank=own.rank, world_size=own.size)

    def _meet(self, say: Callable[[str], None]) -> None:
        """Wait for all processes, which launchers start at about the same time, and agree on the
        number of the attempt.

        Each machine's torchrun counts only the restarts for which its own ranks were the reason.
        """
        here = [f"there/{rank}" for rank in range(self.size)]
        self._of_attempt.set(here[self.rank], str(self.attempt))
        began = said = time.monotonic()
        # Polled, since torch prints lines of its own when a wait times out.
        while not self._of_attempt.check(here):
            now = time.monotonic()
            absent = [
                str(rank) for rank, key in enumerate(here) if not self._of_attempt.check([key])
            ]
            if now - began > COMING.total_seconds():
                raise PeerLost(
                    f"rank {self.rank}: of {self.size} ranks {', '.join(absent)} did not come"
                )
            if self.leads and now - said > SAYING.total_seconds():
                say(f"waiting for {len(absent)} of {self.size} ranks: {', '.join(absent)}")
                said = now
            time.sleep(POLL_S)
        self.attempt = max(int(self._of_attempt.get(key)) for key in here)
        self.again |= self.attempt > 0

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0, which alone prints, logs and decides."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return a new tensor, the sum over ranks of tensors of the same shape and dtype; a
        collective.
        """
        if self.alone:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def within(self, group: dist.ProcessGroup) -> Self:
        """Return this world with the processes of a group alone, for sums and exchanges."""
        part = copy.copy(self)
        part.group = group
        part.rank = dist.get_rank(group)
        part.size = dist.get_world_size(group)
        return part

    def summing(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Start summing a tensor over ranks in place; return the future of the sum; a collective."""
        work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    def exchange(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[r]` numbers of a flat tensor to rank r, and return `received[r]` from each; a
        collective.
        """
        out = tensor.new_empty(sum(received))
        dist.all_to_all_single(out, tensor, received, sent, group=self.group)
        return out

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is set on some rank; a collective."""
        if self.alone:
            return list(flags)
        return [
            count > 0 for count in self.sum(torch.tensor([int(flag) for flag in flags])).tolist()
        ]

    def number(self, value: int) -> int:
        """Return rank 0's whole number on all ranks; a collective, so that it fails if a rank is
        gone.
        """
        return int(self.sum(torch.tensor(value if self.leads else 0)))

    def agreed(self, value: object) -> Any:
        """Return rank 0's value, after a round trip through JSON, on all ranks; they wait for it up
        to PATIENCE.
        """
        if self.alone:
            return value
        self._asked += 1
        key = f"agreed/{self._asked}"
        if self.leads:
            self._of_attempt.set(key, json.dumps(value))
        else:
            self._wait_for(key)
        return json.loads(self._of_attempt.get(key))

    def once(self, work: Callable[[], T]) -> T:
        """Return what `work()` gives on rank 0, which alone calls it, on all ranks; see `agreed`."""
        return work() if self.alone else self.agreed(work() if self.leads else None)

    def gathered(self, value: object) -> list[Any]:
        """Return the values of all ranks, in their order and after a round trip through JSON; a
        collective.
        """
        if self.alone:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.sum(
            torch.tensor([own.numel() * (rank == self.rank) for rank in range(self.size)])
        ).tolist()
        # Gathered tensors are equally long.
        each = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(each, torch.nn.functional.pad(own, (0, max(sizes) - own.numel())))
        return [
            json.loads(text[:size].numpy().tobytes())
            for text, size in zip(each, sizes, strict=True)
        ]

    def shared(self, work: Callable[[Sequence[T]], list[Any]], items: Sequence[T]) -> list[Any]:
        """Return `work(items)`, a value of JSON for each, of which every rank computes a part; a
        collective.
        """
        if self.alone:
            return work(items)
        own = items[self.rank :: self.size]
        parts = self.gathered(work(own) if own else [])
        return [parts[index % self.size][index // self.size] for index in range(len(items))]

    def remember(self, what: str, text: str) -> None:
        """Keep a text for as long as the launcher lives."""
        if not self.alone:
            self.store.set(f"monograph/{what}", text)

    def recall(self, what: str) -> str | None:
        """Return the text kept by this or an earlier attempt; None if there is none under this
        launcher.
        """
        key = f"monograph/{what}"
        return self.store.get(key).decode() if not self.alone and self.store.check([key]) else None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run the block on rank 0 first and then on the others, which can read what it wrote to
        disk.
        """
        if not self.leads:
            self.agreed(None)
        yield
        if self.leads:
            self.agreed(None)

    def gather(self) -> None:
        """Make rank 0 wait, up to PATIENCE, until every other rank has called this."""
        if self.leads:
            self._wait_for(*(f"here/{rank}" for rank in range(1, self.size)))
        else:
            self._of_attempt.set(f"here/{self.rank}", "")

    def _wait_for(self, *keys: str) -> None:
        if keys:
            self._of_attempt.wait([*keys], PATIENCE)

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        if not self.alone:
            dist.barrier()

    def leave(self) -> None:
        """Leave together with all ranks, since a rank that ended earlier would leave the others
        waiting.
        """
        if not self.alone:
            dist.barrier()
            dist.destroy_process_group()
            _let_gloo_finish()


def _let_gloo_finish() -> None:
    """Wait until no thread of gloo runs any more, but at most FINISHING_S, for overloaded machines;
    Linux only.

    Python aborts a process that ends while such a thread still frees a tensor
    (https://github.com/pytorch/pytorch/issues/190489). Destroying the group waits for its threads,
    but torch's caches of sharded tensors keep the group alive.
    """
    until = time.monotonic() + FINISHING_S
    while time.monotonic() < until:
        time.sleep(POLL_S)  # releases Python's global lock, for which such a thread may be waiting
        if not any(_is_gloo_running(task) for task in entries("/proc/self/task")):
            return


def _is_gloo_running(task: Path) -> bool:
    with suppress(OSError):  # the thread has just ended
        status = (task / "status").read_text()
        return "\tpt_gloo_runloop\n" in status and "\nState:\tR" in status
    return False


def lost(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, says that another process cannot be reached."""
    if error is None:
        return False
    said = isinstance(error, RuntimeError) and (
        "gloo" in str(error).lower() or "NCCL" in str(error)
    )
    return said or isinstance(error, dist.DistError) or lost(error.__cause__)
