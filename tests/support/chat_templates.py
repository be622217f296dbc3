"""Chat templates of our own that use what published ones use: ChatML with tools and thinking, DeepSeek's marks, and rarer Jinja."""

from __future__ import annotations

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\nAnswer with <tool_call>{\\"name\\": ..., \\"arguments\\": ...}</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=messages|length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and message.content is string %}
        {%- set ns.looking = false %}
        {%- set ns.last_user = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_user and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif -%}
{% if not thinking is defined %}{% set thinking = true %}{% endif -%}
{% set ns = namespace(is_first=false, system_prompt='', is_tool=false) -%}
{% for message in messages -%}
  {% if message['role'] == 'system' -%}
    {% set ns.system_prompt = ns.system_prompt + message['content'] -%}
  {% endif -%}
{% endfor -%}
{{ bos_token }}{{ ns.system_prompt }}
{%- if tools is not none and tools %}
{{ '## Tools' }}
  {%- for tool in tools %}
{{ '### ' ~ tool.function.name ~ '\\nParameters: ' ~ tool.function.parameters | tojson }}
  {%- endfor %}
{% endif -%}
{% for message in messages -%}
  {% if message['role'] == 'user' -%}
    {% set ns.is_tool = false %}{{ '<｜User｜>' + message['content'] }}
  {%- elif message['role'] == 'assistant' -%}
    {{ '<｜Assistant｜></think>' }}
    {%- for call in message['tool_calls'] or [] -%}
      {{ '<｜tool▁calls▁begin｜>' if loop.first }}{{ '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' -}}
      {{ call['function']['arguments'] | tojson }}{{ '<｜tool▁call▁end｜>' }}{{ '<｜tool▁calls▁end｜>' if loop.last }}
    {%- endfor -%}
    {% set content = message['content'] -%}
    {% if '</think>' in content %}{% set content = content.split('</think>', 1)[1] -%}{% endif -%}
    {{ content + eos_token }}
  {%- elif message['role'] == 'tool' -%}
    {% set ns.is_tool = true %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
  {%- endif -%}
{% endfor -%}
{% if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}
"""

RARE = """\
{%- macro field(name, value='none') -%}
    {{ name }}={{ value | trim | e if name == 'safe' else value }};
{%- endmacro -%}
{% set seen = dict(a=1) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% generation %}
    [{{ loop.index }}/{{ loop.length }}] {{ field(message.role, message.content) }} {{ message.content | length }}
    {% endgeneration %}
    {% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
{{ seen.items() | list }} {{ messages | map(attribute='role') | join(',') }} {{ (tools or []) | tojson(indent=2) }}
{{ eos_token ~ (undefined_name or '') }}
"""

TEMPLATES = {"chatml": CHATML, "deepseek": DEEPSEEK, "rare": RARE}
