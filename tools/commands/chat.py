"""`npucompile chat`: streams a response from a running server."""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from urllib.parse import urlsplit

import click

from ...graphs.errors import ProtocolError, SpecError
from ...server.client import WEBSOCKET_PATH, stream_text
from ..cli import Home
from ..serve.options import API_KEY_VARIABLE


@click.command("chat")
@click.argument("prompt")
@click.option("--url", default="ws://127.0.0.1:8000/v1/responses", show_default=True, help="The server's websocket, or its http URL.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k most likely tokens; 0 keeps all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the most likely tokens up to this total probability.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="Drop tokens below this share of the most likely one.")
@click.option("--seed", type=int, default=None, help="Seed that makes sampling repeatable.")
@click.option("--speculative-tokens", type=click.IntRange(0), help="Drafts verified per step; 0 disables them.  [default: as built]")
@click.pass_obj
def command(
    home: Home,
    prompt: str,
    url: str,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    speculative_tokens: int | None,
) -> None:
    """Stream the continuation of PROMPT from `npucompile serve`, with the key in $NPUCOMPILE_API_KEY if the server asks for one.

    Example: npucompile chat "In the beginning" --temperature 0.7 --top-p 0.9
    """
    options: dict[str, Any] = {"max_output_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    if seed is not None:
        options["seed"] = seed
    if speculative_tokens is not None:
        options["speculative_tokens"] = speculative_tokens

    address = websocket_of(url)

    async def stream() -> None:
        async for delta in stream_text(address, prompt, api_key=home.environment.get(API_KEY_VARIABLE), **options):
            sys.stdout.write(delta)
            sys.stdout.flush()
        sys.stdout.write("\n")

    try:
        asyncio.run(stream())
    except ProtocolError as error:
        hint = "; `npucompile serve` starts a server" if error.code == "connection_failed" else ""
        raise click.ClickException(f"{error}{hint}") from None
    except KeyboardInterrupt:
        sys.stdout.write("\n")


def websocket_of(url: str) -> str:
    """The websocket of a server, by its URL or by those of its HTTP API.

    Raises:
        SpecError: it is no URL of these.
    """
    try:
        parts = urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        legal = scheme in ("ws", "wss") and bool(parts.hostname)
    except ValueError:
        legal = False
    if not legal:
        raise SpecError(f"--url is {url!r}; legal is ws://HOST:PORT{WEBSOCKET_PATH}, or http://HOST:PORT")
    path = WEBSOCKET_PATH if parts.path.rstrip("/") in ("", "/v1") else parts.path
    return parts._replace(scheme=scheme, path=path).geturl()
