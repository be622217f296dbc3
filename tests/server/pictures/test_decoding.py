"""Decoding of pictures: what is legal, how it looks, and what hostile bytes get."""

from __future__ import annotations

import io
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.published_pictures import MODES, encoded, picture
from transformers.image_transforms import convert_to_rgb

from npucompile.graphs.errors import RequestError, SpecError
from npucompile.server.pictures import decoding
from npucompile.server.pictures.decoding import FORMATS, decode
from npucompile.server.pictures.limits import MOST_PIXELS, PictureLimits

CODES = {"empty_image_file", "image_file_too_large", "image_too_large", "unsupported_image_media_type", "image_parse_error"}
DAMAGED = ("image_parse_error", "unsupported_image_media_type")
ADDRESS = re.compile("0x[0-9a-f]{8}")
PLACE = "messages[0].content[1].image_url.url"


def refused(data: bytes, limits: PictureLimits | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(data, limits or PictureLimits(), PLACE)
    error = caught.value
    assert error.param == PLACE
    assert error.code in CODES
    assert not ADDRESS.search(str(error))
    assert error.__cause__ is None
    return error


def array(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in ("JPEG", "GIF")])
def test_a_picture_of_each_format_is_what_was_saved(form: str) -> None:
    image = picture(41, 67, 3)
    rgb = decode(encoded(image, form, **({"lossless": True} if form == "WEBP" else {})))
    assert (rgb.dtype, rgb.shape) == (torch.uint8, (3, 41, 67))
    assert rgb.is_contiguous()
    assert torch.equal(rgb, array(image))


@pytest.mark.parametrize("form", ["JPEG", "GIF"])
def test_lossy_formats_are_what_pillow_reads(form: str) -> None:
    data = encoded(picture(41, 67, 3), form)
    assert torch.equal(decode(data), array(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(form: str) -> None:
    frames = [Image.new("RGB", (40, 30), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **({"lossless": True} if form == "WEBP" else {}))
    assert decode(data)[:, 15, 20].tolist() == [255, 0, 0]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_is_seen_upright(form: str, orientation: int) -> None:
    upright = Image.new("RGB", (96, 64), (10, 10, 10))
    upright.paste((240, 20, 20), (0, 0, 48, 32))
    upright.paste((20, 240, 20), (48, 0, 96, 32))
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that the orientation undoes
    lying = upright.transpose(Image.Transpose(turns[orientation])) if orientation in turns else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}, "PNG": {}}[form]
    rgb = decode(encoded(lying, form, exif=exif, **options))
    assert (rgb.int() - array(upright).int()).abs().max() <= 12


def test_scans_of_a_jpeg_are_bounded_and_what_is_beside_them_is_none() -> None:
    """A few bytes each, and each costs as much as all pixels."""
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + b"\xff\xda" * 500
    file = encoded(picture(32, 48, 3), "JPEG", progressive=True, exif=exif, restart_marker_rows=1)
    assert decode(file).shape == (3, 32, 48)
    scan = file[file.rindex(b"\xff\xda") : -2]
    legal = decoding.MOST_SCANS - file.count(b"\xff\xda", file.index(b"\xff\xc2"))
    assert decode(file[:-2] + scan * legal + file[-2:]).shape == (3, 32, 48)
    error = refused(file[:-2] + scan * (legal + 1) + file[-2:])
    assert (error.code, f"has {decoding.MOST_SCANS + 1} scans" in str(error)) == ("image_parse_error", True)


def test_damaged_exif_turns_nothing() -> None:
    image = picture(32, 48, 1)
    for exif in (b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01" * 9, b"nonsense"):
        assert decode(encoded(image, "JPEG", exif=exif)).shape == (3, 32, 48)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "CMYK"])
def test_every_mode_becomes_rgb_with_white_behind_it(mode: str) -> None:
    data = encoded(picture(33, 47, 5, mode))
    image = Image.open(io.BytesIO(data))
    assert image.mode == mode
    assert torch.equal(decode(data), torch.from_numpy(convert_to_rgb(image, return_numpy=True)).permute(2, 0, 1))


def test_cmyk_is_served() -> None:
    data = encoded(picture(33, 47, 5, "CMYK"), "JPEG")
    assert torch.equal(decode(data), array(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("mode", ["P", "RGB", "L"])
def test_a_colour_that_a_png_declares_transparent_is_white(mode: str) -> None:
    image = Image.new(mode, (8, 8), 0)
    data = encoded(image, transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert decode(data).unique().tolist() == [255]


def test_grays_of_sixteen_bits_keep_their_upper_half() -> None:
    levels = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    rgb = decode(encoded(Image.fromarray(levels)))
    assert torch.equal(rgb[0].flatten(), torch.arange(256, dtype=torch.uint8))


def test_the_smallest_picture_is_served() -> None:
    # CVE-2026-22773: a layout guessed from the shape took one for channels.
    for mode in MODES:
        form = "JPEG" if mode == "CMYK" else "PNG"
        assert decode(encoded(picture(1, 1, 0, mode), form)).shape == (3, 1, 1)


# --- refusals ---


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of one channel with a header alone, and what is behind it."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunk(*each) for each in chunks) + chunk(b"IEND", b"")


BOMBS = [(20_000, 20_000), (10_000, 10_000), (9_000, 9_000), (2**31 - 1, 2**31 - 1), (2**26 + 1, 1)]


@pytest.mark.parametrize(("width", "height"), BOMBS)
def test_a_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    error = refused(png(width, height, (b"IDAT", zlib.compress(bytes(1000)))))
    assert error.code == "image_too_large"
    assert "legal are up to 67108864" in str(error)


def test_a_text_that_unpacks_to_much_is_refused() -> None:
    packed = (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(64 * 2**20)))
    assert refused(png(4, 4, packed, (b"IDAT", zlib.compress(bytes(20))))).code in DAMAGED


FOREIGN = {
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
    "pdf": b"%PDF-1.4\n",
    "psd": b"8BPS\0\x01" + bytes(6) + struct.pack(">HIIHH", 3, 9, 9, 8, 3) + bytes(60),
    "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "jpeg2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40),
    "text": b"a picture of a cat",
}


@pytest.mark.parametrize("form", FOREIGN)
def test_other_formats_are_refused_by_what_is_legal(form: str) -> None:
    error = refused(FOREIGN[form])
    assert error.code == "unsupported_image_media_type"
    assert str(error).endswith("legal are PNG, JPEG, WEBP, GIF, BMP")


@pytest.mark.parametrize("form", ["TIFF", "PPM", "ICO", "TGA", "PCX"])
def test_formats_that_pillow_knows_and_nobody_needs_are_refused(form: str) -> None:
    assert refused(encoded(picture(16, 16, 1), form)).code == "unsupported_image_media_type"


def test_a_name_does_not_matter_but_the_content() -> None:
    assert decode(encoded(picture(20, 30, 1), "BMP")).shape == (3, 20, 30)


@pytest.mark.parametrize("form", FORMATS)
def test_a_cut_file_is_refused(form: str) -> None:
    data = encoded(picture(64, 64, 2), form)
    assert refused(data[: len(data) // 2]).code in DAMAGED


def test_no_bytes_and_too_many_are_refused() -> None:
    assert refused(b"").code == "empty_image_file"
    data = encoded(picture(64, 64, 2))
    message = f"the picture has {len(data)} bytes; legal are up to {len(data) - 1}"
    assert str(refused(data, PictureLimits(max_bytes=len(data) - 1))) == message
    assert decode(data, PictureLimits(max_bytes=len(data))).shape == (3, 64, 64)


def test_pixels_of_a_limit_are_legal_and_one_more_is_not() -> None:
    data = encoded(picture(64, 64, 2))
    assert decode(data, PictureLimits(max_pixels=4096)).shape == (3, 64, 64)
    assert str(refused(data, PictureLimits(max_pixels=4095))) == "the picture has 64x64 pixels; legal are up to 4095"


def test_the_largest_limit_is_where_pillow_takes_a_picture_for_a_bomb():
    assert MOST_PIXELS == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("values", [{"max_bytes": 0}, {"max_pixels": 0}, {"max_pixels": MOST_PIXELS + 1}])
def test_limits_have_limits(values: dict[str, int]) -> None:
    with pytest.raises(SpecError, match=re.escape(f"of a picture is {next(iter(values.values()))}; legal is 1 to")):
        PictureLimits(**values)


@given(st.sampled_from(FORMATS), st.data())
@settings(max_examples=1000)
def test_damaged_files_are_pictures_or_refusals(form: str, data: st.DataObject) -> None:
    damaged = bytearray(encoded(picture(24, 24, 3), form))
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=8)):
        damaged[place] = data.draw(st.integers(0, 255))
    check(bytes(damaged))


def check(data: bytes) -> None:
    """A picture, or a refusal that tells nothing of the server."""
    try:
        rgb = decode(data, PictureLimits(max_pixels=2**20), PLACE)
    except RequestError:
        refused(data, PictureLimits(max_pixels=2**20))
    else:
        assert (rgb.dtype, rgb.shape[0]) == (torch.uint8, 3)


@given(st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"RIFF\0\0\0\0WEBP", b""]), st.binary(max_size=200))
@settings(max_examples=1000)
def test_noise_is_refused(head: bytes, tail: bytes) -> None:
    check(head + tail)
