"""Tool calls as chat templates of each format show them."""

from __future__ import annotations

import json


def hermes(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def coder(name, arguments):
    def text(value):
        return value if isinstance(value, str) else json.dumps(value)

    values = "".join(f"<parameter={key}>\n{text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def fenced(name, arguments):
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
    )


def bare(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments, ensure_ascii=False)}<｜tool▁call▁end｜>"


def invoked(name, arguments):
    values = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'


def keyed(line):
    """GLM's: a string is written raw, what else is as JSON."""

    def write(name, arguments):
        values = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>{line}"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}{line}{values}</tool_call>"

    return write


def numbered(name, arguments, number=0):
    text = json.dumps(arguments, ensure_ascii=False)
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{text}<|tool_call_end|>"


def named(name, arguments):
    values = "".join(
        f'<parameter name="{key}">{value if isinstance(value, str) else json.dumps(value)}</parameter>\n'
        for key, value in arguments.items()
    )
    return f'<invoke name="{name}">\n{values}</invoke>\n'


def opened(name, arguments):
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def listed(name, arguments):
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def args(name, arguments):
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


WRITERS = {
    "hermes": hermes, "qwen3_coder": coder, "deepseek_v3": fenced, "deepseek_v31": bare, "deepseek_v32": invoked, "glm45": keyed("\n"),
    "glm47": keyed(""), "kimi_k2": numbered, "minimax_m2": named, "llama3_json": opened, "mistral": listed, "mistral_args": args,
}  # fmt: skip
AROUND = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "minimax_m2": ("<minimax:tool_call>\n", "</minimax:tool_call>"),
    "mistral": ("[TOOL_CALLS][", "]"),
}
BETWEEN = {**dict.fromkeys(("deepseek_v31", "glm47", "kimi_k2", "mistral_args"), ""), "llama3_json": "; ", "mistral": ", "}


def written(form, *calls):
    """Calls, each a name and arguments, as a model writes them that keeps to the format."""
    before, after = AROUND.get(form, ("", ""))
    text = before + BETWEEN.get(form, "\n").join(WRITERS[form](*call).rstrip("\n") for call in calls)
    return text + ("\n" if form in ("deepseek_v32", "minimax_m2") else "") + after
