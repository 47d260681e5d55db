"""Frames between processes that don't trust each other: garbage ends the conversation, and nothing waits for ever."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from env.wire import MAX_FRAME, Wire, WireError, WireTimeout

pytestmark = pytest.mark.budget(15)


@pytest.fixture
def pair():
    """(a wire, the naked socket at its far end)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield Wire(ours), theirs
    ours.close()
    theirs.close()


def frame(body: bytes, magic: bytes = b"KJ01", size: int | None = None) -> bytes:
    return struct.pack("<4sI", magic, len(body) if size is None else size) + body


def test_round_trip_of_text_numbers_and_odd_characters(pair):
    wire, far = pair
    message = {
        "op": "load",
        "source": "é\n\ud800\0",
        "n": [1, -2.5, True, None],
        "big": 2**70,
        "nested": {"a": {"b": []}},
    }
    wire.send(message)
    assert Wire(far).recv(1) == message


def test_not_a_number_and_infinity_pass(pair):
    wire, far = pair
    wire.send({"times": [float("inf"), float("nan")]})
    times = Wire(far).recv(1)["times"]
    assert times[0] == float("inf") and times[1] != times[1]


def test_several_frames_in_one_packet_and_one_frame_in_many(pair):
    wire, far = pair
    data = b"".join(frame(json.dumps({"n": n}).encode()) for n in range(3))
    far.sendall(data)
    assert [wire.recv(1)["n"] for _ in range(3)] == [0, 1, 2]

    def drip():
        for at in range(len(data)):
            far.sendall(data[at : at + 1])

    thread = threading.Thread(target=drip)
    thread.start()
    assert [wire.recv(5)["n"] for _ in range(3)] == [0, 1, 2]
    thread.join()


def test_a_frame_larger_than_the_sockets_buffer(pair):
    wire, far = pair
    text = "x" * 3_000_000
    received = []
    thread = threading.Thread(target=lambda: received.append(Wire(far).recv(10)))
    thread.start()
    wire.send({"text": text}, timeout_s=10)
    thread.join()
    assert received == [{"text": text}]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(b"{}", magic=b"HTTP"), "not a frame"),
        (b"\0" * 8, "not a frame"),
        (b"Segmentation fault\n", "not a frame"),
        (frame(b"", size=MAX_FRAME + 1), "not a frame"),
        (frame(b"", size=2**32 - 1), "not a frame"),
        (frame(b"{'op': 1}"), "not JSON"),
        (frame(b"\xff\xfe{}"), "not JSON"),
        (frame(b""), "not JSON"),
        (frame(b"[" * 200_000), "not JSON"),
        (frame(b'{"n": ' + b"9" * 10_000 + b"}"), "not JSON"),
        (frame(b"\x80\x04K\x01."), "not JSON"),  # a pickle
        (frame(b"[1, 2]"), "not an object"),
        (frame(b"null"), "not an object"),
        (frame(b"5"), "not an object"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bytes_that_are_no_message(pair, data, words):
    wire, far = pair
    far.sendall(data)
    with pytest.raises(WireError, match=words):
        wire.recv(2)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 12])
def test_far_end_that_closes_in_the_middle(pair, cut):
    wire, far = pair
    far.sendall(frame(b'{"op": "warm"}')[:cut])
    far.close()
    with pytest.raises(WireError, match="closed the channel"):
        wire.recv(2)


@pytest.mark.parametrize("cut", [0, 3, 8, 12])
def test_far_end_that_stops_in_the_middle(pair, cut):
    wire, far = pair
    far.sendall(frame(b'{"op": "warm"}')[:cut])
    started = time.monotonic()
    with pytest.raises(WireTimeout):
        wire.recv(0.2)
    assert 0.15 < time.monotonic() - started < 3


def test_a_drip_of_bytes_does_not_stretch_the_deadline(pair):
    wire, far = pair
    stop = threading.Event()

    def drip():
        far.sendall(frame(b"", size=1000))
        while not stop.wait(0.05):
            far.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    started = time.monotonic()
    with pytest.raises(WireTimeout):
        wire.recv(0.4)
    assert time.monotonic() - started < 3
    stop.set()
    thread.join()


def test_sending_to_nobody_and_to_somebody_who_never_reads(pair):
    wire, far = pair
    with pytest.raises(WireTimeout, match="read nothing"):
        wire.send({"text": "x" * 4_000_000}, timeout_s=0.3)
    far.close()
    with pytest.raises(WireError, match="gone"):
        wire.send({"op": "x"})


def test_a_frame_over_the_limit_is_not_sent(pair):
    wire, far = pair
    with pytest.raises(WireError, match="over the limit"):
        wire.send({"text": "x" * (MAX_FRAME + 1)})
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_arrive_where_they_are_accepted(pair):
    wire, far = pair
    read_end, write_end = os.pipe()
    wire.send({"op": "attach"}, fds=(write_end,))
    os.close(write_end)
    receiver = Wire(far, accept_fds=True)
    assert receiver.recv(1) == {"op": "attach"}
    (received,) = receiver.take_fds()
    assert receiver.take_fds() == []
    os.write(received, b"through")
    assert os.read(read_end, 10) == b"through"
    os.close(received)
    os.close(read_end)


@pytest.mark.parametrize("count", [1, 20, 200])
def test_descriptors_are_not_taken_from_a_worker(pair, count):
    """A worker could otherwise fill the judge's table of descriptors."""
    wire, far = pair
    before = open_descriptors()
    null = os.open("/dev/null", os.O_RDONLY)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * count))]
    far.sendmsg([frame(b'{"ok": true}')], rights)
    os.close(null)
    assert wire.recv(1) == {"ok": True}
    assert wire.take_fds() == []
    assert open_descriptors() == before


def test_readable_tells_of_data_and_of_the_end(pair):
    wire, far = pair
    assert not wire.readable(0.01)
    far.sendall(b"K")
    assert wire.readable(0.5)
    wire.sock.recv(1)
    assert not wire.readable(0.01)
    far.close()
    assert wire.readable(0.5)
