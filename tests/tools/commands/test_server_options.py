"""tools/commands/server_options.py: what a user types becomes limits and keys."""

from __future__ import annotations

import click
import pytest

from npucompile.graphs.errors import SpecError
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.server.guard.access import digest
from npucompile.server.pictures.limits import DecoderLimits, MediaLimits, PictureLimits, RequestLimits, VideoLimits
from npucompile.server.run import Serving
from npucompile.tools.commands.server_options import (
    api_settings,
    media_limits,
    prefix_cache_settings,
    read_keys,
    server_options,
    serving_settings,
)
from npucompile.tools.serve.api_settings import OPENAI, ApiSettings


def parsed(*arguments):
    return server_options(click.command()(lambda **options: None)).make_context("serve", [str(argument) for argument in arguments]).params


def settings(*arguments, **environment):
    return serving_settings(environment, parsed(*arguments))


def test_the_defaults_are_those_of_the_server():
    assert settings() == Serving()


def test_every_option_is_one_of_the_settings(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# two\nfirst\n\nsecond\n")
    chosen = settings(
        "--api-key", keys, "--allowed-origin", "https://a.example", "--allowed-origin", "https://b.example", "--allowed-host", "c.example",
        "--tls-cert", "cert", "--tls-key", "key", "--max-queue", 1, "--max-client-requests", 2, "--max-connections", 3,
        "--max-client-connections", 4, "--max-frame-bytes", 5, "--handshake-timeout", 6, "--slow-reader-timeout", 7, "--drain-timeout", 8,
        "--max-queued-tokens", 9, "--max-client-tokens", 10, "--min-priority", -11, "--request-timeout", 12, "--first-token-timeout", 13,
        "--max-client-refusals", 14, "--trusted-proxy", "10.0.0.7", "--trusted-proxy", "fd00::/8", "--drain-notice", 15,
        "--strict-fields",
    )  # fmt: skip
    assert chosen.access.key_digests == (digest("first"), digest("second"))
    assert chosen.access.origins == {"https://a.example", "https://b.example"}
    assert chosen.access.hosts == {"c.example"}
    assert (str(chosen.tls_cert), str(chosen.tls_key), chosen.drain_timeout_s, chosen.drain_notice_s) == ("cert", "key", 8, 15)
    assert [*map(chosen.access.trusts, ("10.0.0.7", "10.0.0.8", "fd00::1", ""))] == [True, False, True, False]
    limits = chosen.limits
    assert (limits.max_queue, limits.max_requests_per_client, limits.max_connections, limits.max_connections_per_client) == (1, 2, 3, 4)
    assert (limits.max_frame_bytes, limits.handshake_s, limits.slow_reader_s) == (5, 6, 7)
    assert (limits.max_queued_tokens, limits.max_tokens_per_client, limits.min_priority) == (9, 10, -11)
    assert (limits.request_timeout_s, limits.first_token_timeout_s, limits.refusals_per_s) == (12, 13, 14)
    assert limits.strict_fields
    assert settings("--max-client-refusals", 0).limits.refusals_per_s is None


def test_keys_come_from_a_file_or_else_the_environment(tmp_path):
    variable = {"NPUCOMPILE_API_KEY": "of the environment"}
    assert read_keys(None, {}) == []
    assert read_keys(None, variable) == ["of the environment"]
    (tmp_path / "keys").write_text("of the file\n")
    assert read_keys(tmp_path / "keys", variable) == ["of the file"]


def test_a_file_without_keys_opens_nothing(tmp_path):
    (tmp_path / "keys").write_text("# none yet\n\n")
    with pytest.raises(SpecError, match="holds no key"):
        read_keys(tmp_path / "keys", {})
    # A key where a file is expected is not taken for one, and not repeated with a hint to put it there.
    with pytest.raises(SpecError, match="NPUCOMPILE_API_KEY: all users of a machine can read a command line"):
        read_keys(tmp_path / "sk-123", {})


def test_a_key_needs_its_certificate():
    with pytest.raises(SpecError, match="--tls-key is key without --tls-cert"):
        settings("--tls-key", "key")


def test_prefixes_are_kept_unless_told_otherwise():
    assert prefix_cache_settings(parsed()) == PrefixCacheSettings()
    assert prefix_cache_settings(parsed("--prefix-cache-tokens", 64)) == PrefixCacheSettings(64)
    assert prefix_cache_settings(parsed("--no-prefix-cache")) is None
    with pytest.raises(SpecError, match="--prefix-cache-tokens 64 with --no-prefix-cache; legal is one of them"):
        prefix_cache_settings(parsed("--no-prefix-cache", "--prefix-cache-tokens", 64))


def test_the_model_presents_itself_as_the_options_say(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("")
    assert api_settings(parsed()) == ApiSettings()
    arguments = ["--served-model-name", "a", "--served-model-name", "b", "--chat-template", file]
    arguments += ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--default-sampling", "openai"]
    assert api_settings(parsed(*arguments)) == ApiSettings(("a", "b"), file, "qwen3", "hermes", OPENAI)


def test_what_pictures_may_be_is_told_by_options():
    assert media_limits(parsed()) == MediaLimits()
    chosen = media_limits(parsed(
        "--limit-mm-per-prompt", "image=2,video=0", "--max-image-bytes", 3, "--max-image-pixels", 4, "--image-decoders", 5,
        "--image-timeout", 6, "--image-memory", 2**25, "--allowed-media-host", "a.example", "--allowed-media-host", "[::1]:8",
        "--max-video-bytes", 7,
    ))  # fmt: skip
    hosts = ("a.example", "[::1]:8")
    requests = RequestLimits(2, 0, hosts=hosts)
    assert chosen == MediaLimits(PictureLimits(3, 4), DecoderLimits(5, 6, 2**25), requests, video=VideoLimits(7))
    # Of a picture of 80 million pixels more than by default, of small ones no less than a video takes.
    assert media_limits(parsed("--max-image-pixels", 80_000_000)).decoders.memory_bytes == 2**26 + 1_600_000_000
    assert media_limits(parsed("--max-image-pixels", 4)).decoders.memory_bytes == 2**30
    assert media_limits(parsed("--language-model-only")).text_alone
    assert media_limits(parsed("--limit-mm-per-prompt", '{"image": 0}')).text_alone
    with pytest.raises(SpecError, match="is no host"):
        media_limits(parsed("--allowed-media-host", "http://a"))
