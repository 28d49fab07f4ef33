"""The roll call: who does not come, comes twice or does not fit is named, in time, to everybody."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from phalanx import _jax
from phalanx.cli.workers import free_port
from phalanx.cluster import lifeline
from phalanx.cluster.exits import EXIT_LOST
from phalanx.cluster.lifeline import Lifeline
from phalanx.cluster.roll import Roll, call_the_roll, introduce
from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.wire import Wire
from phalanx.errors import ClusterError

SOON = 0.6
"""Seconds within which all must come, where one does not."""


def spec(number, count, port, host="127.0.0.1"):
    return ClusterSpec(
        source="by hand",
        num_processes=count,
        process_id=number,
        coordinator=f"{host}:{port}",
        coordinator_from="MASTER_ADDR",
    )


def call(number, count, port, timeout=10.0, host="127.0.0.1", bind=None, **changes):
    mine = spec(number, count, port, host)
    try:
        return call_the_roll(mine, replace(introduce(mine, "phalanx 1, jax 2"), **changes), timeout, bind)
    except ClusterError as error:
        return str(error)


def all_call(*calls):
    """What each gets: a roll, or the text of its error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=30) for future in [pool.submit(call) for call in calls]]


def close(*rolls):
    for roll in rolls:
        for wire in roll.wires.values():
            wire.close()


@pytest.fixture
def port():
    return free_port()


def test_all_are_there(port):
    rolls = all_call(*(lambda i=i: call(i, 4, port) for i in range(4)))
    assert all([member.process_id for member in roll.members] == [0, 1, 2, 3] for roll in rolls)
    assert [sorted(roll.wires) for roll in rolls] == [[1, 2, 3], [0], [0], [0]]
    close(*rolls)


def test_process_0_may_come_last(port):
    others = [lambda i=i: call(i, 3, port) for i in (1, 2)]

    def late():
        time.sleep(0.3)
        return call(0, 3, port)

    rolls = all_call(*others, late)
    assert all(isinstance(roll, Roll) for roll in rolls)
    close(*rolls)


def test_who_does_not_come_is_named_to_all(port):
    begin = time.monotonic()
    said = all_call(lambda: call(0, 4, port, SOON), lambda: call(2, 4, port, SOON))
    assert all("processes 1, 3 of 4 did not come within 1 s" in text for text in said)
    assert time.monotonic() - begin < SOON + 5


def test_a_coordinator_that_is_not_there_is_named_with_its_address(port):
    begin = time.monotonic()
    text = call(1, 2, port, SOON)
    assert f"MASTER_ADDR=127.0.0.1:{port}: process 1 could not reach process 0" in text
    assert "Connection refused" in text
    assert time.monotonic() - begin < SOON + 2


def test_a_host_that_cannot_be_resolved_is_named(port):
    text = call(1, 2, port, SOON, host="no-such-host.invalid")
    assert "MASTER_ADDR=no-such-host.invalid" in text and "within 1 s" in text
    text = call(0, 2, port, SOON, host="no-such-host.invalid")
    assert "cannot be resolved on process 0 itself" in text and "px.connect(bind=address)" in text


def test_an_address_of_another_host_is_refused_by_process_0(port):
    assert "is no address of this host" in call(0, 2, port, SOON, host="192.0.2.1")


def test_a_port_that_is_taken_is_named(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert f"port {port} is taken on this host" in call(0, 2, port, SOON)


def test_two_processes_with_one_number_are_named_to_all(port):
    said = all_call(lambda: call(0, 3, port), lambda: call(1, 3, port, pid=111), lambda: call(1, 3, port, pid=222))
    assert all("two processes say that they are process 1" in text for text in said)
    assert all("pid 111" in text and "pid 222" in text for text in said)


def test_two_that_say_they_are_process_0_are_refused(port):
    first, second = all_call(lambda: call(0, 2, port, SOON), lambda: time.sleep(0.2) or call(0, 2, port, SOON))
    assert "did not come" in first
    assert "another process that says it is process 0" in second


def test_other_numbers_of_processes_are_refused(port):
    said = all_call(lambda: call(0, 2, port), lambda: call(1, 3, port))
    assert all("was told of 3 processes" in text and "of 2" in text for text in said)


def test_other_versions_are_refused(port):
    said = all_call(lambda: call(0, 2, port), lambda: call(1, 2, port, versions="phalanx 1, jax 3"))
    assert all("has phalanx 1, jax 3, and process 0" in text and "phalanx 1, jax 2" in text for text in said)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 100_000,
        b"[]\n",
        b'{"hello": 1}\n',
        b'{"hello": {"pid": -1}}\n',
        b"x" * 400_000,
        b"",
    ],
    ids=["http", "zeros", "list", "number", "fields", "no end", "nothing"],
)
def test_strangers_are_turned_away_and_do_not_hold_up_the_others(port, nonsense):
    def stranger():
        with socket.create_connection(("127.0.0.1", port)) as connection, contextlib.suppress(OSError):
            connection.sendall(nonsense)
            time.sleep(0.1)

    def come():
        time.sleep(0.3)
        return call(1, 2, port)

    first, second, _ = all_call(lambda: call(0, 2, port), come, lambda: time.sleep(0.1) or stranger())
    assert isinstance(first, Roll) and isinstance(second, Roll)
    close(first, second)


def test_something_else_at_the_coordinators_address_is_said(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()

        def answer():
            with contextlib.suppress(OSError):  # at the end of the test, which closes the socket
                while True:
                    connection, _ = other.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        assert "something else is listening there" in call(1, 2, port, SOON)


def test_a_process_that_died_meanwhile_may_come_again(port):
    def dies():
        with socket.create_connection(("127.0.0.1", port)) as connection:
            Wire(connection).send(hello=vars(introduce(spec(1, 3, port), "phalanx 1, jax 2")))
            time.sleep(0.2)
        return call(1, 3, port)

    rolls = all_call(
        lambda: call(0, 3, port),
        lambda: time.sleep(0.2) or dies(),
        lambda: time.sleep(0.8) or call(2, 3, port),  # until it comes, nothing is settled
    )
    assert all(isinstance(roll, Roll) for roll in rolls)
    close(*rolls)


# ---- the lifeline, without processes -------------------------------------------------------------


def test_a_message_of_one_reaches_all(port):
    rolls = all_call(*(lambda i=i: call(i, 3, port) for i in range(3)))
    lines = [Lifeline(roll, i, heartbeat=30.0) for i, roll in enumerate(rolls)]
    heard: list[tuple[int, int]] = []
    everyone = threading.Barrier(4)

    def note(me):
        def handler(by, message):
            heard.append((me, by))
            everyone.wait(10)

        return handler

    for i, line in enumerate(lines):
        line.handlers["hello"] = note(i)
        line.start()
    threading.Thread(target=lambda: lines[2].tell("hello"), daemon=True).start()
    everyone.wait(10)
    assert sorted(heard) == [(0, 2), (1, 2), (2, 2)]
    threads = [threading.Thread(target=line.finish, args=(10.0,)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    close(*rolls)


def test_the_first_that_waits_at_the_end_says_for_whom_also_when_it_is_not_process_0(port, capsys):
    rolls = all_call(*(lambda i=i: call(i, 3, port) for i in range(3)))
    lines = [Lifeline(roll, i, heartbeat=30.0) for i, roll in enumerate(rolls)]
    for line in lines:
        line.start()
    threads = [threading.Thread(target=line.finish, args=(1.0,)) for line in lines]
    for thread in threads[1:]:
        thread.start()
    time.sleep(2.0)
    threads[0].start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("phalanx: process 1 has finished and waits for process 0")
    close(*rolls)


@pytest.mark.parametrize("reason_is_known", [False, True])
def test_one_that_is_gone_is_blamed_unless_all_are_about_to_end(reason_is_known, port, monkeypatch):
    rolls = all_call(*(lambda i=i: call(i, 2, port) for i in range(2)))
    line, ended = Lifeline(rolls[0], 0, heartbeat=30.0), threading.Event()
    monkeypatch.setattr(lifeline, "end_process", lambda code, text: ended.set())
    if reason_is_known:
        line.excuse_the_gone()
    line.start()
    close(rolls[1])
    assert ended.wait(1.0 if reason_is_known else 10.0) is not reason_is_known
    line._failed = True  # which ends its thread
    line._thread.join(10)
    close(rolls[0])


def test_one_that_is_silent_is_blamed_also_when_all_are_about_to_end(port, monkeypatch):
    rolls = all_call(*(lambda i=i: call(i, 2, port) for i in range(2)))
    line, said = Lifeline(rolls[0], 0, heartbeat=0.5), queue.Queue()
    monkeypatch.setattr(lifeline, "end_process", lambda code, text: said.put((code, text)))
    line.excuse_the_gone()
    line.start()
    code, text = said.get(timeout=10)
    assert code == EXIT_LOST and text.startswith("phalanx: process 1") and "has not been heard of" in text
    line._failed = True  # which ends its thread
    line._thread.join(10)
    close(*rolls)


def test_an_error_that_comes_of_a_lost_process_is_known_as_one_also_from_within_another():
    """Its process waits a moment, to say which process is gone before it says what went wrong."""
    try:
        try:
            raise ConnectionError("the coordinator does not answer")
        except ConnectionError as error:
            raise ClusterError("the checkpoint was not read by all") from error
    except ClusterError as error:
        assert _jax.is_collective_failure(error)
    assert not _jax.is_collective_failure(ClusterError("two processes with one number"))
