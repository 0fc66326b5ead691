"""The decoder-only language model: its configuration, its layers, its masks, and the Hugging Face folder it lives in.

It returns hidden states or logits; losses, optimizers and samplers live elsewhere. Nothing is imported here, so that
`monograph.model.config` stays free of torch.
"""
