"""Sampling from a model, token by token, with a key-value cache."""

from __future__ import annotations

from monograph.decode.generator import Completion as Completion
from monograph.decode.generator import generate as generate
from monograph.decode.generator import prompt_ids as prompt_ids
from monograph.decode.sample import Sampling as Sampling
