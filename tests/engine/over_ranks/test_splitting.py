"""Ranks that split the tokens of a batch have the numbers and the gradients of one rank that runs it alone."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from lowtide.engine.forward import install, score, sequence_of
from lowtide.engine.heads.head import Scores
from lowtide.engine.layers.noise import set_noise
from lowtide.engine.over_ranks.splitting import split_over
from lowtide.engine.weights.sharded.fully_shard import shard_model
from lowtide.ops.logits.linear_logprobs import Want
from lowtide.ragged import RaggedBatch
from lowtide.ranks.sequence import SequenceParallel
from lowtide.ranks.sharding import Sharding
from lowtide.score_rules import IGNORE, LastToken
from tests.support.memory.live_bytes import LivingBytes
from tests.support.models import architectures, preference_models
from tests.support.models.tiny_models import build, checkpointed, separate, shared, tokens, with_adapters
from tests.support.ranks.processes import run_ranks

WANT = Want(entropies=True, mean_logprobs=True, top1=True)


def family(name: str, **changes):
    """In float64, in which the experts of a mixture have one implementation alone."""
    model = architectures.build(name, **changes).double()
    model.set_experts_implementation("eager")
    return model


def llama(**changes):
    return build(dtype=torch.float64, **changes)


def dropping():
    model = with_adapters(llama(), lora_dropout=0.5)
    set_noise(model.get_base_model(), 5.0)
    return model


def longrope():
    """Rows above 12 tokens have other rotary embeddings."""
    factors = {"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.5, 2.0, 3.0, 4.0]}
    rotary = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    return build(
        "phi3",
        torch.float64,
        num_key_value_heads=4,
        original_max_position_embeddings=12,
        max_position_embeddings=64,
        rope_parameters=rotary,
    )


def growing():
    """Rows above 8 tokens have rotary embeddings of their length."""
    rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return llama(rope_parameters=rotary, max_position_embeddings=8)


OF_STATES: dict[str, Callable[[], PreTrainedModel]] = {
    **{
        name: functools.partial(family, name)
        for name in ("qwen3_5", "qwen3_next", "kimi_linear", "bamba", "nemotron_h", "mamba", "jamba", "zamba")
    },
    "mamba of three keys": functools.partial(family, "mamba2", num_heads=6, head_dim=8, hidden_size=24, n_groups=3),
    "mamba of odd channels": functools.partial(family, "mamba", hidden_size=33, expand=1),
}
"""Gated delta rules of a decay a head and a channel, Mamba-2 and selective scans."""

MODELS = {
    "llama": llama,
    "longrope": longrope,
    "growing": growing,
    "one key head": functools.partial(llama, num_key_value_heads=1),
    "three heads": functools.partial(llama, hidden_size=24, num_attention_heads=3, num_key_value_heads=3),
    "six heads": functools.partial(llama, hidden_size=48, num_attention_heads=6, num_key_value_heads=2),
    "three heads, sinks": functools.partial(family, "gpt_oss", num_attention_heads=3, num_key_value_heads=1),
    "tied": functools.partial(llama, tie_word_embeddings=True),
    "checkpointed": lambda: checkpointed(llama()),
    "adapters": lambda: with_adapters(llama()),
    "adapters, checkpointed": lambda: checkpointed(with_adapters(llama()), kwargs={"use_reentrant": False}),
    **{name: functools.partial(family, name) for name in ("mistral", "gemma3", "gpt_oss", "mixtral", "gpt2")},
    "lfm2": functools.partial(family, "lfm2"),
    **OF_STATES,
}
ROUNDED = {"gemma3": 1e-5, **dict.fromkeys(OF_STATES, 1e-6)}
"""Largest error where norms or decays are taken in float32, whatever the weights are in; 1e-9 elsewhere."""
MIXTURES = ("mixtral", "gpt_oss", "three heads, sinks")


def packed() -> RaggedBatch:
    lengths = (3, 8, 2, 13, 6)
    row = {"input_ids": tokens(sum(lengths)), "seq_lengths": list(lengths)}
    return RaggedBatch.from_rows([row, {"input_ids": tokens(5, 9)}])


def scored_at_the_end() -> RaggedBatch:
    """All scores stand among the last tokens, as where an assistant alone is scored: the first rank has none."""
    rows = [tokens(length, length) for length in (12, 11)]
    labels = [[IGNORE] * 12, [IGNORE] * 7 + rows[1][7:]]
    return RaggedBatch.from_segments(rows, labels)


def completions() -> RaggedBatch:
    """As `shared`, of which the completions alone are scored: a prompt is as long as what goes on from it."""
    batch = shared()
    rows = [batch.token_ids[part.start : part.stop].tolist() for part in batch.segments]
    prefix = [part.prefix for part in batch.segments]
    labels = [[IGNORE] * len(row) if before < 0 else row for row, before in zip(rows, prefix, strict=True)]
    return RaggedBatch.from_segments(rows, labels, prefix=prefix, row=[part.row for part in batch.segments])


def few() -> RaggedBatch:
    """Fewer tokens than four ranks have."""
    return RaggedBatch.from_segments([tokens(3)])


BATCHES = {
    "separate": separate,
    "prefixes": shared,
    "completions": completions,
    "packed": packed,
    "scored at the end": scored_at_the_end,
    "few": few,
}
CASES = [
    *(("llama", name) for name in BATCHES),
    *((name, "prefixes") for name in MODELS if name not in ("llama", "growing", "longrope")),
    ("longrope", "completions"),
    ("growing", "separate"),
    ("mistral", "packed"),
    ("gemma3", "separate"),
    ("adapters, checkpointed", "scored at the end"),
    ("mixtral", "few"),
    ("qwen3_5", "packed"),
    ("mamba", "few"),
]
FAST = [
    *(("llama", "separate"), ("three heads", "prefixes"), ("gpt_oss", "prefixes")),
    *(("adapters, checkpointed", "scored at the end"), ("mixtral", "few"), ("qwen3_5", "prefixes")),
]


def found_in(model, batch: RaggedBatch, *, in_forward: bool, mixture: bool) -> dict[str, torch.Tensor]:
    """Statistics and gradients; the loss is formed in forward, or is uneven over the scores."""
    loss = (lambda stats: -stats.logprobs) if in_forward else None
    scores = Scores(batch.score_index, batch.score_target, WANT, 0.7, loss, 0.3, accumulate=True, aux_loss=mixture)
    output = score(model, batch, scores)
    if in_forward:
        total = output.loss
    else:
        slope = torch.linspace(-1, 1, batch.scores, dtype=output.scored.dtype)
        total = (slope * (output.scored + 0.5 * output.stats["entropies"] - output.stats["mean_logprobs"])).sum()
    total = total + 3 * output.aux_loss if mixture else total
    total.backward()
    numbers = {**output.stats, "loss": output.loss, "aux_loss": output.aux_loss}
    statistics = {name: value.detach() for name, value in numbers.items() if value is not None}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {**statistics, **gradients}


def both_ways(name: str, batch: RaggedBatch) -> dict[bool, dict[str, torch.Tensor]]:
    model = MODELS[name]()
    install(model)
    if sequence is not None:
        split_over(model, sequence)
    mixture = name in MIXTURES
    return {how: found_in(model, batch, in_forward=how, mixture=mixture) for how in (False, True)}


sequence: SequenceParallel | None = None
"""Of the processes that split sequences."""


def meet(rank: int, ranks: int, rendezvous: str) -> SequenceParallel:
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=wait)
    return SequenceParallel()


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def split(rank: int, ranks: int, cases: list, rendezvous: str, path: str) -> None:
    global sequence
    sequence = meet(rank, ranks, rendezvous)
    found = {}
    for model, batch in cases:
        for how, numbers in both_ways(model, BATCHES[batch]()).items():
            for name, value in numbers.items():
                if "." in name:  # a gradient, which data parallelism makes the mean over ranks
                    dist.all_reduce(value)
                    value /= ranks
            found[model, batch, how] = numbers
    torch.save(found, f"{path}.{rank}")
    leave()


def assert_same_on(ranks: int, cases: list, tmp_path) -> None:
    run_ranks(split, ranks, cases, f"file://{tmp_path}/rendezvous", f"{tmp_path}/found", ranks=ranks)
    each = [torch.load(f"{tmp_path}/found.{rank}", weights_only=True) for rank in range(ranks)]
    for model, batch in cases:
        for how, wanted in both_ways(model, BATCHES[batch]()).items():
            for found in each:
                got = found[model, batch, how]
                assert got.keys() == wanted.keys()
                for name, value in wanted.items():
                    where, tolerance = f"{model}, {batch}, {how}: {name}", ROUNDED.get(model, 1e-9)
                    error = (got[name].double() - value.double()).norm()
                    assert error <= tolerance * max(float(value.double().norm()), 1e-3), where


def test_two_ranks_have_the_numbers_and_gradients_of_one(tmp_path):
    assert_same_on(2, FAST, tmp_path)


@pytest.mark.slow
def test_two_ranks_have_the_numbers_and_gradients_of_one_in_each_model(tmp_path):
    assert_same_on(2, [case for case in CASES if case not in FAST], tmp_path)


@pytest.mark.slow
def test_four_ranks_repeat_key_heads_and_may_have_no_tokens(tmp_path):
    cases = [("llama", "prefixes"), ("llama", "few"), ("gpt_oss", "prefixes"), ("mixtral", "few")]
    cases += [
        ("three heads", "prefixes"),
        ("six heads", "packed"),
        ("six heads", "few"),
        ("three heads, sinks", "prefixes"),
        ("qwen3_next", "completions"),
        ("bamba", "few"),
        ("mamba of odd channels", "packed"),
    ]
    assert_same_on(4, cases, tmp_path)


def sharded(rank: int, rendezvous: str) -> None:
    together, sharding = meet(rank, 2, rendezvous), Sharding(kind="fsdp2", devices=2)
    for tied, in_forward, split in itertools.product((False, True), repeat=3):
        alone, model = (build(tie_word_embeddings=tied) for _ in range(2))
        for each in (alone, model):
            install(each)
        shard_model(model, sharding, torch.device("cpu"), split_vocabulary=split)
        install(model)
        split_over(model, together)
        wanted, found = (found_in(each, shared(), in_forward=in_forward, mixture=False) for each in (alone, model))
        for name, value in wanted.items():
            got = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    leave()


@pytest.mark.slow
def test_weights_may_be_sharded_over_the_ranks_that_split_sequences(tmp_path):
    run_ranks(sharded, f"file://{tmp_path}/rendezvous")


def sizes(rank: int, rendezvous: str) -> None:
    together, model = meet(rank, 2, rendezvous), build(num_hidden_layers=4)
    install(model)
    batch = RaggedBatch.from_segments([tokens(400, 1), tokens(260, 2)])
    peaks = []
    for ranks in (None, together):
        split_over(model, ranks)
        living = LivingBytes()
        living.model = model
        with living, living.during("layers"):
            score(model, batch).scored.mean().backward()
        peaks.append(living.most_in_layers)
        model.zero_grad()
    assert peaks[1] < 0.55 * peaks[0]
    leave()


@pytest.mark.slow
def test_a_rank_holds_its_share_of_what_backward_needs(tmp_path):
    run_ranks(sizes, f"file://{tmp_path}/rendezvous")


# -- what else is split, said or refused ------------------------------------------------------------------------------


def values(rank: int, rendezvous: str) -> None:
    together = meet(rank, 2, rendezvous)
    kind = AutoModelForSequenceClassification
    batch = RaggedBatch.from_segments([[5, 6, 7, 8], [9, 10, 11]], score_rule=LastToken())
    alone, model = (preference_models.build(0, kind=kind, num_labels=1, pad_token_id=0) for _ in range(2))
    assert split_over(model, together) == ""
    expected, found = (score(each, batch).scored for each in (alone, model))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for each, output in ((alone, expected), (model, found)):
        (output * torch.tensor([1.0, -3.0])).sum().backward()
        gradient = each.score.weight.grad
        if each is model:
            dist.all_reduce(gradient)
            gradient /= 2
    torch.testing.assert_close(model.score.weight.grad, alone.score.weight.grad, rtol=1e-9, atol=1e-12)
    leave()


def test_values_are_read_where_their_hidden_states_are(tmp_path):
    run_ranks(values, f"file://{tmp_path}/rendezvous")


def chance(rank: int, rendezvous: str) -> None:
    together, model = meet(rank, 2, rendezvous), dropping()
    install(model)
    split_over(model, together)
    batch, before = separate(), torch.get_rng_state()
    first, second = score(model, batch).scored, score(model, batch).scored
    after = torch.get_rng_state()
    assert not torch.equal(first, second)
    torch.set_rng_state(before)
    assert torch.equal(score(model, batch).scored, first)  # as a step that is repeated
    drawn: list = [None, None]
    with together.own_random(torch.device("cpu")):
        dist.all_gather_object(drawn, torch.rand(3).tolist())
    assert drawn[0] != drawn[1]
    states: list = [None, None]
    dist.all_gather_object(states, after.tolist())
    assert states[0] == states[1]  # what follows on all ranks is the same
    leave()


def test_ranks_drop_other_tokens_and_go_on_alike(tmp_path):
    run_ranks(chance, f"file://{tmp_path}/rendezvous")


def refusals(rank: int, rendezvous: str) -> None:
    together = meet(rank, 2, rendezvous)
    copied = build(num_key_value_heads=1)
    install(copied)
    said = "heads do not divide by 2 ranks: each of 1 key and value heads is sent 2 times"
    assert split_over(copied, together) == said
    assert sequence_of(copied) is sequence_of(copy.deepcopy(copied)) is together
    assert split_over(copied, None) == ""
    assert sequence_of(copied) is None
    padded = build(hidden_size=24, num_attention_heads=3, num_key_value_heads=3)
    install(padded)
    assert split_over(padded, together) == "heads do not divide by 2 ranks: 3 attention heads are computed as 4"
    for model, padding_free, reason in (
        (architectures.build("bloom"), True, "model type bloom cannot split .*, since it runs padded"),
        (build(), False, "model type llama cannot split sequences over ranks, since it runs padded"),
    ):
        install(model, padding_free=padding_free)
        with pytest.raises(ValueError, match=reason):
            split_over(model, together)
        assert sequence_of(model) is None
    with pytest.raises(ValueError, match="2 ranks cannot be put into groups of 3: take a divisor of 2"):
        SequenceParallel.of_size(3)
    leave()


def test_what_cannot_be_split_is_refused(tmp_path):
    run_ranks(refusals, f"file://{tmp_path}/rendezvous")
