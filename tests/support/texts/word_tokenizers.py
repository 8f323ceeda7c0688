"""Small tokenizers of every form, which differ in what they do about spaces, trained on the texts of a test."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
FORMS = ("wordpiece", "byte-level", "digits apart", "metaspace", "unigram", "gemma", "cut nowhere")


def tokenizer_of(form: str, texts: Sequence[str], size: int = 120) -> PreTrainedTokenizerFast:
    """One that puts <s> and </s> around each text."""
    made, trainer = _untrained(form, size)
    made.train_from_iterator(texts, trainer)
    ends = [("<s>", SPECIAL.index("<s>")), ("</s>", SPECIAL.index("</s>"))]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    names = {
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "mask_token": "<mask>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def _untrained(form: str, size: int) -> tuple[Tokenizer, trainers.Trainer]:
    if form == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        return made, trainers.WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL)
    if form == "unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        return made, trainers.UnigramTrainer(vocab_size=size, special_tokens=SPECIAL, unk_token="<unk>")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if form in ("byte-level", "digits apart", "cut nowhere"):
        made = Tokenizer(models.BPE())
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=form == "byte-level")
        digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
        apart = form == "digits apart"
        made.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of]) if apart else bytes_of
        made.decoder = decoders.ByteLevel()
        return made, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if form == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    else:  # of Gemma: spaces are letters, and nothing is cut
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return made, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL)
