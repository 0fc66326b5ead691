"""Observe a run without changing it: where its time goes, its bottleneck, its memory, and whether the
machine is in order.
"""
