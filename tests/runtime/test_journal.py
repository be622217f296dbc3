"""runtime/journal.py: what is written can be read, as far as it was written."""

from __future__ import annotations

import logging
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.runtime.journal import FORMAT, JournalFile, as_plain, as_request, read
from npucompile.runtime.request import Request, Sampling

ENTRIES = [["step"], ["cancel", 0], ["result", "decode-b1-q1", [[[5], None]]]]


@settings(max_examples=50)
@given(
    st.builds(
        Request,
        id=st.text(),
        prompt=st.lists(st.integers(0, 9), min_size=1).map(tuple),
        max_tokens=st.integers(1, 9),
        sampling=st.builds(Sampling, temperature=st.sampled_from([0.0, 0.7]), top_k=st.integers(0, 3), seed=st.integers(0, 2**64 - 1)),
        stop_token_ids=st.frozensets(st.integers(0, 9)),
        logprobs=st.none() | st.integers(0, 3),
        speculative_tokens=st.none() | st.integers(0, 3),
    )
)
def test_a_request_survives(request_: Request) -> None:
    assert as_request(msgpack.unpackb(msgpack.packb(as_plain(request_)))) == request_


def written(file: Path) -> Path:
    journal = JournalFile(file, {"artifact": "sha256:ab"})
    for entry in ENTRIES:
        journal.write(entry)
        # Nothing is kept back: a process that dies now has it in its file.
        assert list(read(file)[1])[-1] == entry
    journal.close()
    assert file.stat().st_mode & 0o777 == 0o600
    return file


def test_entries_are_read_in_order_with_the_facts(tmp_path: Path) -> None:
    facts, entries = read(written(tmp_path / "journal"))
    assert (facts, list(entries)) == ({"artifact": "sha256:ab"}, [*ENTRIES, ["end"]])


def test_an_entry_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    file = written(tmp_path / "journal")
    file.write_bytes(file.read_bytes()[:-3])
    assert list(read(file)[1]) == ENTRIES


def test_a_journal_that_others_could_read_is_begun_as_its_users_alone(tmp_path: Path) -> None:
    (tmp_path / "journal").touch(0o644)
    (tmp_path / "journal").chmod(0o644)
    written(tmp_path / "journal")


def test_a_changed_byte_is_refused_or_leaves_out_what_follows(tmp_path: Path) -> None:
    """Whatever it is changed to, nothing is read that was not written, and nothing is raised but a sentence."""
    file = written(tmp_path / "journal")
    data = file.read_bytes()
    refused = 0
    for place in range(len(data)):
        for byte in {0x00, 0x81, 0xC1, 0xFF, data[place] ^ 1} - {data[place]}:
            file.write_bytes(data[:place] + bytes([byte]) + data[place + 1 :])
            try:
                facts, entries = read(file)
                found = list(entries)
            except SpecError:
                refused += 1
            else:
                assert (facts, found) == ({"artifact": "sha256:ab"}, [*ENTRIES, ["end"]][: len(found)])
    assert refused > 3 * len(data)


@pytest.mark.parametrize("data", [b"", b"npucompile", msgpack.packb(FORMAT + 1) + msgpack.packb({}), msgpack.packb(FORMAT)])
def test_what_is_no_journal_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "other").write_bytes(data)
    with pytest.raises(SpecError, match="legal is a journal of `npucompile serve --record`"):
        read(tmp_path / "other")


def test_a_full_disk_ends_the_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    # Writing to this device fails with ENOSPC.
    with pytest.raises(OSError, match="No space left"):
        JournalFile(Path("/dev/full"), {})
    journal = JournalFile(Path("/dev/null"), {})
    journal.close()
    journal._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with caplog.at_level(logging.ERROR):
        journal.write(ENTRIES[0])
        journal.write(ENTRIES[0])
    assert [record.message for record in caplog.records] == [
        "/dev/full cannot be written; the record ends here: [Errno 28] No space left on device"
    ]
