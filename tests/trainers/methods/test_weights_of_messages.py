"""Weights of messages between 0 and 1, from conversations to the loss of a training."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from lowtide import DataCollatorWithFlattening, SFTConfig, SFTTrainer
from tests.support.matrix.matrix import COMMON, build, tokenizer
from tests.support.texts.chatml import CHATML

WORDS = "one two three four five six seven eight"


def talks() -> list[dict]:
    def talk(number: int, *weights: float | None) -> dict:
        said = WORDS.split()[number:]
        messages = []
        for weight in weights:
            messages.append({"role": "user", "content": said[0], "weight": None})
            messages.append({"role": "assistant", "content": " ".join(said), "weight": weight})
        return {"messages": messages}

    return [talk(0, None, 0.25), talk(1, 0.5), talk(2, 0, None, 0.75), talk(3, None)]


def trainer(tmp_path, kind: type[SFTTrainer] = SFTTrainer, *, stream: bool = False, data_collator=None, **options):
    chat = tokenizer()
    chat.chat_template = CHATML
    config = {**COMMON, "per_device_train_batch_size": 4, "max_steps": 1, "learning_rate": 0.0, **options}
    rows = Dataset.from_list(talks())
    return kind(
        build("SFT", 64),
        args=SFTConfig(output_dir=str(tmp_path), assistant_only_loss=True, **config),
        data_collator=data_collator,
        train_dataset=rows.to_iterable_dataset() if stream else rows,
        eval_dataset=rows,
        processing_class=chat,
    )


def expected(made: SFTTrainer) -> float:
    """One plain forward for each row, and the weights of the messages whose text a token is of."""
    model, total, weight = build("SFT", 64).eval(), 0.0, 0.0
    for row, talk in zip(made.eval_dataset, talks(), strict=True):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
        scored = [place for place, label in enumerate(labels.tolist()) if label != -100]
        turns = [[scored[0]]]
        for place in scored[1:]:
            turns[-1].append(place) if place == turns[-1][-1] + 1 else turns.append([place])
        said = [each["weight"] for each in talk["messages"][1::2] if each["weight"] != 0]
        for places, own in zip(turns, said, strict=True):
            own = 1.0 if own is None else own
            total -= own * sum(logprobs[place - 1, labels[place]].item() for place in places)
            weight += own * len(places)
    return total / weight


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"packing": True, "max_length": 400, "eval_packing": False},
        {"tokens_per_microbatch": 40},
    ],
    ids=["whole", "accumulated", "packed", "pieces"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_loss_is_weighted_by_message(tmp_path, options, stream):
    made = trainer(tmp_path, stream=stream, **options)
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(expected(made), rel=1e-5)
    assert made.evaluate()["eval_loss"] == pytest.approx(expected(made), rel=1e-5)


class Own(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


def test_what_would_not_see_the_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"weights between 0 and 1, which a loss of Own's own would not see"):
        trainer(tmp_path, Own)
    with pytest.raises(ValueError, match=r"weights between 0 and 1, which a loss of Own's own would not see"):
        trainer(tmp_path, Own, stream=True).train()
    with pytest.raises(ValueError, match=r"data_collator .* leaves out the weights of messages .*loss_weights"):
        trainer(tmp_path, data_collator=DataCollatorWithFlattening())
