"""Manage a run as a person meets it: folder, lock, metrics, the signals that stop it, and progress on screen."""

from __future__ import annotations

from monograph.run.curve import braille_curve as braille_curve
from monograph.run.folder import Run as Run
from monograph.run.progress import Progress as Progress
from monograph.run.signals import StopSignal as StopSignal
