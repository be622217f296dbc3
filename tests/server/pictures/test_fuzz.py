"""Bodies and pictures that nobody meant: no 500, no process lost, nothing of a decoder told, and another stream that goes on."""

from __future__ import annotations

import asyncio
import base64
import random
import time

import httpx
import pytest
from support.published_pictures import encoded, picture
from support.shown import PLACE, reader, showing, url

FORMS = [("PNG", "RGB"), ("PNG", "LA"), ("PNG", "P"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("WEBP", "RGBA"), ("GIF", "P"), ("BMP", "L")]
LEGAL = {200, 400, 413}
LEAKS = (" 0x", "PIL", "Traceback", "site-packages", ".py", "object at")


def files():
    return [encoded(picture(40 + 8 * i, 56, i, mode), form) for i, (form, mode) in enumerate(FORMS)]


def changed(draw: random.Random, data: bytes) -> bytes:
    """A file with bytes changed, left out, doubled or set to what a size may be."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8, 40))):
        at = draw.randrange(len(out) or 1)
        match draw.randrange(5):
            case 0:
                out[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del out[at : at + draw.randrange(1, 200)]
            case 2:
                out[at:at] = out[at : at + draw.randrange(1, 200)]
            case 3:
                out[at : at + 4] = draw.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\xff\xff", b"\x7f\xff\xff\xff", b"\0\1\0\0"))
            case _:
                # Where headers have sizes.
                head = draw.randrange(min(64, len(out) or 1))
                out[head : head + 2] = draw.randbytes(2)
    return bytes(out)


def junk(draw: random.Random, depth: int = 0):
    if depth < 3 and draw.random() < 0.3:
        return {draw.choice(("url", "type", "detail", "image_url", "x")): junk(draw, depth + 1) for _ in range(draw.randrange(3))}
    return draw.choice((None, True, -1, 2**70, 1.5, "", "x", [], [[]], "data:", "data:image/png;base64,", "🙂", "http://[", PLACE))


def image(value: object) -> dict:
    return {"type": "image_url", "image_url": value}


def chat(address: str) -> dict:
    return {"messages": [{"role": "user", "content": [image({"url": address}), {"type": "text", "text": "x"}]}]}


def body(draw: random.Random, sources: list[bytes]) -> tuple[str, dict]:
    """A path and a body with a picture in it, or with what is none in its place."""
    shown = changed(draw, draw.choice(sources)) if draw.random() < 0.8 else draw.choice(sources)
    address: object = f"data:image/png;base64,{base64.b64encode(shown).decode()}"
    if draw.random() < 0.15:
        address = junk(draw)
    kwargs = draw.choice((None, None, {"max_pixels": draw.choice((0, 1, 1024, 65536, 2**40))}, {"min_pixels": 70000}, junk(draw)))
    part = image({"url": address, "detail": draw.choice(("auto", "low", "x"))} if draw.random() < 0.95 else junk(draw))
    text, options = {"type": "text", "text": "x"}, {"mm_processor_kwargs": kwargs}
    match draw.randrange(4):
        case 0:
            prompt = draw.choice((PLACE, "", f"{PLACE}x"))
            return "/generate", {"text": prompt, "image_data": draw.choice((address, [address])), **options}
        case 1:
            content = [{"type": "input_image", "image_url": address}, {"type": "input_text", "text": PLACE}]
            return "/v1/responses", {"input": [{"role": "user", "content": content}], **options}
        case 2:
            return "/tokenize", {"messages": [{"role": "user", "content": [part, text]}], **options}
        case _:
            content = draw.choice(([part, text], [part] * draw.randrange(12), junk(draw)))
            return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **options}


async def fuzz(base: str, count: int, seed: int) -> tuple[dict[int, int], list[float]]:
    """Statuses, and the pauses between the events of a stream meanwhile."""
    draw, sources, statuses, gaps = random.Random(seed), files(), dict[int, int](), list[float]()
    async with httpx.AsyncClient(base_url=base, timeout=300) as client:
        over = asyncio.Event()

        async def streams():
            # One after another: each has as many events as bytes.
            while not over.is_set():
                body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
                async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    last_s = time.monotonic()
                    async for _ in answer.aiter_lines():
                        now_s = time.monotonic()
                        gaps.append(now_s - last_s)
                        last_s = now_s

        async def asks(number: int):
            for _ in range(number):
                path, sent = body(draw, sources)
                answer = await client.post(path, json=sent)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                assert answer.status_code in LEGAL, (path, answer.text, sent)
                if answer.status_code != 200:
                    message = answer.json()["error"]["message"]
                    assert not any(leak in message for leak in LEAKS), message

        watched = asyncio.create_task(streams())
        await asyncio.gather(*(asks(count // 4) for _ in range(4)))
        over.set()
        await watched
    return statuses, gaps


@pytest.mark.parametrize("count", [40, pytest.param(10_000, marks=pytest.mark.long)])
def test_nothing_that_is_sent_as_a_picture_is_the_servers_failure(count):
    with reader() as taken, showing(lambda _: "ok" * 200, taken) as (address, engine):
        base = address.removesuffix("/v1")
        statuses, gaps = asyncio.run(fuzz(base, count, 36))
        gaps.sort()
        longest = [round(1e3 * gaps[-rank]) for rank in (1, 2, 10, 100) if rank <= len(gaps)]
        print(f"statuses {statuses}; longest, 2nd, 10th and 100th of {len(gaps)} pauses of a stream: {longest} ms")
        assert len(statuses) > 1
        # As many processes as before, and they work.
        assert len(taken.pool.process_ids) == 1
        assert httpx.post(f"{base}/v1/chat/completions", json=chat(url()), timeout=300).status_code == 200
        assert len(engine.requests[-1].pictures) == 1


SIZES = [(1, 1), (1, 200), (200, 1), (31, 33), (30, 150), (150, 30), (144, 144), (640, 480)]
MODES = ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"]


def test_every_size_and_mode_is_served_and_none_ends_the_server():
    """CVE-2026-22773 (1x1), sgl-project/sglang#26751 (gray, palettes), vllm-project/vllm#36653 (as many places as rows), and photos larger
    than a bucket (lmstudio-ai/lmstudio-bug-tracker#2003)."""
    with showing() as (address, engine):
        for i, (height, width) in enumerate([*SIZES, *[(64, 96)] * len(MODES)]):
            mode = MODES[max(0, i - len(SIZES))]
            shown = url(height, width, mode=mode, form="JPEG" if mode == "CMYK" else "PNG")
            answer = httpx.post(f"{address}/chat/completions", json=chat(shown), timeout=300)
            assert answer.status_code == 200, answer.text
            request = engine.requests[-1]
            (one,) = request.pictures
            assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == one.span.end - one.span.first == len(one.patches) // 4
            assert one.span.rows * one.span.columns * 4 == one.grid[0] * one.grid[1] == len(one.patches)
