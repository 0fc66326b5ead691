"""Observe a run without changing it: where its time goes, its bottleneck, its memory, and the
machine's health.
"""
