"""The options of `npucompile serve`, a record each: from them come the command's options and their sections, the limits of the server, and
the names that other engines have for them.

Nothing here loads torch: `npucompile build` reads these records to refuse what is an option of serve.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ...lowering.switches import SWITCHES
from ...runtime.kv_transfer.room import DEFAULTS
from ...runtime.kv_transfer.transfer_engine import PROTOCOLS
from ...server.guard.limits import LEAST_CONNECTIONS, SocketLimits
from ...server.parsers.call_formats import FORMATS
from ...server.pictures.limits import MOST_PIXELS, DecoderLimits, PictureLimits, RequestLimits, VideoLimits
from ...server.requests.bounds import MAX_PRIORITY
from ...server.siblings.ids import MOST_DOORS

HOST, PORT = "127.0.0.1", 8000
BOTH, PREFILL, DECODE = ROLES = ("both", "prefill", "decode")
TRANSFER_PORTS = 8
"""Of a rank: an engine takes two, and one that has to be replaced two more."""
API_KEY_VARIABLE = "NPUCOMPILE_API_KEY"
AUTO = "auto"
DEVICES = (AUTO, "cpu", "npu", "emulated")
_DEFAULTS = SocketLimits()
_PICTURE, _DECODERS, _REQUEST = PictureLimits(), DecoderLimits(), RequestLimits()
_FILE = click.Path(path_type=Path, dir_okay=False)
_COUNT, _AMOUNT, _SECONDS = click.IntRange(1), click.IntRange(0), click.FloatRange(0, min_open=True)
_PARSED = "; auto looks at the chat template."


class ApiServers(click.ParamType[str | int]):
    """AUTO or a number of processes."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        """The value itself, or a number."""
        return AUTO if value == AUTO else int(click.IntRange(0, MOST_DOORS).convert(value, param, ctx))


@dataclass(frozen=True)
class ServeOption:
    """An option of serve.

    Attributes:
        option: without dashes.
        help: what it says; the default that it has is added.
        kind: what it takes, as click has it; None for text.
        default: None where there is none, or the help says it.
        limit: the field of `SocketLimits` that it sets, whose default is its own.
        api: the field of `ApiSettings` that it sets.
        same: options of SGLang and vLLM that mean the same.
        seldom: whether few need it: `--help` leaves it out, `--print-config` has it.
        extra: further arguments of `click.option`.
    """

    option: str
    help: str
    kind: Any = None
    default: Any = None
    limit: str = ""
    api: str = ""
    same: tuple[str, ...] = ()
    seldom: bool = False
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the command calls it."""
        return self.api or self.option.replace("-", "_")

    def as_decorator(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Adds the option to a command."""
        default = getattr(_DEFAULTS, self.limit) if self.limit else self.default
        shown = {} if default is None else {"default": default, "show_default": True}
        return click.option(f"--{self.option}", self.name, type=self.kind, help=self.help, hidden=self.seldom, **{**shown, **self.extra})


DEVICE = ServeOption(
    "device", "Where an artifact runs: auto is what it was built for; emulated interprets the graphs of an artifact for NPUs on this CPU.",
    click.Choice(DEVICES), "auto",
)  # fmt: skip
CHECKPOINT = ServeOption(
    "checkpoint", "Read the weights of an artifact for NPUs from this directory.  [default: where the build found them]",
    click.Path(exists=True, file_okay=False, path_type=Path),
)  # fmt: skip
EXPERT_MAP = ServeOption(
    "expert-map", "Map of experts in place of the one that an artifact for NPUs was built with, of as many; weights are read accordingly.",
    seldom=True, extra={"metavar": "FILE"},
)  # fmt: skip

OFF = ServeOption(
    "off", f"On NPUs, do without: {'; '.join(f'{name}: {instead}' for name, instead in SWITCHES.items())}. May be repeated.",
    click.Choice(tuple(SWITCHES)), extra={"multiple": True}, seldom=True,
)  # fmt: skip

SECTIONS: Mapping[str, tuple[ServeOption, ...]] = {
    "What most servers say": (
        ServeOption("host", "Address to listen on.", None, HOST),
        ServeOption("port", "Port; 0 takes a free one.", click.IntRange(0, 65535), PORT),
        ServeOption("api-key", f"File of the keys that clients may use, one a line.  [default: ${API_KEY_VARIABLE}, or none needed]", _FILE,
                    extra={"metavar": "FILE"}),
        ServeOption("served-model-name", "Name of the model in requests; repeat it for several.  [default: the artifact's]", api="names",
                    extra={"multiple": True}),
        DEVICE,
    ),
    "Who may come in": (
        ServeOption("allowed-origin", "Origin of pages that may use the server; may be repeated.",
                    extra={"multiple": True, "metavar": "ORIGIN"}, seldom=True),
        ServeOption("allowed-host", "Name that the server is reached by; may be repeated.", extra={"multiple": True, "metavar": "NAME"}),
        ServeOption("trusted-proxy", "Address or network of a proxy, whose X-Forwarded-For names the client; may be repeated.",
                    extra={"multiple": True, "metavar": "ADDRESS"}, seldom=True),
        ServeOption("tls-cert", "PEM file of a certificate: speak TLS alone.", _FILE, same=("--ssl-certfile",)),
        ServeOption("tls-key", "PEM file of its key.  [default: in the same file]", _FILE, same=("--ssl-keyfile",), seldom=True),
    ),
    "How the model presents itself": (
        ServeOption("chat-template", "Jinja file that takes the place of the checkpoint's chat template.",
                    click.Path(exists=True, dir_okay=False, path_type=Path), api="chat_template", seldom=True),
        ServeOption("reasoning-parser", "What tells reasoning from the answer: qwen3, deepseek_r1, deepseek_v3 or none" + _PARSED, None,
                    "auto", api="reasoning_parser"),
        ServeOption("tool-call-parser", f"How tool calls are written: {', '.join(FORMATS)} or none{_PARSED}", None, "auto",
                    api="tool_call_parser"),
        ServeOption("default-sampling", "Sampling where an HTTP request sets none: the checkpoint's generation_config.json, then OpenAI's; "
                    "or OpenAI's alone.", click.Choice(("checkpoint", "openai")), "checkpoint", api="sampling", seldom=True),
        ServeOption("strict-fields", "Refuse requests with tools or items that no prompt can have, such as a provider's web search; "
                    "without it they are left out, and the answer names them.", limit="strict_fields", extra={"is_flag": True},
                    seldom=True),
    ),
    "How much a client may take": (
        ServeOption("max-queue", "Requests that may wait beside those that run.", _AMOUNT, limit="max_queue",
                    same=("--max-queued-requests", "--max-num-queued-reqs")),
        ServeOption("max-client-requests", "Requests of one client, by key or address, that may wait or run.  [default: as many as of all]",
                    _COUNT, limit="max_requests_per_client", seldom=True),
        ServeOption("max-queued-tokens", "Tokens of the prompts of requests that wait or run.", _COUNT, limit="max_queued_tokens",
                    seldom=True),
        ServeOption("max-client-tokens", "Those of one client.  [default: as many]", _COUNT, limit="max_tokens_per_client", seldom=True),
        ServeOption("min-priority", "Most urgent priority that requests may have; 0 is that of requests without one.",
                    click.IntRange(-MAX_PRIORITY, MAX_PRIORITY), limit="min_priority", seldom=True),
        ServeOption("request-timeout", "Seconds that a request may wait and run; its own timeout_ms may be shorter.  [default: no limit]",
                    _SECONDS, limit="request_timeout_s"),
        ServeOption("first-token-timeout", "Seconds that a request may wait for its first token.  [default: no limit]", _SECONDS,
                    limit="first_token_timeout_s", seldom=True),
        ServeOption("max-connections", f"Connections open at once.  [default: 8 a request that can run, at least {4 * LEAST_CONNECTIONS}]",
                    _COUNT, limit="max_connections", seldom=True),
        ServeOption("max-client-connections", "Connections of one address open at once.  [default: 2 a request that can run, at least "
                    f"{LEAST_CONNECTIONS}]", _COUNT, limit="max_connections_per_client", seldom=True),
        ServeOption("max-frame-bytes", "Largest message of a client.  [default: by the longest context]", _COUNT, limit="max_frame_bytes",
                    seldom=True),
        ServeOption("handshake-timeout", "Seconds in which a connection has to bring a whole request.", _SECONDS, limit="handshake_s",
                    seldom=True),
        ServeOption("max-client-refusals", "Refusals a second of one client, by key or address; more wait for their turns, and 0 lets none "
                    "wait.", click.FloatRange(0), limit="refusals_per_s", seldom=True),
        ServeOption("slow-reader-timeout", "Seconds that a client may be behind in reading.", _SECONDS, limit="slow_reader_s", seldom=True),
        ServeOption("drain-notice", "Seconds after SIGTERM that /ready says no and requests are still taken, for proxies that ask it.",
                    click.FloatRange(0), 0.0, seldom=True),
        ServeOption("drain-timeout", "Seconds that streams may go on after SIGTERM.", click.FloatRange(0), 30.0,
                    same=("--shutdown-timeout",)),
    ),
    "What pictures may be": (
        ServeOption("language-model-only", "Take text alone, whatever the artifact encodes.", extra={"is_flag": True}, seldom=True),
        ServeOption("limit-mm-per-prompt", "Most pictures and videos of a request, image=N,video=M or JSON.  [default: "
                    f"image={_REQUEST.images},video={_REQUEST.videos}]", None,
                    extra={"metavar": "image=N,video=M"}, same=("--limit-mm-data-per-request",)),
        ServeOption("max-image-bytes", "Of the file of a picture.", _COUNT, _PICTURE.max_bytes, seldom=True),
        ServeOption("max-image-pixels", "Of a picture before it is resized.", click.IntRange(1, MOST_PIXELS), _PICTURE.max_pixels,
                    seldom=True),
        ServeOption("image-decoders", "Processes that decode pictures.", _COUNT, _DECODERS.processes, seldom=True),
        ServeOption("image-timeout", "Seconds that a picture may take to be decoded.", _SECONDS, _DECODERS.time_s, seldom=True),
        ServeOption("max-video-bytes", "Of the file of a video.", _COUNT, VideoLimits.max_bytes, seldom=True),
        ServeOption("image-memory", "Bytes that a picture or a video may take while it is decoded.  [default: 64 MiB and 20 for each of "
                    "--max-image-pixels, at least 1 GiB]", click.IntRange(2**24), seldom=True),
        ServeOption("allowed-media-host", "Host whose pictures may be named by URL; may be repeated.  [default: none, data URLs alone]",
                    extra={"multiple": True, "metavar": "HOST[:PORT]"}, seldom=True),
    ),
    "What is kept of prompts": (
        ServeOption("no-prefix-cache", "Keep nothing of prompts and outputs for later prompts that begin with them.",
                    extra={"is_flag": True}),
        ServeOption("prefix-cache-tokens", "Most tokens kept beside running requests, per dp group.  [default: all that they leave room "
                    "for]", _AMOUNT, seldom=True),
    ),
    "What is kept of responses": (
        ServeOption("max-stored-bytes", "Of responses that can be continued, read again or resumed; 0 keeps none.", _AMOUNT,
                    limit="max_stored_bytes", seldom=True),
        ServeOption("stored-timeout", "Seconds that a response is kept after it was last named.", _SECONDS, limit="stored_s", seldom=True),
        ServeOption("resume-timeout", "Seconds that a resumable response goes on without a connection.", click.FloatRange(0),
                    limit="resume_grace_s", seldom=True),
    ),
    "What is written down": (
        ServeOption("access-log", "Log requests with ids as JSON lines, to FILE or standard output.",
                    extra={"is_flag": False, "flag_value": "-", "metavar": "[FILE]"}),
        ServeOption("otlp-traces-endpoint", "Send a span a request by OTLP over HTTP; needs npucompile[otel].", extra={"metavar": "URL"},
                    seldom=True),
        ServeOption("record", "Record every input and step, for `npucompile replay`.", _FILE),
        ServeOption("verbose", "Log requests and swapped executables.", extra={"is_flag": True}),
    ),
    "How steps run": (
        ServeOption("api-servers", "Processes that speak with clients, beside the one that steps; 0 is none: one process does both. auto "
                    "takes 1 from a hundred streams on, for NPUs, on 4 cores or more. Limits of clients are of all together, but for "
                    "--max-client-refusals, which is of each; --max-stored-bytes and --image-decoders are divided among them.",
                    ApiServers(), AUTO, same=("--api-server-count",), extra={"metavar": "auto|N"}),
        ServeOption("threads", "CPU threads of a step on each rank.  [default: all cores, divided among ranks]", _COUNT),
        ServeOption("cpu-binding", "Bind each rank to cores of the NUMA node of its device, or to an even part of all.",
                    extra={"is_flag": True}),
        ServeOption("itl-target", "Most milliseconds between two tokens of a stream that prefill should leave.  [default: none]", _SECONDS,
                    extra={"metavar": "MS"}),
        ServeOption("step-timeout", "Most seconds of a step.  [default: 60; emulated: 1800]", click.FloatRange(1),
                    same=("--watchdog-timeout",), seldom=True),
        ServeOption("join-timeout", "Seconds that ranks wait for each other.", click.FloatRange(1), 60.0,
                    same=("--dist-timeout", "--distributed-timeout-seconds"), seldom=True),
    ),
    "Prefill and decode apart": (
        ServeOption("role", "What this server does: both; prefill computes prompts for decode servers; decode has them computed by prefill "
                    "servers.", click.Choice(ROLES), BOTH, same=("--disaggregation-mode",)),
        ServeOption("prefill", "Prefill servers of a decode server, http://HOST:PORT separated by commas; they need the first key of "
                    "--api-key, where there are keys.", extra={"metavar": "URL,URL"}),
        ServeOption("transfer-port", f"First of {TRANSFER_PORTS} ports that the transfer engine of each rank may take, rank by rank.  "
                    "[default: free ones]", click.IntRange(1024, 65535 - TRANSFER_PORTS), seldom=True),
        ServeOption("transfer-protocol", "How the transfer engine moves bytes.  [default: ascend on NPUs, tcp elsewhere]",
                    click.Choice(PROTOCOLS), seldom=True),
        ServeOption("handover-timeout", "Seconds that a prompt may be computed for a decode server, that its pages wait there, and that "
                    "their transfer may take, each.", _SECONDS, DEFAULTS.asked, seldom=True),
    ),
    "Several machines": (
        ServeOption("nnodes", "Machines that share the ranks evenly; the same line on each, with its own --node-rank.", _COUNT, 1),
        ServeOption("node-rank", "Number of this machine; 0 has the clients' port.", _AMOUNT, 0),
        ServeOption("master-addr", "Where node rank 0 is; the port is 29500 by default.", extra={"metavar": "HOST[:PORT]"},
                    same=("--dist-init-addr",)),
        ServeOption("host-address", "This machine's address for others: of its ranks, gloo, HCCL and transfers in a pair.  [default: of "
                    "the route to --master-addr, or in a pair to the first prefill server, or else --host]", extra={"metavar": "ADDRESS"},
                    seldom=True),
        ServeOption("rank-token", "File of the token that all machines share.  [default: $NPUCOMPILE_RANK_TOKEN]", _FILE,
                    extra={"metavar": "FILE"}, seldom=True),
    ),
    "What is built and read first": (
        ServeOption("no-build", "Serve only what is built; compile nothing in the background.", extra={"is_flag": True}),
        CHECKPOINT,
        OFF,
        EXPERT_MAP,
    ),
}  # fmt: skip
"""By section of the help."""

OPTIONS: tuple[ServeOption, ...] = tuple(option for options in SECTIONS.values() for option in options)
