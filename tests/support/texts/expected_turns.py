"""What a model is given for a turn, and what it has to write, from plain renderings of a chat template.

Written apart from the encoder: the ends of turns are found by the words of each message, which are all different.
"""

from lowtide.compat.templates.jinja import TEMPLATE_FAILURES
from tests.support.texts.template_families import STOPS, STOPS_OF, template
from tests.support.texts.template_families import tokenizer as family_tokenizer

OPENED = "the prompt opens what the answer never has"
UNSHOWN = "the template does not show it"
THOUGHT_END = "\n</think>\n\n"


class Unjudged(Exception):
    """There is nothing to compare with."""


def words_of(message):
    """The words that a turn says, in the order of the fields."""
    thought = next((message[name] for name in ("reasoning_content", "thinking") if name in message), "")
    calls = "".join(str(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    texts = f"{thought} {message['content']} {calls}".replace('"', " ").replace("'", " ")
    return [word.strip(".:{}") for word in texts.split() if word.startswith("word")]


def expected_turn(name, messages, number, tools):
    """The texts of context and target of the turn that is message `number`."""
    tok = family_tokenizer()

    def render(some, prompt=False):
        options = {"tools": tools, "chat_template": template(name), "add_generation_prompt": prompt, "tokenize": False}
        try:
            return str(tok.apply_chat_template(some, **options))
        except TEMPLATE_FAILURES as error:
            raise Unjudged("the template can't render it") from error

    context, whole = render(messages[:number], prompt=True), render(messages[: number + 1])
    words = words_of(messages[number])
    places = [whole.rfind(word) for word in words]
    if min(places) < 0:
        raise Unjudged(UNSHOWN)
    if whole.startswith(context):
        start = len(context)
    else:
        shared = render(messages[:number])
        header = context[len(shared) :] if context.startswith(shared) else ""
        start = whole.rfind(header, 0, min(places)) + len(header) if header else -1
        if not header or whole.rfind(header, 0, min(places)) < 0:
            raise Unjudged(OPENED)
    said = max(place + len(word) for place, word in zip(places, words, strict=True))
    stops = STOPS_OF.get(name, STOPS)
    ends = [whole.find(stop, said) + len(stop) for stop in stops if whole.find(stop, said) >= 0]
    if ends:
        return context, whole[start : min(ends)]
    role = "tool" if messages[number].get("tool_calls") else "user"
    more = render([*messages[: number + 1], {"role": role, "name": "weather", "content": "more"}])
    rest = more[more.rfind(words[-1]) + len(words[-1]) :]
    rest = rest.removeprefix(whole[said:])
    stop = next((stop for stop in stops if rest.startswith(stop)), None)
    return context, whole[start:] + (stop or "")


def expected_thinking(name, messages, number, tools):
    """The same of a turn whose prompt opens a thought that the template never writes: the thought, what ends it, and
    the answer behind the header without any thought; None where the prompt has closed the thought, or the template
    leaves out the header of a second call (DeepSeek-V3)."""
    tok = family_tokenizer()
    message = messages[number]

    def render(stop, prompt=False):
        options = {"tools": tools, "chat_template": template(name), "add_generation_prompt": prompt, "tokenize": False}
        return str(tok.apply_chat_template(messages[:stop], **options))

    context, whole = render(number, prompt=True), render(number + 1)
    if whole.startswith(context):
        return expected_turn(name, messages, number, tools)
    header = context.removesuffix("<think>\n")
    if header == context or not whole.startswith(header):
        return None
    answer = whole[len(header) :].removeprefix("<think></think>")
    stops = [answer.find(stop) + len(stop) for stop in STOPS_OF.get(name, STOPS) if stop in answer]
    thought = message.get("reasoning_content") or ""
    if "</think>" in message["content"] and "</think>" not in answer:
        thought = message["content"].split("</think>")[0].split("<think>")[1].strip()
    return context, thought + THOUGHT_END + answer[: min(stops)]
