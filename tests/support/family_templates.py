"""Chat templates of families in their published formats, with their marks as their tokenizers have them, and what is said in them."""

from __future__ import annotations

from typing import NamedTuple

_TOOLS = "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}"
_LAST = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"""

_GLM = """[gMASK]<sop>{%- if tools %}{{- '<|system|>\\n# Tools\\n<tools>' }}TOOLS{{- '</tools>\\nFORM' }}{%- endif %}LAST
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|user|>LINE' + m.content }}
    {%- elif m.role == 'system' %}{{- '<|system|>LINE' + m.content }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- 'LINE<tool_response>LINE' + m.content + 'LINE</tool_response>' }}
    {%- else %}
        {{- '<|assistant|>LINE' }}
        {%- if m.reasoning_content and loop.index0 > ns.last %}{{- '<think>' + m.reasoning_content + '</think>' }}
        {%- else %}{{- 'EMPTY' }}{%- endif %}
        {%- if m.content %}{{- 'LINE' + m.content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- 'LINE<tool_call>' + call.function.name + 'LINE' }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<arg_key>' + k + '</arg_key>LINE<arg_value>' + (v if v is string else v | tojson) + '</arg_value>LINE' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>START' }}{%- endif %}
""".replace("TOOLS", _TOOLS).replace("LAST", _LAST)


def _glm(line: str, empty: str, start: str) -> str:
    form = f"<tool_call>{{name}}{line}<arg_key>{{key}}</arg_key>{line}<arg_value>{{value}}</arg_value>{line}</tool_call>"
    return _GLM.replace("FORM", form).replace("LINE", line).replace("EMPTY", empty).replace("START", start)


_KIMI = """{%- macro turn(m) %}
    {{- '<|im_user|>user' if m.role == 'user' else '<|im_assistant|>assistant' if m.role == 'assistant' else '<|im_system|>' + m.role }}
    {{- '<|im_middle|>' }}
{%- endmacro %}
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' }}TOOLS{{- '<|im_end|>' }}{%- endif %}
{%- for m in messages %}
    {{- turn(m) }}
    {%- if m.role == 'assistant' %}
        {{- '<think>' + (m.reasoning_content or '') + '</think>' + m.content }}
        {%- if m.tool_calls %}
            {{- '<|tool_calls_section_begin|>' }}
            {%- for call in m.tool_calls %}
                {{- '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' + call.function.arguments | tojson }}
                {{- '<|tool_call_end|>' }}
            {%- endfor %}
            {{- '<|tool_calls_section_end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}{{- '## Return of ' + m.tool_call_id + '\\n' + m.content }}
    {%- else %}{{- m.content }}{%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_assistant|>assistant<|im_middle|>' + ('<think></think>' if thinking is defined and not thinking else '<think>') }}
{%- endif %}
""".replace("TOOLS", _TOOLS)

_MINIMAX = """{{- ']~!b[]~b]system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.') }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>\\n' }}
    {%- for tool in tools %}{{- '<tool>' + tool.function | tojson + '</tool>\\n' }}{%- endfor %}
    {{- '</tools>\\n\\n<minimax:tool_call>\\n<invoke name="tool">\\n<parameter name="key">value</parameter>\\n</invoke>\\n' }}
    {{- '</minimax:tool_call>' }}
{%- endif %}
{{- '[e~[\\n' }}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'assistant' %}
        {{- ']~b]ai\\n' }}
        {%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
        {{- m.content }}
        {%- if m.tool_calls %}
            {{- '\\n<minimax:tool_call>\\n' }}
            {%- for call in m.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\\n' }}
                {%- for k, v in call.function.arguments.items() %}
                    {{- '<parameter name="' + k + '">' + (v if v is string else v | tojson) + '</parameter>\\n' }}
                {%- endfor %}
                {{- '</invoke>\\n' }}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
        {{- '[e~[\\n' }}
    {%- elif m.role == 'tool' %}{{- ']~b]tool\\n<response>' + m.content + '</response>[e~[\\n' }}
    {%- else %}{{- ']~b]user\\n' + m.content + '[e~[\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}
"""

_LLAMA = """{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
    TOOLS{{- '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
        {{- '{"name": "' + m.tool_calls[0].function.name + '", ' + '"parameters": ' + m.tool_calls[0].function.arguments | tojson + '}' }}
    {%- elif m.role == 'tool' %}{{- {'output': m.content} | tojson }}
    {%- else %}{{- m.content | trim }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""".replace("TOOLS", _TOOLS)

_MISTRAL = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role in ('user', 'system') %}
        {%- if loop.last and tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        @OPEN
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            @CALL
        {%- endfor %}
        @CLOSE
        {{- eos_token }}
    {%- elif m.role == 'tool' %}
        @RESULT
    {%- else %}{{- m.content + eos_token }}{%- endif %}
{%- endfor %}
"""
_LIST = {
    "OPEN": "{{- '[TOOL_CALLS][' }}",
    "CALL": """{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}""",
    "CLOSE": "{{- ']' }}",
    "RESULT": """{{- '[TOOL_RESULTS]{"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}""",
}
_ARGS = {
    "OPEN": "",
    "CALL": "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}",
    "CLOSE": "",
    "RESULT": "{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}",
}


def _filled(template: str, parts: dict[str, str]) -> str:
    for name, text in parts.items():
        template = template.replace(f"@{name}", text)
    return template


class Family(NamedTuple):
    """How models of a family converse.

    Attributes:
        parsers: that its template chooses, of reasoning and calls.
        special, plain: marks that are special tokens, and others.
        reply: what a model writes that thinks where it can, and asks for the weather in Rome for two days.
        turn: how the template shows that reply, from the question on, with the result "sunny" behind it.
    """

    template: str
    parsers: tuple[str | None, str]
    special: tuple[str, ...]
    plain: tuple[str, ...]
    reply: str
    turn: str


_KEYS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM_TURNS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_SECTION = tuple(f"<|tool_call{mark}|>" for mark in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end"))
_JSON = '{"city": "Rome", "days": 2}'
_LINES = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
</tool_call>"""
_KIMI_CALL = (
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{_JSON}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
_INVOKE = """<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Rome</parameter>
<parameter name="days">2</parameter>
</invoke>
</minimax:tool_call>"""

FAMILIES = {
    "GLM-4.6": Family(
        _glm("\\n", "<think></think>", ""), ("qwen3", "glm45"), _GLM_TURNS, _KEYS, f"\n<think>I ask.</think>\n{_LINES}",
        f"<|user|>\nHow?<|assistant|>\n<think>I ask.</think>\n{_LINES}<|observation|>\n<tool_response>\nsunny\n</tool_response>"
        "<|assistant|>",
    ),
    "GLM-5": Family(
        _glm("", "</think>", "<think>"), ("qwen3", "glm47"), _GLM_TURNS, _KEYS, "I ask." + _LINES.replace("\n", ""),
        f"<|user|>How?<|assistant|><think>I ask.</think>{_LINES}<|observation|><tool_response>sunny</tool_response>".replace("\n", "")
        + "<|assistant|><think>",
    ),
    "Kimi-K2.5": Family(
        _KIMI, ("qwen3", "kimi_k2"), ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        ("<think>", "</think>", *_SECTION), f"I ask.{_KIMI_CALL}",
        f"<|im_user|>user<|im_middle|>How?<|im_end|><|im_assistant|>assistant<|im_middle|><think>I ask.</think>{_KIMI_CALL}<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.weather:0\nsunny<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
    ),
    "MiniMax-M2": Family(
        _MINIMAX, ("qwen3", "minimax_m2"), ("]~!b[", "]~b]", "[e~["),
        ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"), f"I ask.\n</think>\n\n{_INVOKE}",
        f"]~b]user\nHow?[e~[\n]~b]ai\n<think>\nI ask.\n</think>\n\n\n{_INVOKE}[e~[\n]~b]tool\n<response>sunny</response>[e~[\n"
        "]~b]ai\n<think>\n",
    ),
    "Llama-3.1": Family(
        _LLAMA, (None, "llama3_json"), ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"), (),
        f'<|python_tag|>{{"name": "weather", "parameters": {_JSON}}}',
        "<|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        f'{{"name": "weather", "parameters": {_JSON}}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n{{"output": "sunny"}}'
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Mistral-7B-v0.3": Family(
        _filled(_MISTRAL, _LIST), (None, "mistral"), ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), (),
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_JSON}}}]',
        f'[INST]How?[/INST][TOOL_CALLS][{{"name": "weather", "arguments": {_JSON}, "id": "000000000"}}]</s>'
        '[TOOL_RESULTS]{"content": "sunny", "call_id": "000000000"}[/TOOL_RESULTS]',
    ),
    "Devstral-2": Family(
        _filled(_MISTRAL, _ARGS), (None, "mistral_args"),
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), (), f"[TOOL_CALLS]weather[ARGS]{_JSON}",
        f"[INST]How?[/INST][TOOL_CALLS]weather[ARGS]{_JSON}</s>[TOOL_RESULTS]sunny[/TOOL_RESULTS]",
    ),
}  # fmt: skip
