"""A run as a person meets it: its folder, lock and metrics, the signals that stop it, and its progress on screen."""

from __future__ import annotations

from monograph.run.curve import braille_curve as braille_curve
from monograph.run.folder import Run as Run
from monograph.run.progress import Progress as Progress
from monograph.run.signals import StopSignal as StopSignal
