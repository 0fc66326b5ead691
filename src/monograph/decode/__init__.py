"""Sampling from a model: the model, the sampler and the stop rules of a step are one graph."""

from monograph.decode.completion import Completion, Generation, generate, prompt_ids
from monograph.decode.sampling import Sampling

__all__ = ["Completion", "Generation", "Sampling", "generate", "prompt_ids"]
