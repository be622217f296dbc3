"""server/pictures/media.py: allowed hosts alone, public addresses alone, no redirects, within size and time; one text for all failures."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from npucompile.graphs.errors import RequestError, SpecError
from npucompile.server.pictures.media import Hosts, addresses_of, is_public

BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"


@contextlib.contextmanager
def peer(answer, pause_s=0.0):
    """A server that sends the pieces of its answer; yields its port and the requests it has had."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        asked.append(connection.recv(10_000))
                        for piece in [answer] if isinstance(answer, bytes) else answer:
                            connection.sendall(piece)
                            time.sleep(pause_s)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1], asked
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def fetch(hosts, url, kind="image"):
    return asyncio.run(hosts.fetch(url, "the place", kind))


def refused(hosts, url, kind="image"):
    with pytest.raises(RequestError) as caught:
        fetch(hosts, url, kind)
    assert caught.value.param == "the place"
    return caught.value


def test_a_picture_of_an_allowed_host_is_fetched():
    with peer(BODY) as (port, asked):
        assert fetch(Hosts([f"127.0.0.1:{port}"], {"image": 3, "video": 2 * 3}), f"http://127.0.0.1:{port}/a%20b?c=d") == b"abc"
    assert asked[0].startswith(b"GET /a%20b?c=d HTTP/1.1\r\n")
    assert b"\r\nHost: 127.0.0.1" in asked[0]


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("/zwölf/ä.png?größe=ß%20&b=🙂", b"/zw%C3%B6lf/%C3%A4.png?gr%C3%B6%C3%9Fe=%C3%9F%20&b=%F0%9F%99%82"),
        ("/a(1)[2];c,d|e", b"/a(1)[2];c,d|e"),
    ],
)
def test_other_letters_of_a_url_are_asked_for_as_browsers_do(url, target):
    with peer(BODY) as (port, asked):
        assert fetch(Hosts([f"127.0.0.1:{port}"], {"image": 3, "video": 3}), f"HTTP://127.0.0.1:{port}{url}") == b"abc"
    assert asked[0].startswith(b"GET " + target + b" HTTP/1.1\r\n")


@pytest.mark.parametrize("allowed", ["bücher.example", "BÜCHER.example", "xn--bcher-kva.example"])
@pytest.mark.parametrize("url", ["http://bücher.example/", "http://Bücher.EXAMPLE./", "http://xn--bcher-kva.example/"])
def test_a_host_with_other_letters_is_one_name_however_it_is_written(allowed, url):
    asked = []

    def resolve(name, port):
        asked.append((name, port))
        return ["127.0.0.1"]

    refused(Hosts([allowed], {"image": 3, "video": 3}, resolve=resolve), url)
    assert asked == [("xn--bcher-kva.example", 80)]


def test_a_video_may_be_larger_and_errors_are_of_one():
    with peer(BODY) as (port, asked):
        hosts, url = Hosts([f"127.0.0.1:{port}"], {"image": 2, "video": 3}), f"http://127.0.0.1:{port}/"
        assert fetch(hosts, url, "video") == b"abc"
        assert b"\r\nAccept: video/*\r\n" in asked[0]
        error = refused(Hosts([f"127.0.0.1:{port}"], {"image": 9, "video": 2}), url, "video")
        assert (str(error), error.code) == ("the video has more than 2 bytes; legal are up to that many", "video_file_too_large")
        assert refused(hosts, url).code == "image_file_too_large"
    error = refused(hosts, url, "video")
    assert error.code == "failed_to_download_video"
    assert "legal is the URL of a video" in str(error)
    assert refused(hosts, "http://other.example/", "video").code == "invalid_video_url"


@pytest.mark.parametrize(
    "url",
    ["http://evil.example/", "http://127.0.0.1/", "http://a@ok.example/", "http://ok.example@evil.example/", "http://ok.example:8080/",
     "http://sub.ok.example/", "http://ok.example\\.evil/", "http://ok.example /", "http://ok.example/\r\nX: y", "http://[::1]/",
     "http://é@ok.example/", "http://ok。evil.example/", "http://ok.example\u200b/", "https://", "http://ok.example:x/", "http://2130706433/"],
)  # fmt: skip
def test_other_hosts_are_refused_before_anything_is_looked_up(url):
    def resolve(*_):
        raise AssertionError("nothing is looked up")

    error = refused(Hosts(["ok.example"], {"image": 10, "video": 2 * 10}, resolve=resolve), url)
    assert error.code == "invalid_image_url"
    assert "evil" not in str(error)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255",
     "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "2002:7f00:1::", "64:ff9b::7f00:1",
     "64:ff9b:1::1", "2001:0:1::", "nonsense"],
)  # fmt: skip
def test_names_of_private_addresses_are_not_connected_to(address):
    """V#57157, V#57825: the host is allowed, and its name leads inside; one such address among several is enough."""
    assert not is_public(address)
    error = refused(
        Hosts(["ok.example"], {"image": 10, "video": 2 * 10}, resolve=lambda *_: ["93.184.215.14", address]), "http://ok.example/"
    )
    assert error.code == "failed_to_download_image"
    assert address not in str(error)


def test_public_addresses_are_told_from_others():
    assert all(map(is_public, ("93.184.215.14", "8.8.8.8", "2606:4700::1111")))
    assert addresses_of("127.0.0.1", 80) == ["127.0.0.1"]


def test_a_name_is_resolved_once_and_the_connection_goes_there(monkeypatch):
    """V#55539: a name server that answers otherwise the second time changes nothing."""
    answers, reached = [["93.184.215.14"], ["127.0.0.1"]], []

    def connect(address, timeout):
        reached.append(address)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", connect)
    refused(Hosts(["ok.example"], {"image": 10, "video": 2 * 10}, resolve=lambda *_: answers.pop(0)), "http://ok.example/")
    assert reached == [("93.184.215.14", 80)]
    assert answers == [["127.0.0.1"]]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/secret\r\nContent-Length: 0\r\n\r\n", "failed_to_download_image"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "failed_to_download_image"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "failed_to_download_image"),
        (b"nonsense", "failed_to_download_image"),
        (b"", "failed_to_download_image"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(100), "image_file_too_large"),
    ],
)
def test_what_is_no_picture_there_fails_with_one_text(answer, code):
    with peer(answer) as (port, _):
        error = refused(Hosts([f"127.0.0.1:{port}"], {"image": 20, "video": 2 * 20}), f"http://127.0.0.1:{port}/")
    assert error.code == code
    assert "127.0.0.1" not in str(error)


def test_a_host_that_drips_is_left_in_time():
    with peer([b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", *[b"x"] * 30], 0.1) as (port, _):
        error = refused(Hosts([f"127.0.0.1:{port}"], {"image": 2000, "video": 2 * 2000}, 0.5), f"http://127.0.0.1:{port}/")
    assert error.code == "failed_to_download_image"
    assert "within 0.5 s" in str(error)


@pytest.mark.parametrize("host", ["", "http://x", "x/y", "a@b", "x:y", "*.example", "[::1"])
def test_what_is_no_host_is_refused(host):
    with pytest.raises(SpecError, match="is no host"):
        Hosts([host], {"image": 1, "video": 2 * 1})
