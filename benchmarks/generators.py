"""Build each generating system: Monograph, transformers, and a compiled model with a sampler on the
host. llama.cpp and gpt-fast have their own files.

Each is built once in its own process and then generates when asked: it is a function of (tokens,
greedy) that returns the texts of all rows. Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from contestants import System
from numpy.typing import NDArray
from peer_gpt_fast import gpt_fast
from peer_llama import llama_cpp, llama_cpp_backend
from systems import drawn_on
from torch import Tensor

from monograph.decode import Generation, Sampling
from monograph.decode.cache import KVCache
from monograph.decode.generator import Generator
from monograph.decode.knobs import chain_of
from monograph.decode.request import Request
from monograph.device import default_device
from monograph.graph.lora_merge import plain_parameters
from monograph.model.config import LlamaConfig
from monograph.model.layouts import to_file_tensors
from monograph.model.llama import Llama
from monograph.text.tokenizer import BOS, EOS, PAD, Tokenizer
from monograph.text.tokenizer_file import byte_alphabet

# In transformers' order: temperature, top-k, top-p, min-p.
CHAIN: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
PROMPT = "The model and the whole sampler are one graph; only ids leave the device."
Write = Callable[[int, bool], list[str]]


class Task(NamedTuple):
    """What to generate: `rows` continuations of one prompt, each of at most `tokens` tokens.

    Attributes:
        model: the same random weights for every system; only printable ASCII is ever likely, so
            that texts can be compared and no row ends early.
        tokenizer: with as many entries as the model has.
        rows: continuations at once.
        tokens: the most tokens to generate.
        threads: of the CPU.
    """

    model: Llama
    tokenizer: Tokenizer
    rows: int
    tokens: int
    threads: int

    @property
    def prompt_ids(self) -> list[int]:
        """Return the prompt's ids, with the token that begins a document first."""
        return [self.tokenizer.bos_id, *self.tokenizer.encode(PROMPT)]

    @property
    def slots(self) -> int:
        """Return the number of positions of a row."""
        return len(self.prompt_ids) + self.tokens


def task(config: LlamaConfig, rows: int, tokens: int, threads: int, dtype: torch.dtype) -> Task:
    """Return a task on this machine's device."""
    device = default_device()
    torch.manual_seed(0)
    model = Llama(config) if device.type == "cpu" else drawn_on(device, config)
    tokenizer = ascii_tokenizer(config.vocab_size)
    letters = [
        piece.isascii() and piece.decode().isprintable() and piece != b""
        for piece in tokenizer.pieces
    ]
    with torch.no_grad():
        # Logits with the spread of a trained model's; tokens that must not be drawn get 0, which is
        # unlikely.
        model.lm_head.weight.mul_(8.0).mul_(torch.tensor(letters, device=device)[:, None])
    model = model.to(dtype).eval()
    torch.cuda.empty_cache()  # what was drawn in float32, for the other systems' processes
    return Task(model, tokenizer, rows, tokens, threads)


def ascii_tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of the 256 bytes, then pairs and triples of printable ASCII."""
    letters = [chr(code) for code in range(33, 127)]
    pairs = [(first, second) for first in letters for second in letters]
    merges = [*pairs, *((first + second, third) for first, second in pairs for third in letters)][
        : size - 259
    ]
    entries = [
        BOS,
        EOS,
        PAD,
        *sorted(byte_alphabet()),
        *(first + second for first, second in merges),
    ]
    content = {
        "added_tokens": [
            {"id": index, "content": name, "special": True}
            for index, name in enumerate((BOS, EOS, PAD))
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "decoder": {"type": "ByteLevel"},
        "model": {
            "type": "BPE",
            "vocab": {entry: index for index, entry in enumerate(entries)},
            "merges": [list(merge) for merge in merges],
        },
    }
    return Tokenizer(content, "pairs and triples")


# ── Monograph ─────────────────────────────────────────────────────────────────────────────────────


def monograph(task: Task) -> Write:
    """Return the compiled decode graph with the whole sampler or the greedy one; on a GPU a
    replayed CUDA graph.
    """
    hows = {False: Sampling(**CHAIN), True: Sampling(temperature=0)}
    generators = {
        greedy: Generator(
            task.model,
            chain_of([how]),
            rows=task.rows,
            slots=task.slots,
            vocabulary=task.tokenizer.vocab_size,
            mode="compiled",
        )
        for greedy, how in hows.items()
    }

    def write(tokens: int, greedy: bool) -> list[str]:
        requests = [
            Request(tuple(task.prompt_ids), dataclasses.replace(hows[greedy], seed=row), tokens)
            for row in range(task.rows)
        ]
        done = list(Generation(generators[greedy], requests, task.tokenizer, []))
        assert all(len(completion.token_ids) == tokens for completion in done)
        return [completion.text for completion in done]

    return write


# ── a compiled model whose logits go to a sampler on the host ─────────────────────────────────────


@torch.no_grad()
def host_sampler(task: Task) -> Write:
    """Return one compiled decode step of this project's model; its logits are copied and numpy
    draws from them.
    """
    model, ids, rows = task.model, task.prompt_ids, task.rows
    weight = model.lm_head.weight
    cache = KVCache.allocate(model.config, rows, task.slots, weight.dtype, weight.device)

    def logits(tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        hidden_BTD = model(tokens_BT, positions=positions_BT, cache=cache)
        return model.logits(hidden_BTD[:, -1]).float()

    step = torch.compile(logits, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def write(tokens: int, greedy: bool) -> list[str]:
        random = np.random.default_rng(0)
        cache.reset_recurrences([])
        tokens_BT = torch.tensor([ids] * rows, device=weight.device)
        positions_BT = torch.arange(len(ids), device=weight.device).expand(rows, -1)
        found, forward = [], logits
        for _ in range(tokens):
            logits_BV = forward(tokens_BT, positions_BT).cpu().numpy()
            found.append(
                logits_BV.argmax(-1)
                if greedy
                else np.array([drawn(row_V, random) for row_V in logits_BV])
            )
            tokens_BT = torch.from_numpy(found[-1])[:, None].to(weight.device)
            positions_BT, forward = positions_BT[:, -1:] + 1, step
        return [task.tokenizer.decode(row) for row in np.stack(found, 1).tolist()]

    return write


def drawn(logits_V: NDArray[np.float32], random: np.random.Generator) -> int:
    """Draw one id as a careful host sampler does: a partial sort first, then only its k candidates."""
    k = min(CHAIN["top_k"], len(logits_V) - 1)
    best_k = np.argpartition(logits_V, -int(k))[-int(k) :]
    best_k = best_k[np.argsort(-logits_V[best_k])]
    odds_k = np.exp((logits_V[best_k] - logits_V[best_k[0]]) / CHAIN["temperature"])
    odds_k /= odds_k.sum()
    kept = int(np.searchsorted(odds_k.cumsum(), CHAIN["top_p"])) + 1
    odds_k = odds_k[:kept][odds_k[:kept] >= CHAIN["min_p"] * odds_k[0]]
    return int(best_k[np.searchsorted(odds_k.cumsum(), random.random() * odds_k.sum())])


# ── transformers ──────────────────────────────────────────────────────────────────────────────────


def transformers_dynamic(task: Task) -> Write:
    """Return transformers' `generate` with its defaults."""
    return _transformers(task, {})


def transformers_static(task: Task) -> Write:
    """Return `generate` with a static cache, which compiles the forward pass; on a CPU it must be
    told to compile.
    """
    import transformers

    compiled = transformers.CompileConfig()
    compiled._compile_all_devices = True
    return _transformers(
        task,
        {"cache_implementation": "static", "max_cache_len": task.slots, "compile_config": compiled},
    )


def _transformers(task: Task, options: dict[str, Any]) -> Write:
    import transformers

    weight = task.model.lm_head.weight
    config = transformers.AutoConfig.for_model(**task.model.config.to_hf())
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    # Shared, except for layers that are joined in files: a GPU has no room for a second copy.
    in_files = to_file_tensors(plain_parameters(task.model), task.model.config)
    theirs.load_state_dict({each.name: each.read() for each in in_files}, assign=True)
    theirs.tie_weights()
    if theirs.model.rotary_emb is not None:  # a model may rotate nothing
        with weight.device:  # buffers that are computed, not loaded
            theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    ids_BT = torch.tensor([task.prompt_ids] * task.rows, device=weight.device)

    def write(tokens: int, greedy: bool) -> list[str]:
        torch.manual_seed(0)
        how = {"do_sample": False} if greedy else {"do_sample": True, **CHAIN}
        settings = transformers.GenerationConfig(
            **how,
            **options,
            max_new_tokens=tokens,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        rows_BT = theirs.generate(
            ids_BT, attention_mask=torch.ones_like(ids_BT), generation_config=settings
        )
        assert rows_BT.shape[1] == ids_BT.shape[1] + tokens
        return [task.tokenizer.decode(row) for row in rows_BT[:, ids_BT.shape[1] :].tolist()]

    return write


SYSTEMS = {
    "monograph": System(monograph),
    "compiled, host sampler": System(host_sampler),
    "transformers, dynamic": System(transformers_dynamic, ("transformers",)),
    "transformers, static": System(transformers_static, ("transformers",)),
    "llama.cpp": System(llama_cpp, ("xllamacpp", "gguf")),
    "llama.cpp, backend": System(llama_cpp_backend, ("xllamacpp", "gguf")),
    "gpt-fast": System(gpt_fast, clones=("GPT_FAST",)),
}
# The wheel of the package index runs on the CPU only.
ON_A_CPU_ONLY = ("llama.cpp", "llama.cpp, backend")
HOW_TO_INSTALL = (
    "pip install -e '.[peers]' -c constraints.txt; for gpt-fast, git clone https://github.com/pytorch-labs/gpt-fast "
    "and set GPT_FAST to its folder"
)
