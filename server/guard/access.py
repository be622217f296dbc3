"""Who may talk to the server: the Host and the Origin of a request, and its key. The one place for HTTP and for the websocket.

- Host: a page whose name was pointed at this machine (DNS rebinding) sends its own name. Legal are this machine's loopback name, any
  address in numbers, and the names that were allowed.
- Origin: browsers send it with whatever a page does elsewhere, and with every websocket, which no same-origin policy guards. Legal is
  the origin of the request's own host, or one that was allowed. Clients that are not browsers send none.
- Proxy: of those that were named, `X-Forwarded-For` says whose request it is; what anybody else says there is not read.
- Key: `Authorization: Bearer KEY`, or, for browsers, which cannot set headers of a websocket, the subprotocol `KEY_SUBPROTOCOL` + KEY as
  OpenAI's clients offer it. Keys are compared by digest, in a time that does not depend on the key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...graphs.errors import SpecError
from ..requests.error_objects import Refusal
from ..requests.fields import show

KEY_SUBPROTOCOL = "openai-insecure-api-key."
OPEN_PATHS = frozenset({"/health", "/ready", "/"})
"""Need no key: whatever watches the server may have none, and the chat page asks for it. They say nothing of what is served."""

CHANGING_PATHS = frozenset({"/flush_cache", "/health_generate"})
"""May be read with GET, and change something or take the engine's time: a page can have a browser read them as the source of an image."""

BROWSER = "Mozilla/"
"""What the User-Agent of every browser begins with."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LOOPBACK = "localhost"
ANY = "*"
DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


@dataclass(frozen=True)
class Access:
    """What is let in.

    Attributes:
        key_digests: SHA-256 of each key; with none, no key is asked for.
        origins: allowed beside the server's own, as `scheme://host[:port]`; `*` allows all.
        hosts: names allowed beside localhost and addresses in numbers; `*` allows all.
        proxies: that may say for whom they ask.
    """

    key_digests: tuple[bytes, ...] = ()
    origins: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    proxies: tuple[Network, ...] = ()

    @staticmethod
    def of(keys: Sequence[str] = (), origins: Sequence[str] = (), hosts: Sequence[str] = (), proxies: Sequence[str] = ()) -> Access:
        """From keys, origins, names and addresses as a user gives them.

        Raises:
            SpecError: a key is empty or holds blanks, an origin is no origin, a host is not a bare name, or a proxy is no address.
        """
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise SpecError(
                    "an API key is empty, or holds blanks or other than printable ASCII; legal are letters, digits and punctuation"
                )
        for origin in origins:
            if origin not in (ANY, "null") and _authority(origin) is None:
                raise SpecError(f"origin {origin!r}; legal is scheme://host[:port], as in https://chat.example.org, null, or * for all")
        for host in hosts:
            if host != ANY and (not host or host.lower() != _host_name(host)):
                raise SpecError(f"host {host!r}; legal is a name without scheme and port, as in llm.example.org, or * for all")
        lowered = [frozenset(text.lower().rstrip("/") for text in texts) for texts in (origins, hosts)]
        return Access(tuple(digest(key) for key in keys), lowered[0], lowered[1], tuple(map(_network, proxies)))

    def check(self, scope: Mapping[str, Any]) -> str | None:
        """Checks an ASGI request; returns the digest in hex of its key, None where no key is asked for.

        Raises:
            RequestError: it is not let in (codes host_not_allowed, origin_not_allowed, invalid_api_key).
        """
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        self._check_host(host)
        self._check_origin(headers.get(b"origin"), host)
        if scope["path"] in CHANGING_PATHS and b"origin" not in headers and ANY not in self.origins:
            _check_page(headers)
        return None if scope["path"] in OPEN_PATHS else self._check_key(_authorization(headers), scope.get("subprotocols", ()))

    def trusts(self, address: str) -> bool:
        """Whether a connection from there is a proxy's."""
        return _is_address(address) and any(ipaddress.ip_address(address) in network for network in self.proxies)

    def _check_host(self, host: str) -> None:
        name = _host_name(host)
        # Without the header it was no browser.
        if not host or ANY in self.hosts or name == LOOPBACK or name in self.hosts or _is_address(name):
            return
        raise Refusal("host_not_allowed", host=show(host), names=", ".join(sorted({LOOPBACK, *self.hosts})))

    def _check_origin(self, origin: str | None, host: str) -> None:
        if origin is None or ANY in self.origins or origin.lower() in self.origins:
            return
        authority = _authority(origin)
        if authority is not None and authority == _authority(f"{urlsplit(origin).scheme}://{host}"):
            return
        raise Refusal("origin_not_allowed", origin=show(origin))

    def _check_key(self, authorization: str | None, subprotocols: Sequence[str]) -> str | None:
        if not self.key_digests:
            return None
        offered = [name.removeprefix(KEY_SUBPROTOCOL) for name in subprotocols if name.startswith(KEY_SUBPROTOCOL)]
        scheme, _, value = (authorization or "").partition(" ")
        if scheme.lower() == "bearer":
            offered.insert(0, value.strip())
        given = digest(offered[0]) if offered else b""
        # All are compared, so that the time does not tell which one fits.
        if sum(hmac.compare_digest(given, known) for known in self.key_digests):
            return given.hex()
        raise Refusal("invalid_api_key", state="is not one of this server's" if offered else "is missing")


def _authorization(headers: Mapping[bytes, str]) -> str | None:
    """The header that has the key; clients of Anthropic's API have one of their own."""
    key = headers.get(b"x-api-key")
    return headers.get(b"authorization") or (None if key is None else f"Bearer {key}")


def _check_page(headers: Mapping[bytes, str]) -> None:
    """Refuses what a page elsewhere may have asked for without an origin. Browsers say where a request comes from, but not to everybody:
    to this machine and over TLS."""
    site = headers.get(b"sec-fetch-site")
    if site in ("none", "same-origin") or (site is None and not headers.get(b"user-agent", "").startswith(BROWSER)):
        return
    raise Refusal("origin_not_allowed.read", site="no" if site is None else show(site))


def digest(key: str) -> bytes:
    """What is kept and compared of a key."""
    return hashlib.sha256(key.encode()).digest()


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        legal = "legal is an address or a network in numbers, as in 10.0.0.7 or 10.0.0.0/24"
        raise SpecError(f"trusted proxy {text!r}: {error}; {legal}") from None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """The name or address in a Host header, in lower case, without port and without the final dot; "" where there is none."""
    try:
        parts = urlsplit(f"//{host}")
        legal = not (parts.path or parts.query or parts.fragment or "@" in parts.netloc)
        return (parts.hostname or "").rstrip(".") if legal else ""
    except ValueError:
        return ""


def _authority(url: str) -> tuple[str, int | None] | None:
    """Host and port of an origin; None where it is no origin."""
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None
    if not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    return parts.hostname.rstrip("."), port
