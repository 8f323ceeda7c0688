"""The ragged generator: what it holds, who enters and leaves, and that neither changes what is written."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lowtide.engine.forward import compute_in
from lowtide.rollout.generators import ragged
from lowtide.rollout.generators.cache import KeyStore, blocks_of, padded_tokens
from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.rollout.generators.policy import warn_of_positions
from lowtide.rollout.generators.ragged import RaggedGenerator
from tests.support.models.architectures import VOCAB
from tests.support.runs.generating import prompt, scored, some_requests, token_ids, writer, written_logprobs

STOPS = tuple(range(3, 9))
"""Likely enough for completions to end at unlike lengths."""
SAMPLING = Sampling(30, stop_ids=STOPS)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[KeyStore]:
    """All stores of keys that generators make; each checks itself against its tensors whenever something changes."""
    made: list[KeyStore] = []

    class Checked(KeyStore):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.peak = 0
            made.append(self)

        def remove(self, gone: Sequence) -> None:
            self._check()
            super().remove(gone)
            self._check()

        def _check(self) -> None:
            for layer in self.layers.values():
                held = sum(block.keys.shape[0] * block.keys.shape[2] for block in layer.blocks)
                held += 0 if layer.own is None else layer.own.keys.shape[0] * layer.own.keys.shape[2]
                assert held <= self.held_tokens
                self.peak = max(self.peak, held)
            assert [line.place for line in self.lines] == list(range(len(self.lines)))

    monkeypatch.setattr(ragged, "KeyStore", Checked)
    return made


@pytest.mark.slow
def test_what_is_written_depends_on_nothing_beside_it(stores: list[KeyStore]):
    model, requests = writer(), some_requests()

    together = token_ids(RaggedGenerator().generate(model, requests, SAMPLING))

    alone = [token_ids(RaggedGenerator().generate(model, [each], SAMPLING))[0] for each in requests]
    assert alone == together
    for budget in (107, 130, 200, 1000):
        stores.clear()
        got = RaggedGenerator(tokens_per_generation_batch=budget).generate(model, requests, SAMPLING)
        assert token_ids(got) == together
        assert 0 < stores[0].peak <= budget
    backwards = RaggedGenerator().generate(model, requests[::-1], SAMPLING)
    assert token_ids(backwards)[::-1] == together
    lengths = {len(row) for group in together for row in group}
    assert len(lengths) > 4
    assert max(lengths) == 30


def test_seeds_and_numbers_of_completions_tell_their_random_numbers():
    model, asked = writer(), prompt(6)
    requests = [Request(asked, 3, seed=1), Request(asked, 2, seed=1), Request(asked, 2, seed=2)]

    first, second, third = token_ids(RaggedGenerator().generate(model, requests, Sampling(12)))

    assert first[:2] == second
    assert len({tuple(row) for row in (*first, *third)}) == 5


def test_requests_with_the_same_prompt_share_its_keys(monkeypatch: pytest.MonkeyPatch):
    admitted = []
    inner = KeyStore.admit
    monkeypatch.setattr(KeyStore, "admit", lambda self, groups: admitted.append(groups) or inner(self, groups))
    requests = [Request(prompt(6), 2), Request(prompt(9), 1), Request(prompt(6), 3, seed=5)]

    RaggedGenerator().generate(writer(), requests, Sampling(4))

    assert [[(len(group.prompt)) for group in groups] for groups in admitted[-1:]] == [[6, 9]]


def test_prompts_and_completions_take_what_they_have_to(stores: list[KeyStore]):
    """P + G * R keys and values: a prompt once for its completions, in bytes of all tensors that are there."""
    model = writer()
    config, most, count, length = model.config, 32, 4, 40
    seen: list[int] = []

    def reply(request: int, number: int, completion) -> None:
        store = stores[0]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in store.tensors()}
        seen.append(sum(storages.values()))

    sampling = Sampling(most, stop_ids=tuple(range(VOCAB)))
    RaggedGenerator().generate(model, [Request(prompt(length), count)], sampling, reply)
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // 4) * 8
    assert seen == [length * a_token] * count  # all end at their first token, whose keys are never needed

    stores.clear()
    RaggedGenerator().generate(model, [Request(prompt(length), count)], Sampling(most))
    assert stores[0].peak == length + count * most


def test_lines_are_freed_as_completions_end(stores: list[KeyStore]):
    model = writer()

    RaggedGenerator(lengths=lambda request, number: (3, 5, 40, 60)[number]).generate(
        model, [Request(prompt(5), 4)], Sampling(64)
    )

    store = stores[0]
    assert store.peak < 5 + 4 * 64
    assert store.lines == []
    assert store.tensors() == []


def test_all_is_freed_after_an_error(monkeypatch: pytest.MonkeyPatch):
    model = writer()
    stores, failing = [], []
    inner = KeyStore.reserve

    def reserve(self: KeyStore, tokens: int) -> None:
        stores.append(weakref.ref(self))
        failing.append(tokens)
        if len(failing) == 12:
            raise RuntimeError("no memory is left")
        inner(self, tokens)

    generator = RaggedGenerator()
    generator.generate(model, some_requests()[:1], Sampling(2))  # proves the model
    stores.clear()
    failing.clear()
    monkeypatch.setattr(KeyStore, "reserve", reserve)
    model.train()
    with pytest.raises(RuntimeError, match="no memory is left"):
        generator.generate(model, some_requests(), SAMPLING)

    gc.collect()
    assert all(store() is None for store in stores)
    assert all(module.training for module in model.modules())


@pytest.mark.slow
def test_each_module_stays_in_its_mode_and_no_gradient_is_kept():
    model = writer("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    weights = [weight.clone() for weight in model.parameters()]

    got = RaggedGenerator().generate(model, some_requests(), SAMPLING)

    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), weights, strict=True))
    assert all(weight.grad is None for weight in model.parameters())
    plain = RaggedGenerator().generate(writer("llama"), some_requests(), SAMPLING)
    assert token_ids(got) == token_ids(plain)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_adapters_write_what_they_are_scored_by(tied: bool):
    inner = writer(tie_word_embeddings=tied)
    targets = ["q_proj", "v_proj", "down_proj", *([] if tied else ["lm_head"])]
    model = get_peft_model(inner, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).double()

    got = RaggedGenerator().generate(model, some_requests(), SAMPLING)

    torch.testing.assert_close(written_logprobs(got), scored(model, some_requests(), got), atol=1e-5, rtol=0)
    with model.disable_adapter():
        plain = RaggedGenerator().generate(model, some_requests(), SAMPLING)
        wanted = scored(model, some_requests(), plain)
    torch.testing.assert_close(written_logprobs(plain), wanted, atol=1e-5, rtol=0)
    assert token_ids(plain) != token_ids(got)


def test_mixed_precision_is_that_of_the_scorer():
    model = writer(dtype=torch.float32)
    compute_in(model, torch.bfloat16)

    got = RaggedGenerator().generate(model, some_requests(), Sampling(12))

    error = (written_logprobs(got) - scored(model, some_requests(), got)).abs()
    assert error.mean() < 0.05
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_in_the_dtype_of_the_weights(dtype: torch.dtype):
    model = writer(dtype=dtype)

    got = RaggedGenerator().generate(model, some_requests(), Sampling(12))

    error = (written_logprobs(got) - scored(model, some_requests(), got)).abs()
    assert error.mean() < (1e-5 if dtype == torch.float32 else 0.05)


def test_logits_that_are_not_finite_are_told():
    model = writer()
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    generator = RaggedGenerator()
    generator._served.add(model)

    for sampling in (Sampling(4), Sampling(4, temperature=0), Sampling(4, top_k=3), Sampling(4, top_p=0.5)):
        with pytest.raises(FloatingPointError, match=r"request \d, completion 0, are not finite at its token 0"):
            generator.generate(model, some_requests(), sampling)


@pytest.mark.parametrize(
    ("requests", "sampling", "message"),
    [
        ([Request([5]), Request([])], Sampling(4), "request 1 has an empty prompt"),
        ([Request([5], 0)], Sampling(4), "request 0 asks for 0 completions"),
        ([Request([5, VOCAB])], Sampling(4), "request 0 has a token outside of the model's vocabulary of 101"),
        ([Request([5] * 10), Request([5] * 10, 6)], Sampling(9), "request 1 alone needs 64 tokens"),
        ([Request([5])], Sampling(4, stop_strings=("a",)), "give the generator a `tokenizer`"),
    ],
)
def test_what_cannot_be_written_is_refused(requests: list[Request], sampling: Sampling, message: str):
    with pytest.raises(ValueError, match=message):
        RaggedGenerator(tokens_per_generation_batch=60).generate(writer(), requests, sampling)


def test_a_table_of_positions_ends_and_computed_ones_go_on(caplog):
    asked = [Request([5] * 120)], Sampling(20)
    with pytest.raises(ValueError, match="makes 140, above the 128 positions of the model"):
        RaggedGenerator().generate(writer("gpt2"), *asked)
    warn_of_positions.cache_clear()
    ((written,),) = RaggedGenerator().generate(writer(), *asked)
    assert len(written.token_ids) == 20
    assert "past the 128 positions that the model was made for" in caplog.text


def test_nothing_is_asked_for():
    assert RaggedGenerator().generate(writer(), [], Sampling(4)) == []


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"repetition_penalty": 1.5}])
def test_plain_logprobs_are_the_scorers_whatever_is_cut(changes: dict):
    model = writer()

    got = RaggedGenerator().generate(model, some_requests(), Sampling(12, **changes))

    torch.testing.assert_close(written_logprobs(got), scored(model, some_requests(), got), atol=1e-5, rtol=0)
    if "repetition_penalty" not in changes:
        assert (written_logprobs(got, plain=False) >= written_logprobs(got) - 1e-6).all()


@pytest.mark.parametrize("seed", range(5))
def test_blocks_hold_each_prompt_once_with_little_padding(seed: int):
    lengths = torch.randint(1, 300, (20,), generator=torch.Generator().manual_seed(seed)).tolist()

    blocks = blocks_of(lengths)

    assert sorted(place for block in blocks for place in block) == list(range(20))
    assert sum(lengths) <= padded_tokens(lengths) <= 1.25 * sum(lengths)
