"""The decoder-only language model: its configuration, its layers, its masks, and its files in
several formats.

The model returns hidden states or logits; losses, optimizers and samplers are elsewhere. Nothing is
imported here, so that `monograph.model.config` can be imported without torch.
"""
