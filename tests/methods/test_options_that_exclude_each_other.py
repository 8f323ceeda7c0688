"""Options that exclude each other are refused by name, and the nearest values that do not are taken."""

from __future__ import annotations

from typing import Any

import pytest

import lowtide

BASE: dict[str, Any] = {"report_to": "none", "use_cpu": True, "per_device_train_batch_size": 8}
TRUNCATED = {"use_vllm": True, "vllm_importance_sampling_clip_max": None}
LLAMA = {"model_type": "llama"}
CONFIGS = {name.removesuffix("Config"): getattr(lowtide, name) for name in lowtide.__all__ if name.endswith("Config")}
CASES: list[tuple[str, dict[str, Any], dict[str, Any] | None, str]] = [
    ("CPO", {"beta": 0.0, "loss_type": "ipo"}, {"beta": 0.0, "loss_type": "hinge"}, "beta=0 must be above 0"),
    ("CPO", {"beta": 0.0, "loss_type": "simpo"}, {"beta": 0.1, "loss_type": "simpo"}, "beta=0 must be above 0"),
    ("DPO", {"loss_type": []}, {"loss_type": ["ipo"]}, "loss_type is empty"),
    ("DPO", {"loss_weights": [1.0, 2.0]}, {"loss_weights": [2.0]}, "2 weights for the 1 losses"),
    (
        "DPO",
        {"loss_type": "robust", "label_smoothing": 0.5},
        {"loss_type": "robust", "label_smoothing": 0.49},
        "label_smoothing=0.5 must be below 0.5",
    ),
    (
        "DPO",
        {"loss_type": "exo_pair"},
        {"loss_type": "exo_pair", "label_smoothing": 0.001},
        "label_smoothing=0.0 must lie between 0 and 1",
    ),
    (
        "DPO",
        {"loss_type": "aot_unpaired", "use_weighting": True},
        {"loss_type": "hinge", "use_weighting": True},
        "which aot_unpaired has not",
    ),
    (
        "DPO",
        {"loss_type": "apo_zero", "label_smoothing": 0.1},
        {"loss_type": ["apo_zero", "robust"], "label_smoothing": 0.1},
        "label_smoothing=0.1 would have no effect",
    ),
    (
        "DPO",
        {"sync_ref_model": True, "precompute_ref_log_probs": True},
        {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 2},
        "set one of them back",
    ),
    ("DPO", {"precompute_ref_batch_size": 2}, None, "requires precompute_ref_log_probs=True"),
    (
        "MaskedLM",
        {"mask_replace_prob": 0.7, "random_replace_prob": 0.31},
        {"mask_replace_prob": 0.7, "random_replace_prob": 0.3},
        "come to more than 1",
    ),
    ("MaskedLM", {"max_span_length": 4}, {"max_span_length": 4, "masking": "spans"}, "requires masking='spans'"),
    ("MaskedLM", {"masking": "ngrams", "span_geometric_p": 0.3}, {"span_geometric_p": 0.2}, "requires masking='spans'"),
    ("Pretrain", {"config_name": "a", **LLAMA}, {"config_name": "a"}, "both say which model begins"),
    (
        "Pretrain",
        {"tokenizer_name": "a", "train_tokenizer": 300, **LLAMA},
        {"tokenizer_name": "a", **LLAMA},
        "both say which tokenizer",
    ),
    ("Pretrain", {"train_tokenizer": 300}, {"train_tokenizer": 300, **LLAMA}, "begins with random weights"),
    ("Pretrain", {"max_tokens": 64, "packing": False}, {"packing": False}, "max_tokens=64 counts full rows"),
    ("Seq2Seq", {"source_lang": "en"}, {"source_lang": "en", "target_lang": "de"}, "requires target_lang"),
    (
        "Seq2Seq",
        {"generation_num_beams": 2},
        {"generation_num_beams": 2, "predict_with_generate": True},
        "requires predict_with_generate=True",
    ),
    ("SequenceClassification", {"class_names": ["a", "a"]}, {"class_names": ["a", "b"]}, "name each label once"),
    ("SequenceClassification", {"class_weights": [0.0, 0.0]}, {"class_weights": [0.0, 1.0]}, "are all 0"),
    (
        "SequenceClassification",
        {"problem_type": "regression", "class_weights": [1.0, 2.0]},
        {"problem_type": "regression"},
        "class_weights is of classes",
    ),
    (
        "SequenceClassification",
        {"problem_type": "multi_label_classification", "label_smoothing_factor": 0.1},
        {"problem_type": "single_label_classification", "label_smoothing_factor": 0.1},
        "smooths the choice of one class",
    ),
    (
        "SequenceClassification",
        {"max_length": 60, "max_seq_length": 70},
        {"max_seq_length": 70},
        "contradict each other",
    ),
    ("TokenClassification", {"max_length": 513, "max_seq_length": 70}, {"max_length": 512}, "contradict each other"),
    ("TokenClassification", {"class_weights": [-1.0]}, {"class_weights": [0, 2]}, "weights are numbers, 0 or above"),
    ("GRPO", {"num_generations": 1}, {"num_generations": 2}, "num_generations=1 leaves"),
    ("GRPO", {"temperature": 0.0}, {"temperature": 0.1}, "temperature=0 writes the likeliest token"),
    (
        "GRPO",
        {"entropy_coef_min": 0.2, "entropy_coef_max": 0.1},
        {"entropy_coef_min": 0.1, "entropy_coef_max": 0.1},
        "is above entropy_coef_max=0.1",
    ),
    (
        "GRPO",
        {"vllm_importance_sampling_clip_min": 2.0, "vllm_importance_sampling_clip_max": 2.0},
        {"vllm_importance_sampling_clip_min": 1.0, "vllm_importance_sampling_clip_max": 2.0},
        "must be below vllm_importance_sampling_clip_max=2.0",
    ),
    (
        "GRPO",
        {**TRUNCATED, "vllm_importance_sampling_mode": "token_truncate"},
        {**TRUNCATED, "vllm_importance_sampling_mode": "token_mask"},
        "and has none",
    ),
    (
        "GRPO",
        {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
        {"use_vllm": True, "loss_type": "dapo", "vllm_importance_sampling_mode": "sequence_mask"},
        "does not go with loss_type='vespo'",
    ),
    ("GRPO", {"sync_ref_model": True, "beta": 0.0}, {"sync_ref_model": True, "beta": 0.1}, "beta=0 has none"),
    ("RLOO", {"num_generations": 1}, {"num_generations": 2}, "num_generations=1 leaves"),
    ("RLOO", {"reward_clip_range": [1.0, 0.5]}, {"reward_clip_range": [0.5, 0.5]}, "must be .least, most."),
    ("RLOO", {"reward_clip_range": [1.0]}, {"reward_clip_range": [-1.0, 1.0]}, "must be .least, most."),
    ("RLOO", {"vllm_importance_sampling_correction": True}, {}, "is GRPO's"),
    ("OnlineDPO", {"beta": []}, {"beta": [0.1, 0.2]}, "beta is an empty list"),
    ("OnlineDPO", {"num_generations_eval": 4}, {"num_generations_eval": 2}, "must be 2"),
    (
        "OnlineDPO",
        {"max_length": 8, "max_completion_length": 8},
        {"max_length": 8, "max_completion_length": 7},
        "leaves no token of a prompt",
    ),
    ("OnlineDPO", {"max_new_tokens": 8, "max_completion_length": 9}, {"max_new_tokens": 8}, "an older name"),
    (
        "PPO",
        {"num_iterations": 3, "num_ppo_epochs": 2},
        {"num_iterations": 2, "num_ppo_epochs": 2},
        "is called num_ppo_epochs",
    ),
    ("PPO", {"stop_token": "eos", "stop_token_id": 3}, {"stop_token_id": 3}, "set one of them"),
]


@pytest.mark.parametrize(
    ("method", "refused", "taken", "match"),
    [pytest.param(*case, id=f"{case[0]}: {case[3]}") for case in CASES],
)
def test_options_that_exclude_each_other_are_refused(method, refused, taken, match, tmp_path):
    config = CONFIGS[method]
    with pytest.raises(ValueError, match=match):
        config(str(tmp_path), **BASE, **refused)
    if taken is not None:
        config(str(tmp_path), **BASE, **taken)
