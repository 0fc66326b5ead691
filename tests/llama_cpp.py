"""llama.cpp itself, on one thread of a CPU and in fp32 wherever it has the choice: the other side
of law 11.

Usage: python tests/llama_cpp.py (answers questions from its standard input; `Apart` starts it)
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


class LlamaCpp:
    """A server of a GGUF file, for as long as the process lives; skips the test where the package
    is missing.
    """

    def __init__(
        self, path: Path, context: int = 256, adapter: Path | None = None, own_drafts: int = 0
    ) -> None:
        """With `own_drafts`, the file's own head proposes so many tokens at a time."""
        client = pytest.importorskip(
            "xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp"
        )
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
        if own_drafts:
            kinds = client.common_speculative_type
            asked.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
            asked.speculative.draft.n_max = own_drafts
            asked.load_mtp = True
        self._server = client.Server(asked)
        # Never destroyed: on a busy machine its destructor was seen to wait for its own thread for
        # ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._server))

    def _ask(self, path: str, **body: Any) -> Any:
        address = self._server.listening_address + path
        request = urllib.request.Request(
            address, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=900) as answer:
            return json.load(answer)

    def tokenize(
        self, texts: Sequence[str], separator: int, special: bool = False
    ) -> list[list[int]]:
        """Ids of each text; `separator` is an id that none of them has."""
        mixed = [part for text in texts for part in (text, separator)]
        ids = self._ask("/tokenize", content=mixed, add_special=False, parse_special=special)[
            "tokens"
        ]
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
            "/completion",
            prompt=list(prompt),
            n_predict=tokens,
            temperature=0,
            return_tokens=True,
            cache_prompt=False,
        )

    def drawn(
        self,
        prompt: Sequence[int],
        count: int,
        among: Sequence[int],
        vocabulary: int,
        seed: int = 0,
    ) -> tuple[list[int], list[list[float]]]:
        """Draw tokens after a prompt; return them, and before each one the log-probabilities of all
        tokens.

        `among` are ids whose texts are whole characters: it reports nothing for a token that is a
        part of one.
        """
        never = [[index, False] for index in range(vocabulary) if index not in set(among)]
        answer = self._ask(
            "/completion", prompt=list(prompt), n_predict=count, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
            seed=seed, logit_bias=never, n_probs=vocabulary, return_tokens=True, cache_prompt=False,
        )  # fmt: skip
        rows = []
        for place in answer["completion_probabilities"]:
            by_id = {each["id"]: each["logprob"] for each in place["top_logprobs"]}
            rows.append([by_id[index] for index in range(vocabulary)])
        assert len(rows) == len(answer["tokens"]) == count, answer["stop_type"]
        return answer["tokens"], rows

    def defaults(self) -> dict[str, Any]:
        """How it draws if a request does not say it."""
        with urllib.request.urlopen(
            self._server.listening_address + "/props", timeout=900
        ) as answer:
            return json.load(answer)["default_generation_settings"]["params"]

    def rendered(self, messages: Sequence[dict[str, str]]) -> str:
        """A chat as its own reading of the file's chat template writes it, up to where the answer
        begins.
        """
        return self._ask("/apply-template", messages=list(messages))["prompt"]

    def answered(self, messages: Sequence[dict[str, str]], tokens: int) -> dict[str, Any]:
        """What it says to a chat."""
        return self._ask(
            "/v1/chat/completions", messages=list(messages), max_tokens=tokens, temperature=0
        )


class Apart:
    """llama.cpp in a process of its own, which some files make it abort; the next question then
    starts another one.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as this object)
        self._process: subprocess.Popen[str] | None = None

    def drawn(
        self, path: Path, context: int, **question: Any
    ) -> tuple[list[int], list[list[float]]]:
        """`LlamaCpp.drawn` of a file; raises OSError, which says why, if the file is not loaded."""
        if self._process is None:
            self._errors.truncate(0)
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({"path": str(path), "context": context, **question}) + "\n"
        )
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._end()
            self._errors.seek(0)
            said = [line.strip() for line in self._errors if "ASSERT" in line or "what()" in line]
            raise OSError(f"llama.cpp ended with {code}: {'; '.join(said[:2])}")
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["tokens"], answer["rows"]

    def _end(self) -> int:
        """Return the exit code of the process, which ends with its questions."""
        assert self._process is not None
        self._process.communicate()
        code = self._process.returncode
        self._process = None
        return code

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._end()
        self._errors.close()


def _answer_questions() -> None:
    """Answer each line of the standard input with one of the standard output, which llama.cpp must
    not write to.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            client = LlamaCpp(Path(question.pop("path")), context=question.pop("context"))
            tokens, rows = client.drawn(**question)
            answer: dict[str, Any] = {"tokens": tokens, "rows": rows}
        except (RuntimeError, AssertionError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _answer_questions()
