"""The loss of conversations under each chat template that TRL ships: that of one plain forward a turn."""

import copy
import functools
import re

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3Config

pytest.importorskip("trl", reason="the templates need the bench extra (trl)")

from lowtide.data.prepare import PrepareOptions, prepare
from lowtide.engine.forward import install, score
from lowtide.ragged import RaggedBatch
from tests.support.marks import slow_but
from tests.support.texts.expected_turns import Unjudged, expected_turn
from tests.support.texts.template_families import KINDS, PLAIN, conversation, stop_ids, template
from tests.support.texts.template_families import tokenizer as family_tokenizer

UNJUDGED = ("deepseek_r1_distill", "deepseekv3", "idefics3", "llava_next", "smolvlm")
"""Templates that show no conversation: their prompt opens what no answer has, or they take contents in parts."""
MARKS = re.compile(r"(?<=\{%)([-+]?\s*)(end)?generation(?=\s*[-+]?%\})")
pytestmark = pytest.mark.usefixtures("datasets_cache")


@functools.cache
def models():
    """A model that takes rows as they are prepared, and its equal, which takes a plain sequence."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(family_tokenizer()), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096, initializer_range=0.2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = copy.deepcopy(model)
    install(model)
    return model, plain


@functools.cache
def judged(name):
    """The conversations of a template whose turns it shows: by kind, the texts of the context and target of each."""
    found = {}
    for kind in KINDS:
        messages, tools = conversation(name, kind)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            found[kind] = [expected_turn(name, messages, number, tools) for number in turns]
        except Unjudged:
            continue
    return found


def loss_of_plain_forwards(turns):
    """The mean loss, in nats, of all tokens of the targets, each turn being a sequence of its own."""
    losses = []
    for texts in turns:
        context, target = (family_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts)
        outputs = models()[1](torch.tensor([context + target]), logits_to_keep=len(target) + 1)
        logprobs = outputs.logits[0, :-1].log_softmax(-1)
        losses.append(-logprobs.gather(1, torch.tensor(target)[:, None]))
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("name", UNJUDGED)
def test_templates_that_show_no_conversation(name):
    assert not judged(name)


@torch.no_grad()
@pytest.mark.parametrize("name", slow_but(["qwen3", "gptoss", "glm4moe", "llama3"], sorted({*PLAIN} - {*UNJUDGED})))
def test_the_loss_is_that_of_one_plain_forward_a_turn(name):
    rows = []
    for kind in judged(name):
        messages, tools = conversation(name, kind)
        rows.append({"messages": messages, "tools": tools})
    unmarked = MARKS.sub(lambda found: f"{found[1]}{'endif' if found[2] else 'if true'}", template(name))
    options = PrepareOptions(
        assistant_only_loss=True, chat_template=unmarked, stop_ids=tuple(stop_ids(name)), max_length=None
    )
    prepared, _ = prepare(Dataset.from_list(rows), family_tokenizer(), options, batch_size=8, packing=False)
    expected = {kind: loss_of_plain_forwards(turns) for kind, turns in judged(name).items()}
    found = [-score(models()[0], RaggedBatch.from_rows([row])).scored.mean().item() for row in list(prepared)]
    assert dict(zip(expected, found, strict=True)) == pytest.approx(expected, abs=2e-4)
    assert min(expected.values()) > 1


def test_most_conversations_are_judged():
    assert sum(len(judged(name)) for name in PLAIN) >= 0.97 * 156
