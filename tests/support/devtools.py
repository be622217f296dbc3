"""A page in a headless Chromium, driven by the DevTools protocol."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from websockets.sync.client import ClientConnection, connect

TIMEOUT_S = 30


class Page:
    """One page."""

    def __init__(self, socket: ClientConnection, session: str) -> None:
        self._socket, self._session, self._numbers = socket, session, count(100)
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What a method of the protocol returns."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "sessionId": self._session, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=TIMEOUT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self.events.append(message)

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """The value of an expression, as soon as it is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, f"{expression}: {self.run('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def said(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of a kind."""
        return [event["params"] for event in self.events if event.get("method") == method]


@contextlib.contextmanager
def opened(browser: str, url: str) -> Iterator[Page]:
    """A page in a browser of its own, for the length of a `with`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            address = None
            for line in process.stderr:
                if address := re.search(r"ws://\S+", line):
                    break
            assert address is not None
            with connect(address.group(), max_size=None) as socket:
                browser_wide = Page(socket, "")
                socket.send(json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
                target = _answer(socket, 1)["targetId"]
                socket.send(json.dumps({"id": 2, "method": "Target.attachToTarget", "params": {"targetId": target, "flatten": True}}))
                page = Page(socket, _answer(socket, 2)["sessionId"])
                assert browser_wide.events == []
                for domain in ("Runtime", "Network", "Page", "Log"):
                    page.call(f"{domain}.enable")
                page.call("Page.navigate", url=url)
                page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
                yield page
        finally:
            process.kill()
            process.communicate()


def _answer(socket: ClientConnection, number: int) -> dict[str, Any]:
    while True:
        message = json.loads(socket.recv(timeout=TIMEOUT_S))
        if message.get("id") == number:
            return dict(message["result"])
