"""A running server as the storms see it: its URL, what its metrics say, and how much memory its process has."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path

import httpx

IDLE_S = 20.0


@dataclass(frozen=True)
class Target:
    """A server of the bundled model.

    Attributes:
        http: its URL, without a path.
        pid: of its process.
        max_model_len: most tokens of prompt and output.
    """

    http: str
    pid: int
    max_model_len: int = 128

    @property
    def websocket(self) -> str:
        """URL of the websocket."""
        return self.http.replace("http:", "ws:") + "/v1/responses"

    @property
    def resident_bytes(self) -> int:
        """Memory of the process."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text(encoding="ascii"))
        assert found is not None
        return int(found.group(1)) * 1024

    async def metrics(self) -> dict[str, float]:
        """Gauges and counters without labels."""
        async with httpx.AsyncClient(timeout=30) as client:
            text = (await client.get(f"{self.http}/metrics")).text
        lines = re.findall(r"^([a-z_:0-9]+) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in lines}

    async def owned(self) -> dict[str, float]:
        """What requests and connections hold; everything is 0 once all have ended."""
        metrics = await self.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "websocket_connections")
        return {name: metrics[f"npucompile:{name}"] for name in names}

    async def idle(self) -> dict[str, float]:
        """`owned` once nothing is held any more, or as it is after IDLE_S."""
        for _ in range(int(IDLE_S / 0.1)):
            if not any((owned := await self.owned()).values()):
                break
            await asyncio.sleep(0.1)
        return owned
