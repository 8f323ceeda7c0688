"""What TRL's scripts put into `model_init_kwargs`, much of it after the config was made, is read."""

import pytest
import torch
from datasets import Dataset
from transformers import BitsAndBytesConfig

import lowtide
from lowtide import SFTTrainer
from lowtide.demo.model import save
from lowtide.engine.weights.model_init import model_init
from lowtide.trainers.predictions import run_of

OF_A_SCRIPT = {"revision": "main", "trust_remote_code": True, "attn_implementation": None, "dtype": "bfloat16"}
TURNS = [[{"role": "user", "content": "1 + 1"}], [{"role": "assistant", "content": "2"}]]
WRONG = [{"role": "assistant", "content": "3"}]
ROWS = {
    "SFT": {"prompt": TURNS[0], "completion": TURNS[1]},
    "DPO": {"prompt": TURNS[0], "chosen": TURNS[1], "rejected": WRONG},
    "KTO": {"prompt": TURNS[0], "completion": TURNS[1], "label": True},
    "Reward": {"prompt": TURNS[0], "chosen": TURNS[1], "rejected": WRONG},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(folder, seed=0)
    return str(folder)


def trainer(folder, tmp_path, init, *, method="SFT", **options):
    config = getattr(lowtide, f"{method}Config")
    args = config(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, **options)
    args.model_init_kwargs = init  # as TRL's scripts do: when the config is there already
    return getattr(lowtide, f"{method}Trainer")(folder, args=args, train_dataset=Dataset.from_list([ROWS[method]] * 4))


@pytest.mark.parametrize("method", ROWS)
def test_what_a_script_passes_reaches_the_model(folder, tmp_path, method):
    made = trainer(folder, tmp_path, OF_A_SCRIPT, method=method)
    assert made.model.dtype == torch.bfloat16
    assert OF_A_SCRIPT["trust_remote_code"] is True  # the script's own dictionary stays as it is


@pytest.mark.parametrize(
    ("init", "dtype"),
    [
        ({"dtype": None, "device_map": None, "revision": None, "quantization_config": None}, torch.float32),
        ({"torch_dtype": torch.bfloat16}, torch.bfloat16),
        ({"torch_dtype": "bfloat16", "dtype": None}, torch.bfloat16),
        ({"dtype": "auto"}, torch.float32),
        ({"device_map": "auto"}, torch.float32),
        ({"device_map": {"": "cpu"}, "use_cache": False}, torch.float32),
    ],
)
def test_each_argument_trains(folder, tmp_path, init, dtype):
    made = trainer(folder, tmp_path, init, save_strategy="no")
    made.train()
    assert made.model.dtype == dtype
    assert "use_cache" not in init or made.model.config.use_cache is False


@pytest.mark.parametrize(("init", "dtype"), [({"dtype": "auto"}, torch.float32), (OF_A_SCRIPT, torch.bfloat16)])
def test_a_budget_is_planned_with_the_dtype_that_came_after_the_config(folder, tmp_path, init, dtype):
    made = trainer(folder, tmp_path, init, memory_budget="8GB")
    run = run_of(SFTTrainer.method, made.args, folder, requested=made.args.requested)
    assert run.faked(made.train_dataset, {}).model.dtype == dtype == made.model.dtype


def test_a_none_is_the_default_and_the_scripts_word_on_code_comes_first():
    assert model_init({"attn_implementation": None, "trust_remote_code": True}) == {"trust_remote_code": True}
    assert model_init(None, trust_remote_code=True) == {"trust_remote_code": True}
    assert model_init({"trust_remote_code": False}, trust_remote_code=True) == {"trust_remote_code": False}
    assert model_init({"torch_dtype": "float16", "dtype": "bfloat16"})["dtype"] == "bfloat16"


def test_a_revision_is_a_name():
    assert model_init({"revision": "v1"})["revision"] == "v1"
    with pytest.raises(ValueError, match="revision=3 must be the name of a branch"):
        model_init({"revision": 3})


def test_a_quantization_given_twice_is_refused():
    eight = BitsAndBytesConfig(load_in_8bit=True)
    assert model_init({}, quantization_config=eight)["quantization_config"] is eight
    with pytest.raises(ValueError, match="quantization_config is given twice"):
        model_init({"quantization_config": eight}, quantization_config=eight)
