"""What no file can be called is refused by the option that it was given to."""

import pytest

from lowtide import SFTConfig
from lowtide.engine.weights.loading import load_tokenizer
from lowtide.option_values import options_of

TEXTS = [name for name, option in options_of(SFTConfig).items() if str in option.kinds and name != "output_dir"]


@pytest.mark.parametrize("path", ["x" * 500, "x" * 300 + ".json", "\0"])
def test_each_option_that_takes_text_takes_it_or_refuses_it_by_name(path, tmp_path):
    assert {"memory_report", "chat_template_path"} <= {*TEXTS}
    for name in TEXTS:
        try:
            SFTConfig(**{"output_dir": tmp_path, "use_cpu": True, "bf16": False, name: path})
        except (ValueError, TypeError) as error:
            if name not in str(error):
                pytest.fail(f"{name} is not named by {error}")


@pytest.mark.parametrize("option", ["deepspeed", "memory_report"])
def test_a_file_of_such_a_name_is_refused(option, tmp_path):
    with pytest.raises(ValueError, match=f"{option}='xxx"):
        SFTConfig(**{"output_dir": tmp_path, "use_cpu": True, "bf16": False, option: "x" * 500})


def test_a_model_is_refused():
    with pytest.raises(ValueError, match="no tokenizer at 'xxx"):
        load_tokenizer("x" * 500)
