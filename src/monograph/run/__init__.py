"""Manage a run outside of its training: folder, lock, metrics, models, signals that stop it, progress on screen."""

from __future__ import annotations

from monograph.run.curve import braille_curve as braille_curve
from monograph.run.folder import Run as Run
from monograph.run.progress import Progress as Progress
from monograph.run.signals import StopSignal as StopSignal
