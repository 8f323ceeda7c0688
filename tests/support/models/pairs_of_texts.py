"""Sources and targets of generated words, a tokenizer of these, and small encoder-decoders of several families."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerFast

from lowtide import Seq2SeqConfig, Seq2SeqTrainer
from tests.support.runs.on_a_cpu import ON_A_CPU

SPECIAL = ["<pad>", "</s>", "<unk>", "en_XX", "de_DE"]
WORDS = [f"w{number}" for number in range(40)]
PAD, END, UNKNOWN = range(3)
OF_BART: dict[str, Any] = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
    **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    **{"bos_token_id": END, "decoder_start_token_id": END, "forced_eos_token_id": None},
}
OF_T5: dict[str, Any] = {
    **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": PAD},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bart": OF_BART,
    "mbart": {**OF_BART, "scale_embedding": True},
    "marian": OF_BART,
    "pegasus": OF_BART,
    "t5": OF_T5,
    "mt5": {**OF_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    **ON_A_CPU,
    "rehearsal": False,
    "gradient_checkpointing": False,
}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Words, and the end token behind them."""
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


class Multilingual(PreTrainedTokenizerFast):
    """As mBART's: a source ends with its language, a target begins with it."""

    src_lang, tgt_lang = "en_XX", "en_XX"

    def __call__(self, text: Any = None, text_target: Any = None, **options: Any) -> Any:
        language = self.get_vocab()[self.src_lang if text_target is None else self.tgt_lang]
        found = super().__call__(text if text_target is None else text_target, **options)
        lists = found["input_ids"] if isinstance(found["input_ids"][0], list) else [found["input_ids"]]
        made = [[*each, language] if text_target is None else [language, *each] for each in lists]
        found["input_ids"] = made if isinstance(found["input_ids"][0], list) else made[0]
        return found


def multilingual() -> Multilingual:
    """The same words, with tokens for languages."""
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    languages = ["en_XX", "de_DE"]
    return Multilingual(tokenizer_object=tokenizer().backend_tokenizer, additional_special_tokens=languages, **names)


def rows(count: int, longest: int = 20, seed: int = 0) -> Dataset:
    """Words, of which every second is the target; of very different lengths."""
    rng = random.Random(seed)
    texts = [[rng.choice(WORDS) for _ in range(rng.randint(2, longest))] for _ in range(count)]
    return Dataset.from_list([{"source": " ".join(words), "target": " ".join(words[::2])} for words in texts])


def tokenized(count: int, seed: int = 0) -> Dataset:
    """The same as `input_ids` and `labels`, as transformers' scripts have them."""
    texts = rows(count, seed=seed)
    made = tokenizer()
    pairs = zip(made(list(texts["source"]))["input_ids"], made(list(texts["target"]))["input_ids"], strict=True)
    return Dataset.from_list([{"input_ids": source, "labels": target} for source, target in pairs])


def build(family: str = "bart", **more: Any) -> PreTrainedModel:
    """Seeded weights, large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer()), "pad_token_id": PAD, "eos_token_id": END}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **{**ids, **FAMILIES[family], **more}))
    sinusoids = family in ("marian", "pegasus")
    for name, p in model.named_parameters():
        if p.ndim > 1 and not (sinusoids and "positions" in name):
            nn.init.normal_(p, std=0.1)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(std=0.3)
    return model


def make(folder: Any, train: Dataset, *, family: str = "bart", **options: Any) -> Seq2SeqTrainer:
    """A trainer; `options` are of the config, and the names of its arguments of the trainer."""
    names = ("eval_dataset", "peft_config", "data_collator", "processing_class", "model", "compute_metrics")
    arguments = {"processing_class": tokenizer(), **{name: options.pop(name) for name in names if name in options}}
    arguments.setdefault("model", None)
    if arguments["model"] is None:
        arguments["model"] = build(family)
    args = Seq2SeqConfig(output_dir=str(folder), **{**COMMON, **options})
    return Seq2SeqTrainer(args=args, train_dataset=train, **arguments)


def losses(trainer: Any) -> list[float]:
    """Of each step that was logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
