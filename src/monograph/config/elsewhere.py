"""Names that other programs have for keys, options and commands: people who know them look for them first.

Sources: the arguments of transformers' Trainer 5, TRL 1, PEFT 0.18, Unsloth, axolotl, litgpt, torchtune and nanochat.
"""

# The key, or a sentence that says how the same is had.
ELSEWHERE: dict[str, str] = {
    # transformers: TrainingArguments
    "learning_rate": "optim.lr",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.updates",
    "per_device_train_batch_size": "train.micro_batch is the rows on the device at once",
    "gradient_accumulation_steps": "train.tokens_per_update says how much text an update sees, however it is split",
    "warmup_steps": "optim.warmup_updates",
    "warmup_ratio": "optim.warmup_updates is a number of updates",
    "lr_scheduler_type": "optim.schedule",
    "adam_beta1": "optim.betas holds both, as in optim.betas=0.9,0.95",
    "adam_beta2": "optim.betas holds both, as in optim.betas=0.9,0.95",
    "adam_epsilon": "optim.eps",
    "max_grad_norm": "optim.grad_clip",
    "optim": "optim.name is adamw or muon, and optim.state = 8bit is for adamw_8bit",
    "bf16": "train.precision = bf16",
    "fp16": "train.precision = fp16",
    "gradient_checkpointing": "train.remat",
    "save_steps": "train.save_every",
    "eval_steps": "train.eval_every",
    "save_total_limit": "train.keep",
    "torch_compile": "train.compile",
    "output_dir": "say --out FOLDER",
    "resume_from_checkpoint": "say --resume RUN",
    "model_name_or_path": "model.init",
    "dataset_name": "data.source",
    "report_to": "monograph follow RUN --to wandb sends a run's numbers to a tracker",
    "deepspeed": "train.parallel, or train.memory = stream for a model larger than the device",
    "fsdp": "train.parallel = fsdp",
    # TRL
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "max_completion_length": "rl.max_new_tokens",
    "max_prompt_length": "data.sequence_length less rl.max_new_tokens is what a prompt may have",
    "num_generations": "rl.group",
    "num_iterations": "rl.updates",
    "reward_funcs": "rl.reward",
    "loss_type": "prefer.loss, or rl.advantage for rewards",
    "epsilon": "rl.advantage has its own bounds of the ratio (docs/rewards.md)",
    "assistant_only_loss": "it is always so: of a conversation, answers alone are trained on",
    "completion_only_loss": "it is always so: of prompt and completion, the completion alone is trained on",
    "dataset_text_field": "data.text_key",
    "packing": "data.packing",
    # PEFT, Unsloth, axolotl
    "r": "lora.rank",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
    "lora_target_modules": "lora.targets",
    "use_rslora": "lora.rslora",
    "use_dora": "lora.dora",
    "loraplus_lr_ratio": "lora.lr_ratio",
    "trainable_token_indices": "lora.tokens",
    "modules_to_save": "lora.tokens trains rows of the embedding and the head",
    "load_in_4bit": "say lora.base = nf4 and lora.rank = 16",
    "load_in_8bit": "say lora.base = int8 and lora.rank = 16",
    "base_model": "model.init",
    "sequence_len": "data.sequence_length",
    "sample_packing": "data.packing",
    "micro_batch_size": "train.micro_batch",
    "val_set_size": "data.held_out",
    "train_on_inputs": "answers alone are trained on; data.answers says which",
    # litgpt, torchtune, nanochat
    "global_batch_size": "train.tokens_per_update",
    "max_tokens": "train.tokens",
    "min_lr": "optim.min_lr_ratio is a share of optim.lr",
    "block_size": "data.sequence_length",
    "n_layer": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "n_embd": "model.hidden_size",
    "depth": "model.num_hidden_layers",
    "batch_size": "train.tokens_per_update is what an update sees, and train.micro_batch the rows at once",
    "device_batch_size": "train.micro_batch",
    "total_batch_size": "train.tokens_per_update",
    "enable_activation_checkpointing": "train.remat",
    "dtype": "train.precision",
    "epochs": "train.epochs",
    "steps": "train.updates",
    "lr": "optim.lr",
    "beta": "prefer.beta for preferences, or rl.kl_coef for rewards",
}

# Options that nothing here is called, and how the same is had.
OPTIONS: dict[str, str] = {
    "dry_run": "monograph plan says what a run would do, and trains nothing",
    "wandb": "monograph follow RUN --to wandb sends a run's numbers to a tracker",
    "tensorboard": "monograph follow RUN --to tensorboard sends a run's numbers to a tracker",
    "max_wall": "say --wall-minutes N",
    "max_time": "say --wall-minutes N",
    "time_limit": "say --wall-minutes N",
    "gpu": "say --device NAME to plan for another card",
    "gpus": "say torchrun --nproc-per-node N -m monograph train",
    "num_gpus": "say torchrun --nproc-per-node N -m monograph train",
    "nproc_per_node": "say torchrun --nproc-per-node N -m monograph train",
    "config": "a file of settings is named as it is: monograph train run.toml",
    "data": "texts are named as they are: monograph train my_texts/",
    "dataset": "texts are named as they are: monograph train my_texts/",
    "model": "train and plan take model.init=FOLDER, other commands the folder as it is",
    "seed": "say train.seed=N",
    "prompt": "the prompt is typed as it is: monograph generate last 'Once upon a time'",
    "precision": "say train.precision=bf16",
}

# Commands that nothing here is called, and the command that does the same.
COMMANDS: dict[str, str] = {
    "init": "monograph train --print-config > run.toml writes a commented file of settings",
    "config": "monograph keys explains settings, and monograph train --print-config prints all of them",
    "ls": "monograph runs lists runs",
    "list": "monograph runs lists runs",
    "pretrain": "monograph train does it",
    "finetune": "monograph train --recipe lora does it",
    "sft": "monograph train --recipe chats does it",
    "lora": "monograph train --recipe lora does it",
    "dpo": "monograph train --recipe dpo does it",
    "grpo": "monograph train --recipe rewards does it",
    "rl": "monograph train --recipe rewards does it",
    "resume": "monograph train --resume RUN does it",
    "tune": "monograph sweep does it",
    "search": "monograph sweep does it",
    "eval": "monograph evaluate does it",
    "test": "monograph evaluate does it",
    "infer": "monograph generate does it",
    "inference": "monograph generate does it",
    "predict": "monograph generate does it",
    "sample": "monograph generate does it",
    "convert": "monograph export does it",
    "merge": "monograph export does it",
    "quantize": "monograph export does it",
    "push": "monograph export RUN --to hf://OWNER/NAME does it",
    "upload": "monograph export RUN --to hf://OWNER/NAME does it",
    "download": "a name of the Hub is used as a folder is: model.init=hf://OWNER/NAME",
    "bench": "monograph profile says where the time goes",
    "benchmark": "monograph profile says where the time goes",
    "info": "monograph check looks at this machine",
    "doctor": "monograph check looks at this machine",
    "env": "monograph check looks at this machine",
    "tokenize": "monograph data build does it",
}


def as_here(name: str, keys: tuple[str, ...]) -> str:
    """Return the end of a message that says what a key from elsewhere is called here; "" if the name is unknown.

    The part after the last dot counts, so that `train.learning_rate` is found, too.
    """
    said = ELSEWHERE.get(name.rpartition(".")[2].lower())
    if said is None:
        return ""
    return f"; did you mean {said}?" if said in keys else f"; {said}"
