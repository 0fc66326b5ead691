"""Plan how a run can be trained on a device: list the ways with their memory and time, choose one,
and say why.
"""

from monograph.planner.candidates import Candidate, PlanRequest
from monograph.planner.defaults import Plan, budget, plan, streamed_or_resident
from monograph.planner.streaming import Limits, StreamCandidate

__all__ = [
    "Candidate",
    "Limits",
    "Plan",
    "PlanRequest",
    "StreamCandidate",
    "budget",
    "plan",
    "streamed_or_resident",
]
