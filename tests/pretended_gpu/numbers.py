"""Make kernels of the pretended card compute; import this before anything of torch's compiler."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are made

from pretended_gpu import collectives, graphs, interpreted, operators, order

operators.install()
interpreted.install(order.launch)
graphs.install()
collectives.install()
