"""`push_to_hub`, the last line of every script: a card with what the model is, and what was asked for uploaded.

The hub is stood in for: nothing leaves the machine.
"""

import re
from importlib.metadata import version
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


def trained(method, folder, tmp_path, settings=None, **more):
    config = getattr(lowtide, f"{method}Config")
    given = {
        "output_dir": str(tmp_path / "tiny"),
        "max_steps": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "push_to_hub": True,
        "hub_model_id": "someone/tiny",
    }
    args = config(**given | (settings or {}))
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


@pytest.mark.parametrize("adapted", [False, True])
def test_every_save_has_a_card_checkpoints_too(folder, tmp_path, adapted):
    more = {"peft_config": LoraConfig(task_type="CAUSAL_LM")} if adapted else {}
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "push_to_hub": False, "max_steps": 2}
    trainer = trained("SFT", folder, tmp_path, eval_dataset=Dataset.from_list(ROWS["SFT"]), settings=settings, **more)
    trainer.evaluate()
    trainer.save_model()
    then, now = (ModelCard.load(tmp_path / "tiny" / each / "README.md") for each in ("checkpoint-2", "."))
    for card in (then, now):
        assert card.data.to_dict()["library_name"] == ("peft" if adapted else "transformers")
        assert card.data.to_dict()["model_name"] == "tiny"
        assert "[More Information Needed]" not in card.text
        assert folder not in card.content
        assert "lowtide chat tiny" in card.text
        assert "| rows | 4 |" in card.text
        peak = re.search(r"\| peak memory \(cpu\) \| (\S+ \w+) \|", card.text)
        assert peak is not None
        assert f"| lowtide | {version('lowtide')} |" in card.text
        assert (f"| peft | {version('peft')} |" in card.text) is adapted
    assert "| optimizer steps | 2 |" in then.text
    assert "loss on the evaluation set" not in then.text
    evaluated = next(log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log)
    assert f"| loss on the evaluation set | {evaluated:.4g} |" in now.text


def test_a_readme_of_ones_own_stays_and_a_card_keeps_what_it_was_told(folder, tmp_path):
    trainer = trained("SFT", folder, tmp_path, settings={"push_to_hub": False})
    path = tmp_path / "tiny" / "README.md"
    trainer.create_model_card("My model", dataset_name="trl-lib/Capybara", tags="mine", license="mit")
    trainer.save_model()
    data = ModelCard.load(path).data.to_dict()
    assert (data["model_name"], data["datasets"], data["license"]) == ("My model", "trl-lib/Capybara", "mit")
    assert "mine" in data["tags"]
    path.write_text("What I think of it.")
    trainer.save_model()
    assert path.read_text() == "What I think of it."
    trainer.create_model_card()  # asked for
    assert ModelCard.load(path).data.to_dict()["model_name"] == "My model"


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
