"""llama.cpp itself, on one thread of a CPU and in fp32 wherever it has the choice: the other side of law 11."""

from __future__ import annotations

import ctypes
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


class LlamaCpp:
    """A server of a GGUF file, for as long as the process lives; skips the test where the package is missing."""

    def __init__(self, path: Path, context: int = 256, adapter: Path | None = None) -> None:
        client = pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
        asked = client.CommonParams()
        asked.model.path = str(path)
        asked.n_ctx, asked.n_parallel, asked.n_gpu_layers, asked.n_threads_http = context, 1, 0, 1
        asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = 1
        asked.warmup, asked.verbosity = False, 0
        # Its defaults keep keys and values in fp16.
        asked.cache_type_k = asked.cache_type_v = client.ggml_type.GGML_TYPE_F32
        asked.flash_attn_type = client.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if adapter:
            asked.lora_adapters = [client.CommonAdapterLoraInfo(str(adapter))]
        self._server = client.Server(asked)
        # Never destroyed: on a busy machine its destructor was seen to wait for its own thread for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._server))

    def _ask(self, path: str, **body: Any) -> Any:
        address = self._server.listening_address + path
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=900) as answer:
            return json.load(answer)

    def tokenize(self, texts: Sequence[str], separator: int, special: bool = False) -> list[list[int]]:
        """Ids of each text; `separator` is an id that none of them has."""
        mixed = [part for text in texts for part in (text, separator)]
        ids = self._ask("/tokenize", content=mixed, add_special=False, parse_special=special)["tokens"]
        answers: list[list[int]] = [[]]
        for index in ids:
            if index == separator:
                answers.append([])
            else:
                answers[-1].append(index)
        assert answers.pop() == [] and len(answers) == len(texts)
        return answers

    def greedy(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """Its answer to a prompt of ids: "tokens", "stop_type" and more."""
        return self._ask(
            "/completion", prompt=list(prompt), n_predict=tokens, temperature=0, return_tokens=True, cache_prompt=False
        )

    def rendered(self, messages: Sequence[dict[str, str]]) -> str:
        """A chat as its own reading of the file's chat template writes it, up to where the answer begins."""
        return self._ask("/apply-template", messages=list(messages))["prompt"]

    def answered(self, messages: Sequence[dict[str, str]], tokens: int) -> dict[str, Any]:
        """What it says to a chat."""
        return self._ask("/v1/chat/completions", messages=list(messages), max_tokens=tokens, temperature=0)
