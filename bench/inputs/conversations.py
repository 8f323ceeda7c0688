"""Generated conversations of an agent: each round asks, thinks, calls a tool, thinks again and answers."""

import random
from typing import Any

from bench.inputs.generated import word_source

ASKED, THOUGHT, ANSWER, FOUND = 40, 200, 60, 40
"""Words of a question, of a thought, of an answer, and of what a tool returns."""
DROPPING = (
    "{% set last = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > last.asked and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or () %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that writes thoughts behind the last question alone, as Qwen3's does."""


def agent_talk(rounds: int, seed: int, *, tools: bool = True) -> list[dict[str, Any]]:
    """The messages of a conversation of so many rounds.

    Args:
        tools: whether each round calls one before it answers.
    """
    draw = word_source(random.Random(seed))

    def words(count: int) -> str:
        return " ".join(draw(count))

    messages: list[dict[str, Any]] = []
    for number in range(rounds):
        messages.append({"role": "user", "content": words(ASKED)})
        if tools:
            call = {"type": "function", "function": {"name": "find", "arguments": {"number": number}}}
            thought = words(THOUGHT // 2)
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]})
            messages.append({"role": "tool", "content": words(FOUND)})
        thought = words(THOUGHT // (1 + tools))
        messages.append({"role": "assistant", "content": words(ANSWER), "reasoning_content": thought})
    return messages
