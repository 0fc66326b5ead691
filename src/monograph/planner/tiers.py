"""How much of a streamed model lies where: on the device, in the host's memory, in files; and what stays on the device.

device = resident buffers + slots + desks + boundaries + masks + max(one stage's passes, an update's intermediates)
host   = all other buffers + boundaries that are offloaded
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from monograph.measure.estimate import EAGER_UPDATE_BYTES, ORTHOGONAL_NUMBERS, stored_numbers
from monograph.measure.footprint import Work
from monograph.ops.cross_entropy import chunk_count
from monograph.planner.stages import ORIGIN, Names, PlaneShape, Stages, desks_bytes, slots_bytes, turns_bytes
from monograph.stream import Placement
from monograph.stream.boundaries import RINGS
from monograph.stream.chunked_update import MOST
from monograph.stream.placement import When, Where
from monograph.stream.store import GRADIENT, REST, WEIGHTS

Tiers = Mapping[str, Mapping[str, int]]  # bytes by origin, of "device", "host" and "disk"
# What passes take is estimated; what stays on the device leaves so much more room for it.
MARGIN = 1.25
GOLDEN = 0.618033988749895  # multiples of it, modulo 1, are spread evenly, however many there are


@dataclass(frozen=True)
class Way:
    """One way to stream a model.

    Attributes:
        work: of a micro-batch.
        stages: of the model.
        blocks_per_stage: of which they are made.
        when: weights are updated.
        offload: whether boundaries are kept on the host.
        where: weights are updated, if they are at home.
        on_disk: names of buffers in files.
        files_first: whether these are the first to stay on the device, as a disk is slow, or the last, as there is room
            on a disk.
    """

    work: Work
    stages: Stages
    blocks_per_stage: int
    when: When
    offload: bool
    where: Where = "device"
    on_disk: Names = frozenset()
    files_first: bool = True

    @property
    def micro_batches(self) -> int:
        """Of an update."""
        return -(-self.work.window_rows // self.work.rows)

    @property
    def number_bytes(self) -> int:
        """Of a number that is computed with."""
        return 4 if self.work.precision == "fp32" else 2

    @property
    def state_bytes(self) -> int:
        """Of what goes from stage to stage of a micro-batch."""
        return self.work.rows * self.work.length * self.work.config.hidden_size * self.number_bytes

    @cached_property
    def order(self) -> list[list[tuple[int, str]]]:
        """What stays on the device first, as (stage, name), in groups of a name: what saves the most copies a byte.

        Files first or last; weights, which come up to three times an update, then gradients, which go in the backward
        pass and come in the forward pass. Where weights are updated at home a stage stays there as a whole, or on the
        device.
        """
        stages = sorted(range(self.stages.count), key=lambda index: index * GOLDEN % 1)
        names = [WEIGHTS, GRADIENT, REST, *(n for n in self.stages.names if n not in (WEIGHTS, GRADIENT, REST))]
        names = [name for name in names if name in self.stages.names and not (name == GRADIENT and self.at_once)]
        names.sort(key=lambda name: (name in self.on_disk) != self.files_first)
        groups = [[(index, name) for index in stages if self.stages.size_bytes(index, name)] for name in names]
        if self.where == "host":
            groups = [[(index, name) for name in names if self.stages.size_bytes(index, name)] for index in stages]
        return [group for group in groups if group]

    @property
    def at_once(self) -> bool:
        """Whether gradients never leave a slot."""
        return self.when == "backward"

    def on_host(self, index: int, resident: Sequence[Names]) -> list[PlaneShape]:
        """A stage's planes that are updated at home."""
        return [plane for plane in self.stages.planes(index) if self.where == "host" and plane.stays(resident[index])]

    @cached_property
    def passing(self) -> dict[str, int]:
        """Bytes on the device beside planes, by origin; estimates but for boundaries and masks."""
        work, number = self.work, self.number_bytes
        config, tokens = work.config, work.rows * work.length
        inside = stored_numbers(work, work.remat) * number * tokens * self.blocks_per_stage
        block = stored_numbers(work, "none") * number * tokens
        head = config.vocab_size * config.hidden_size
        chunk = tokens / chunk_count(tokens, config.vocab_size, work.device_type)
        loss = chunk * config.vocab_size * (4 + number) + 8 * head + 2 * tokens * config.hidden_size * number
        matrices = [plane.whole for plane in self.stages.middle if plane.whole > 1]
        largest = max(MOST, *matrices, 1)
        if work.compile == "none":
            update = (EAGER_UPDATE_BYTES[work.optim.state] + 8) * largest
        else:
            update = max(4 * largest, ORTHOGONAL_NUMBERS * number * max(matrices, default=0))
        passes = inside + max(2 * block, loss - inside, 4 * head - inside, update - inside)
        every = work.window_rows * work.length
        masks = every * (work.length + 4 * config.head_dim) if work.packed else 0  # dense ones, cosine and sine
        return {
            "boundaries": self._states * self.state_bytes,
            "activations": int(inside),
            "workspace": int(passes - inside) + masks,
        }

    @property
    def _states(self) -> int:
        """The most that are on the device: all inputs and a gradient, or what is read, what is made, and the rings."""
        inner = self.stages.count - 1
        if not self.offload:
            return inner * self.micro_batches + 1
        return (2 + min(RINGS, inner - 1)) * self.micro_batches

    def resident(self, count: int) -> list[Names]:
        """The names of each stage's buffers on the device, if so many of `order` are."""
        found: list[set[str]] = [set() for _ in range(self.stages.count)]
        for index, name in [each for group in self.order for each in group][:count]:
            found[index].add(name)
        return [frozenset(names) for names in found]

    def device(self, resident: Sequence[Names]) -> dict[str, int]:
        """Bytes on the device by origin."""
        found = dict.fromkeys(("weights", "gradients", "moments"), 0)
        for index, names in enumerate(resident):
            for name in names:
                found[ORIGIN.get(name, "moments")] += self.stages.size_bytes(index, name)
        slots = slots_bytes(self.stages, resident)
        on_host = self.where == "host"
        desks = desks_bytes(self.stages, resident, gradient=not self.at_once, on_host=on_host)
        return found | {"slots": slots, "desks": desks} | self.passing

    def filled(self, limit: int) -> list[Names]:
        """What stays on the device, as much as its memory holds."""
        passing = self.passing
        spare = limit - int(MARGIN * (passing["activations"] + passing["workspace"])) - passing["boundaries"]

        def fits(count: int) -> bool:
            return sum(size for name, size in self.device(self.resident(count)).items() if name not in passing) <= spare

        ends = [0]
        for group in self.order:
            ends.append(ends[-1] + len(group))
        # Inside of a group memory only grows; at its end slots may vanish.
        whole = max((n for n, end in enumerate(ends) if fits(end)), default=0)
        if self.where == "host":
            return self.resident(ends[whole])
        low, high = ends[whole], ends[min(whole + 1, len(ends) - 1)]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return self.resident(low)

    def tiers(self, resident: Sequence[Names]) -> Tiers:
        """Bytes by origin, tier by tier."""
        tiers = {"device": self.device(resident), "host": dict[str, int](), "disk": dict[str, int]()}
        for index in range(self.stages.count):
            for name in self.stages.names:
                size = self.stages.size_bytes(index, name)
                if not size or name in resident[index] or (name == GRADIENT and self.at_once):
                    continue
                tier = tiers["disk" if name in self.on_disk else "host"]
                origin = ORIGIN.get(name, "moments")
                tier[origin] = tier.get(origin, 0) + size
        if self.where == "host" and self.at_once and (turns := turns_bytes(self.stages, resident)):
            tiers["host"]["gradients"] = turns
        if self.offload:
            tiers["host"]["boundaries"] = (self.stages.count - 2) * self.micro_batches * self.state_bytes
        return tiers

    def placement(self, resident: Sequence[Names]) -> Placement:
        """The same for the engine; its device and folder are the caller's."""
        return Placement(
            when=self.when,
            where=self.where,
            blocks_per_stage=self.blocks_per_stage,
            offload=self.offload,
            on_device=frozenset((index, name) for index, names in enumerate(resident) for name in names),
            on_disk=self.on_disk,
        )
