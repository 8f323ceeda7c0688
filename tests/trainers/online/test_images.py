"""Methods whose policy writes, on prompts that show images: what is learned, what rewards see, and what is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from peft import LoraConfig
from PIL import Image
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

import lowtide
from tests.rollout.chat_templates import HERMES_TEMPLATE, add
from tests.support.marks import slow_but
from tests.support.models.vision_models import FAMILIES, padded, picture, processor, rows, user, vision_model
from tests.support.runs.online_runs import SETTINGS, assert_near, even_tokens, weights

MOST = 8


def questions(count: int = 6, **more: Any) -> list[dict[str, Any]]:
    """Prompts, the second of which shows no image."""
    made = [
        {"images": row["images"], "prompt": row["prompt"], "number": number} | more
        for number, row in enumerate(rows(count))
    ]
    made[1] |= {"images": [], "prompt": [user("No image: ", "what is it?")]}
    return made


def online(
    folder: Path, family: str = "qwen2_5_vl", method: str = "GRPO", given: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A trainer of a model in float64."""
    settings = {**SETTINGS, "max_completion_length": MOST, "rehearsal": False, "optim": "sgd", **options}
    arguments = {"model": None, "train_dataset": questions(), "reward_funcs": even_tokens, **(given or {})}
    model, data = arguments.pop("model"), arguments.pop("train_dataset")
    return getattr(lowtide, f"{method}Trainer")(
        vision_model(family).double() if model is None else model,
        args=getattr(lowtide, f"{method}Config")(output_dir=str(folder), **settings),
        train_dataset=data if isinstance(data, Dataset) else Dataset.from_list(data),
        **{"processing_class": processor(family), **arguments},
    )


class Recorded:
    """A reward that keeps what it is given."""

    __name__ = "recorded"

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> list[float]:
        self.given.append(given)
        return even_tokens(given["completion_ids"])


def plain_logprobs(family: str, model: Any, row: dict[str, Any], completion: list[int]) -> Tensor:
    """[tokens]: of one completion, by the model's own forward on what the processor makes of the prompt."""
    own = processor(family)
    if row["images"]:
        inputs = padded(own, [row["prompt"]], [row["images"]])
        text = own.apply_chat_template([row["prompt"]], add_generation_prompt=True)[0]
        ids = own(images=[row["images"]], text=[text], add_special_tokens=False)["input_ids"][0]
    else:
        made = own.tokenizer.apply_chat_template(
            [row["prompt"]], chat_template=own.chat_template, add_generation_prompt=True, return_dict=True
        )
        inputs, ids = {}, made["input_ids"][0]
    whole = torch.tensor([[*ids, *completion]])
    inputs = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = (whole == own.image_token_id).int()
    logits = model(input_ids=whole, attention_mask=torch.ones_like(whole), **inputs).logits[0, len(ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, whole[0, len(ids) :, None])[:, 0]


@pytest.mark.parametrize("method", slow_but(["GRPO"], ["GRPO", "RLOO"]))
@pytest.mark.parametrize("family", slow_but([*FAMILIES][:1], FAMILIES))
def test_a_step_is_that_of_the_plain_computation(family: str, method: str, tmp_path: Path) -> None:
    """On a prompt with two images and on one without, in the same step."""
    reward, rate, group = Recorded(), 0.5, 4
    options = {"max_steps": 1, "learning_rate": rate, "beta": 0.0, "max_grad_norm": 1e9, "shuffle_dataset": False}
    run = online(tmp_path, family, method, {"reward_funcs": reward}, **options)
    plain = vision_model(family).double().train()
    run.train()
    [given] = reward.given
    completions, data = given["completion_ids"], questions()
    assert given["number"] == [0] * group + [1] * group
    rewards = torch.tensor(even_tokens(completions), dtype=torch.float64).view(-1, group)
    by_group = method == "GRPO"
    if by_group:
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    else:
        advantages = rewards - (rewards.sum(1, keepdim=True) - rewards) / (group - 1)
    divisor = sum(map(len, completions)) if by_group else len(completions)
    total = torch.zeros((), dtype=torch.float64)
    for number, ids, advantage in zip(given["number"], completions, advantages.flatten(), strict=True):
        logprobs = plain_logprobs(family, plain, data[number], ids)
        change = logprobs - logprobs.detach()
        total = total - advantage * (change.exp().sum() if by_group else change.sum().exp()) / divisor
    total.backward()
    expected = {name: p.detach() - rate * p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert any("visual" in name or "vision_model" in name for name in expected)
    assert_near(weights(run), expected, 2e-6)
    assert run.state.log_history[0]["loss"] == pytest.approx(total.item(), abs=1e-6)


def first_step(method: str, family: str, folder: Path, **options: Any) -> tuple[Any, list[Any], Any]:
    """A run by SGD after one step on a prompt with two images and on one without, what rewards were given, and the
    model as it was before."""
    reward = Recorded()
    how = {"max_steps": 1, "learning_rate": 0.5, "max_grad_norm": 1e9, "shuffle_dataset": False, **options}
    run = online(folder, family, method, {"reward_funcs": reward}, **how)
    plain = vision_model(family).double().train()
    if method == "PPO":
        plain.value_head = copy.deepcopy(run.model.value_head)
    run.train()
    [given] = reward.given
    return run, given, plain


def assert_stepped(run: Any, plain: Any, loss: Tensor) -> None:
    loss.backward()
    expected = {name: p.detach() - 0.5 * p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert any("visual" in name or "vision_model" in name for name in expected)
    assert_near(weights(run), expected, 2e-6)
    assert run.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_a_step_of_online_dpo_is_that_of_the_plain_computation(family: str, tmp_path: Path) -> None:
    """Against another reference, so that the losses of pairs are no constants."""
    other = vision_model(family, seed=1).double()
    options: dict[str, Any] = {"num_generations": 2, "per_device_train_batch_size": 2, "max_length": None}
    reward = Recorded()
    how = {"max_steps": 1, "learning_rate": 0.5, "max_grad_norm": 1e9, "shuffle_dataset": False, **options}
    run = online(tmp_path, family, "OnlineDPO", {"reward_funcs": reward, "ref_model": other}, **how)
    run.train()
    [given] = reward.given
    data, rewards, losses = questions(), even_tokens(given["completion_ids"]), []
    plain, reference = vision_model(family).double().train(), vision_model(family, seed=1).double()
    assert given["number"] == [0, 0, 1, 1]
    for first in (0, 2):
        ratios = []
        for place in (first, first + 1) if rewards[first] >= rewards[first + 1] else (first + 1, first):
            ids, row = given["completion_ids"][place], data[given["number"][place]]
            with torch.no_grad():
                referred = plain_logprobs(family, reference, row, ids).sum()
            ratios.append(plain_logprobs(family, plain, row, ids).sum() - referred)
        losses.append(-torch.nn.functional.logsigmoid(0.1 * (ratios[0] - ratios[1])))
    assert_stepped(run, plain, torch.stack(losses).mean())


def valued(family: str, model: Any, row: dict[str, Any], ids: list[int]) -> tuple[Tensor, Tensor]:
    """([tokens], [tokens]) of one completion: log-probabilities, and the values before its tokens."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logprobs = plain_logprobs(family, model, row, ids)
    hook.remove()
    return logprobs, model.value_head(seen[0])[0, -len(ids) - 1 : -1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_a_step_of_ppo_is_that_of_the_plain_computation(family: str, tmp_path: Path) -> None:
    """Policy and value function see the images; the trunk learns of both."""
    options = {"num_generations": 4, "num_ppo_epochs": 1, "kl_coef": 0.0, "temperature": 1.0, "vf_coef": 0.5}
    run, given, plain = first_step("PPO", family, tmp_path, **options)
    data, rewards = questions(), even_tokens(given["completion_ids"])
    advantages, returns, logprobs, values = [], [], [], []
    for ids, number, reward in zip(given["completion_ids"], given["number"], rewards, strict=True):
        own, expected = valued(family, plain, data[number], ids)
        after, found = 0.0, []
        for place in reversed(range(len(ids))):
            last = place == len(ids) - 1
            error = (reward if last else expected[place + 1].item()) - expected[place].item()
            after = error + 0.95 * after
            found.insert(0, after)
        advantages.append(torch.tensor(found, dtype=torch.float64))
        returns.append(advantages[-1] + expected.detach())
        logprobs.append(own)
        values.append(expected)
    advantage = torch.cat(advantages)
    advantage = (advantage - advantage.mean()) / (advantage.var() + 1e-8).sqrt()
    own, expected = torch.cat(logprobs), torch.cat(values)
    policy = -(advantage * (own - own.detach()).exp()).mean()
    assert_stepped(run, plain, policy + 0.5 * ((expected - torch.cat(returns)) ** 2 / 2).mean())


def test_an_image_is_not_cut_for_what_is_written_after_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_generations": 2, "per_device_train_batch_size": 2, "max_length": 20}
    with pytest.raises(ValueError, match=r"row 0 .*its \d+ tokens .*raise max_length"):
        online(tmp_path, method="OnlineDPO", **options)


WAYS: dict[str, dict[str, Any]] = {
    "prompts repeated": {"prefix_sharing": False},
    "a token budget": {"tokens_per_microbatch": 110},
    "a budget of what is written": {"tokens_per_generation_batch": 100},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "nothing checkpointed": {"gradient_checkpointing": False},
    "workers": {"dataloader_num_workers": 1},
    "rehearsed": {"rehearsal": True},
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = online(tmp_path_factory.mktemp("usual"), beta=0.05, max_steps=2)
    run.train()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("way", slow_but(["a token budget"], WAYS))
def test_every_way_to_take_a_step_gives_the_same_weights(way: str, usual: Any, tmp_path: Path) -> None:
    run = online(tmp_path, **{"beta": 0.05, "max_steps": 2, **WAYS[way]})
    run.train()
    assert_near(weights(run), weights(usual))


@pytest.mark.slow
def test_the_tower_runs_once_an_image_for_a_group(tmp_path: Path) -> None:
    run, patches = online(tmp_path, max_steps=1, gradient_checkpointing=False, shuffle_dataset=False), []
    run.model.model.visual.patch_embed.register_forward_hook(lambda _, args, __: patches.append(len(args[0])))
    run.train()
    [first, _] = questions(2)
    once = len(padded(processor(), [first["prompt"]], [first["images"]])["pixel_values"])
    assert patches == [once, once], "in writing and in the update"


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_adapters_learn_against_the_model_without_them(family: str, tmp_path: Path) -> None:
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    found = []
    for share in (True, False):
        torch.manual_seed(0)
        given = {"peft_config": adapters}
        options = {"beta": 0.5, "num_iterations": 2, "learning_rate": 0.1, "prefix_sharing": share, "max_steps": 4}
        run = online(tmp_path, family, given=given, **options)
        run.train()
        found.append(weights(run))
        assert all(math.isfinite(entry["kl"]) for entry in run.state.log_history if "kl" in entry)
        assert max(entry["kl"] for entry in run.state.log_history if "kl" in entry) > 0
    assert_near(found[1], found[0])


@pytest.mark.slow
def test_a_frozen_tower_stays(tmp_path: Path) -> None:
    run = online(tmp_path, freeze_vision_tower=True, learning_rate=0.1)
    before = weights(run)
    run.train()
    changed = {name for name, value in weights(run).items() if not torch.equal(value, before[name])}
    assert any("merger" in name for name in changed)
    assert not any("visual.blocks" in name or "patch_embed" in name for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize("by_path", slow_but([True], [True, False]))
def test_a_run_that_stops_within_a_window_goes_on_with_the_same_bits(by_path: bool, tmp_path: Path) -> None:
    data = questions()
    for number, row in enumerate(data if by_path else ()):
        paths = [str(tmp_path / f"{number}-{place}.png") for place in range(len(row["images"]))]
        for path, image in zip(paths, row["images"], strict=True):
            image.save(path)
        row["images"] = paths
    given = {"train_dataset": data}
    options = {"num_iterations": 3, "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "beta": 0.05}
    whole = online(tmp_path / "whole", given=given, **options)
    whole.train()
    first = online(tmp_path / "parts", given=given, **options)
    first.args.max_steps = 2
    first.train()
    second = online(tmp_path / "parts", given=given, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(whole).items())


# -- what rewards see ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rewards_see_pictures(tmp_path: Path) -> None:
    reward, data = Recorded(), questions()
    for row in data:
        row["target"] = picture(row["number"], 8, 16)
    online(tmp_path, given={"reward_funcs": reward, "train_dataset": data}, max_steps=1, shuffle_dataset=False).train()
    [given] = reward.given
    parts = given["prompts"][0][0]["content"]
    assert [part["type"] for part in parts] == ["text", "image", "image", "text"]
    shown = [part["image"] for part in parts if part["type"] == "image"]
    assert [image.tobytes() for image in shown] == [image.tobytes() for image in data[0]["images"]]
    assert [len(each) for each in given["images"]] == [2] * 4 + [0] * 4
    assert isinstance(given["images"][0][0], Image.Image)
    assert given["target"][0].tobytes() == data[0]["target"].tobytes()
    assert given["prompts"][4] == [{"role": "user", "content": [{"type": "text", "text": "No image: what is it?"}]}]
    assert given["completions"][0][0]["role"] == "assistant"


@pytest.mark.slow
def test_one_image_by_path_before_plain_text(tmp_path: Path) -> None:
    picture(0, 16, 24).save(tmp_path / "cat.png")
    given = [{"image": str(tmp_path / "cat.png"), "prompt": [{"role": "user", "content": "What is this?"}]}] * 2
    as_column = Dataset.from_list(given).cast_column("image", ImageFeature())
    found = []
    for data in (Dataset.from_list(given), as_column):
        reward = Recorded()
        run = online(tmp_path, given={"reward_funcs": reward, "train_dataset": data}, max_steps=2)
        run.train()
        found.append(weights(run))
        [asked] = reward.given[0]["prompts"][0]
        assert [part["type"] for part in asked["content"]] == ["image", "text"]
    assert_near(found[1], found[0], 0)
    assert isinstance(reward.given[0]["image"][0], Image.Image)


@pytest.mark.slow
def test_the_table_of_completions_says_where_images_stand(tmp_path: Path) -> None:
    run = online(tmp_path, max_steps=1, log_completions=True, shuffle_dataset=False)
    run.train()
    [path] = tmp_path.glob("completions/*.parquet")
    prompts = Dataset.from_parquet(str(path))["prompt"]
    assert prompts[0].startswith("[user] Look: [image][image] What is number 0?")


@pytest.mark.slow
def test_prompts_that_are_evaluated_show_images_too(tmp_path: Path) -> None:
    run = online(tmp_path, per_device_eval_batch_size=8, given={"eval_dataset": Dataset.from_list(questions(2))})
    assert math.isfinite(run.evaluate()["eval_loss"])


@pytest.mark.slow
def test_prompts_of_text_train_a_vision_language_model(tmp_path: Path) -> None:
    data = [{"prompt": [{"role": "user", "content": f"What is {n}?"}]} for n in range(4)]
    reward = Recorded()
    run = online(tmp_path, given={"train_dataset": data, "reward_funcs": reward}, max_steps=2)
    run.train()
    assert reward.given[0]["prompts"][0][0]["content"].startswith("What is")


# -- what is refused -------------------------------------------------------------------------------------------------


def broken(row: int, **value: Any) -> list[dict[str, Any]]:
    """Rows by path, one of which is another."""
    made = [{"images": ["good.png"], "prompt": rows(1, images=1)[0]["prompt"]} for _ in range(3)]
    made[row] |= value
    return made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"images": ["bad.png"]}, r"the train dataset, row 1 .*'bad.png' cannot be read as an image"),
        ({"images": ["nowhere.png"]}, r"row 1 .*'nowhere.png' cannot be read as an image .*No such file"),
        ({"images": ["good.png"] * 2}, r"row 1 .*has 2 images, of which 'prompt' shows 1"),
        ({"images": []}, r"row 1 .*'prompt' shows more images than the row has \(0\)"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}], "images": []}, r"row 1 .*of type 'video'"),
    ],
)
def test_a_broken_image_names_its_row(value: Any, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    picture(0).save("good.png")
    Path("bad.png").write_bytes(Path("good.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=message):
        online(tmp_path, given={"train_dataset": broken(1, **value)})


def text_model() -> Any:
    config = LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config)


def without_column(count: int = 2) -> list[dict[str, Any]]:
    """Prompts whose images are within their messages."""
    part = {"type": "image", "path": "cat.png"}
    return [{"prompt": [{"role": "user", "content": [part]}]} for _ in range(count)]


REFUSED: dict[str, Any] = {
    "a text model": (
        {"model": text_model, "processing_class": lambda: processor().tokenizer},
        {},
        "has the column 'images', and text models are trained here",
    ),
    "a text model, images within messages": (
        {"model": text_model, "processing_class": lambda: processor().tokenizer, "train_dataset": without_column},
        {},
        "row 0: the prompt shows an image, and prompts are read as text here",
    ),
    "an image after a row without": (
        {"train_dataset": lambda: [{"prompt": [user("Hm?")]}, *without_column()]},
        {},
        "row 1: the prompt shows an image, and prompts are read as text here",
    ),
    "a tokenizer": (
        {"processing_class": lambda: processor().tokenizer},
        {},
        "has images, and processing_class is a tokenizer, which reads none: save the model's processor",
    ),
    "tools": (
        {"tools": lambda: [add], "processing_class": lambda: calling()},
        {},
        "prompts show images, which do not go with tools",
    ),
    "a rollout_func": ({"rollout_func": lambda: print}, {}, "which do not go with rollout_func"),
    "padded": ({}, {"padding_free": False}, "only lowtide's own generator writes after them"),
    "generate": ({}, {"generation_backend": "transformers"}, "leave out .*generation_backend='transformers'"),
    "a prompt that is cut": ({}, {"max_prompt_length": 6}, r"row 0 .*its \d+ tokens .*raise max_length"),
}


def calling() -> Any:
    """A processor whose tokenizer's own template writes calls of tools."""
    made = processor()
    made.tokenizer.chat_template = HERMES_TEMPLATE
    return made


@pytest.mark.parametrize("case", [*REFUSED])
def test_what_cannot_go_with_images_is_refused(case: str, tmp_path: Path) -> None:
    given, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        online(tmp_path, given={name: make() for name, make in given.items()}, **options)


def test_a_reward_model_is_refused(tmp_path: Path) -> None:
    config = text_model().config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    given = {"reward_funcs": model, "reward_processing_classes": processor().tokenizer}
    with pytest.raises(ValueError, match="do not go with a reward model, which reads text alone"):
        online(tmp_path, given=given)


def test_images_of_a_later_evaluation_are_refused_where_tools_are_called(tmp_path: Path) -> None:
    text = [{"prompt": [{"role": "user", "content": "Hm?"}]}] * 2
    given = {"train_dataset": text, "tools": [add], "processing_class": calling()}
    run = online(tmp_path, given=given, per_device_eval_batch_size=8)
    with pytest.raises(ValueError, match="prompts show images, which do not go with tools"):
        run.evaluate(Dataset.from_list(questions(2)))
