"""TRL's public names that are not in lowtide, and what to use instead. `from lowtide import NAME` raises with this."""

from __future__ import annotations

NOT_YET = "trains by a method that lowtide does not have yet: keep TRL's"
SERVER = "is DistillationTrainer here: its DistillationConfig takes teacher_model_server_url, loss_top_k and the others"
VISION = "is of models that make images, and lowtide trains those that write: keep TRL's"
JUDGE = (
    "judges completions with another model: derive from BasePairwiseJudge, and pass that as OnlineDPOTrainer's judge"
)
VALUE_HEAD = "was for the older PPOTrainer: this one puts a value head on any language model by itself"
SPEC = "is TRL's: import it from trl.experimental.harbor or .openreward, and give GRPOTrainer its three properties"

ELSEWHERE: dict[str, str] = {
    **{f"{method}{kind}": NOT_YET for method in ("XPO", "NashMD") for kind in ("Config", "Trainer")},
    **dict.fromkeys(("ServerDistillationConfig", "ServerDistillationTrainer"), SERVER),
    **dict.fromkeys(
        ("AsyncDistillationConfig", "AsyncDistillationTrainer"),
        "writes beside training: take DistillationConfig and DistillationTrainer",
    ),
    **dict.fromkeys(
        ("AutoModelForCausalLMWithValueHead", "AutoModelForSeq2SeqLMWithValueHead", "PreTrainedModelWrapper"),
        VALUE_HEAD,
    ),
    **dict.fromkeys(
        (
            *("BaseJudge", "BaseBinaryJudge", "BaseRankJudge", "AllTrueJudge", "HfPairwiseJudge"),
            *("OpenAIPairwiseJudge", "PairRMJudge"),
        ),
        JUDGE,
    ),
    **dict.fromkeys(("HarborSpec", "HarborEnv", "HarborBashEnv", "OpenRewardSpec"), SPEC),
    "add_fused_lm_head": "is not needed: the head of every trainer is fused",
    "ConstantLengthDataset": "was removed from TRL: SFTConfig(packing=True) packs, pack_dataset packs by hand",
    "IterativeSFTConfig": "was removed from TRL: SFTTrainer trains on one dataset after the other",
    "IterativeSFTTrainer": "was removed from TRL: SFTTrainer trains on one dataset after the other",
    **dict.fromkeys(("SFTScriptArguments", "DPOScriptArguments"), "is called ScriptArguments by now"),
    **dict.fromkeys(
        ("DPODataCollatorWithPadding", "RewardDataCollatorWithPadding"),
        "was removed from TRL: leave data_collator out, and the method's own is used",
    ),
    "get_formatting_func_from_dataset": "is not needed: the form of rows is found by their columns",
    "disable_dropout_in_model": "is an option by now: disable_dropout=True",
    "prepare_model_for_kbit_training": "is PEFT's, and not needed: a trainer prepares quantized models by itself",
    "peft_module_casting_to_bf16": "is not needed: adapters stay in float32, and bf16=True computes in bfloat16",
    "set_seed": "is transformers': from transformers import set_seed",
    "AlignPropConfig": VISION,
    "AlignPropTrainer": VISION,
    "DDPOConfig": VISION,
    "DDPOTrainer": VISION,
}
