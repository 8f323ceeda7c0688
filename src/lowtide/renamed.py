"""Options that TRL and transformers had once, and what does the same now: for the message on an unknown option.

Older tutorials are full of them, and the nearest spelling would mislead (`rpo_alpha` is near to `ld_alpha`). Names that
are still accepted, such as `max_seq_length`, are not here.
"""

from __future__ import annotations

from typing import Any

NO_PADDING = "there is no padding: leave it out"
NO_LOGITS = "the head computes scored tokens alone: leave it out"
LENGTHS = "use `max_length`, `max_prompt_length` or `max_completion_length`"
REFERENCE = "pass the reference as `ref_model`; without one it is the policy as it arrived"
PACKING = "`packing=True` reads the whole dataset and fills bins of `max_length`: leave it out"
UDM = "BCO weighs all rows alike here: leave it out"
ONLINE = "it is of the methods whose policy writes completions (`lowtide grpo`, `rloo`, `online-dpo`, `ppo`)"
NOT_THERE = "transformers has removed it: leave it out"

REPLACED: dict[str, str] = {
    # preference methods
    "rpo_alpha": "use `loss_type=['sigmoid', 'sft']` with `loss_weights=[1.0, rpo_alpha]`",
    "reference_free": "use CPO with `cpo_alpha=0`, which has no reference (`lowtide cpo`, CPOConfig)",
    "label_pad_token_id": NO_PADDING,
    "padding_value": NO_PADDING,
    "padding_side": NO_PADDING,
    "is_encoder_decoder": "encoder-decoder models are not trained: take a causal one",
    "max_target_length": "use `max_completion_length`",
    "max_query_length": "use `max_prompt_length`",
    "generate_during_eval": "add a `LogCompletionsCallback(trainer)`",
    "use_num_logits_to_keep": NO_LOGITS,
    "use_logits_to_keep": NO_LOGITS,
    "base_model_attribute_name": NO_LOGITS,
    "model_adapter_name": "the active adapter is trained: call `model.set_adapter(name)` before",
    "ref_adapter_name": REFERENCE,
    "force_use_ref_model": REFERENCE,
    "ref_model_init_kwargs": "load the reference yourself and pass it as `ref_model`",
    "ref_model_name_or_path": "use `ref_model`",
    "tools": "tools are read from the rows' column `tools`",
    "prompt_sample_size": UDM,
    "min_density_ratio": UDM,
    "max_density_ratio": UDM,
    # supervised fine-tuning
    "seq_length": "use `max_length`",
    "max_seq_length": LENGTHS,
    "dataset_batch_size": "rows are prepared at the best size for it: leave it out",
    "dataset_map_num_proc": "use `dataset_num_proc`",
    "num_of_sequences": PACKING,
    "chars_per_token": PACKING,
    "infinite": "use `num_train_epochs` or `max_steps`",
    "use_liger": "use `use_liger_kernel`",
    "use_liger_loss": "the head is fused in any case: leave it out",
    # models and adapters
    "torch_dtype": "use `dtype`",
    "model_name": "use `model`",
    "peft_lora_r": "use `lora_r`",
    "peft_lora_alpha": "use `lora_alpha`",
    "use_flash_attention_2": "the attention without padding needs no option: leave it out",
    "bnb_4bit_quant_storage": "4-bit weights are packed into bytes: leave it out",
    "bnb_4bit_compute_dtype": "`bf16=True` computes 4-bit weights in bfloat16",
    "ignore_bias_buffers": "nothing is wrapped in DistributedDataParallel: leave it out",
    # data and running
    "streaming": "use `dataset_streaming`",
    "log_with": "use `report_to`",
    "batch_size": "use `per_device_train_batch_size`",
    "mini_batch_size": "use `per_device_train_batch_size`, or `tokens_per_microbatch`",
    "gradient_checkpointing_use_reentrant": 'use `gradient_checkpointing_kwargs={"use_reentrant": false}`',
    "num_generations": ONLINE,
    "use_vllm": ONLINE,
    "max_new_tokens": ONLINE,
    # transformers
    "evaluation_strategy": "use `eval_strategy`",
    "warmup_ratio": "use `warmup_steps` below 1, which is a share of all steps",
    "no_cuda": "use `use_cpu`",
    "use_mps_device": "the device is found: leave it out",
    "per_gpu_train_batch_size": "use `per_device_train_batch_size`",
    "per_gpu_eval_batch_size": "use `per_device_eval_batch_size`",
    "group_by_length": "use `train_sampling_strategy='group_by_length'`; without padding it saves nothing",
    "adafactor": "use `optim='adafactor'`",
    "push_to_hub_token": "use `hub_token`",
    "push_to_hub_model_id": "use `hub_model_id`",
    "push_to_hub_organization": "use `hub_model_id='organization/name'`",
    "overwrite_output_dir": "a run overwrites what it finds unless `resume_from_checkpoint` is set: leave it out",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "save_safetensors": "weights are always saved as safetensors: leave it out",
    "include_inputs_for_metrics": "`compute_metrics` gets log-probs and token ids: leave it out",
    "half_precision_backend": NOT_THERE,
    "fp16_backend": NOT_THERE,
    "fp16_opt_level": NOT_THERE,
    "past_index": NOT_THERE,
    "jit_mode_eval": NOT_THERE,
    "use_ipex": NOT_THERE,
    "ray_scope": NOT_THERE,
    "tpu_num_cores": NOT_THERE,
    "tpu_metrics_debug": NOT_THERE,
    "mp_parameters": NOT_THERE,
    "torchdynamo": "use `torch_compile`",
    "xpu_backend": "use `ddp_backend`",
}


def replaced(name: str) -> str:
    """`: TRL's older name; ...`, what to use instead of an option that is gone; empty if there is nothing to say."""
    return f", an option of older versions: {REPLACED[name]}" if name in REPLACED else ""


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing: it is None, false or 0."""
    return value is None or (isinstance(value, bool | int | float) and not value)
