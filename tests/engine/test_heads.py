"""Heads are found on a model and run as the head module's own call; sharded heads have the gradients of whole ones."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from lowtide.engine.forward import install, score
from lowtide.engine.heads import HEADS, check_type, head_of, head_of_task
from lowtide.engine.heads.classes import SequenceClasses
from lowtide.engine.heads.head import Scores
from lowtide.engine.heads.language_model import LanguageModel
from lowtide.engine.heads.masked_language_model import MaskedLanguageModel
from lowtide.engine.heads.sequence_to_sequence import SequenceToSequence
from lowtide.engine.heads.value import Value
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import LastToken
from tests.support.ranks.processes import run_ranks

ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17, 18]]
RANKS = 2


def build(kind=AutoModelForCausalLM, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return kind.from_config(LlamaConfig(**sizes, num_attention_heads=2, initializer_range=0.2, **changes))


def negative_logprob(stats):
    return -stats.logprobs


def loss_of(model, rows, in_forward: bool):
    batch = RaggedBatch.from_segments(rows)
    loss = negative_logprob if in_forward else None
    output = score(model, batch, Scores(batch.score_index, batch.score_target, loss=loss, accumulate=True))
    return output.loss if in_forward else -output.scored.sum()


def test_the_head_of_a_model_is_found():
    assert head_of(build()) is LanguageModel
    assert head_of(build(AutoModelForSequenceClassification, num_labels=1)) is Value
    assert head_of(build(AutoModelForSequenceClassification, num_labels=3)) is SequenceClasses
    with pytest.raises(ValueError, match=r"model type llama\) has no head .* AutoModelForCausalLM or"):
        install(build(AutoModel))
    firsts: dict = {}
    for head in HEADS:
        assert head_of_task(head.task_type) is firsts.setdefault(head.task_type, head)
    assert len(firsts) == 5
    assert head_of_task(None) is LanguageModel


def test_a_value_head_gives_values_and_no_log_probs():
    model = build(AutoModelForSequenceClassification, num_labels=1, pad_token_id=0)
    expected = torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in ROWS])
    install(model)
    batch = RaggedBatch.from_segments(ROWS, score_rule=LastToken())
    output = score(model, batch)
    torch.testing.assert_close(output.scored, expected)
    assert output.scored is output.stats["values"]
    assert "logprobs" not in output.stats
    with pytest.raises(ValueError, match="log-probs were asked of a LlamaForSequenceClassification, which has no lang"):
        score(model, batch, Scores(batch.score_index, batch.score_target, head=LanguageModel))


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("adapters", ["none", "lora", "saved"])
def test_hooks_of_the_head_are_called_once(adapters, in_forward):
    model = build()
    if adapters == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    if adapters == "saved":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    install(model)
    inner = model if adapters == "none" else model.get_base_model()
    plain = inner.lm_head(torch.ones(2, 16))
    seen: list[tuple] = []
    inner.lm_head.register_forward_pre_hook(lambda module, args: seen.append(("before", args)))
    inner.lm_head.register_forward_hook(lambda module, args, output: seen.append(("after", output)))
    inner.lm_head.register_full_backward_hook(lambda module, *gradients: seen.append(("back", gradients)))
    loss_of(model, ROWS, in_forward).backward()
    assert [name for name, _ in seen] == ["before", "after", "back"]
    (hidden,) = seen[0][1]
    assert hidden.shape == (sum(map(len, ROWS)), 16)
    assert type(seen[1][1]) is tuple
    assert all(isinstance(each, torch.Tensor) for each in seen[1][1])
    assert torch.equal(inner.lm_head(torch.ones(2, 16)), plain)  # its own forward is as it was


def shares() -> list[list[list[int]]]:
    return [ROWS[:1], ROWS[1:]]


def sharded(rank: int, rendezvous: str, path: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    mesh, found = init_device_mesh("cpu", (RANKS,)), {}
    for tied in (False, True):
        for in_forward in (False, True):
            model = build(tie_word_embeddings=tied)
            install(model)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard([model.model.embed_tokens, model.lm_head] if tied else model.lm_head, mesh=mesh)
            fully_shard(model, mesh=mesh)
            for _ in range(2):  # the second time into gradients that are there
                loss_of(model, shares()[rank], in_forward).backward()
            gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            found[tied, in_forward] = gradients
    if rank == 0:
        torch.save(found, path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_sharded_heads_have_the_gradients_of_whole_ones(tmp_path):
    run_ranks(sharded, f"file://{tmp_path}/rendezvous", f"{tmp_path}/found.pt", ranks=RANKS)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert len(found) == 4
    for (tied, in_forward), gradients in found.items():
        model = build(tie_word_embeddings=tied)
        install(model)
        for share in shares():
            (2 / RANKS * loss_of(model, share, in_forward)).backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("head", "kind", "said"),
    [
        (LanguageModel, "t5", "of which there are no language models .* trained as encoder-decoders"),
        (LanguageModel, "bert", "is an encoder .* `lowtide masked-lm`"),
        (SequenceToSequence, "llama", "of which there are no encoder-decoders .* trained as language models"),
        (MaskedLanguageModel, "llama", "of which there are no masked language models"),
    ],
)
def test_a_type_of_models_without_such_a_head_is_refused_by_its_config(head, kind, said):
    with pytest.raises(ValueError, match=said):
        check_type(head, AutoConfig.for_model(kind), "some-model")


def test_types_that_have_a_head_are_not():
    for head, kind in ((LanguageModel, "llama"), (SequenceToSequence, "t5"), (MaskedLanguageModel, "bert")):
        check_type(head, AutoConfig.for_model(kind), "some-model")
    check_type(LanguageModel, None, "a folder of adapters")
