"""Generate and serve with llama.cpp by its wheel `xllamacpp`: a GGUF file, its server in this
process, a slot a row.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monograph.model.gguf import save_gguf

if TYPE_CHECKING:
    from generators import Task

HTTP_THREADS = 64  # a connection takes one as long as it is open
ORDER = ["temperature", "top_k", "top_p", "min_p"]


def llama_cpp(task: Task) -> Callable[[int, bool], list[str]]:
    """Return llama.cpp with its samplers on the host."""
    return _llama_cpp(task, backend_sampling=False)


def llama_cpp_backend(task: Task) -> Callable[[int, bool], list[str]]:
    """Return llama.cpp with its samplers inside the graph (`--backend-sampling`)."""
    return _llama_cpp(task, backend_sampling=True)


def _llama_cpp(task: Task, backend_sampling: bool) -> Callable[[int, bool], list[str]]:
    import xllamacpp
    from generators import CHAIN

    folder = tempfile.TemporaryDirectory()
    save_gguf(task.model, Path(folder.name, "out"), task.tokenizer, "f32", print)
    params = xllamacpp.CommonParams()
    params.model.path = str(Path(folder.name, "out", "model.gguf"))
    params.n_parallel, params.n_ctx = task.rows, task.rows * -(-task.slots // 256) * 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
    # As in the other systems.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.sampling.backend_sampling, params.verbosity = backend_sampling, 0
    server = xllamacpp.Server(params)
    folder.cleanup()  # the file stays mapped

    def one(tokens: int, greedy: bool, row: int) -> str:
        asked: dict[str, Any] = {
            "prompt": task.prompt_ids,
            "max_tokens": tokens,
            "seed": row,
            "cache_prompt": False,
        }
        # A temperature of 0 leaves one candidate, and llama.cpp aborts if a backend's top-k gets
        # fewer than k.
        asked |= (
            {"samplers": ORDER[:1], "temperature": 0.0} if greedy else {"samplers": ORDER, **CHAIN}
        )
        answer = server.handle_completions(asked)
        assert answer["usage"]["completion_tokens"] == tokens, json.dumps(answer)[:300]
        return str(answer["choices"][0]["text"])

    def write(tokens: int, greedy: bool) -> list[str]:
        with ThreadPoolExecutor(task.rows) as pool:
            return list(pool.map(lambda row: one(tokens, greedy, row), range(task.rows)))

    return write


def serve(path: str, rows: int, slots: int, threads: int) -> None:
    """Serve a GGUF file in this process, which says where, until stdin ends."""
    import xllamacpp

    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity, params.n_threads_http = path, 0, HTTP_THREADS
    params.n_parallel, params.n_ctx, params.n_gpu_layers = rows, rows * -(-slots // 256) * 256, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # as in Monograph
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address}), file=reply, flush=True)
    sys.stdin.read()
    os._exit(0)  # its destructor may wait for its own thread
