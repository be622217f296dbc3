"""server/pictures/reader.py: pictures are counted before they are decoded, and equal ones are decoded once."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest
from PIL import Image
from support.published_pictures import encoded, picture
from support.shown import VISION, data_url, url

from npucompile.graphs.errors import RequestError
from npucompile.server.pictures.decoding import decode, size
from npucompile.server.pictures.limits import PictureLimits, RequestLimits, VideoLimits
from npucompile.server.pictures.processor import PUBLISHED
from npucompile.server.pictures.reader import PictureReader
from npucompile.server.requests.pictures import PicturePart, ProcessorFields


class Inline:
    """A pool that decodes here and notes what it is asked for."""

    def __init__(self):
        self.sizes, self.pictures = [], []

    def size(self, data, param):
        self.sizes.append(param)
        return done(lambda: size(data, PictureLimits(), param))

    def picture(self, data, processor, param):
        self.pictures.append(param)
        return done(lambda: processor.picture(decode(data, PictureLimits(), param), param))


def done(work):
    future = Future()
    try:
        future.set_result(work())
    except RequestError as error:
        future.set_exception(error)
    return future


def reader(pool, vision=VISION, **limits):
    return PictureReader(vision, PictureLimits(), RequestLimits(**limits), pool)


def parts(*urls):
    return [PicturePart(one, f"[{i}]") for i, one in enumerate(urls)]


def test_equal_pictures_are_one_file_and_decoded_once():
    async def run():
        one = reader(pool := Inline())
        several = parts(url(), url(), url(seed=2))
        assert await one.counts(several) == (6, 6, 6)
        assert pool.pictures == []
        first, again, other = await one.pictures(several[:1]) + await one.pictures(several[1:])
        assert first is again
        assert first.digest != other.digest
        assert several[0].file is several[1].file is not several[2].file
        assert [part.url for part in several] == [""] * 3
        # What is known needs no header.
        assert await one.counts(parts(url())) == (6,)
        assert (len(pool.sizes), pool.pictures) == (3, ["[0]", "[2]"])
        # With other options it is another picture.
        (small,) = await one.pictures(parts(url()), ProcessorFields(max_pixels=2048))
        assert small.digest != first.digest

    asyncio.run(run())


def test_what_is_kept_is_bounded_and_the_latest():
    async def run():
        room = 24 * 768
        one = reader(pool := Inline(), cache_bytes=2 * room)
        for seed in (1, 2, 1, 3, 1, 2):
            await one.pictures(parts(url(seed=seed)))
        assert len(pool.pictures) == 4
        assert one._cached_bytes == 2 * room

    asyncio.run(run())


def test_the_first_error_in_order_is_told():
    async def run():
        one = reader(Inline())
        with pytest.raises(RequestError) as caught:
            await one.counts(parts(url(), data_url(b"x"), "data:image/png;base64,!"))
        assert caught.value.param == "[1]"

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_counts_are_those_of_the_picture_whatever_its_mode_and_orientation(mode):
    async def run():
        one = reader(Inline())
        for orientation in range(1, 9) if mode == "RGB" else (1,):
            image = picture(70, 45, 3, mode)
            exif = image.getexif()
            exif[0x0112] = orientation
            file = encoded(image, "JPEG" if mode == "CMYK" else "PNG", exif=exif)
            (count,) = await one.counts(parts(data_url(file)))
            (shown,) = await one.pictures(parts(data_url(file)))
            assert shown.tokens == count

    asyncio.run(run())


@pytest.mark.parametrize(
    ("height", "width", "tokens"),
    [
        (1, 1, 64),
        (144, 144, 64),
        (31, 33, 72),
        (10, 1999, 114),
        (448, 448, 196),
        (1024, 1024, 1024),
        (2160, 3840, 8160),
        (4096, 4096, 16384),
    ],
)
def test_the_published_processor_has_as_many_rows_as_were_counted(height, width, tokens):
    """Up to its largest picture (vllm-project/vllm#36653, #15764); the numbers are those of transformers."""

    async def run():
        one = reader(Inline(), replace(VISION, processor=PUBLISHED, max_patches=65_536))
        file = parts(data_url(encoded(Image.new("RGB", (width, height), (9, 80, 200)))))
        (count,), (shown,) = await one.counts(file), await one.pictures(file)
        assert count == shown.tokens == len(shown.pixels) // 4 == tokens

    asyncio.run(run())


def test_long_pictures_take_no_more_patches_than_a_bucket_has():
    vision = replace(VISION, processor=VISION.processor.with_limits(65536, 65536))
    with pytest.raises(RequestError, match="takes 456 patches; legal are up to 256") as caught:
        vision.tokens(vision.processor, 1, 200, "p")
    assert caught.value.code == "image_too_large"


def test_bodies_may_be_larger_by_the_pictures():
    small, large = (reader(Inline(), images=count, videos=0).body_bytes for count in (1, 4))
    assert small > 4 / 3 * PictureLimits().max_bytes
    assert large == pytest.approx(4 * small, abs=4)
    with_video = reader(Inline(), images=1, videos=2).body_bytes - small
    assert with_video > 2 * 4 / 3 * VideoLimits().max_bytes
    assert reader(Inline(), replace(VISION, videos="none"), images=1, videos=2).body_bytes == small
