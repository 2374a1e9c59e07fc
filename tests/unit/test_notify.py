"""Messages for systemd, over a real socket."""

import socket

import pytest

from hearth.host.notify import Notifier, extend, status


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(5)
        yield channel


def test_messages_arrive_as_one_datagram(listener):
    notifier = Notifier({"NOTIFY_SOCKET": listener.getsockname()})
    assert notifier.connected
    notifier.send(["READY=1", status("Serving.")])
    assert listener.recv(1000) == b"READY=1\nSTATUS=Serving."


def test_an_abstract_socket_is_reached():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind("\0hearth-test-notify")
        channel.settimeout(5)
        Notifier({"NOTIFY_SOCKET": "@hearth-test-notify"}).send(["WATCHDOG=1"])
        assert channel.recv(100) == b"WATCHDOG=1"


def test_without_systemd_nothing_is_sent():
    notifier = Notifier({})
    assert not notifier.connected
    notifier.send(["READY=1"])


def test_a_systemd_that_is_gone_is_logged(tmp_path, caplog):
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).send(["READY=1"])
    assert "can't be told READY=1" in caplog.text


def test_nothing_to_say_is_not_said(listener):
    notifier = Notifier({"NOTIFY_SOCKET": listener.getsockname()})
    notifier.send([])
    notifier.send(["WATCHDOG=1"])
    assert listener.recv(100) == b"WATCHDOG=1"


def test_a_status_is_one_short_line():
    assert status("a\nREADY=1") == "STATUS=a READY=1"
    assert len(status("x" * 5000)) < 300


def test_time_is_asked_for_in_microseconds():
    assert extend(1.5) == "EXTEND_TIMEOUT_USEC=1500000"
