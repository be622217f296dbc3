"""server/chat/template.py: against transformers, which defines what a template means."""

from __future__ import annotations

from datetime import datetime

import pytest
from support.chat_templates import TEMPLATES
from support.family_templates import FAMILIES
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from npucompile.graphs.errors import ModelError, RequestError
from npucompile.server.chat.template import Chat, ChatTemplate

ALL = TEMPLATES | {name: FAMILIES[name].template for name in ("GLM-4.6", "GLM-5", "Kimi-K2.5", "MiniMax-M2")}
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells 'the' <weather> & more",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
CHATS = {
    "one": Chat([{"role": "user", "content": "Hello <b> & 'you'"}]),
    "system": Chat([{"role": "system", "content": "Be  brief. "}, {"role": "user", "content": " 日本 "}], add_generation_prompt=False),
    "turns": Chat(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
            {"role": "user", "content": "c"},
        ]
    ),
    "reasoned": Chat(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "reasoning_content": "hm", "content": "b"},
        ],
        add_generation_prompt=False,
    ),
    "tools": Chat([{"role": "user", "content": "How is it?"}], tools=[TOOL]),
    "tool turns": Chat(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        ],
        tools=[TOOL],
    ),
    "no thinking": Chat([{"role": "user", "content": "a"}], variables={"enable_thinking": False}),
    "continued": Chat(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "and "}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
}


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", ALL.values(), ids=ALL)
def test_a_prompt_is_the_one_of_transformers(template, chat):
    peer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    expected = peer.apply_chat_template(
        [dict(message) for message in chat.messages],
        tools=chat.tools,
        chat_template=template,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        tokenize=False,
        **chat.variables,
    )
    assert ChatTemplate(template, SPECIAL).render(chat) == expected


def test_the_date_is_of_the_clock():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 3, 1))
    assert template.render(CHATS["one"]) == "01 Mar 2026"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
        "{% set n = namespace(__init__=1) %}",
        "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}",
        "{{ messages[9].role }}",
        "{{ 1 + 'a' }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_what_a_template_may_not_do_is_the_requests_error(text):
    with pytest.raises(RequestError, match=r"^the chat template refuses these messages: .{,500}$") as caught:
        ChatTemplate(text).render(CHATS["one"])
    assert caught.value.param == "messages"


def test_a_template_that_is_none_is_named():
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("a\n{% if %}")


@pytest.mark.parametrize("name", ["messages", "tools", "raise_exception", "_x"])
def test_a_request_cannot_replace_what_the_template_relies_on(name):
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        ChatTemplate("{{ messages }}").render(Chat([{"role": "user", "content": "a"}], variables={name: 1}))


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "a"}]])
def test_there_must_be_a_text_to_continue(content):
    with pytest.raises(RequestError, match="no text to continue"):
        ChatTemplate("{{ messages }}").render(Chat([{"role": "assistant", "content": content}], continue_final_message=True))


def test_a_template_that_drops_the_last_message_cannot_continue_it():
    with pytest.raises(RequestError, match="leaves parts"):
        ChatTemplate("{{ messages[0].content }}").render(
            Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], continue_final_message=True)
        )
