"""Train one run on several devices, with a process for each, by PyTorch's DDP or FSDP2 around the
usual step.
"""
