"""`push_to_hub`, the last line of every script: a card with what the model is, and what was asked for uploaded.

The hub is stood in for: nothing leaves the machine.
"""

from types import SimpleNamespace

import pytest
from datasets import Dataset
from huggingface_hub import HfApi, ModelCard
from peft import LoraConfig

import lowtide
from lowtide.demo.model import save
from lowtide.methods import METHODS
from tests.support.marks import slow_but

TURNS = [[{"role": "user", "content": "1 + 1"}], [{"role": "assistant", "content": "2"}]]
WRONG = [{"role": "assistant", "content": "3"}]
PAIR = {"prompt": TURNS[0], "chosen": TURNS[1], "rejected": WRONG}
SINGLE = {"prompt": TURNS[0], "completion": TURNS[1]}
ROWS = {"SFT": [SINGLE] * 4, "DPO": [PAIR] * 4, "Reward": [PAIR] * 4, "KTO": [{**SINGLE, "label": True}] * 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(folder, seed=0)
    return str(folder)


@pytest.fixture
def uploads(monkeypatch):
    """What would have been uploaded."""
    calls = []
    made = SimpleNamespace(repo_id="someone/tiny")
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **_: made)
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **given: calls.append(given))
    return calls


def trained(method, folder, tmp_path, **more):
    config = getattr(lowtide, f"{method}Config")
    args = config(
        output_dir=str(tmp_path / "tiny"),
        max_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        push_to_hub=True,
        hub_model_id="someone/tiny",
    )
    rows = Dataset.from_list(ROWS[method])
    trainer = getattr(lowtide, f"{method}Trainer")(folder, args=args, train_dataset=rows, **more)
    trainer.train()
    return trainer


@pytest.mark.parametrize("method", slow_but([*ROWS][:2], ROWS))
def test_what_a_script_pushes_has_a_card(method, folder, tmp_path, uploads):
    trainer = trained(method, folder, tmp_path)
    trainer.push_to_hub(dataset_name="trl-lib/Capybara", tags="mine", license="mit")
    [upload] = uploads
    assert (upload["repo_id"], upload["folder_path"]) == ("someone/tiny", str(tmp_path / "tiny"))
    card = ModelCard.load(tmp_path / "tiny" / "README.md")
    data = card.data.to_dict()
    assert (data["datasets"], data["license"]) == ("trl-lib/Capybara", "mit")
    assert data["tags"] == ["generated_from_trainer", "lowtide", method.lower(), "mine"]
    assert data["pipeline_tag"] == ("text-classification" if method == "Reward" else "text-generation")
    assert data["library_name"] == "transformers"
    assert "base_model" not in data  # a folder of this machine is no name of the hub's
    assert folder not in card.content
    assert 'model="someone/tiny"' in card.text
    assert "[trl-lib/Capybara](https://huggingface.co/datasets/trl-lib/Capybara)" in card.text
    assert "| optimizer steps | 2 |" in card.text
    last = [log["loss"] for log in trainer.state.log_history if "loss" in log][-1]
    assert f"| loss, last | {last:.4g} |" in card.text
    paper = METHODS[method.lower()].paper
    assert (paper is None) == (method == "SFT")
    assert paper is None or paper.citation in card.text


def test_an_adapter_of_a_model_on_the_hub_names_it_and_a_local_dataset_is_not_linked(folder, tmp_path, uploads):
    trainer = trained("SFT", folder, tmp_path, peft_config=LoraConfig(task_type="CAUSAL_LM"))
    trainer.model.config._name_or_path = "Qwen/Qwen3-0.6B"
    trainer.create_model_card("Tiny", dataset_name=str(tmp_path / "rows.jsonl"))
    card = ModelCard.load(tmp_path / "tiny" / "README.md")
    assert card.data.to_dict()["base_model"] == "Qwen/Qwen3-0.6B"
    assert card.data.to_dict()["library_name"] == "peft"
    assert "datasets" not in card.data.to_dict()
    assert card.text.lstrip().startswith("# Tiny")
    assert "`rows.jsonl`" in card.text
    assert str(tmp_path) not in card.content


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.paper])
def test_each_methods_citation_is_one_entry_with_the_paper_that_trl_names(name):
    citation = METHODS[name].paper.citation
    assert citation.count("@misc{") == 1
    assert citation.count("{") == citation.count("}")
    homes = {"dpo": "trl.trainer.dpo_trainer", "kto": "trl.trainer.kto_trainer"}
    homes |= {each: f"trl.experimental.{each}.{each}_trainer" for each in ("orpo", "cpo")}
    if name in homes:
        module = pytest.importorskip(homes[name], reason="the comparison needs the bench extra (trl)")
        theirs = getattr(module, f"{name.upper()}Trainer")._paper
        assert (METHODS[name].paper.title, METHODS[name].paper.arxiv) == (theirs["title"], theirs["id"])
