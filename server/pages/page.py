"""The chat page at `/`: one file that loads nothing else, with a policy that lets it load nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

PATH = "/"
FILE = "chat_page.html"


def route() -> Route:
    """The route of the page."""
    text = files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(text),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    async def page(_: Request) -> Response:
        return HTMLResponse(text, headers=headers)

    return Route(PATH, page, methods=["GET"])


def policy(text: str) -> str:
    """The Content-Security-Policy of a page: its own script and style by their digests, connections to its own server, users' pictures."""
    script, style = (_digests(text, tag) for tag in ("script", "style"))
    closed = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"{closed}; script-src {script}; style-src {style}; connect-src 'self'; img-src data:"


def _digests(text: str, tag: str) -> str:
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" for content in contents)
