"""Transform the computation of any `nn.Module`: try, capture, recompute, fuse, adapt it, or change
its precision.
"""
