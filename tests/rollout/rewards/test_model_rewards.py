"""Reward models: on the ragged engine, with the numbers of their own padded forward and of TRL."""

import logging
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from lowtide import RewardConfig, RewardTrainer
from lowtide.ragged import RaggedBatch
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.models import (
    Group,
    ModelReward,
    RewardModelOptions,
    group_by_prompt,
    lay_groups,
    load_reward_model,
)
from lowtide.rollout.rewards.rewards import Rewards
from tests.support.models.classifiers import SIZES, classifier
from tests.support.texts.byte_tokenizer import byte_tokenizer
from tests.support.texts.chatml import CHATML

TEXTS = [("What is 2 + 2?", [" 4", " It is 5, as I see it.", " four"]), ("Why?", [" Because.", " Who knows", " ."])]


def completed(chat: bool = False) -> Completed:
    prompts = [prompt for prompt, answers in TEXTS for _ in answers]
    answers = [answer for _, answers in TEXTS for answer in answers]
    tokenizer = byte_tokenizer()
    ids = {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": tokenizer(answers)["input_ids"]}
    if chat:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
        answers = [[{"role": "assistant", "content": answer}] for answer in answers]
    return Completed(prompts, answers, **ids)


def of_trl(model, tokenizer, what: Completed) -> torch.Tensor:
    """TRL's own rewards, from the model's own padded forward."""
    pytest.importorskip("trl")
    from trl.trainer.grpo_trainer import GRPOTrainer

    class Trainer(GRPOTrainer):
        def __init__(self):
            self.accelerator = SimpleNamespace(device="cpu", gather=lambda each: each, is_main_process=False)
            self.args = SimpleNamespace(report_to=[])
            self.reward_funcs, self.reward_processing_classes = [model], [tokenizer]
            self.reward_func_names, self.environments, self.chat_template_kwargs = ["model"], None, {}
            self.state = SimpleNamespace(global_step=0)
            self._prepare_inputs = None

    prepare = "trl.trainer.grpo_trainer._BaseTrainer._prepare_inputs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, lambda self, inputs: inputs)
        rows = [{"prompt": prompt} for prompt in what.prompts]
        calculate = GRPOTrainer._calculate_rewards.__wrapped__
        return calculate(Trainer(), rows, list(what.prompts), list(what.completions), what.completion_ids)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "bert"])
@pytest.mark.parametrize("chat", [False, True])
def test_the_numbers_are_trl_s(model_type, chat):
    tokenizer = byte_tokenizer(CHATML)
    model = classifier(model_type, pad_token_id=0)
    ours = ModelReward(classifier(model_type, pad_token_id=0), tokenizer, "judge", RewardModelOptions())
    found = ours(completed(chat))
    assert ours.padding_free == (model_type != "bert")
    torch.testing.assert_close(found[:, None], of_trl(model, tokenizer, completed(chat)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"tokens_per_microbatch": 1},
        {"tokens_per_microbatch": 40},
        {"prefix_sharing": False, "tokens_per_microbatch": 60},
        {"padding_free": False},
        {"padding_free": False, "tokens_per_microbatch": 50},
    ],
)
def test_neither_micro_batches_nor_sharing_change_the_numbers(options):
    plain = ModelReward(classifier(), byte_tokenizer(), "judge", RewardModelOptions())(completed())
    found = ModelReward(classifier(), byte_tokenizer(), "judge", RewardModelOptions(**options))(completed())
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)


def test_what_completions_begin_with_is_computed_once(monkeypatch):
    seen: list[RaggedBatch] = []
    from lowtide.rollout.rewards import models

    def watch(model, batch, *args, **options):
        seen.append(batch)
        return score_shared(model, batch, *args, **options)

    score_shared = models.score_shared
    monkeypatch.setattr(models, "score_shared", watch)
    ModelReward(classifier(), byte_tokenizer(), "judge", RewardModelOptions())(completed())
    [batch] = seen
    answers = sum(len(answer) - 1 for _, answers in TEXTS for answer in answers)  # all begin with a space
    assert batch.tokens == sum(len(prompt) + 1 for prompt, _ in TEXTS) + answers


def test_tokens_of_the_rollout_are_read_where_that_is_asked():
    tokenizer = byte_tokenizer(pad="<|im_start|>")
    texts = completed()
    ended = Completed(
        texts.prompts, texts.completions, [[*ids, 0] for ids in texts.completion_ids], prompt_ids=texts.prompt_ids
    )
    options = RewardModelOptions(inputs="ids", policy_tokenizer=byte_tokenizer(pad="<|im_start|>"))
    found = ModelReward(classifier(), tokenizer, "judge", options)(ended)
    longer = Completed(texts.prompts, [f"{each}<eos>" for each in texts.completions], ended.completion_ids)
    wanted = ModelReward(classifier(), tokenizer, "judge", RewardModelOptions())(longer)
    torch.testing.assert_close(found, wanted)
    other = RewardModelOptions(inputs="ids", policy_tokenizer=byte_tokenizer(CHATML))
    as_text = ModelReward(classifier(), tokenizer, "judge", other)(ended)
    plain = ModelReward(classifier(), tokenizer, "judge", RewardModelOptions())(texts)
    torch.testing.assert_close(as_text, plain)


def test_a_model_by_its_folder_beside_a_function(tmp_path):
    model, tokenizer = classifier(), byte_tokenizer(CHATML)
    model.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    rewards = Rewards([lambda completions: [1.0] * 6, str(tmp_path / "judge")], weights=[1, 0.5])
    assert rewards.names == ["<lambda>", "judge"]
    found = rewards(completed(chat=True))
    wanted = ModelReward(model, tokenizer, "judge", RewardModelOptions())(completed(chat=True))
    torch.testing.assert_close(found[:, 1], wanted, check_dtype=False)
    assert found[:, 0].tolist() == [1.0] * 6


def test_a_language_model_is_no_reward_model(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {name: size for name, size in SIZES.items() if name != "num_labels"}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(tmp_path / "policy")
    byte_tokenizer().save_pretrained(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"score\.weight"):
        Rewards(str(tmp_path / "policy"))


def test_bad_models_and_texts():
    with pytest.raises(ValueError, match="gives 2 numbers"):
        Rewards(classifier(num_labels=2), processing_classes=byte_tokenizer())
    with pytest.raises(ValueError, match="ids up to 258"):
        Rewards(classifier(vocab_size=100), processing_classes=byte_tokenizer())
    with pytest.raises(ValueError, match="neither a padding nor an end token"):
        Rewards(classifier(), processing_classes=byte_tokenizer(eos=None))
    with pytest.raises(ValueError, match="no tokenizer at"):
        Rewards(classifier())
    rewards = Rewards(classifier(), processing_classes=byte_tokenizer())
    with pytest.raises(ValueError, match="no token to read for completion 1 "):
        rewards(Completed(["a", ""], ["b", ""], [[1], [1]]))
    broken = classifier()
    torch.nn.init.constant_(broken.score.weight, torch.nan)
    with pytest.raises(ValueError, match="gives nan for completion 0"):
        Rewards(broken, processing_classes=byte_tokenizer(), models=RewardModelOptions(padding_free=False))(completed())
    with pytest.raises(ValueError, match="policy_tokenizer"):
        RewardModelOptions(inputs="ids")
    with pytest.raises(ValueError, match="'tokens'"):
        RewardModelOptions(inputs="tokens")


def test_a_model_that_lets_segments_see_each_other_runs_padded(monkeypatch, caplog):
    from lowtide.rollout.rewards import models

    real = models.probe
    monkeypatch.setattr(models, "probe", lambda model: SimpleNamespace(**{**vars(real(model)), "isolated": False}))
    with caplog.at_level(logging.WARNING):
        found = ModelReward(classifier(), byte_tokenizer(), "judge", RewardModelOptions())(completed())
    assert "runs padded" in caplog.text
    monkeypatch.undo()
    wanted = ModelReward(classifier(), byte_tokenizer(), "judge", RewardModelOptions())(completed())
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_groups_keep_a_token_each():
    ids = [[1, 2, 3], [1, 2], [1, 2, 3, 4], [5], [5]]
    groups = group_by_prompt(["a", "a", "a", "b", "b"], ids)
    assert groups == [Group([1], [[2, 3], [2], [2, 3, 4]], [0, 1, 2]), Group([], [[5], [5]], [3, 4])]
    batch = lay_groups(groups, pad_id=None)
    assert batch.scores == 5
    assert batch.token_ids.tolist() == [1, 2, 3, 2, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("padding_free", [True, False])
def test_an_exhausted_memory_halves_the_micro_batches(padding_free, caplog):
    options = RewardModelOptions(tokens_per_microbatch=200, padding_free=padding_free)
    wanted = ModelReward(classifier(), byte_tokenizer(), "judge", options)(completed())
    scorer = ModelReward(classifier(), byte_tokenizer(), "judge", options)
    assert scorer.padding_free == padding_free
    sizes = []

    def limit(module, inputs):
        sizes.append(inputs[0].numel())
        if sizes[-1] > 60:
            raise torch.OutOfMemoryError("out of memory")

    scorer.model.get_input_embeddings().register_forward_pre_hook(limit)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(scorer(completed()), wanted, atol=1e-5, rtol=1e-5)
    assert max(sizes) > 60
    assert "now 100 tokens a micro-batch" in caplog.text
    before = len(sizes)
    scorer(completed())
    assert max(sizes[before:]) <= 60  # the smaller ones are kept


def test_a_text_that_alone_exhausts_memory_stops():
    scorer = ModelReward(classifier(), byte_tokenizer(), "judge", RewardModelOptions())
    assert scorer.padding_free

    def full(module, inputs):
        raise torch.OutOfMemoryError("out of memory")

    scorer.model.get_input_embeddings().register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        scorer(completed())


@pytest.mark.parametrize("padding_free", [True, False])
def test_mixed_precision(padding_free):
    tokenizer = byte_tokenizer(pad="<eos>")
    options = RewardModelOptions(computed_in=torch.bfloat16, padding_free=padding_free)
    found = ModelReward(classifier(), tokenizer, "judge", options)(completed())
    model = classifier(pad_token_id=0)
    texts = [prompt + answer for prompt, answers in TEXTS for answer in answers]
    inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mixed = model(**inputs).logits[:, 0].float()
    with torch.no_grad():
        full = model(**inputs).logits[:, 0]
    assert (found - mixed).abs().max() < 0.05 * full.abs().max()
    assert not torch.equal(found, full)


@pytest.mark.parametrize("padding_free", [True, False])
def test_end_tokens_that_are_padding_are_passed_over(padding_free):
    tokenizer = byte_tokenizer(pad="<eos>")
    prompt, answers = [50, 51, 52], [[0], [60, 0], [60, 61], [0, 60, 0, 0]]
    options = RewardModelOptions(inputs="ids", policy_tokenizer=tokenizer, padding_free=padding_free)
    what = Completed(["p"] * 4, ["c"] * 4, answers, prompt_ids=[prompt] * 4)
    found = ModelReward(classifier(), tokenizer, "judge", options)(what)
    model = classifier()
    model.config.pad_token_id = 0
    with torch.no_grad():
        dense = [model(input_ids=torch.tensor([prompt + answer])).logits[0, 0] for answer in answers]
    torch.testing.assert_close(found, torch.stack(dense), atol=1e-5, rtol=1e-5)


MOODY = (
    "{% for message in messages %}{{ message['content'] }}{% if mood is defined %} [{{ mood }}]{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kwargs", [{}, {"mood": "glad"}, {"mood": "a much longer mood"}])
def test_the_chat_template_of_a_reward_model_is_given_its_keywords(kwargs):
    tokenizer, said = byte_tokenizer(MOODY), f" [{kwargs['mood']}]" if kwargs else ""
    options = RewardModelOptions(chat_template_kwargs=kwargs)
    found = ModelReward(classifier(), tokenizer, "judge", options)(completed(chat=True))
    plain = completed()
    written = Completed(
        [f"{prompt}{said}" for prompt in plain.prompts], [f"{each}{said}" for each in plain.completions], None
    )
    wanted = ModelReward(classifier(), tokenizer, "judge", RewardModelOptions())(written)
    torch.testing.assert_close(found, wanted)


def test_a_hostile_chat_template_of_a_reward_model_is_refused_with_the_row():
    reward = ModelReward(classifier(), byte_tokenizer("{{ 'x'.center(10**10) }}"), "judge", RewardModelOptions())
    with pytest.raises(ValueError, match=r"chat template of reward model 'judge' cannot render .*`center`"):
        reward(completed(chat=True))


@pytest.mark.slow
def test_a_model_is_read_at_the_tokens_at_which_it_was_trained(tmp_path):
    """A template writes a line break behind the stop token, at which training with whole conversations reads."""
    tokenizer, what = byte_tokenizer(CHATML, eos="<|im_end|>", pad="<eos>"), completed(chat=True)
    sides = zip(what.prompts, what.completions, strict=True)
    rows = [{"prompt": p, "chosen": c, "rejected": [{"role": "assistant", "content": "Else"}]} for p, c in sides]
    read = {}
    for turns in ("as_generated", "whole"):
        args = RewardConfig(
            str(tmp_path), turns=turns, use_cpu=True, bf16=False, report_to="none", max_steps=1, disable_tqdm=True
        )
        trainer = RewardTrainer(classifier(), args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        trainer.save_model(str(tmp_path / turns))
        model, own = load_reward_model(str(tmp_path / turns), RewardModelOptions())
        found = ModelReward(model, own, "judge", RewardModelOptions())(what)
        with torch.no_grad():
            ids = [row["prompt_ids"] + row["chosen_ids"] for row in trainer.train_dataset]
            read[turns] = torch.stack([model(input_ids=torch.tensor([each])).logits[0, 0] for each in ids])
        torch.testing.assert_close(found, read[turns], atol=1e-5, rtol=1e-5)
    assert (read["as_generated"] - read["whole"]).abs().min() > 1e-4
    model.config.lowtide_turns = {"turns": "as_generated", "stop_ids": ["<|im_end|>", None], "thought_end": 3}
    broken = ModelReward(model, own, "judge", RewardModelOptions())(what)  # what the config says is not trusted
    torch.testing.assert_close(broken, read["as_generated"], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_adapters_are_read_at_the_tokens_at_which_they_were_trained(tmp_path):
    tokenizer, what = byte_tokenizer(CHATML, eos="<|im_end|>", pad="<eos>"), completed(chat=True)
    base = str(tmp_path / "base")
    classifier().save_pretrained(base)
    sides = zip(what.prompts, what.completions, strict=True)
    rows = [{"prompt": p, "chosen": c, "rejected": [{"role": "assistant", "content": "Else"}]} for p, c in sides]
    args = RewardConfig(
        str(tmp_path), learning_rate=0.1, use_cpu=True, bf16=False, report_to="none", max_steps=2, disable_tqdm=True
    )
    trainer = RewardTrainer(
        *(base, args),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "adapters"))
    model, own = load_reward_model(str(tmp_path / "adapters"), RewardModelOptions())
    assert model.config.lowtide_turns["turns"] == "as_generated"
    found = ModelReward(model, own, "judge", RewardModelOptions())(what)
    with torch.no_grad():
        ids = [row["prompt_ids"] + row["chosen_ids"] for row in trainer.train_dataset]
        read = torch.stack([trainer.model(input_ids=torch.tensor([each])).logits[0, 0] for each in ids])
    torch.testing.assert_close(found, read, atol=1e-5, rtol=1e-5)
    del model.config.lowtide_turns
    later = ModelReward(model, own, "judge", RewardModelOptions())(what)
    assert (later - read).abs().min() > 1e-4


THINKING = (
    "{% for message in messages %}{{ message.thinking }}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ '[' + call.function.arguments + ']' }}{% endfor %}{% endfor %}"
)
"""It takes arguments as texts, and thoughts under a name of its own."""


def test_messages_come_in_the_form_that_the_template_takes():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}  # b is Arrow's
    answer = {"role": "assistant", "content": "So.", "reasoning_content": "Well. ", "tool_calls": [call]}
    asked = [{"role": "user", "content": "?", "tool_calls": None}]
    found = ModelReward(classifier(), byte_tokenizer(THINKING), "judge", RewardModelOptions())(
        Completed([asked], [[answer]], None)
    )
    wanted = ModelReward(classifier(), byte_tokenizer(CHATML), "judge", RewardModelOptions())(
        Completed(["?Well. So."], ['[{"a": 1}]'], None)
    )
    torch.testing.assert_close(found, wanted)
