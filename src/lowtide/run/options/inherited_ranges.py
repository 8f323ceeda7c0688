"""The ranges of the numbers among the options of `transformers.TrainingArguments`, which checks few of them.

From its documentation and from what its code does with them; `tests/run/options/test_option_ranges.py` goes through its
fields, so that a number that a newer version adds is noticed.
"""

from __future__ import annotations

from lowtide.option import COUNT, NOT_NEGATIVE, SHARE, Range

STEPS = Range(least=0, note="a number of steps or, below 1, a share of all steps")
DECAY = Range(least=0, below=1)
SEED = Range(least=0, most=2**32 - 1, note="what numpy's generator takes")

INHERITED_RANGES: dict[str, Range] = {
    # batches and length
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "num_train_epochs": Range(above=0, most=10**9),
    "max_steps": Range(least=1, also=-1, note="-1 trains for num_train_epochs"),
    # optimizer and schedule
    "learning_rate": NOT_NEGATIVE,
    "warmup_steps": STEPS,
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": DECAY,
    "adam_beta2": DECAY,
    "adam_epsilon": NOT_NEGATIVE,
    "max_grad_norm": Range(least=0, note="0 trains without clipping"),
    "label_smoothing_factor": SHARE,
    "neftune_noise_alpha": NOT_NEGATIVE,
    # logging, evaluation and saving
    "logging_steps": STEPS,
    "eval_steps": STEPS,
    "eval_delay": NOT_NEGATIVE,
    "eval_accumulation_steps": COUNT,
    "save_steps": STEPS,
    "save_total_limit": Range(least=1, note="None keeps all checkpoints"),
    # the machine
    "seed": SEED,
    "data_seed": SEED,
    "torch_empty_cache_steps": COUNT,
    "dataloader_num_workers": Range(least=0, most=1024, note="each is a process"),
    "dataloader_prefetch_factor": COUNT,
    "ddp_bucket_cap_mb": COUNT,
    "ddp_timeout": Range(least=1, most=10**9, note="in seconds"),
    "local_rank": Range(least=-1),
}
"""By name of the field."""
