"""What the options of `npucompile serve` come to: limits, keys, how prefixes are kept, and how the model presents itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...graphs.errors import SpecError
from ...runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from ...server.guard.access import Access
from ...server.guard.limits import SocketLimits
from ...server.pictures.limits import DecoderLimits, MediaLimits, PictureLimits, RequestLimits, VideoLimits, decoder_memory
from ...server.pictures.media import Hosts
from ...server.run import Serving
from ..serve.api_settings import ApiSettings
from ..serve.options import API_KEY_VARIABLE, OPTIONS
from ..serve.per_prompt import read_per_prompt


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds all options of serve."""
    for option in reversed(OPTIONS):
        command = option.as_decorator()(command)
    return command


def api_settings(options: Mapping[str, Any]) -> ApiSettings:
    """How the model presents itself.

    Raises:
        SpecError: names of the model that are not legal.
    """
    return ApiSettings(**{option.api: options[option.name] for option in OPTIONS if option.api})


def serving_settings(environment: Mapping[str, str], options: Mapping[str, Any]) -> Serving:
    """The settings that the options stand for.

    Raises:
        SpecError: a key file cannot be read or holds no legal key, or an option is not legal.
    """
    values = {option.limit: options[option.name] for option in OPTIONS if option.limit}
    # No refusals a second would let every client wait; 0 lets none wait.
    limits = SocketLimits(**{**values, "refusals_per_s": values["refusals_per_s"] or None})
    keys = read_keys(options["api_key"], environment)
    access = Access.of(keys, options["allowed_origin"], options["allowed_host"], options["trusted_proxy"])
    cert, key = options["tls_cert"], options["tls_key"]
    if key and not cert:
        raise SpecError(f"--tls-key is {key} without --tls-cert; legal is a key beside its certificate")
    return Serving(limits, access, cert, key, options["drain_timeout"], options["drain_notice"])


def media_limits(options: Mapping[str, Any]) -> MediaLimits:
    """What pictures may be.

    Raises:
        SpecError: a host that is none.
    """
    counts = read_per_prompt(options["limit_mm_per_prompt"] or "{}")
    images = counts.get("image", RequestLimits.images)
    picture = PictureLimits(options["max_image_bytes"], options["max_image_pixels"])
    hosts = tuple(options["allowed_media_host"])
    Hosts(hosts, {})
    return MediaLimits(
        picture,
        DecoderLimits(options["image_decoders"], options["image_timeout"], options["image_memory"] or decoder_memory(picture.max_pixels)),
        RequestLimits(images, counts.get("video", RequestLimits.videos), hosts=hosts),
        options["language_model_only"] or not images,
        VideoLimits(options["max_video_bytes"]),
    )


def prefix_cache_settings(options: Mapping[str, Any]) -> PrefixCacheSettings | None:
    """How prefixes are kept; None keeps none.

    Raises:
        SpecError: a number of tokens, and none are to be kept.
    """
    most = options["prefix_cache_tokens"]
    if options["no_prefix_cache"] and most is not None:
        raise SpecError(f"--prefix-cache-tokens {most} with --no-prefix-cache; legal is one of them")
    return None if options["no_prefix_cache"] else PrefixCacheSettings(most)


def read_keys(file: Path | None, environment: Mapping[str, str]) -> list[str]:
    """Keys of a file, one a line, or else of the environment; blank lines and lines that begin with # are left out.

    Raises:
        SpecError: the file cannot be read, or there is no key in it.
    """
    if file is None:
        key = environment.get(API_KEY_VARIABLE, "")
        return [key] if key else []
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"--api-key: {file} cannot be read: {getattr(error, 'strerror', None) or error}; legal is a file of keys, or the key in "
            f"${API_KEY_VARIABLE}: all users of a machine can read a command line"
        ) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SpecError(f"--api-key: {file} holds no key; legal is one a line")
    return keys
