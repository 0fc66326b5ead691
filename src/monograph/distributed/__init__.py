"""Train one run on several devices, with a process for each.

PyTorch's DDP or FSDP2 is put around the usual step.
"""
