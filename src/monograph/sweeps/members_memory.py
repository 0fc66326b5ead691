"""Plan the peak memory of members of a sweep that train at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from monograph.errors import InputRefused, UsageError
from monograph.planner import Candidate, StreamCandidate
from monograph.planner.defaults import MAX_ESTIMATE_ERROR
from monograph.planner.traces import traced_bytes
from monograph.session.plan import RunPlan
from monograph.sweeps.spec import have_own_rows


@dataclass(frozen=True)
class MembersMemory:
    """The memory of members that train at once, as it is planned.

    The memory of N members is predicted by a trace of their step, which takes seconds
    (`planner.traces`). If they clearly fit, nothing is traced, and their memory is estimated as

        base + N (peak of one member alone - base) + extra(N)

    where extra(N) is what they need in addition to their step, such as a decoder.

    Attributes:
        expected: the planner's prediction for one member alone.
        plans: the plans of all members of a group.
        base_bytes: the part of the prediction that all members share.
        limit: the memory that the members may take.
        eager: whether they train without a graph, even if the prediction is for members with one.
        extra_bytes: returns the bytes that this many members need in addition to their step.
    """

    expected: Candidate
    plans: Sequence[RunPlan]
    base_bytes: int
    limit: int
    eager: bool = False
    extra_bytes: Callable[[int], int] = field(default=lambda members: 0)

    def planned_bytes(self, members: int) -> int:
        """Return the peak memory of the first `members` of the group."""
        alone = self.expected.work
        own_bytes = self.expected.peak_memory_bytes - self.base_bytes
        extra_bytes = self.extra_bytes(members)
        estimated = self.base_bytes + members * own_bytes + extra_bytes
        # An ensemble recomputes nothing. So the estimate is too low for members that would recompute if they
        # trained alone.
        is_clear = estimated * MAX_ESTIMATE_ERROR <= self.limit and alone.remat == "none"
        if members == 1 or is_clear or isinstance(self.expected, StreamCandidate):
            return estimated
        plans = self.plans[:members]
        work = alone.of_members(
            [plan.job.adapters() for plan in plans],
            own_rows=have_own_rows(plans),
            compiled=alone.compile != "none" and not self.eager,
        )
        try:
            return sum(traced_bytes(work).values()) + extra_bytes
        except (UsageError, InputRefused):
            # No graph can hold these members. The sweep says why when it tries.
            return estimated

    def most(self) -> int:
        """Return how many members of the group fit the limit at once, at least 1."""
        members = len(self.plans)
        while members > 1:
            needed = self.planned_bytes(members)
            if needed <= self.limit:
                break
            # The bytes of each member are nearly equal, so this takes two or three traces.
            own_bytes = (needed - self.base_bytes) / members
            members = max(1, min(members - 1, int((self.limit - self.base_bytes) / own_bytes)))
        return members
