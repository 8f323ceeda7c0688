"""What is no chat template's path, whatever it is, is refused by the option's name."""

import pytest

from lowtide.data.encode.chat import read_chat_template


@pytest.mark.parametrize("path", ["x" * 500, "\0", ""])
def test_a_name_that_no_file_can_have_is_refused(path):
    with pytest.raises(ValueError, match="chat_template_path"):
        read_chat_template(path)
