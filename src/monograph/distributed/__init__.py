"""Train one run on several devices: a process for each device, with PyTorch's DDP or FSDP2 around
the usual step.
"""
