"""server/pages/page.py: the chat page, in a browser, before a server whose engine says what the user said."""

from __future__ import annotations

import httpx
import pytest
from support.devtools import opened
from support.optional import browser
from support.scripted import MODEL, ScriptedEngine
from support.shown import showing, url
from support.texts import byte_codec

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.engine.service import Service
from npucompile.server.guard.access import Access
from npucompile.server.pages.page import policy
from npucompile.server.run import Serving, running

TEMPLATE = "{{ messages[-1].content }}<think>"
FORM = ChatFormat.of(ChatTemplate(TEMPLATE), "qwen3")


@pytest.fixture
def server(request):
    engine = ScriptedEngine(lambda prompt: prompt.removesuffix("<think>"))
    access = Access.of(getattr(request, "param", []))
    with running(Service(engine, byte_codec(), MODEL, chat=FORM), settings=Serving(access=access)) as one:
        yield f"http://127.0.0.1:{one.port}/", engine
    engine.close()


def say(page, text):
    page.run(f"$('text').value = {text!r}; $('ask').requestSubmit()")


def last(page, status):
    """The text of the last answer, once it has this status."""
    return page.until(f"(() => {{ const e = $('log').lastElementChild; return e.dataset.status === '{status}' && e.innerText }})()")


def requested(page):
    return {entry["request"]["url"] for entry in page.said("Network.requestWillBeSent")}


def test_a_page_says_what_it_may_load(server):
    answer = httpx.get(server[0])
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"] == policy(answer.text)
    assert "'unsafe" not in policy(answer.text)
    for directive in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert directive in policy(answer.text)
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    assert httpx.get(server[0], headers={"Host": "evil.example"}).status_code == 421


def test_a_conversation_with_reasoning_sampling_and_a_stop(server):
    url, engine = server
    with opened(browser(), url) as page:
        page.until("$('state').textContent === 'connected'")
        page.run("$('temperature').value = '0.5'; $('seed').value = '7'; $('top_k').value = '3'")
        say(page, "hm</think>\n\n<b>Ä</b> says it.")
        assert "<b>Ä</b> says it." in last(page, "completed")
        sampling = engine.requests[-1].sampling
        assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.5, 7, 3)
        assert page.run("document.querySelector('details p').textContent") == "hm"
        assert page.run("document.querySelector('details').open") is False
        assert page.run("$('log').querySelector('b')") is None
        assert "tokens/s" in page.until("$('speed').textContent")
        assert page.until("$('model').textContent !== 'npucompile' && $('model').textContent") == "tiny"
        say(page, "x</think>again…")
        page.until("$('log').lastElementChild.innerText.includes('again')")
        page.run("$('stop').click()")
        assert "stopped" in last(page, "cancelled")
        assert engine.wait_cancelled()
        assert page.run("app.items.map((item) => item.role).join()") == "user,assistant,user,assistant"
        say(page, "")
        assert page.run("$('log').children.length") == 4
        assert all(address.startswith(url) or address == "about:blank" for address in requested(page))
        assert not [entry for entry in page.said("Log.entryAdded") if entry["entry"]["level"] == "error" and "favicon" not in str(entry)]


def test_a_stream_that_loses_its_connection_goes_on(server):
    url, engine = server
    with opened(browser(), url) as page:
        page.until("$('state').textContent === 'connected'")
        say(page, "</think>abc…")
        page.until("$('log').lastElementChild.innerText === 'abc'")
        page.run("app.first = app.socket; app.socket.close()")
        page.until("app.socket && app.socket !== app.first && app.socket.readyState === 1 && $('state').textContent === 'resuming'")
        page.run("$('stop').click()")
        assert last(page, "cancelled").startswith("abc\n")
        assert len(engine.requests) == 1


@pytest.mark.parametrize("server", [["the-key"]], indirect=True)
def test_a_key_is_asked_for(server):
    with opened(browser(), server[0]) as page:
        page.until("!$('key-field').hidden && $('state').textContent === 'this server asks for a key'")
        page.run("$('key').value = 'wrong'; $('key').onchange()")
        page.until("$('state').textContent.includes('not one of')")
        page.run("$('key').value = 'the-key'; $('key').onchange()")
        page.until("$('state').textContent === 'connected'")
        say(page, "</think>yes")
        assert last(page, "completed") == "yes"
        assert "the-key" not in str(requested(page))


DROP = """(async () => {
  const bytes = Uint8Array.from(atob('%s'), (letter) => letter.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], 'a.png', { type: '%s' }));
  const event = '%s' === 'drop' ? new DragEvent('drop', { dataTransfer: files, bubbles: true, cancelable: true })
    : new ClipboardEvent('paste', { clipboardData: files, bubbles: true, cancelable: true });
  $('text').dispatchEvent(event);
  return event.defaultPrevented;
})()"""


def test_a_picture_is_dropped_or_pasted_shown_and_sent():
    with showing(lambda _: "seen") as (address, engine), opened(browser(), address.removesuffix("v1")) as page:
        page.until("$('state').textContent === 'connected'")
        data = url(64, 96).partition(",")[2]
        assert page.run(DROP % (data, "image/png", "drop"))
        page.until("document.querySelectorAll('#shown img').length === 1 && document.querySelector('#shown img').naturalWidth === 96")
        assert page.run(DROP % (url(32, 32).partition(",")[2], "image/png", "paste"))
        page.until("document.querySelectorAll('#shown img').length === 2")
        page.run(DROP % (data, "text/html", "drop"))
        page.until("$('state').textContent === 'a.png is no picture'")
        say(page, "what?")
        assert "seen" in last(page, "completed")
        assert [shown.grid for shown in engine.requests[-1].pictures] == [(4, 6), (2, 2)]
        assert page.run("document.querySelectorAll('#shown img').length") == 0
        assert page.run("document.querySelectorAll('#log .user img').length") == 2
        # A second turn has them still; one that is clicked away is not sent.
        page.run(DROP % (data, "image/png", "drop"))
        page.until("!!document.querySelector('#shown img')")
        page.run("document.querySelector('#shown img').click()")
        page.until("!document.querySelector('#shown img')")
        say(page, "again")
        page.until("$('log').children.length === 4 && $('log').lastElementChild.dataset.status === 'completed'")
        assert len(engine.requests[-1].pictures) == 2
        assert not [entry for entry in page.said("Log.entryAdded") if entry["entry"]["level"] == "error" and "favicon" not in str(entry)]
