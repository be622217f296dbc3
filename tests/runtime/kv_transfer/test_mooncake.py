"""The real engine over tcp between two processes of this machine."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from unittest import mock

import pytest
import torch

from npucompile.graphs.errors import SpecError
from npucompile.runtime.kv_transfer.mooncake import Mooncake
from npucompile.runtime.kv_transfer.transfer_engine import RegisteredMemory, Segment, TransferError
from tests.support import optional

PAGE, PAGES, BIG = 4096, 2500, 1 << 28
PROCESSES = multiprocessing.get_context("forkserver")
# Peers are forks of one process that has imported all that they need.
PROCESSES.set_forkserver_preload([__name__])
GO = lambda: True  # noqa: E731


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    optional.transfer_engine()


def receive(pipe: Connection) -> None:
    """A process with registered memory, which says what is in it."""
    engine = Mooncake("127.0.0.1")
    pool = torch.zeros(PAGES * PAGE, dtype=torch.uint8)
    engine.register([RegisteredMemory(pool.data_ptr(), pool.nbytes)])
    pipe.send((engine.session, pool.data_ptr()))
    while pipe.recv():
        pipe.send(pool.numpy().tobytes())
    engine.close()


@pytest.fixture
def peer():
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    session, address = ours.recv()
    yield process, ours, session, address
    process.kill()
    process.join()


@pytest.fixture
def engine():
    engine = Mooncake("127.0.0.1")
    pool = torch.randint(256, (PAGES * PAGE,), dtype=torch.uint8)
    engine.register([RegisteredMemory(pool.data_ptr(), pool.nbytes)])
    yield engine, pool
    engine.close()


def test_more_segments_than_the_engine_takes_at_once_arrive(engine, peer):
    (mooncake, pool), (_, pipe, session, address) = engine, peer
    order = random.Random(0).sample(range(PAGES), PAGES)
    plan = [Segment(pool.data_ptr() + here * PAGE, address + there * PAGE, PAGE) for there, here in enumerate(order)]
    transfers = [mooncake.write(session, plan[start::4], GO) for start in range(4)]
    assert [transfer.result() for transfer in transfers] == [""] * 4
    pipe.send(True)
    assert pipe.recv() == pool.view(PAGES, PAGE)[order].numpy().tobytes()


def test_memory_that_nobody_registered_is_neither_sent_nor_written(engine, peer):
    (mooncake, pool), (_, pipe, session, address) = engine, peer
    for source in (pool.data_ptr() - 1, pool.data_ptr() + pool.nbytes - PAGE + 1, 4096):
        with pytest.raises(TransferError, match="not registered"):
            mooncake.write(session, [Segment(source, address, PAGE)], GO)
    outside = Segment(pool.data_ptr(), address + PAGES * PAGE, PAGE)
    right = [Segment(pool.data_ptr() + place * PAGE, address + place * PAGE, PAGE) for place in (1, 2)]
    reason = mooncake.write(session, [right[0], outside, right[1]], GO).result()
    assert reason == f"1 of 3 segments to {session} cannot be written, says Mooncake"
    assert mooncake.write(session, [Segment(pool.data_ptr(), address, PAGE)], GO).result() == ""
    pipe.send(True)
    assert pipe.recv() == pool[: 3 * PAGE].numpy().tobytes() + bytes((PAGES - 3) * PAGE)


def test_what_was_not_begun_is_not_written(engine, peer):
    (mooncake, pool), (_, pipe, session, address) = engine, peer
    answers = iter([True, False, *[False] * 9])
    plan = [Segment(pool.data_ptr() + place * PAGE, address + place * PAGE, PAGE) for place in range(3)]
    transfer = mooncake.write(session, plan, lambda: next(answers))
    # It is asked before each.
    assert transfer.result() == f"2 of 3 segments to {session} are not written any more"
    pipe.send(True)
    assert pipe.recv() == pool[:PAGE].numpy().tobytes() + bytes((PAGES - 1) * PAGE)


def send(pipe: Connection) -> None:
    """A process that writes to whom it is told of."""
    engine = Mooncake("127.0.0.1")
    pool = torch.full((BIG,), 7, dtype=torch.uint8)
    engine.register([RegisteredMemory(pool.data_ptr(), pool.nbytes)])
    pipe.send(engine.session)
    while known := pipe.recv():
        session, address, nbytes = known
        pipe.send(engine.write(session, [Segment(pool.data_ptr(), address, nbytes)], GO).result())


@pytest.mark.parametrize("stops", ["before it writes", "while it writes"])
def test_a_writer_that_was_stopped_writes_nothing_once_the_memory_was_opened_again(stops):
    """Whatever it was told, or has begun."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=send, args=(theirs,), daemon=True)
    process.start()
    engine, pool = Mooncake("127.0.0.1"), torch.zeros(BIG, dtype=torch.uint8)
    engine.register([RegisteredMemory(pool.data_ptr(), pool.nbytes)])
    ours.recv()
    first = engine.session
    ours.send((first, pool.data_ptr(), PAGE))
    assert ours.recv() == ""
    if stops == "before it writes":
        os.kill(process.pid, signal.SIGSTOP)
    ours.send((first, pool.data_ptr(), BIG))
    if stops == "while it writes":
        while not pool[BIG // 64]:
            pass
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.2)
        assert not pool[-1], "the machine writes faster than it stops a process"
    engine.reopen()
    assert engine.session != first
    pool.fill_(1)
    os.kill(process.pid, signal.SIGCONT)
    assert first in ours.recv()
    assert bool((pool == 1).all())
    # It lives, and reaches the memory under its new session.
    ours.send((engine.session, pool.data_ptr(), PAGE))
    assert ours.recv() == ""
    assert pool[: PAGE + 1].tolist() == [*[7] * PAGE, 1]
    process.kill()
    process.join()
    engine.close()


def test_memory_that_cannot_be_opened_again_is_closed(engine, peer, monkeypatch):
    (mooncake, pool), (_, _, session, address) = engine, peer
    with monkeypatch.context() as patch:
        patch.setattr(mooncake, "_start", mock.Mock(side_effect=TransferError("no port is free")))
        with pytest.raises(TransferError, match="no port is free"):
            mooncake.reopen()
    plan = [Segment(pool.data_ptr(), address, PAGE)]
    assert mooncake.write(session, plan, GO).result() == "the memory of this server is being opened again"
    mooncake.reopen()
    assert mooncake.write(session, plan, GO).result() == ""


def test_a_peer_that_is_lost_is_a_reason(engine, peer):
    (mooncake, pool), (process, _, session, address) = engine, peer
    plan = [Segment(pool.data_ptr(), address, PAGE)]
    assert mooncake.write(session, plan, GO).result() == ""
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert session in mooncake.write(session, plan, GO).result()


def test_an_engine_that_is_stuck_is_replaced(engine, peer, monkeypatch):
    (mooncake, pool), (_, pipe, session, address) = engine, peer
    first = mooncake._engines[0]

    class Stuck:
        """What an engine does after its queue to a peer was full."""

        transfer_submit_write, transfer_check_status = staticmethod(lambda *_: 1), staticmethod(lambda _: -1)
        send_probe, unregister_memory = first.send_probe, first.unregister_memory

    monkeypatch.setattr(mooncake, "_engines", [Stuck()])
    assert mooncake.write(session, [Segment(pool.data_ptr(), address, PAGE)], GO).result() == ""
    pipe.send(True)
    assert pipe.recv()[:PAGE] == pool[:PAGE].numpy().tobytes()


def test_waiting_keeps_no_core(engine, peer):
    """Nor does it say anything of a peer that stands still, whose pages are not to be used until it has said something."""
    (mooncake, pool), (process, pipe, session, address) = engine, peer
    plan = [Segment(pool.data_ptr(), address, PAGES * PAGE)]
    assert mooncake.write(session, plan, GO).result() == ""
    os.kill(process.pid, signal.SIGSTOP)
    transfer, began = mooncake.write(session, plan, GO), time.process_time()
    time.sleep(1.5)
    assert not any(part.done() for part in transfer.parts)
    assert time.process_time() - began < 0.75
    os.kill(process.pid, signal.SIGCONT)
    assert transfer.result() == ""
    pipe.send(True)
    assert pipe.recv() == pool.numpy().tobytes()


def test_an_address_that_is_not_of_this_machine_is_refused():
    with pytest.raises(TransferError, match=r"does not reach itself as 203\.0\.113\.1:\d+ over tcp"):
        Mooncake("203.0.113.1")


def test_a_protocol_that_there_is_not_is_refused():
    with pytest.raises(SpecError, match="'roce'; legal are tcp, rdma, ascend"):
        Mooncake("127.0.0.1", "roce")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Installs a wheel of a name beside the others, or alone; the engine is the real one."""
    importlib.import_module("mooncake.engine")

    def install(name: str, alone: bool = False) -> None:
        directory = tmp_path / f"{name.replace('-', '_')}-1.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        monkeypatch.setattr(sys, "path", [str(tmp_path), *([] if alone else sys.path)])

    return install


def test_a_wheel_of_another_transport_is_refused_before_it_moves_anything(wheel):
    here = r"mooncake-transfer-engine-non-cuda"
    with pytest.raises(TransferError, match=rf"{here} cannot move bytes over ascend.*'npucompile\[kv-transfer-npu\]'"):
        Mooncake("127.0.0.1", "ascend")
    wheel("mooncake-transfer-engine-npu")
    for protocol, extra in (("ascend", "kv-transfer-npu"), ("tcp", "kv-transfer")):
        with pytest.raises(TransferError, match=rf"pip uninstall -y {here} mooncake-transfer-engine-npu, then .*\[{extra}\]"):
            Mooncake("127.0.0.1", protocol)


def test_the_wheel_for_npus_is_for_ascend_alone(wheel):
    wheel("mooncake-transfer-engine-npu", alone=True)
    Mooncake("127.0.0.1", "ascend").close()
    with pytest.raises(TransferError, match=r"mooncake-transfer-engine-npu cannot move bytes over rdma.*'npucompile\[kv-transfer\]'"):
        Mooncake("127.0.0.1", "rdma")


@pytest.fixture
def links(engine):
    """The engine as it writes over the links of NPUs, by tcp; and its submissions, the first of which may fail."""
    mooncake, pool = engine
    mooncake._protocol, submitted, fails = "ascend", [], [False]
    real = mooncake._engines[0]

    class Counted:
        send_probe, unregister_memory = real.send_probe, real.unregister_memory

        def batch_transfer_sync_write(self, session, *lists):
            submitted.append([len(each) for each in lists])
            return -1 if fails.pop(0) else real.batch_transfer_sync_write(session, *lists)

    mooncake._engines[0] = Counted()
    return mooncake, pool, submitted, fails


def test_over_links_of_npus_a_batch_is_one_submission_and_is_written_again_whole(links, peer):
    (mooncake, pool, submitted, fails), (_, pipe, session, address) = links, peer
    fails[:] = [False, True, False]
    order = random.Random(0).sample(range(PAGES), 700)
    plan = [Segment(pool.data_ptr() + here * PAGE, address + there * PAGE, PAGE) for there, here in enumerate(order)]
    assert mooncake.write(session, plan[:500], GO).result() == ""
    assert mooncake.write(session, plan[500:], GO).result() == ""
    assert submitted == [[500] * 3, [200] * 3, [200] * 3]
    pipe.send(True)
    assert pipe.recv()[: 700 * PAGE] == pool.view(PAGES, PAGE)[order].numpy().tobytes()
    assert len(mooncake._engines) == 1, "a device has one engine"


def test_a_batch_that_fails_twice_or_is_not_wanted_any_more_is_a_reason(links, peer):
    (mooncake, pool, submitted, fails), (_, _, session, address) = links, peer
    plan = [Segment(pool.data_ptr() + place * PAGE, address + place * PAGE, PAGE) for place in range(3)]
    fails[:] = [True, True]
    assert mooncake.write(session, plan, GO).result() == f"3 of 3 segments to {session} cannot be written, says Mooncake"
    assert mooncake.write(session, plan, lambda: False).result() == f"3 of 3 segments to {session} are not written any more"
    assert len(submitted) == 2
