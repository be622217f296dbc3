"""Servers of artifacts for several ranks, in processes of their own."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from support import ranks

from npucompile.server.client import Client


class Server:
    """`npucompile serve` of an artifact for several ranks, which has said that it is ready.

    Attributes:
        output: standard error until then.
        url: of the websocket.
        http: URL of the server.
        others: processes of the ranks but 0, in their order.

    Args:
        options: of the command.
        home: `$NPUCOMPILE_HOME`; None leaves what the environment says.
    """

    def __init__(self, artifact: Path, *options: object, home: Path | None = None) -> None:
        arguments = ranks.command("serve", artifact, "--port", 0, "--threads", 1, *options)
        self.process = ranks.spawn(arguments, ranks.environment(home))
        self.output = ""
        assert self.process.stderr is not None
        while not any(last in self.output for last in ("talk to it", "computes prompts for")):
            line = self.process.stderr.readline()
            assert line, self.output
            self.output += line
        found = re.search(r"ws://\S+", self.output)
        assert found is not None
        self.url = found.group()
        self.http = self.url.replace("ws:", "http:").removesuffix("/v1/responses")
        self.others = ranks.children_of(self.process.pid)

    async def ask(self, tokens: int, prompt: Sequence[int] = (7, 8, 9)) -> tuple[int, ...]:
        """The greedy tokens after a prompt, over a connection of its own."""
        async with await Client.connect(self.url) as client:
            return (await client.create(list(prompt), max_output_tokens=tokens, ignore_eos=True).completion()).token_ids

    def metrics(self) -> str:
        """What `/metrics` says."""
        with urllib.request.urlopen(f"{self.http}/metrics") as answer:
            return str(answer.read().decode())

    def ended(self, within_s: float = 10) -> tuple[int, str]:
        """Status and remaining standard error of the process, which ends by itself within this time."""
        began = time.monotonic()
        status, _, output = ranks.finished(self.process, 60)
        assert time.monotonic() - began < within_s
        assert "Traceback" not in output
        return status, output

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
