"""Methods beside SFT and DPO on rows with images: one step is that of the plain padded computation, in value and in
gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor

import lowtide
from tests.support.marks import slow_but
from tests.support.models.vision_models import FAMILIES, assistant, padded, processor, rows, user, vision_model
from tests.support.runs.online_runs import assert_near, weights

RATE = 0.5
ROWS = 4


def trainer(
    method: str, family: str, folder: Path, made: list[dict[str, Any]], given: dict[str, Any] | None = None, **more: Any
) -> Any:
    """Of one step by SGD, of a model in float64."""
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "max_steps": 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1e9,
        "max_length": None,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "rehearsal": False,
        "train_sampling_strategy": "sequential",
        **more,
    }
    arguments = {"model": vision_model(family).double(), "processing_class": processor(family), **(given or {})}
    return getattr(lowtide, f"{method}Trainer")(
        arguments.pop("model"),
        args=getattr(lowtide, f"{method}Config")(**settings),
        train_dataset=Dataset.from_list(made),
        **arguments,
    )


def mixed() -> list[dict[str, Any]]:
    """Pairs, one of which shows no image."""
    made = rows(ROWS)
    made[2] |= {"images": [], "prompt": [user("No image: ", "what is it?")]}
    return made


def plain_logits(family: str, model: Any, row: dict[str, Any], answer: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """([tokens - 1, vocab] before each token but the first, [tokens]) of one row, by the model's own forward."""
    own = processor(family)
    if row["images"]:
        batch = padded(own, [row["prompt"] + answer], [row["images"]])
    else:
        ids = own.tokenizer.apply_chat_template([row["prompt"] + answer], return_dict=True)["input_ids"]
        batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.ones_like(torch.tensor(ids))}
        if "mm_token_type_ids" in own.model_input_names:
            batch["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"]).int()
    return model(**batch).logits[0, :-1], batch["input_ids"][0]


def prompt_tokens(run: Any, number: int) -> int:
    return len(run.train_dataset[number]["prompt_ids"])


def assert_stepped(run: Any, plain: Any, loss: Tensor) -> None:
    """A run has taken the step of a loss that the plain computation has for it."""
    loss.backward()
    expected = {name: p.detach() - RATE * p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert any("visual" in name or "vision_model" in name for name in expected)
    assert run.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert_near(weights(run), expected, 2e-6)


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_odds_ratios_are_those_of_the_padded_forward(family: str, sharing: bool, tmp_path: Path) -> None:
    """Prompts are scored, but for the places of images."""
    made = mixed()
    run = trainer("ORPO", family, tmp_path, made, prefix_sharing=sharing)
    first = [prompt_tokens(run, number) for number in range(ROWS)]
    run.train()
    plain, mark = vision_model(family).double().train(), processor(family).image_token_id
    nll, count, odds = torch.zeros((), dtype=torch.float64), 0, []
    for number, row in enumerate(made):
        means = []
        for side in ("chosen", "rejected"):
            logits, ids = plain_logits(family, plain, row, row[side])
            own = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            means.append(own[first[number] - 1 :].mean())
            if side == "chosen":
                scored = ids[1:] != mark
                nll, count = nll - own[scored].sum(), count + int(scored.sum())
        chosen, rejected = means
        odds.append(chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp())))
    assert run.ledger.scored_tokens == count + sum(
        len(plain_logits(family, plain, row, row["rejected"])[1]) - first[number] for number, row in enumerate(made)
    )
    assert_stepped(run, plain, nll / count - 0.1 * F.logsigmoid(torch.stack(odds)).mean())


@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_single_answers_are_classified_as_by_the_padded_forward(family: str, tmp_path: Path) -> None:
    """BCO: against the mean of all rewards, those of the whole batch."""
    made = [
        {"images": row["images"], "prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 == 0}
        for number, row in enumerate(mixed())
    ]
    given = {"ref_model": vision_model(family, seed=1).double()}
    run = trainer("BCO", family, tmp_path, made, given, desirable_weight=1.5, tokens_per_microbatch=150)
    first = [prompt_tokens(run, number) for number in range(ROWS)]
    run.train()
    plain, reference = vision_model(family).double().train(), vision_model(family, seed=1).double()
    ratios = []
    for number, row in enumerate(made):
        sums = []
        for model in (plain, reference):
            logits, ids = plain_logits(family, model, row, row["completion"])
            sums.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[first[number] - 1 :].sum())
        ratios.append(sums[0] - sums[1].detach())
    rewards = 0.1 * torch.stack(ratios)
    ahead = rewards - rewards.mean().detach()
    desirable = torch.tensor([row["label"] for row in made])
    losses = torch.where(desirable, -1.5 * F.logsigmoid(ahead), -F.logsigmoid(-ahead))
    assert_stepped(run, plain, losses.mean())


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """[tokens]: of logits [tokens, vocab]."""
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    share = torch.tensor(beta, dtype=torch.float64)
    mixed = torch.logaddexp(student + torch.log1p(-share), teacher + share.log())
    of_teacher, of_student = (((each.exp() * (each - mixed)).sum(-1)) for each in (teacher, student))
    return beta * of_teacher + (1 - beta) * of_student


@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_a_teacher_sees_the_images_too(family: str, tmp_path: Path) -> None:
    made = [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in mixed()]
    teacher = vision_model(family, seed=1).double()
    run = trainer("GKD", family, tmp_path, made, {"teacher_model": teacher}, lmbda=0.0)
    labels = [torch.tensor(row["labels"]) for row in run.train_dataset]
    run.train()
    plain, total, count = vision_model(family).double().train(), torch.zeros((), dtype=torch.float64), 0
    teacher = vision_model(family, seed=1).double()
    for row, label in zip(mixed(), labels, strict=True):
        student, _ = plain_logits(family, plain, row, row["chosen"])
        with torch.no_grad():
            theirs, _ = plain_logits(family, teacher, row, row["chosen"])
        scored = label[1:] >= 0
        total, count = total + jensen_shannon(student, theirs)[scored].sum(), count + int(scored.sum())
    assert_stepped(run, plain, total / count)


def forward_inputs(own: Any, row: dict[str, Any], ids: Tensor, answer: list[dict[str, Any]]) -> dict[str, Any]:
    """What a model's own forward takes of the tokens of a row whose prompt is answered so."""
    inputs: dict[str, Any] = {}
    if row["images"]:
        made_of = padded(own, [row["prompt"] + answer], [row["images"]])
        inputs = {k: v for k, v in made_of.items() if k not in ("input_ids", "attention_mask")}
    inputs |= {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
    if "mm_token_type_ids" in own.model_input_names:
        inputs["mm_token_type_ids"] = (ids[None] == own.image_token_id).int()
    return inputs


@pytest.mark.parametrize("options", [{"lmbda": 1.0}, {"lmbda": 0.0, "seq_kd": True}], ids=["student", "teacher"])
@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_completions_are_written_after_the_images(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Almost greedily, as by transformers' `generate`; and learned from as the data's are."""
    made = [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in mixed()]
    given = {"teacher_model": vision_model(family, seed=1).double()}
    run = trainer("GKD", family, tmp_path, made, given, temperature=1e-5, max_new_tokens=6, **options)
    writer = vision_model(family, seed=0 if "seq_kd" not in options else 1).double()
    seen: list[Any] = []
    take = run.runner.gradients
    run.runner.gradients = lambda batch: (seen.append(batch), take(batch))[1]
    run.train()
    [batch] = seen
    assert [len(each) for each in batch.segment_images] == [2, 2, 0, 2]
    own = processor(family)
    student, teacher = vision_model(family).double().train(), vision_model(family, seed=1).double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for number, (part, row) in enumerate(zip(batch.segments, mixed(), strict=True)):
        ids = batch.token_ids[part.start : part.stop]
        first = int(batch.score_index[part.score_start]) - part.start + 1
        written = ids[first:].tolist()
        inputs = forward_inputs(own, row, ids, [assistant(own.tokenizer.decode(written))])
        prompt = {k: v[:, :first] if v.shape[:2] == ids[None].shape else v for k, v in inputs.items()}
        never = {"suppress_tokens": [own.image_token_id]}
        with torch.no_grad():
            expected = writer.eval().generate(**prompt, do_sample=False, max_new_tokens=6, eos_token_id=0, **never)
            theirs = teacher(**inputs).logits[0, first - 1 : -1]
        assert written == expected[0, first:].tolist(), f"row {number}"
        ours = student(**inputs).logits[0, first - 1 : -1]
        total, count = total + jensen_shannon(ours, theirs).sum(), count + len(written)
    assert_stepped(run, student, total / count)


class OtherFamily:
    """A run of GOLD, whose teacher is of another family than the student, and what the teacher reads in it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.own, self.theirs = processor("qwen2_5_vl"), processor("idefics3")
        for each in (self.theirs, vision_model("idefics3").config):
            each.save_pretrained(folder / "teacher")
        made = [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in mixed()]
        options |= {"use_uld_loss": True, "teacher_tokenizer_name_or_path": str(folder / "teacher")}
        given = {"teacher_model": vision_model("idefics3", seed=1).double()}
        self.run = trainer("GOLD", "qwen2_5_vl", folder, made, given, **options)
        self.reads: list[Any] = []
        tokenizers = self.run.training_run.tokenizers
        read = tokenizers.read
        tokenizers.read = lambda *args: (self.reads.append(read(*args)), self.reads[-1])[1]

    def prompt(self, row: dict[str, Any]) -> Any:
        """What the teacher's processor makes of the student's text, with its own mark of images in it."""
        text = self.own.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        how = {"return_tensors": "pt", "add_special_tokens": False}
        return self.theirs(
            text=[text.replace("<|image_pad|>", "<image>")], images=[row["images"]] if row["images"] else None, **how
        )


def test_a_teacher_of_another_family_reads_images_by_its_own_processor(tmp_path: Path) -> None:
    """Probabilities in falling order, at each token; both have bytes for tokens."""
    both = OtherFamily(tmp_path, lmbda=0.0)
    labels = [torch.tensor(row["labels"]) for row in both.run.train_dataset]
    both.run.train()
    student, teacher = vision_model("qwen2_5_vl").double().train(), vision_model("idefics3", seed=1).double()
    total = torch.zeros((), dtype=torch.float64)
    for row, label, found in zip(mixed(), labels, both.reads, strict=True):
        read, answer = both.prompt(row), label[label >= 0]
        assert found.prompt == read["input_ids"][0].tolist()
        ids = torch.cat([read["input_ids"], answer[None]], 1)
        with torch.no_grad():
            logits = teacher(**{**read, "input_ids": ids, "attention_mask": torch.ones_like(ids)}).logits
        p = logits[0, -len(answer) - 1 : -1].softmax(-1)
        q = plain_logits("qwen2_5_vl", student, row, row["chosen"])[0][label[1:] >= 0].softmax(-1)
        apart = q.sort(-1, descending=True).values - p.sort(-1, descending=True).values
        total = total + apart.abs().sum(-1).mean() / ROWS
    assert_stepped(both.run, student, total)


@pytest.mark.slow
def test_it_reads_them_before_what_the_student_writes(tmp_path: Path) -> None:
    both = OtherFamily(tmp_path, lmbda=1.0, max_completion_length=6)
    both.run.train()
    assert both.run.state.log_history[0]["completions/mean_length"] > 0
    for row, found in zip(mixed(), both.reads, strict=True):
        assert found.prompt == both.prompt(row)["input_ids"][0].tolist()
        assert len(found.images) == len(row["images"])


def test_one_that_reads_text_alone_is_refused(tmp_path: Path) -> None:
    made = [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in mixed()]
    theirs, given = processor("idefics3"), {"teacher_model": vision_model("idefics3")}
    theirs.tokenizer.save_pretrained(tmp_path / "text")
    options = {"use_uld_loss": True, "teacher_tokenizer_name_or_path": str(tmp_path / "text")}
    with pytest.raises(ValueError, match="reads text alone"):
        trainer("GOLD", "qwen2_5_vl", tmp_path, made, given, **options)


def another(**changes: Any) -> Any:
    """A model of the first family that takes images in another way."""
    from tests.support.models.vision_models import CONFIGS

    config = CONFIGS["qwen2_5_vl"]()
    for name, value in changes.items():
        setattr(config.vision_config if hasattr(config.vision_config, name) else config, name, value)
    return vision_model(config=config)


@pytest.mark.parametrize(
    ("method", "other", "message"),
    [
        ("GKD", lambda: vision_model("idefics3"), "teacher_model has another model_type"),
        ("GKD", lambda: another(patch_size=2), r"teacher_model has another patch_size \(2\) .* \(4\)"),
        ("DPO", lambda: another(spatial_merge_size=1), r"ref_model has another spatial_merge_size \(1\)"),
    ],
)
def test_models_that_take_images_in_another_way_are_refused(
    method: str, other: Any, message: str, tmp_path: Path
) -> None:
    made = mixed()
    if method == "GKD":
        made = [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in made]
    name = "teacher_model" if method == "GKD" else "ref_model"
    with pytest.raises(ValueError, match=message):
        trainer(method, "qwen2_5_vl", tmp_path, made, {name: other()})


def test_a_teacher_that_reads_text_alone_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.support.models.vision_models import VOCABULARY

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    teacher = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    made = [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in mixed()]
    with pytest.raises(ValueError, match=r"teacher_model .* reads text alone"):
        trainer("GKD", "qwen2_5_vl", tmp_path, made, {"teacher_model": teacher})
