"""Wrap every use of torch's private functions; tested on torch 2.11 and 2.13.

A function imports Dynamo and Inductor only when it is called. Their import takes about 1.5 s of CPU
time, nearly twice as long as that of torch itself, and a run that compiles nothing does not need
it.
"""

from monograph.compat.cpp_kernels import *  # noqa: F403 - other packages use these functions as compat.NAME
from monograph.compat.dynamo import *  # noqa: F403
from monograph.compat.inductor import *  # noqa: F403
from monograph.compat.operators import *  # noqa: F403
