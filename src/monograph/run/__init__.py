"""Manage a run outside of its training: folder, lock, metrics, models, signals that stop it,
progress on screen.
"""
