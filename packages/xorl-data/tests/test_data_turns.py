"""Long conversations: their turns are found from short parts, and are those that every turn by itself gives."""

import random
from dataclasses import replace

import pytest

from xorl.data import DataError
from xorl.data.formats import load_tokenizer
from xorl.data.formats.finder import TurnFinder
from xorl.data.formats.messages import read_conversation
from xorl.data.formats.template import ChatTemplate
from xorl.data.formats.turns import render_turns, special_pattern

BODY = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = "{% for m in messages %}<|{{ m.role }}|>" + BODY + "<|end|>\n{% endfor %}" + PROMPT
THINKS = "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}){% endif %}"
# Of these, some write turns differently by what comes before or after them, near or far.
TEMPLATES = {
    "plain": PLAIN,
    "numbered": PLAIN.replace("<|{{", "{{ loop.index if m.role == 'user' }}<|{{"),
    "without end": PLAIN.replace("<|end|>\n", ""),
    "last end": PLAIN.replace("<|end|>\n", "{{ '<|pad|>' if loop.last else '<|end|>' }}"),
    "last reasoning": PLAIN.replace("|>{{ m.c", "|>" + THINKS + "{{ m.c"),
    "reasoning after the last question": (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        + PLAIN.replace(
            "|>{{ m.c",
            "|>{% if m.reasoning_content and loop.index0 > ns.last %}({{ m.reasoning_content }}){% endif %}{{ m.c",
        )
    ),
    "tools in the last question": PLAIN.replace(
        "<|{{",
        "{% if tools and m.role == 'user' and messages[loop.index:] | selectattr('role', 'equalto', 'user') | list"
        " | length == 0 %}{{ tools | tojson }}{% endif %}<|{{",
    ),
    "tools in every header": PLAIN.replace("role }}|>", "role }}{{ '!' if tools }}|>").replace(
        "<|assistant|>{% endif %}", "<|assistant{{ '!' if tools }}|>{% endif %}"
    ),
    "joined results": (
        "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>" + BODY + "<|end|>\n{% else %}"
        "{{ '<|user|>' if loop.previtem.role != 'tool' }}[{{ m.content }}]"
        "{{ '<|end|>\n' if loop.last or loop.nextitem.role != 'tool' }}{% endif %}{% endfor %}" + PROMPT
    ),
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def random_conversation(rng, num_questions):
    """A row with calls and reasoning, whose messages are often equal, empty or like the ends of others."""
    messages = [{"role": "system", "content": "x0x"}] if rng.random() < 0.3 else []
    with_tools = rng.random() < 0.5
    for _ in range(num_questions):
        messages.append({"role": "user", "content": rng.choice(["x0x", "Hi", "", " é ", "ok<|end|>"])})
        for _ in range(rng.randint(0, 3) if with_tools else 0):
            calls = [{"function": {"name": "f", "arguments": {"x": rng.randint(0, 9)}}}] * rng.randint(1, 2)
            messages.append({"role": "assistant", "content": rng.choice(["", "Wait"]), "tool_calls": calls})
            messages += [{"role": "tool", "content": rng.choice(["r", "x0x"])}] * rng.randint(1, 2)
        messages.append({"role": "assistant", "content": rng.choice(["x0x", "yes", " é ", "Hi<|end|>more", "b\n"])})
    for message in messages:
        if message["role"] == "assistant" and rng.random() < 0.3:
            message["reasoning_content"] = rng.choice(["why", "x0x"])
    return {"messages": messages, "tools": TOOLS if with_tools and rng.random() < 0.8 else None}


def found(function, *arguments):
    try:
        return function(*arguments)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_turns_of_long_conversations_are_those_of_every_turn_by_itself(text_options, name):
    """Catches masks that are moved by a message elsewhere, by messages that repeat, or by reasoning left out."""
    tokenizer = load_tokenizer(text_options.tokenizer_folder)
    special = special_pattern(tokenizer.special_texts)
    template = ChatTemplate(TEMPLATES[name], tokenizer.special, name)
    finder = TurnFinder(template, special)
    rng = random.Random(name)
    for _ in range(40):
        conversation = read_conversation(random_conversation(rng, rng.randint(5, 9)), {})
        answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        turns = [number for number in answers if rng.random() < 0.85]
        assert found(finder.render, conversation, turns) == found(render_turns, template, conversation, turns, special)


class CountingTemplate(ChatTemplate):
    """Counts the messages that are rendered."""

    num_messages = 0

    def render(self, messages, tools, *, add_generation_prompt=False):
        self.num_messages += len(messages)
        return super().render(messages, tools, add_generation_prompt=add_generation_prompt)

    def render_marked(self, messages, tools):
        self.num_messages += len(messages)
        return super().render_marked(messages, tools)


MARKED = PLAIN.replace(
    BODY,
    "{% if m.role == 'assistant' %}{% generation %}" + BODY + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
)


@pytest.mark.parametrize("template", [PLAIN, TEMPLATES["reasoning after the last question"], MARKED])
@pytest.mark.parametrize("with_tools", [False, True])
def test_the_work_grows_with_the_number_of_turns(text_options, template, with_tools):
    """Catches renderings of the whole conversation for each of its turns, which take seconds for long ones."""
    tokenizer = load_tokenizer(text_options.tokenizer_folder)
    special = special_pattern(tokenizer.special_texts)
    numbers = []
    for num in (100, 400):
        messages = [{"role": "user", "content": "a"}]
        for _ in range(num):
            call = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]} if with_tools else {}
            messages += [{"role": "assistant", "content": "a b", **call}]
            messages += [{"role": "tool" if with_tools else "user", "content": "a"}]
        row = {"messages": [*messages, {"role": "assistant", "content": "b"}], "tools": TOOLS if with_tools else None}
        conversation = read_conversation(row, {})
        counting = CountingTemplate(template, tokenizer.special, "counted")
        turns = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        rendered = TurnFinder(counting, special).render(conversation, turns)
        assert len(rendered.spans) == num + 1
        numbers.append(counting.num_messages)
    assert numbers[1] < 4.2 * numbers[0]
    assert numbers[1] < 12 * len(row["messages"])


def test_many_turns_are_mapped_to_tokens(prepare_rows, text_options):
    """Catches masks of long conversations that drift where characters have several bytes."""
    turn = [{"role": "user", "content": "né?"}, {"role": "assistant", "content": "où 😀"}]
    options = replace(text_options, bin_len=20_000)
    documents = prepare_rows([{"messages": turn * 300}], options, type="chat")
    ids, labels = documents.document(0)
    core = load_tokenizer(options.tokenizer_folder).core
    assert core.decode(labels[labels >= 0].tolist(), skip_special_tokens=False) == "où 😀<|end|>" * 300
    assert core.decode(ids.tolist(), skip_special_tokens=False).count("né?<|end|>") == 300
