"""A chat template of our own that is as strict as those of Qwen3.5, and a model that acts by what it says."""

from __future__ import annotations

STRICT = """\
{%- if not messages %}{{ raise_exception('nobody speaks') }}{% endif %}
{%- for tool in tools or [] %}{{ '[' + tool.function.name + ']' }}{% endfor %}
{%- set ns = namespace(asked=false) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('the system speaks first') }}{% endif %}
        {{- '<system>' + message.content + '\\n' }}
    {%- elif message.role == 'user' %}
        {%- set ns.asked = true %}
        {{- '<user>' + message.content + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<assistant>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<function=' + call.function.name + '>' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>' + (value if value is string else value | tojson) + '</parameter>' }}
            {%- endfor %}
        {%- endfor %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<tool>' + message.content + '\\n' }}
    {%- else %}{{ raise_exception('who is ' + message.role) }}{% endif %}
{%- endfor %}
{%- if not ns.asked %}{{ raise_exception('nobody asks') }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<assistant>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}{{- '<think>\\n' }}{% endif %}
{%- endif %}
{#- calls are written as <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> -#}
"""


def call(name: str, **arguments: str) -> str:
    """A call as the model writes it."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
