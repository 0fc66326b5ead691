"""Kills, tears or fails any callable at any of its I/O operations; see harness.py."""
