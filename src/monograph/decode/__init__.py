"""Sampling from a model: the model, the sampler and the stop rules of a step are one graph."""

from __future__ import annotations

from monograph.decode.completion import Completion as Completion
from monograph.decode.completion import Generation as Generation
from monograph.decode.completion import generate as generate
from monograph.decode.completion import prompt_ids as prompt_ids
from monograph.decode.sampling import Sampling as Sampling
