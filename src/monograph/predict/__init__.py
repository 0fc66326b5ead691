"""Predict a step before it runs: its operations, bytes, lifetimes of buffers, and time."""
