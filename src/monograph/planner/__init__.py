"""Plan how a run can be trained on a device: list the ways with their memory and time, choose one, and say why."""

from __future__ import annotations

from monograph.planner.candidates import Candidate as Candidate
from monograph.planner.candidates import Request as Request
from monograph.planner.choose import Plan as Plan
from monograph.planner.choose import budget as budget
from monograph.planner.choose import plan as plan
from monograph.planner.choose import streamed_or_resident as streamed_or_resident
from monograph.planner.streaming import Limits as Limits
from monograph.planner.streaming import StreamCandidate as StreamCandidate
