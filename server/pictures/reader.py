"""Pictures of a request, from its URLs to patches: counted and measured before a pixel is decoded, and decoded elsewhere (`pool`)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ...graphs.errors import RequestError
from ..requests.pictures import NOUNS, Kind, PictureBytes, PicturePart, ProcessorFields, data_of, is_data
from .limits import PictureLimits, RequestLimits, VideoLimits
from .pool import DecoderPool
from .processor import PatchProcessor, Picture, PictureProcessor
from .video_file import DEFAULT_LIMITS
from .videos import Video, VideoProcessor, text_at

INLINE_CHARS = 2**16
"""Longer URLs are read on a thread."""

NO_FIELDS = ProcessorFields()


@dataclass(frozen=True)
class Vision:
    """What a served model's tower takes.

    Attributes:
        processor: of the checkpoint, with no larger pictures than the largest encode bucket takes.
        max_patches: of that bucket.
        image, video: texts of the tokens that stand in a prompt for each row of a picture and of a video.
        start, end: texts of those around them.
        image_token_id, video_token_id: of `image` and of `video`.
        videos: their processor, whose frames are no larger than pictures; or a sentence that says why there is none.
    """

    processor: PictureProcessor
    max_patches: int
    image: str
    video: str
    start: str
    end: str
    image_token_id: int
    video_token_id: int
    videos: VideoProcessor | str

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a user may type, and that mean pictures in a prompt alone."""
        return self.image, self.video, self.start, self.end

    def processor_for(self, fields: ProcessorFields) -> PictureProcessor:
        """The processor of a request.

        Raises:
            RequestError: it asks for larger pictures than are legal here, or for a range without one.
        """
        most = self.processor.max_pixels
        if fields.max_pixels is not None and fields.max_pixels > most:
            message = f"max_pixels is {fields.max_pixels}; legal are up to {most}, the largest picture that this server encodes"
            raise RequestError(message, param="mm_processor_kwargs.max_pixels", code="image_too_large")
        try:
            return self.processor.with_limits(fields.min_pixels, fields.max_pixels)
        except RequestError as error:
            error.param = "mm_processor_kwargs"
            raise

    def video_processor_for(self, fields: ProcessorFields, param: str) -> VideoProcessor:
        """The processor of a video of a request.

        Raises:
            RequestError: no videos are taken here, or it asks for what is not legal.
        """
        if isinstance(self.videos, str):
            message = f"{param} is a video, and this server takes none: {self.videos}"
            raise RequestError(message, param=param, code="unsupported_value")
        try:
            return self.videos.with_options(fields.fps, fields.max_frames, fields.min_pixels, fields.max_pixels)
        except RequestError as error:
            error.param = "mm_processor_kwargs"
            raise

    def check_patches(self, count: int, what: str, param: str) -> None:
        """Raises RequestError where a picture takes more patches than an encode bucket has; `what` begins the sentence."""
        if count > self.max_patches:
            raise RequestError(f"{what} takes {count} patches; legal are up to {self.max_patches}", param=param, code="image_too_large")

    def tokens(self, processor: PictureProcessor, height: int, width: int, param: str) -> int:
        """Tokens of a picture, the same whether it is turned or not.

        Raises:
            RequestError: it is too long for its width, or takes more patches than an encode bucket has.
        """
        _, rows, columns = processor.grid(height, width, param)
        self.check_patches(rows * columns, f"the picture is {width}x{height} and", param)
        return rows * columns // processor.merge_size**2


@dataclass(frozen=True)
class VideoFrames:
    """What stands in a prompt for a video.

    Attributes:
        texts: before each pair of frames.
        each: tokens of a pair.
    """

    texts: tuple[str, ...]
    each: int


Count = int | VideoFrames
"""What stands in a prompt for a picture, its number of tokens, or for a video."""


def tokens_of(count: Count) -> int:
    """Tokens of a picture, or of the frames of a video."""
    return count if isinstance(count, int) else len(count.texts) * count.each


def count_of(shown: Picture | Video) -> Count:
    """What stands in a prompt for a picture or a video."""
    if isinstance(shown, Picture):
        return shown.tokens
    return VideoFrames(tuple(pair.text for pair in shown.pairs), shown.pairs[0].picture.tokens)


Fetch = Callable[[str, str, Kind], Awaitable[bytes]]
"""(URL, param, what it is of) -> the bytes there; raises RequestError."""


async def fetch_nothing(url: str, param: str, kind: Kind) -> bytes:
    """Raises RequestError."""
    message = f"{param} is a URL to fetch, and this server fetches nothing (`npucompile serve --allowed-media-host`); legal is a data URL"
    raise RequestError(message, param=param, code=f"invalid_{kind}_url")


BASE64_CHARS = 4 / 3
"""Of a byte."""

URL_CHARS = 2**12
"""Of a URL to fetch, and of what stands around the base64 in any."""


class PictureReader:
    """Reads pictures of requests; used on the event loop alone.

    Args:
        vision: of the model.
        pictures, requests, videos: limits.
        pool: decodes.
        fetch: gets what is at http and https URLs.

    Attributes:
        hits: pictures and videos that were decoded for another request before.
    """

    def __init__(
        self,
        vision: Vision,
        pictures: PictureLimits,
        requests: RequestLimits,
        pool: DecoderPool,
        fetch: Fetch = fetch_nothing,
        videos: VideoLimits = DEFAULT_LIMITS,
    ) -> None:
        self.hits = 0
        self.vision, self.limits, self.pool = vision, requests, pool
        self._most_bytes: Mapping[Kind, int] = {"image": pictures.max_bytes, "video": videos.max_bytes}
        self._fetch = fetch
        # Equal pictures of stored conversations are one.
        self._files: WeakValueDictionary[bytes, PictureBytes] = WeakValueDictionary()
        self._cache: OrderedDict[tuple[bytes, PatchProcessor], Picture | Video] = OrderedDict()
        self._cached_bytes = 0

    def close(self) -> None:
        """Ends the processes."""
        self.pool.close()

    def stats(self) -> dict[str, Any]:
        """Numbers by name, as of an engine."""
        return {**self.pool.stats(), "picture_decode_hits_total": self.hits, "picture_decode_cached_bytes": self._cached_bytes}

    @property
    def body_bytes(self) -> int:
        """What pictures add to the largest body of a request."""
        most = {"image": self.limits.images, "video": 0 if isinstance(self.vision.videos, str) else self.limits.videos}
        return int(sum(most[kind] * (BASE64_CHARS * size + URL_CHARS) for kind, size in self._most_bytes.items()))

    async def counts(self, parts: Sequence[PicturePart], fields: ProcessorFields = NO_FIELDS) -> tuple[Count, ...]:
        """What stands for each picture and video of a request, by its header.

        Raises:
            RequestError: there are too many, or one is not legal.
        """
        kinds: Mapping[Kind, int] = {"image": self.limits.images, "video": self.limits.videos}
        for kind, most in kinds.items():
            if len(several := [part for part in parts if part.kind == kind]) > most:
                what = f"{len(several)} {NOUNS[kind]}s in a request"
                message = f"{what}; legal are up to {most} (`npucompile serve --limit-mm-per-prompt`)"
                raise RequestError(message, param=several[most].param, code=f"too_many_{kind}s")
        return await _in_order([self._count(part, self._processor(part, fields)) for part in parts])

    async def pictures(self, parts: Sequence[PicturePart], fields: ProcessorFields = NO_FIELDS) -> tuple[Picture | Video, ...]:
        """The pictures and videos, whose `counts` are legal.

        Raises:
            RequestError: one of them cannot be decoded.
        """
        return await _in_order([self._shown(part, self._processor(part, fields)) for part in parts])

    def _processor(self, part: PicturePart, fields: ProcessorFields) -> PictureProcessor | VideoProcessor:
        if part.kind == "video":
            return self.vision.video_processor_for(fields, part.param)
        return self.vision.processor_for(fields)

    async def _count(self, part: PicturePart, processor: PictureProcessor | VideoProcessor) -> Count:
        file = await self._file(part)
        if (known := self._cache.get((file.digest, processor))) is not None:
            return count_of(known)
        if isinstance(processor, PictureProcessor):
            height, width = await asyncio.wrap_future(self.pool.size(file.data, part.param))
            return self.vision.tokens(processor, height, width, part.param)
        header = await asyncio.wrap_future(self.pool.header(file.data, part.param))
        _, rows, columns = processor.grid(header.frames, header.rate, header.height, header.width, part.param)
        self.vision.check_patches(rows * columns, f"a frame of {header.width}x{header.height}", part.param)
        seconds = processor.seconds(processor.sampled(header.frames, header.rate), header.rate)
        return VideoFrames(tuple(map(text_at, seconds)), rows * columns // processor.merge_size**2)

    async def _shown(self, part: PicturePart, processor: PictureProcessor | VideoProcessor) -> Picture | Video:
        file = await self._file(part)
        key = file.digest, processor
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self.hits += 1
            return known
        shown: Picture | Video
        if isinstance(processor, PictureProcessor):
            shown = await asyncio.wrap_future(self.pool.picture(file.data, processor, part.param))
        else:
            shown = await asyncio.wrap_future(self.pool.video(file.data, processor, part.param))
        if key not in self._cache:
            self._cache[key] = shown
            self._cached_bytes += shown.size_bytes
        while self._cached_bytes > self.limits.cache_bytes:
            self._cached_bytes -= self._cache.popitem(last=False)[1].size_bytes
        return shown

    async def _file(self, part: PicturePart) -> PictureBytes:
        if part.file is None:
            if not is_data(part.url):
                file = PictureBytes(await self._fetch(part.url, part.param, part.kind))
            elif len(part.url) <= INLINE_CHARS:
                file = self._data(part)
            else:
                file = await asyncio.to_thread(self._data, part)
            part.file, part.url = self._files.setdefault(file.digest, file), ""
        return part.file

    def _data(self, part: PicturePart) -> PictureBytes:
        file = PictureBytes(data_of(part.url, part.param, self._most_bytes[part.kind], part.kind))
        _ = file.digest  # here, as this may be a thread
        return file


T = TypeVar("T")


async def _in_order(work: Sequence[Awaitable[T]]) -> tuple[T, ...]:
    """Results of work that is done at once; raises the first error in order, when all is done."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return tuple(outcome for outcome in outcomes if not isinstance(outcome, BaseException))
