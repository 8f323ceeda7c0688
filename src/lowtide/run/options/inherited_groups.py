"""The options of `transformers.TrainingArguments` that `--help` lists, by group and in this order.

The others are accepted all the same; `--help` names them at its end.
"""

from __future__ import annotations

from lowtide.option import Group

TRAINING = """
learning_rate num_train_epochs per_device_train_batch_size gradient_accumulation_steps max_steps lr_scheduler_type
warmup_steps weight_decay max_grad_norm optim label_smoothing_factor seed
"""
MEMORY = "gradient_checkpointing bf16 fp16"
DEVICES = "fsdp parallelism_config"
SAVING = """
eval_strategy eval_steps per_device_eval_batch_size logging_steps report_to run_name save_strategy save_steps
save_total_limit push_to_hub hub_model_id
"""
INHERITED_GROUPS: dict[str, Group] = {
    **dict.fromkeys(TRAINING.split(), Group.TRAINING),
    **dict.fromkeys(MEMORY.split(), Group.MEMORY),
    **dict.fromkeys(DEVICES.split(), Group.DEVICES),
    **dict.fromkeys(SAVING.split(), Group.SAVING),
}
"""By name of the field."""
