"""Adapters that travel without the base, and the check that a server writes by what it was sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load
from torch import nn

from lowtide.engine.forward import install
from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.rollout.generators.vllm.adapters import AdapterFolders, adapter_file, told_of, why_merged
from lowtide.rollout.generators.vllm.facts import AdapterRoom
from lowtide.rollout.generators.vllm.fingerprint import far, is_rounded
from lowtide.rollout.generators.vllm.http import Calls, Refused
from lowtide.rollout.generators.vllm.label import Label, StaleWeights
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.generators.vllm.remote import VLLMServerGenerator
from lowtide.rollout.generators.vllm.weights import Copies
from tests.support.references.parity_world import build_model
from tests.support.vllm.writing_server import Writes, writing_server

LABEL = Label("run", 3, 2, adapter=True)
ROOM = AdapterRoom(8, 3)
SAMPLING = Sampling(6, stop_ids=(2,))
REQUESTS = [Request([25, 36, 47], 2, seed=1), Request([17], 1, seed=2)]
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def adapted(config: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(build_model("llama").double(), config or LoraConfig(**{**LORA, **more}))


def moved(model: nn.Module, name: str = "lora_") -> None:
    with torch.no_grad():
        for each in (p for n, p in model.named_parameters() if name in n):
            each += 0.1 * torch.randn_like(each)


# -- what travels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"lora_alpha": 3, "use_rslora": True},
        {"rank_pattern": {"v_proj": 4}, "alpha_pattern": {"q_proj": 5}},
        {"target_modules": "all-linear"},
    ],
)
def test_a_file_with_its_base_is_the_merged_model(more: dict[str, Any]):
    model = adapted(**more)
    base = dict(Copies(adapted=False).lacking(model))
    config, label = told_of(file := adapter_file(model, LABEL))
    factors = load(file)
    for name in [name for name in factors if ".lora_A." in name]:
        a, b = factors[name], factors[name.replace(".lora_A.", ".lora_B.")]
        assert a.shape[0] == b.shape[1] == config["r"] == config["lora_alpha"], "the scale is 1"
        base[name.removeprefix("base_model.model.").replace(".lora_A.", ".")] += b @ a
    for name, weight in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(base[name], weight.data, msg=name)
    assert label == {"run": "run", "version": 3, "copy": 2, "adapter": True}


def test_the_base_without_adapters_is_the_model_that_they_were_put_on():
    copies, model = Copies(adapted=False), adapted()
    found = dict(copies.lacking(model))
    for name, weight in build_model("llama").double().named_parameters():
        assert torch.equal(found[name], weight)
    moved(model)
    assert copies.current(model), "adapters are no part of it"
    moved(model, "norm")
    assert not copies.current(model)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "q_proj has a variant of LoRA"),
        ({"modules_to_save": ["lm_head"]}, "lm_head has adapters that are no LoRA of a dense layer"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens has adapters that are no LoRA"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head stands outside of the layers"),
        ({"lora_bias": True}, "has an adapter with a bias"),
        ({"r": 16}, "their rank is 16, and the server takes 8 .start it with --max_lora_rank 16"),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "k_proj has adapters that are no LoRA"),
    ],
)
def test_what_vllm_does_not_take_travels_merged(config: Any, why: str):
    model = adapted(**config) if isinstance(config, dict) else adapted(config)
    found = why_merged(model, ROOM)
    assert found is not None
    assert why.split(" .")[0] in found


def test_other_trained_weights_and_servers_without_room_have_them_merged():
    model = adapted()
    assert why_merged(model, ROOM) is None
    assert "--max_lora_rank" in str(why_merged(model, AdapterRoom()))
    model.get_submodule("base_model.model.model.norm").requires_grad_(True)
    assert "norm.weight is trained beside them" in str(why_merged(model, ROOM))
    assert "no LoRA adapters" in str(why_merged(build_model("llama"), ROOM))


def test_files_are_there_until_they_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders = AdapterFolders()
    for name in ("a", "b"):
        folders.put(name, adapter_file(adapted(), LABEL))
    found = sorted(each.name for each in tmp_path.glob("*/*"))
    assert found == ["adapter_config.json"] * 2 + ["adapter_model.safetensors"] * 2
    folders.drop("a")
    assert len([*tmp_path.iterdir()]) == 1
    assert folders.drop_all() == ["b"]
    assert not [*tmp_path.iterdir()]


def test_plain_peft_reads_them(tmp_path):
    from peft import PeftModel

    from tests.support.references.parity_world import tokenizer

    folder = AdapterFolders().put("a", adapter_file(model := adapted(rank_pattern={"v_proj": 4}), LABEL))
    again = PeftModel.from_pretrained(build_model("llama").double(), folder)
    ids = torch.tensor([tokenizer()("1 + 2 =")["input_ids"]])
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


# -- a server that has the base ------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Writes:
    engine = Writes()
    engine.max_lora_rank = 8
    return engine


@pytest.fixture
def url(engine: Writes) -> Iterator[str]:
    with writing_server(engine) as running:
        yield running.url


def generator_at(url: str, model: nn.Module, **limits: Any) -> VLLMServerGenerator:
    install(model)
    return VLLMServerGenerator(url, model, timeout=60.0, limits=Limits(**limits))


def distance(model: nn.Module, found: list) -> float:
    """How far what a server says of its tokens is from what a dense forward says."""
    worst = 0.0
    for request, group in zip(REQUESTS, found, strict=True):
        for each in group:
            ids = torch.tensor([[*request.prompt_ids, *each.token_ids]])
            with torch.no_grad():
                said = torch.log_softmax(model(ids).logits[0, len(request.prompt_ids) - 1 : -1], -1)
            own = said.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0]
            worst = max(worst, (own - torch.tensor(each.logprobs)).abs().max().item())
    return worst


def test_the_base_is_sent_once_and_each_version_has_a_name_of_its_own(engine: Writes, url: str):
    model = adapted()
    generator = generator_at(url, model, adapters_held=2)
    names = []
    for version in range(4):
        generator.sync(model, version)
        assert distance(model, generator.generate(model, REQUESTS, SAMPLING)) < 1e-6
        names.append([*engine.adapters])
        moved(model)
    assert engine.copies == 1
    whole = [f"lowtide-{generator.run}-{number}" for number in (1, 2, 3, 4)]
    assert names == [whole[:1], whole[:2], whole[1:3], whole[2:]]


def test_two_versions_answer_side_by_side(engine: Writes, url: str):
    model = adapted()
    generator = generator_at(url, model, adapters_held=2)
    generator.sync(model, 0)
    first, before = generator.label, generator.generate(model, REQUESTS, SAMPLING)
    moved(model)
    generator.sync(model, 1)
    now = generator.generate(model, REQUESTS, SAMPLING)
    generator.copied.label = first
    again = generator.generate(model, REQUESTS, SAMPLING)
    assert before == again != now


def test_a_base_that_was_written_to_is_sent_again(engine: Writes, url: str):
    model = adapted()
    generator = generator_at(url, model)
    generator.sync(model, 0)
    moved(model, "norm")
    generator.sync(model, 1)
    assert engine.copies == 2
    assert len(engine.adapters) == 1
    assert distance(model, generator.generate(model, REQUESTS, SAMPLING)) < 1e-6


def test_a_server_that_was_started_again_gets_the_base_again():
    model, first, second = adapted(), Writes(), Writes()
    first.max_lora_rank = second.max_lora_rank = 8
    with writing_server(first) as running:
        generator = generator_at(running.url, model)
        generator.sync(model, 0)
    moved(model)
    with writing_server(second) as running:
        calls = Calls(running.url, 60.0)
        generator.calls = generator.backend.calls = calls
        with pytest.raises(StaleWeights, match="it was started again"):
            generator.generate(model, REQUESTS, SAMPLING)
        generator.sync(model, 1)
        assert second.copies == 1
        assert distance(model, generator.generate(model, REQUESTS, SAMPLING)) < 1e-6


def test_what_goes_merged_is_the_policy_too(engine: Writes, url: str):
    model = adapted(use_dora=True)
    generator = generator_at(url, model)
    for version in range(2):
        generator.sync(model, version)
        assert distance(model, generator.generate(model, REQUESTS, SAMPLING)) < 1e-6
        moved(model)
    assert engine.copies == 2
    assert not engine.adapters


def test_an_adapter_without_its_base_is_refused(url: str):
    calls = Calls(url, 60.0)
    with pytest.raises(Refused, match=r"409.*whose base is not here"):
        calls.post_bytes("/adapters/put", adapter_file(adapted(), LABEL), {})
    for nothing in (b"", b"1" * 100, (2**63).to_bytes(8, "little") + b"{}", (9).to_bytes(8, "little") + b'{"a": []}'):
        with pytest.raises(Refused, match=r"400.*are no adapter"):
            calls.post_bytes("/adapters/put", nothing, {})


# -- what tells which weights answer ------------------------------------------------------------------------------


class Caching(Writes):
    """An engine whose prefix cache is never reset: a prompt that it saw is read by the weights that saw it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def write(self, jobs: Any) -> list:
        found = []
        for turns, sampling, adapter in jobs:
            assert len(turns) == 1
            now = {name: p.clone() for name, p in self.model.named_parameters()}
            then = self.seen.setdefault(tuple(turns[0].token_ids), now)
            self.load(then)
            found += super().write([(turns, sampling, adapter)])
            self.load(now)
        return found


def test_a_right_server_passes_and_the_first_and_every_so_many_copies_are_checked(engine: Writes, url: str):
    model = adapted()
    generator = generator_at(url, model, checked_every=3)
    asked = []
    for version in range(5):
        generator.sync(model, version)
        asked.append(engine.asked)
        moved(model)
    assert asked == [2, 2, 2, 4, 4]
    assert engine.copies == 1


def test_a_wrong_base_is_told_and_sent_again(engine: Writes, url: str, caplog):
    model = adapted()
    generator = generator_at(url, model, checked_every=1)
    generator.sync(model, 0)
    moved(engine.model, "q_proj")  # as where another run left its weights there
    moved(model)
    generator.sync(model, 1)
    assert engine.copies == 2
    [told] = [each.message for each in caplog.records if "sent again" in each.message]
    assert "does not write by the weights after step 1 that it was sent" in told
    assert distance(model, generator.generate(model, REQUESTS, SAMPLING)) < 1e-6


def test_keys_of_older_weights_are_told_by_the_second_prompt():
    model, engine = build_model("llama").double(), Caching()
    with writing_server(engine) as running:
        generator = generator_at(running.url, model, checked_every=1)
        generator.sync(model, 0)
        moved(model, "proj")
        with pytest.raises(StaleWeights, match="nats away") as raised:
            generator.sync(model, 1)
    fresh, cached = (float(each) for each in re.findall(r"([\d.e-]+) (?:nats away|after one)", str(raised.value)))
    assert fresh < 1e-6 < 0.01 < cached


@pytest.mark.parametrize("computes_in", ["float32", "bfloat16"])
def test_rounding_is_no_other_weights(engine: Writes, url: str, caplog, computes_in: str):
    model = adapted()
    install(model)
    generator = VLLMServerGenerator(url, model, limits=Limits(checked_every=1), computes_in=computes_in)
    engine.after = lambda number, found: [
        type(each)(each.token_ids, [logprob + 0.1 for logprob in each.logprobs], each.finish) for each in found
    ]
    if computes_in == "bfloat16":
        generator.sync(model, 0)
        assert "sent again" not in caplog.text
    else:
        with pytest.raises(StaleWeights, match=r"0\.1 nats away .* where rounding makes 0\.01 at most"):
            generator.sync(model, 0)


def test_quantized_weights_may_differ_by_more():
    model = build_model("llama")
    assert not is_rounded(model)
    model.lm_head.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    assert is_rounded(model)
    assert far("float32", "float64") == 0.01 < far("float32", "") == far("bfloat16", "float32") == 0.25


def test_a_server_that_stays_wrong_is_not_written_by(engine: Writes, url: str):
    model = adapted()
    generator = generator_at(url, model, checked_every=1)
    engine.after = lambda number, found: [
        type(each)(each.token_ids, [float("nan")] * len(each.logprobs), each.finish) for each in found
    ]
    with pytest.raises(StaleWeights, match="nan nats away"):
        generator.sync(model, 0)
    assert engine.copies == 2
