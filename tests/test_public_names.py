"""The public names, once more: a change here is a change for users."""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide
from lowtide.scripts.elsewhere import ELSEWHERE

NAMES = [
    "A2POConfig",
    "A2POTrainer",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "BCOConfig",
    "BCOTrainer",
    "BEMACallback",
    "BasePairwiseJudge",
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "DataCollatorForChatML",
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorForLanguageModeling",
    "DataCollatorForPreference",
    "DataCollatorForUnpairedPreference",
    "DataCollatorForVisionLanguageModeling",
    "DataCollatorForVisionPreference",
    "DataCollatorForVisionUnpairedPreference",
    "DataCollatorWithFlattening",
    "DatasetConfig",
    "DatasetMixtureConfig",
    "DistillationConfig",
    "DistillationTrainer",
    "GKDConfig",
    "GKDTrainer",
    "GMPOConfig",
    "GMPOTrainer",
    "GOLDConfig",
    "GOLDTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "IWOPDConfig",
    "IWOPDTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LogCompletionsCallback",
    "MaskedLMConfig",
    "MaskedLMTrainer",
    "MergeConfig",
    "MergeModelCallback",
    "ModelConfig",
    "ORPOConfig",
    "ORPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "PRMConfig",
    "PRMTrainer",
    "PretrainConfig",
    "PretrainTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "RaggedBatch",
    "RandomPairwiseJudge",
    "ReplacedTokenDetectionConfig",
    "ReplacedTokenDetectionTrainer",
    "RewardConfig",
    "RewardTrainer",
    "RichProgressCallback",
    "SDFTConfig",
    "SDFTTrainer",
    "SDPOConfig",
    "SDPOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "Seq2SeqConfig",
    "Seq2SeqTrainer",
    "SequenceClassificationConfig",
    "SequenceClassificationTrainer",
    "SyncRefModelCallback",
    "TPOConfig",
    "TPOTrainer",
    "TokenClassificationConfig",
    "TokenClassificationTrainer",
    "TrlParser",
    "WeaveCallback",
    "WinRateCallback",
    "accuracy_reward",
    "add_response_schema",
    "apply_chat_template",
    "clone_chat_template",
    "create_reference_model",
    "estimate",
    "extract_prompt",
    "get_cosine_scaled_reward",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "get_training_chat_template",
    "init_zero_verbose",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "plan",
    "prepare_multimodal_messages",
    "reasoning_accuracy_reward",
    "setup_chat_format",
    "supports_tool_calling",
    "think_format_reward",
    "truncate_dataset",
    "unpair_preference_dataset",
]


def test_the_public_names_are_these():
    assert lowtide.__all__ == NAMES
    assert {name for name in dir(lowtide) if not name.startswith("__")} == set(NAMES) - {"__version__"}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_that_is_not_here_says_what_to_use(name):
    with pytest.raises(ImportError, match=f"^{name} is not in lowtide: it "):
        exec(f"from lowtide import {name}")


def test_every_public_name_of_trl_is_here_or_says_what_to_use():
    trl = pytest.importorskip("trl", reason="the comparison needs the bench extra (trl)")
    theirs = {name for names in trl._import_structure.values() for name in names}
    assert theirs - set(lowtide.__all__) - set(ELSEWHERE) == set()
    assert not set(lowtide.__all__) & set(ELSEWHERE)


def test_each_public_name_resolves_to_what_it_is_called():
    for name in NAMES:
        assert getattr(lowtide, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(lowtide, "SFTTrainner")


def test_importing_the_package_and_its_command_imports_nothing_heavy():
    code = (
        "import sys, lowtide, lowtide.cli.main\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_module_of_trls_experimental_folder_has_a_row():
    folder = Path(pytest.importorskip("trl").__file__).with_name("experimental")
    modules = [each.name for each in pkgutil.iter_modules([str(folder)]) if each.name != "utils"]
    page = (Path(__file__).parents[1] / "docs" / "migrating-from-trl.md").read_text(encoding="utf-8")
    assert len(modules) > 10
    assert [name for name in modules if f"| `from trl.experimental.{name} import " not in page] == []
    listed = {name for row in re.findall(r"`from trl\.experimental\..*", page) for name in re.findall(r"\w+", row)}
    exported = {name for path in folder.glob("*/__init__.py") for name in _exported(path)}
    assert len(exported) > 20
    assert exported - listed == set()


def _exported(path: Path) -> set[str]:
    """The names that a package gives out of its modules, without importing it."""
    found = [each for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(each, ast.ImportFrom)]
    names = {name.asname or name.name for each in found if each.level == 1 for name in each.names}
    return {name for name in names if not name.startswith("_")}
