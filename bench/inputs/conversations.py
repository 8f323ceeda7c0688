"""Generated conversations in which the assistant thinks before each answer."""

import random
from typing import Any

from bench.inputs.generated import word_source

ASKED, THOUGHT, ANSWER = 25, 125, 38
"""Words of a question, of a thought and of an answer."""
DROPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that writes the thought of the last answer alone, as Qwen3's does."""


def thinking_talk(rounds: int, seed: int) -> list[dict[str, Any]]:
    """The messages of a conversation of so many rounds."""
    draw = word_source(random.Random(seed))
    messages: list[dict[str, Any]] = []
    for _ in range(rounds):
        asked, thought, answer = (" ".join(draw(count)) for count in (ASKED, THOUGHT, ANSWER))
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer, "reasoning_content": thought})
    return messages
