"""Pictures and videos fetched by URL, from hosts that the operator allows (SSRF: CVE-2025-6242).

A name is resolved once; each of its addresses has to be a public one, and the connection goes to one of these, so that no later answer of
a name server changes where (DNS rebinding). A host that is allowed as an address in numbers may be any. Redirects are not followed: where
they lead nobody has allowed. Errors are one text, whatever was found, as what differs tells of what is behind this server.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from string import punctuation
from urllib.parse import SplitResult, quote, urlsplit

from ...graphs.errors import RequestError, SpecError
from ..requests.pictures import NOUNS, Kind
from ..requests.shared_threads import SharedThreads

FETCHES = 8
"""At once; more wait."""
FETCH_S = 5.0
"""vLLM's VLLM_IMAGE_FETCH_TIMEOUT."""
CHUNK_BYTES = 2**16
PORTS = {"http": 80, "https": 443}
NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Sequence[str]]
"""(name, port) -> its addresses; raises OSError."""


def addresses_of(name: str, port: int) -> Sequence[str]:
    """Addresses of a name, from this machine's resolver."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether an address is one of the internet's, and none that stands for another network's: mapped, 6to4, Teredo, NAT64."""
    try:
        value: Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(value, ipaddress.IPv6Address) and (
        value.ipv4_mapped or value.sixtofour or value.teredo or any(value in network for network in NAT64)
    ):
        return False
    return value.is_global and not value.is_multicast


class Hosts:
    """Hosts that pictures and videos are fetched from.

    Args:
        allowed: names or addresses, with :PORT where another than the scheme's is meant; addresses of IPv6 in brackets.
        max_bytes: of a picture, and of a video.
        time_s: of a fetch, from its first look-up to its last byte.
        resolve: looks names up.
        context: of TLS; None checks certificates as this machine does.

    Raises:
        SpecError: one of them is no host.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        max_bytes: Mapping[Kind, int],
        time_s: float = FETCH_S,
        resolve: Resolve = addresses_of,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = frozenset(map(_host, allowed))
        self._max_bytes, self._time_s, self._resolve = max_bytes, time_s, resolve
        self._context = context or ssl.create_default_context()
        # A name server that hangs holds a thread, which others then lack.
        self._threads = SharedThreads(FETCHES, "npucompile-media")

    async def fetch(self, url: str, param: str, kind: Kind) -> bytes:
        """What is at a URL.

        Raises:
            RequestError: its host is not allowed, or nothing could be fetched (codes invalid_image_url, failed_to_download_image).
        """
        place = self._place(url, param, kind)
        deadline_s = time.monotonic() + self._time_s
        work = asyncio.wrap_future(self._threads.submit(lambda: self._get(place, kind, deadline_s)))
        try:
            return await asyncio.wait_for(work, self._time_s)
        except _TooLarge:
            message = f"the {NOUNS[kind]} has more than {self._max_bytes[kind]} bytes; legal are up to that many"
            raise RequestError(message, param=param, code=f"{kind}_file_too_large") from None
        except Exception:  # What a network or a peer leads to; it is not told apart.
            message = f"{param} could not be fetched within {self._time_s:g} s; legal is the URL of a {NOUNS[kind]}, without redirects"
            raise RequestError(message, param=param, code=f"failed_to_download_{kind}") from None

    def _place(self, url: str, param: str, kind: Kind) -> SplitResult:
        try:
            given = urlsplit(url)
            place = _encoded(given)
            host, port = (place.hostname or "").rstrip("."), place.port or PORTS[place.scheme]
            allowed = not self._allowed.isdisjoint({(host, port), (host, 0 if port in PORTS.values() else port)})
            plain = url.isprintable() and " " not in url and given.username is None and given.password is None
        except (ValueError, KeyError):
            allowed = plain = False
        if not (plain and allowed):
            message = f"{param} is a URL of a host that is not allowed here (`npucompile serve --allowed-media-host`); legal is a data URL"
            raise RequestError(message, param=param, code=f"invalid_{kind}_url")
        return place

    def _get(self, place: SplitResult, kind: Kind, deadline_s: float) -> bytes:
        host, port = str(place.hostname).rstrip("."), place.port or PORTS[place.scheme]
        # An address in numbers was allowed as such; the resolver is asked for names alone.
        addresses = [host] if _is_address(host) else list(self._resolve(host, port))
        if not addresses or not (_is_address(host) or all(map(is_public, addresses))):
            raise OSError
        connection = http.client.HTTPConnection(host, port, timeout=_left(deadline_s))
        connection.sock = socket.create_connection((addresses[0], port), _left(deadline_s))
        try:
            if place.scheme == "https":
                connection.sock = self._context.wrap_socket(connection.sock, server_hostname=host)
            target = (place.path or "/") + (f"?{place.query}" if place.query else "")
            connection.request("GET", target, headers={"Accept": f"{kind}/*", "Accept-Encoding": "identity"})
            connection.sock.settimeout(_left(deadline_s))
            # The response keeps the socket, where its peer ends the connection.
            peer = connection.sock
            with connection.getresponse() as response:
                if response.status != 200:
                    raise OSError
                data = bytearray()
                while chunk := response.read1(CHUNK_BYTES):
                    data += chunk
                    if len(data) > self._max_bytes[kind]:
                        raise _TooLarge
                    peer.settimeout(_left(deadline_s))
                if response.length:
                    raise OSError
                return bytes(data)
        finally:
            connection.close()


class _TooLarge(Exception):
    pass


def _ascii(host: str | None) -> str:
    """The name that is looked up."""
    return (host or "") if host is None or host.isascii() else host.encode("idna").decode()


def _encoded(place: SplitResult) -> SplitResult:
    """A URL in ASCII, as browsers ask for it: names of hosts in IDNA, other letters of path and query in percents of UTF-8."""
    netloc = place.netloc
    if not netloc.isascii():
        netloc = _ascii(place.hostname) + (f":{place.port}" if place.port else "")
    path, query = (quote(text, safe=punctuation) for text in (place.path, place.query))
    return place._replace(netloc=netloc, path=path, query=query)


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host(text: str) -> tuple[str, int]:
    """Name and port; port 0 stands for those of the schemes."""
    try:
        place = urlsplit(f"//{text}")
        host, port = _ascii(place.hostname), place.port or 0
    except ValueError:
        host, port = "", 0
    if not host or place.path or place.query or place.username is not None or "*" in host:
        raise SpecError(f"--allowed-media-host {text!r} is no host; legal is a name or an address, and :PORT where another is meant")
    return host.rstrip("."), port
