"""Trains one run on several devices, a process for each: PyTorch's DDP and FSDP2 around the same step and engine."""

from __future__ import annotations
