"""server/guard/access.py: hosts, origins and keys."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import RequestError, SpecError
from npucompile.server.guard import access
from npucompile.server.guard.access import Access
from npucompile.server.openai.control import flush_cache, health_generate
from npucompile.server.openai.routes import GETS


def scope(path="/v1/responses", subprotocols=(), **headers):
    named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"path": path, "headers": named, "subprotocols": list(subprotocols)}


def refusal(rules, *args, **headers):
    with pytest.raises(RequestError) as caught:
        rules.check(scope(*args, **headers))
    return caught.value.code


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "llm.example.org:80"]
)
def test_hosts_that_are_ours(host):
    Access.of(hosts=["LLM.example.org"]).check(scope(host=host))


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example",
        "localhost.attacker.example",
        "127.0.0.1.attacker.example",
        "127.0.0.1@attacker.example",
        "x y",
        "[::1",
        "a/localhost",
    ],
)
def test_names_pointed_at_this_machine_are_refused(host):
    assert refusal(Access(), host=host) == "host_not_allowed"
    # Not even a probe is answered: a rebound page could read it.
    assert refusal(Access(), "/health", host=host) == "host_not_allowed"


def test_all_hosts_may_be_allowed():
    Access.of(hosts=["*"]).check(scope(host="anything.example"))


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8000", "localhost:8000"),
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("https://localhost", "localhost:443"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("https://chat.example.org", "localhost:8000"),
        ("https://CHAT.example.org", "localhost:8000"),
    ],
)
def test_own_and_listed_origins(origin, host):
    Access.of(origins=["https://chat.example.org"]).check(scope(host=host, origin=origin))


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost:3000", "http://127.0.0.1:8000", "null", "", "http://localhost:8000.evil.example",
     "http://localhost:8000@evil.example", "https://chat.example.org.evil.example", "http://[::1", "localhost:8000", "http://localhost:8000/x"],
)  # fmt: skip
def test_other_pages_are_refused(origin):
    rules = Access.of(origins=["https://chat.example.org"])
    assert refusal(rules, host="localhost:8000", origin=origin) == "origin_not_allowed"


IMAGE = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/140.0"}


@pytest.mark.parametrize("path", [path for path, get in GETS.items() if get in (flush_cache, health_generate)])
@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({}, True),
        ({"user-agent": "curl/8.5.0"}, True),
        ({"origin": "http://localhost:8000", **IMAGE}, True),
        ({"sec-fetch-site": "none", **IMAGE}, True),
        ({"sec-fetch-site": "same-origin", **IMAGE}, True),
        ({"sec-fetch-site": "cross-site", **IMAGE}, False),
        ({"sec-fetch-site": "same-site"}, False),
        (IMAGE, False),
        ({"origin": "https://evil.example", **IMAGE}, False),
    ],
)
def test_a_page_elsewhere_cannot_change_anything_by_reading(path, headers, let_in):
    """An image's request has no Origin."""
    request = {"path": path, "headers": [(name.encode(), value.encode()) for name, value in {"host": "localhost:8000", **headers}.items()]}
    if let_in:
        Access().check(request)
    else:
        with pytest.raises(RequestError) as refused:
            Access().check(request)
        assert refused.value.code == "origin_not_allowed"
    Access().check({**request, "path": "/version"} if "origin" not in headers else {**request, "headers": []})
    Access.of(origins=["*"]).check(request)


@given(st.text(), st.text())
def test_whatever_a_header_holds_is_let_in_or_refused(host, origin):
    encoded = [(b"host", host.encode()), (b"origin", origin.encode())]
    try:
        Access().check({"path": "/", "headers": encoded})
    except RequestError as error:
        message = str(error)
    else:
        message = ""
    assert len(message) < 500


KEYS = ["first-key", "second-key"]


@pytest.mark.parametrize("headers", [{"authorization": "Bearer second-key"}, {"authorization": "bearer  first-key "}])
def test_any_of_the_keys_opens(headers):
    rules = Access.of(KEYS)
    assert rules.check(scope(**headers)) == access.digest(headers["authorization"].split()[1]).hex()


def test_a_browser_gives_its_key_as_a_subprotocol():
    offered = ["npucompile.json", "openai-insecure-api-key.first-key"]
    assert Access.of(KEYS).check(scope("/v1/responses", offered)) == access.digest("first-key").hex()


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Bearer first-ke"}, {"authorization": "Bearer first-key2"},
     {"authorization": "Basic first-key"}, {"authorization": "first-key"}, {"authorization": "Bearer \xff"}, {"api-key": "first-key"}],
    ids=str,
)  # fmt: skip
def test_no_other_key_opens(headers):
    for path in ("/v1/responses", "/v1/models", "/metrics", "/health/", "/health/../metrics"):
        assert refusal(Access.of(KEYS), path, **headers) == "invalid_api_key"
    for path in ("/health", "/ready"):
        assert Access.of(KEYS).check(scope(path, **headers)) is None


def test_the_comparison_does_not_stop_at_the_first_difference_or_the_first_key(monkeypatch):
    compared, compare = [], hmac.compare_digest

    def watched(a, b):
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(access.hmac, "compare_digest", watched)
    for key in ("first-key", "second-key", "f", "x" * 1000):
        compared.clear()
        try:
            Access.of(KEYS).check(scope(authorization=f"Bearer {key}"))
        except RequestError:
            assert key not in KEYS
        # Digests of one length, and all of them.
        assert compared == [(32, 32)] * 2


def test_the_keys_themselves_are_not_kept():
    assert "first-key" not in repr(Access.of(KEYS))


@pytest.mark.parametrize(
    "arguments",
    [{"keys": [""]}, {"keys": ["two words"]}, {"keys": ["ü"]}, {"origins": ["chat.example.org"]}, {"origins": ["https://x/path"]},
     {"hosts": ["https://x"]}, {"hosts": ["x:80"]}, {"hosts": [""]}, {"proxies": ["proxy"]}, {"proxies": ["10.0.0.1/24"]}],
    ids=str,
)  # fmt: skip
def test_what_a_user_types_wrong_is_named(arguments):
    with pytest.raises(SpecError, match="legal"):
        Access.of(**arguments)
