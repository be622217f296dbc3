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


WRITERS = {"hermes": hermes, "qwen3_coder": coder, "deepseek_v3": fenced, "deepseek_v31": bare, "deepseek_v32": invoked}
AROUND = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
}
