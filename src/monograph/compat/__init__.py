"""Wrap every use of torch's private parts; tested on torch 2.11 and 2.13.

Functions import Dynamo and Inductor only when called: that takes about 1.5 s of CPU time, nearly
twice as long as torch itself, and a run that compiles nothing does not need it.
"""

from monograph.compat.cpp_kernels import *  # noqa: F403 - each function of these files is for the other rooms
from monograph.compat.dynamo import *  # noqa: F403
from monograph.compat.inductor import *  # noqa: F403
from monograph.compat.operators import *  # noqa: F403
