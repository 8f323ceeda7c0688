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


def thinking_talks(count: int, rounds: int) -> list[dict[str, Any]]:
    """So many conversations, as rows with `messages`."""
    draw = word_source(random.Random(0))

    def words(count: int) -> str:
        return " ".join(draw(count))

    def asked_and_answered() -> list[dict[str, Any]]:
        answer = {"role": "assistant", "content": words(ANSWER), "reasoning_content": words(THOUGHT)}
        return [{"role": "user", "content": words(ASKED)}, answer]

    return [{"messages": [message for _ in range(rounds) for message in asked_and_answered()]} for _ in range(count)]
