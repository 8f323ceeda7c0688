"""Turns of a conversation whose template leaves out earlier thoughts: each is learned from in the context that it was
written in, and no token that was written is encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lowtide
from lowtide.engine.forward import install
from lowtide.engine.reference import logprobs
from lowtide.rollout.conversations import Conversations, ToolUse
from lowtide.rollout.generators.generator import Completion, Request, Restart
from lowtide.rollout.rollout import Rollout
from lowtide.rollout.turns import Turns
from tests.rollout.chat_templates import HERMES_TEMPLATE, add, call
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.runs.on_a_cpu import ON_A_CPU
from tests.support.texts.byte_tokenizer import SPECIAL, byte_tokenizer

BY_FIELD = HERMES_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message.reasoning_content and loop.last %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message['content'] }}",
)
"""Writes the thought of the last message alone."""
BY_TEXT = HERMES_TEMPLATE.replace("message['content']", "message['content'].split('</think>\n\n')[-1]")
"""Leaves out what stands before an answer in its text, as DeepSeek's."""
SCRIPT = [
    "<think>\nhm\n</think>\n\n" + call("add", a=2, b=2),
    "<think>\nso\n</think>\n\n" + call("add", a=4, b=1),
    "It is 5.",
]
ROWS: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": "2 + 2 + 1?"}]}]
MOST = 400


def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes, of which "It", "is" and "hm" are one token each where a text is encoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("I", "t"), ("i", "s"), ("h", "m"), ("a", "d"), ("ad", "d")]
    pieces = [*SPECIAL, *alphabet, *("".join(each) for each in merges)]
    made = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


class Scripted:
    """A generator whose policy writes turns in their order, a byte a token, the last one to each request another."""

    def __init__(self, turns: Sequence[str]) -> None:
        self.turns, self.bytes = turns, byte_tokenizer(eos="<|im_end|>")
        self.asked: list[Request] = []

    def generate(self, model: Any, requests: Sequence[Request], sampling: Any, reply: Any = None) -> list:
        return self(requests, reply)

    def __call__(self, requests: Sequence[Request], reply: Any) -> list[list[Completion]]:
        self.asked += requests
        return [[self._one(number, request, reply)] for number, request in enumerate(requests)]

    def _one(self, number: int, request: Request, reply: Any) -> Completion:
        shorter = {len(each.prompt_ids) for each in self.asked if len(each.prompt_ids) < len(request.prompt_ids)}
        written, turn = Completion(), len(shorter)  # the prompts of a conversation are ever longer
        while True:
            text = self.turns[turn].replace("is 5", f"is {5 + number}")
            said = [*self.bytes(text)["input_ids"], self.bytes.eos_token_id]
            said = said[: (request.most or MOST) - len(written.token_ids)]
            written.append(said, [-1.0] * len(said), [float("nan")] * len(said), written=True)
            written.finish = "stop"
            suffix = reply(number, 0, written)
            if suffix is None:
                return written
            written.append(suffix, [0.0] * len(suffix), [0.0] * len(suffix), written=False)
            turn += 1


def started(tokenizer: Any, rows: Any = None, most: int = MOST) -> Conversations:
    return ToolUse(Turns(tokenizer), tools=[add]).start(rows or ROWS, max_completion_length=most)


@pytest.mark.parametrize("make", [byte_tokenizer, merging_tokenizer])
@pytest.mark.parametrize("template", [BY_FIELD, BY_TEXT], ids=["by field", "by text"])
def test_each_turn_is_written_behind_what_the_template_writes(template: str, make: Any):
    tokenizer = byte_tokenizer(template, eos="<|im_end|>") if make is byte_tokenizer else make(template)
    conversations, policy = started(tokenizer), Scripted(SCRIPT)
    [completion] = conversations.write([7], policy)
    prompt, second, third = (list(each.prompt_ids) for each in policy.asked)
    assert "hm" not in tokenizer.decode(second)
    assert "so" not in tokenizer.decode(third)
    [one] = conversations.all
    assert [each["role"] for each in one.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert third[: len(second)] == second, "the template keeps the rest"
    assert tokenizer.decode(third).count("<tool_call>") == 2
    said = [[*policy.bytes(turn)["input_ids"], 2] for turn in SCRIPT]
    assert completion.token_ids == [token for turn in said for token in turn], "none was encoded again"
    assert completion.restarts == [Restart(len(said[0]), second), Restart(len(said[0] + said[1]), third)]
    assert prompt == one.prompt_ids
    assert len({each.seed for each in policy.asked}) == 3
    assert completion.written == [True] * len(completion.token_ids)
    if make is merging_tokenizer:
        assert tokenizer(tokenizer.decode(said[2]))["input_ids"] != said[2]


@pytest.mark.parametrize("script", [SCRIPT, [SCRIPT[0].split("\n\n")[1], "It is 4."]], ids=["thoughts", "none"])
def test_what_a_template_keeps_goes_on_as_it_was_written(script: list[str]):
    template = BY_FIELD.replace(" and loop.last", "") if script is SCRIPT else BY_FIELD
    tokenizer, policy = merging_tokenizer(template), Scripted(script)
    [completion] = started(tokenizer).write([7], policy)
    assert len(policy.asked) == 1
    assert not completion.restarts
    runs, start = [], 0
    for place in range(1, len(completion.written) + 1):
        if place == len(completion.written) or completion.written[place] != completion.written[start]:
            runs.append((completion.written[start], completion.token_ids[start:place]))
            start = place
    assert [ids for own, ids in runs if own] == [[*policy.bytes(turn)["input_ids"], 2] for turn in script]


def test_what_does_not_fit_is_not_asked_for():
    policy = Scripted(SCRIPT)
    first = len(policy.bytes(SCRIPT[0])["input_ids"]) + 1
    conversations = started(merging_tokenizer(BY_FIELD), most=first + 5)
    [completion] = conversations.write([7], policy)
    assert len(policy.asked) == 1
    assert len(conversations.all[0].messages) == 1
    policy = Scripted(SCRIPT)
    [completion] = started(merging_tokenizer(BY_FIELD), most=first + 120).write([7], policy)
    assert policy.asked[1].most is not None
    assert 0 < policy.asked[1].most < 120
    assert len(completion.token_ids) <= first + 120


def test_others_do_not_wait_for_a_rank_that_is_done():
    told: list[bool] = []
    policy = Scripted(["It is 4."])

    def on_any_rank(here: bool) -> bool:
        told.append(here)
        return len(told) < 3

    [completion] = started(merging_tokenizer(BY_FIELD)).write([7], policy, on_any_rank=on_any_rank)
    assert told == [False] * 3
    assert len(policy.asked) == 1
    assert len(completion.token_ids) == 9


# -- what is learned from ------------------------------------------------------------------------------------------


def small_model(tokenizer: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=2048, **sizes)
    return LlamaForCausalLM(config)


def written(tokenizer: Any) -> Rollout:
    rows = [*ROWS, {"prompt": [{"role": "user", "content": "4?"}]}]
    completions = started(tokenizer).write([7], Scripted(SCRIPT))
    plain = started(tokenizer, rows[1:]).write([8], Scripted(["It is 4."]))
    prompts = [each.all[0].prompt_ids for each in (started(tokenizer), started(tokenizer, rows[1:]))]
    return Rollout(prompts, [*completions, *plain], 0, torch.zeros(2, 1))


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("template", [BY_FIELD, BY_TEXT], ids=["by field", "by text"])
def test_the_policy_is_scored_in_the_contexts(template: str, sharing: bool):
    tokenizer = merging_tokenizer(template)
    rollout, model = written(tokenizer), small_model(tokenizer).double()
    expected = []
    for prompt, one in zip(rollout.prompts, rollout.completions, strict=True):
        starts = [Restart(0, prompt), *one.restarts]
        for (start, context), stop in zip(starts, [*(each.place for each in starts[1:]), None], strict=True):
            ids = torch.tensor([[*context, *one.token_ids[start:stop]]])
            with torch.no_grad():
                said = torch.log_softmax(model(ids).logits[0, len(context) - 1 : -1], -1)
            expected.append(said.gather(1, ids[0, len(context) :, None])[:, 0])
    install(model)
    batch = rollout.batch(sharing=sharing)
    found = logprobs(model, batch, padding_free=True)
    torch.testing.assert_close(found, torch.cat(expected))
    assert batch.rows == 2
    assert batch.completions == 1
    assert len(batch.segments) == (2 + 4 if sharing else 4)
    assert batch.score_target.tolist() == [token for one in rollout.completions for token in one.token_ids]


def test_it_is_the_same_after_a_checkpoint_and_of_a_completion_that_is_left_out(tmp_path: Path):
    rollout = written(merging_tokenizer(BY_FIELD))
    rollout.save(tmp_path / "rollout.safetensors")
    again, _ = Rollout.load(tmp_path / "rollout.safetensors")
    assert [each.restarts for each in again.completions] == [each.restarts for each in rollout.completions]
    assert torch.equal(again.batch().token_ids, rollout.batch().token_ids)
    rollout.learned = [False, True]
    assert len(rollout.batch().segments) == 4, "nothing is scored of the later contexts"
    [first, _] = rollout.completions
    place = first.restarts[1].place
    assert first.before(10**6, 2) is first
    first.token_ids[place] = 999
    assert first.before(999, 2).restarts == first.restarts[:1]


def test_a_teacher_reads_its_own_prompt_in_all_contexts():
    rollout = written(merging_tokenizer(BY_FIELD))
    rollout.teacher_prompts = [[5, 6, 7], [8]]
    [first, _] = rollout.taught.completions
    for mine, taught in zip(rollout.completions[0].restarts, first.restarts, strict=True):
        assert taught.context == [5, 6, 7, *mine.context[len(rollout.prompts[0]) :]]
    assert rollout.taught.batch().scores == rollout.batch().scores


def trainer_of(folder: Path, **options: Any) -> Any:
    tokenizer = merging_tokenizer(BY_FIELD)
    return lowtide.GRPOTrainer(
        model=small_model(tokenizer),
        reward_funcs=lambda completions, **_: [float(len(each)) + n for n, each in enumerate(completions)],
        args=lowtide.GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=MOST,
            max_steps=2,
            learning_rate=1e-3,
            num_iterations=2,
            **ON_A_CPU | options,
        ),
        train_dataset=Dataset.from_list(ROWS * 4),
        processing_class=tokenizer,
        tools=[add],
    )


@pytest.mark.slow
def test_grpo_learns_from_them(tmp_path: Path):
    trainer = trainer_of(tmp_path)
    trainer.maker.generator = policy = Scripted(SCRIPT)
    trainer.train()
    assert [each.most is None for each in policy.asked] == [True] * 2 + [False] * 4
    logs = [each for each in trainer.state.log_history if "loss" in each]
    assert all(each["grad_norm"] > 0 for each in logs)
    said = sum(len(turn) + 1 for turn in SCRIPT)
    assert logs[0]["completions/mean_length"] == said


def rank_main(rank: int, folder: str) -> None:
    with rank_of(Path(folder), rank, 2):
        trainer = trainer_of(Path(folder), fsdp="full_shard", ds3_gather_for_generation=True)
        assert trainer.maker.writer.has_a_part
        trainer.maker.generator = policy = Scripted(SCRIPT[-1:] if rank else SCRIPT)
        trainer.train()
        assert len(policy.asked) == (2 if rank else 6)


@pytest.mark.slow
def test_ranks_that_share_the_weights_write_equally_often(tmp_path: Path):
    run_ranks(rank_main, str(meeting_place(tmp_path)), ranks=2)
