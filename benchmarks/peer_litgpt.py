"""Train with litgpt's pretrain: its own `main` on its own GPT, and the names of its weights."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peers import Task, loader
from systems import BETAS, CLIP, DECAY
from torch import Tensor, nn
from torch.utils.data import DataLoader

from monograph.model.config import LlamaConfig
from monograph.model.llama import Llama


def litgpt(task: Task) -> None:
    """Run `litgpt.pretrain.main` on its own GPT: rows cut from the concatenated documents, with no
    mask between.
    """
    import lightning as L
    from litgpt import pretrain
    from litgpt.args import EvalArgs, TrainArgs

    shape = task.shape
    weights = to_litgpt(Llama(shape.config, seed=task.seed).state_dict())

    def initialise(fabric: Any, model: nn.Module, **sizes: int) -> None:
        tied = {"lm_head.weight": weights["transformer.wte.weight"]}  # `main` ties them afterwards
        model.load_state_dict(tied | weights)
        task.model = model

    train_args = TrainArgs(
        save_interval=None,
        log_interval=10**9,
        global_batch_size=task.rows_per_update,
        micro_batch_size=shape.micro_batch,
        max_tokens=10**15,
        max_norm=CLIP,
        max_seq_length=shape.length,
        tie_embeddings=shape.config.tie_word_embeddings,
        lr_warmup_steps=0,
    )
    fabric = L.Fabric(
        devices=1,
        accelerator="cpu",
        precision="bf16-mixed" if task.precision == "bf16" else "32-true",
    )
    init_args = {"lr": task.lr, "betas": BETAS, "weight_decay": DECAY}
    patches = [
        mock.patch.object(pretrain, "initialize_weights", initialise),
        mock.patch.object(
            pretrain, "get_lr", lambda lr, it, *_: lr * task.schedule(it // shape.micro_batches)
        ),
    ]
    if not task.compiled:  # it compiles always
        patches.append(mock.patch.object(torch, "compile", lambda model: model))
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for patch in patches:
            stack.enter_context(patch)
        pretrain.main(
            fabric=fabric,
            devices=1,
            seed=task.seed,
            initial_checkpoint_dir=None,
            resume=False,
            config=litgpt_config(task),
            data=Concatenated(task),
            out_dir=Path(folder),
            tokenizer_dir=None,
            tokenizer=None,
            train=train_args,
            eval=EvalArgs(interval=10**9, max_iters=1),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": init_args},
        )


class Concatenated:
    """litgpt's data module: rows of T + 1 tokens cut from all documents, concatenated."""

    def __init__(self, task: Task) -> None:
        self.task = task
        stream = torch.cat(task.documents)
        width = task.shape.length + 1
        self.blocks = list(stream[: len(stream) // width * width].view(-1, width))

    def connect(self, **_: Any) -> None:
        """Do nothing: nothing depends on the model."""

    def prepare_data(self) -> None:
        """Do nothing: there is nothing to download."""

    def setup(self) -> None:
        """Do nothing: there is nothing to set up."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the micro-batches."""
        return loader(self.task, self.blocks, torch.stack)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return one micro-batch, with which litgpt checks itself when it starts."""
        return DataLoader(self.blocks[: self.task.shape.micro_batch], self.task.shape.micro_batch)


def litgpt_config(task: Task) -> Any:
    """Return the same sizes as a litgpt config."""
    from litgpt import Config

    sizes = task.shape.config
    return Config(
        name="peer",
        block_size=task.shape.length,
        vocab_size=sizes.vocab_size,
        padded_vocab_size=sizes.vocab_size,
        n_layer=sizes.num_hidden_layers,
        n_embd=sizes.hidden_size,
        n_head=sizes.num_attention_heads,
        n_query_groups=sizes.num_key_value_heads,
        head_size=sizes.head_dim,
        intermediate_size=sizes.intermediate_size,
        rotary_percentage=1.0,
        rope_base=int(sizes.rope_theta),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=sizes.rms_norm_eps,
        mlp_class_name="LLaMAMLP",
    )


def to_litgpt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under litgpt's names, query, key and value joined in one matrix; gradients in
    the same way.
    """
    names = {
        "model.embed_tokens": "transformer.wte",
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "input_layernorm": "norm_1",
        "post_attention_layernorm": "norm_2",
        "self_attn.o_proj": "attn.proj",
        "mlp.gate_proj": "mlp.fc_1",
        "mlp.up_proj": "mlp.fc_2",
        "mlp.down_proj": "mlp.proj",
        "self_attn.q_proj": "attn.qkv",
    }
    found = {}
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            continue
        if "q_proj" in name:
            tensor = torch.cat([tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        found[name] = tensor
    return found


def from_litgpt(tensors: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Return tensors under Hugging Face's names; a tied head becomes the embedding."""
    query, key_value = (
        heads * config.head_dim
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    like = to_litgpt({name: torch.empty(0) for name in Llama(config).state_dict()})
    names = dict(
        zip(
            like,
            [n for n in Llama(config).state_dict() if "k_proj" not in n and "v_proj" not in n],
            strict=True,
        )
    )
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("qkv.weight"):
            for part, piece in zip("qkv", tensor.split([query, key_value, key_value]), strict=True):
                found[names[name].replace("q_proj", f"{part}_proj")] = piece
        else:
            found[names[name]] = tensor
    return found
