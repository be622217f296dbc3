"""The options of `npucompile serve` that say who may come in and how much of the server a client may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ...graphs.errors import SpecError
from ...runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from ...server.guard.access import Access
from ...server.guard.limits import LEAST_CONNECTIONS, SocketLimits
from ...server.requests.bounds import MAX_PRIORITY
from ...server.run import Serving

API_KEY_VARIABLE = "NPUCOMPILE_API_KEY"
_DEFAULTS = SocketLimits()
_FILE = click.Path(path_type=Path, dir_okay=False)


def _refuse_interval(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise SpecError("--stream-interval-ms is gone: tokens of each step are sent at once, as with 0 before; legal is to leave it out")


_OPTIONS = (
    click.option("--api-key", "api_key_file", metavar="FILE", type=_FILE,
                 help=f"File of the keys that clients may use, one a line.  [default: ${API_KEY_VARIABLE}, or none needed]"),
    click.option("--allowed-origin", multiple=True, metavar="ORIGIN", help="Origin of pages that may use the server; may be repeated."),
    click.option("--allowed-host", multiple=True, metavar="NAME", help="Name that the server is reached by; may be repeated."),
    click.option("--tls-cert", type=_FILE, help="PEM file of a certificate: speak TLS alone."),
    click.option("--tls-key", type=_FILE, help="PEM file of its key.  [default: in the same file]"),
    click.option("--max-queue", type=click.IntRange(0), default=_DEFAULTS.max_queue, show_default=True,
                 help="Requests that may wait beside those that run."),
    click.option("--max-client-requests", type=click.IntRange(1), default=_DEFAULTS.max_requests_per_client, show_default=True,
                 help="Requests of one client, by key or address, that may wait or run."),
    click.option("--max-queued-tokens", type=click.IntRange(1), default=_DEFAULTS.max_queued_tokens, show_default=True,
                 help="Tokens of the prompts of requests that wait or run."),
    click.option("--max-client-tokens", type=click.IntRange(1), help="Those of one client.  [default: as many]"),
    click.option("--min-priority", type=click.IntRange(-MAX_PRIORITY, MAX_PRIORITY), default=_DEFAULTS.min_priority, show_default=True,
                 help="Most urgent priority that requests may have; 0 is that of requests without one."),
    click.option("--request-timeout", type=click.FloatRange(0, min_open=True),
                 help="Seconds that a request may wait and run; its own timeout_ms may be shorter.  [default: no limit]"),
    click.option("--first-token-timeout", type=click.FloatRange(0, min_open=True),
                 help="Seconds that a request may wait for its first token.  [default: no limit]"),
    click.option("--max-connections", type=click.IntRange(1),
                 help=f"Connections open at once.  [default: 8 a request that can run, at least {4 * LEAST_CONNECTIONS}]"),
    click.option("--max-client-connections", type=click.IntRange(1),
                 help=f"Connections of one address open at once.  [default: 2 a request that can run, at least {LEAST_CONNECTIONS}]"),
    click.option("--max-frame-bytes", type=click.IntRange(1), help="Largest message of a client.  [default: by the longest context]"),
    click.option("--handshake-timeout", type=click.FloatRange(0, min_open=True), default=_DEFAULTS.handshake_s, show_default=True,
                 help="Seconds in which a connection has to bring a whole request."),
    click.option("--max-client-refusals", type=click.FloatRange(0), default=_DEFAULTS.refusals_per_s, show_default=True,
                 help="Refusals a second of one client, by key or address; more wait for their turns, and 0 lets none wait."),
    click.option("--slow-reader-timeout", type=click.FloatRange(0, min_open=True), default=_DEFAULTS.slow_reader_s, show_default=True,
                 help="Seconds that a client may be behind in reading."),
    click.option("--stream-interval-ms", hidden=True, help="It is gone.", expose_value=False, callback=_refuse_interval),
    click.option("--no-prefix-cache", is_flag=True,
                 help="Keep nothing of prompts and outputs for later prompts that begin with them."),
    click.option("--prefix-cache-tokens", type=click.IntRange(0),
                 help="Most tokens kept beside running requests, per dp group.  [default: all that they leave room for]"),
    click.option("--max-stored-bytes", type=click.IntRange(0), default=_DEFAULTS.max_stored_bytes, show_default=True,
                 help="Of responses that can be continued, read again or resumed; 0 keeps none."),
    click.option("--stored-timeout", type=click.FloatRange(0, min_open=True), default=_DEFAULTS.stored_s, show_default=True,
                 help="Seconds that a response is kept after it was last named."),
    click.option("--resume-timeout", type=click.FloatRange(0), default=_DEFAULTS.resume_grace_s, show_default=True,
                 help="Seconds that a resumable response goes on without a connection."),
    click.option("--drain-timeout", type=click.FloatRange(0), default=Serving().drain_timeout_s, show_default=True,
                 help="Seconds that streams may go on after SIGTERM."),
)  # fmt: skip


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets them by their names and passes them to `serving_settings`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def serving_settings(environment: Mapping[str, str], options: Mapping[str, Any]) -> Serving:
    """The settings that the options stand for.

    Raises:
        SpecError: a key file cannot be read or holds no legal key, or an option is not legal.
    """
    limits = SocketLimits(
        max_frame_bytes=options["max_frame_bytes"],
        max_connections=options["max_connections"],
        max_connections_per_client=options["max_client_connections"],
        max_queue=options["max_queue"],
        max_requests_per_client=options["max_client_requests"],
        max_queued_tokens=options["max_queued_tokens"],
        max_tokens_per_client=options["max_client_tokens"],
        min_priority=options["min_priority"],
        request_timeout_s=options["request_timeout"],
        first_token_timeout_s=options["first_token_timeout"],
        slow_reader_s=options["slow_reader_timeout"],
        handshake_s=options["handshake_timeout"],
        refusals_per_s=options["max_client_refusals"] or None,
        max_stored_bytes=options["max_stored_bytes"],
        stored_s=options["stored_timeout"],
        resume_grace_s=options["resume_timeout"],
    )
    access = Access.of(read_keys(options["api_key_file"], environment), options["allowed_origin"], options["allowed_host"])
    cert, key = options["tls_cert"], options["tls_key"]
    if key and not cert:
        raise SpecError(f"--tls-key is {key} without --tls-cert; legal is a key beside its certificate")
    return Serving(limits, access, cert, key, options["drain_timeout"])


def prefix_cache_settings(options: Mapping[str, Any]) -> PrefixCacheSettings | None:
    """How prefixes are kept; None keeps none.

    Raises:
        SpecError: a number of tokens, and none are to be kept.
    """
    most = options["prefix_cache_tokens"]
    if options["no_prefix_cache"] and most is not None:
        raise SpecError(f"--prefix-cache-tokens {most} with --no-prefix-cache; legal is one of them")
    return None if options["no_prefix_cache"] else PrefixCacheSettings(most)


def read_keys(file: Path | None, environment: Mapping[str, str]) -> list[str]:
    """Keys of a file, one a line, or else of the environment; blank lines and lines that begin with # are left out.

    Raises:
        SpecError: the file cannot be read, or there is no key in it.
    """
    if file is None:
        key = environment.get(API_KEY_VARIABLE, "")
        return [key] if key else []
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"--api-key: {file} cannot be read: {getattr(error, 'strerror', None) or error}; legal is a file of keys, or the key in "
            f"${API_KEY_VARIABLE}: all users of a machine can read a command line"
        ) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SpecError(f"--api-key: {file} holds no key; legal is one a line")
    return keys
