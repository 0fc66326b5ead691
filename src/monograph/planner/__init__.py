"""Plan how a run can be trained on a device: every way, what it takes, and why one is chosen."""

from __future__ import annotations

from monograph.planner.candidates import Asked as Asked
from monograph.planner.candidates import Candidate as Candidate
from monograph.planner.choose import Plan as Plan
from monograph.planner.choose import budget as budget
from monograph.planner.choose import plan as plan
from monograph.planner.choose import streamed_or_resident as streamed_or_resident
from monograph.planner.streaming import Limits as Limits
from monograph.planner.streaming import StreamCandidate as StreamCandidate
from monograph.planner.streaming import streamed as streamed
