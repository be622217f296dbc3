"""Where a decode server finds its prefill servers; `test_decode_engine.py` has connections and their ends."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.server.fleet.prefill_link import socket_url


@pytest.mark.parametrize(
    ("url", "socket"),
    [
        ("http://host:8000", "ws://host:8000/v1/handover"),
        ("https://[::1]:8000/", "wss://[::1]:8000/v1/handover"),
        ("ws://10.0.0.1", "ws://10.0.0.1/v1/handover"),
    ],
)
def test_a_server_has_one_place_for_handovers(url: str, socket: str) -> None:
    assert socket_url(url) == socket


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", "http://host/v1", "http://host?x=1", "8000"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(SpecError, match="legal are URLs like http://HOST:PORT"):
        socket_url(url)
