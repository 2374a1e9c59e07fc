"""Taken ports are refused, with the owner's name."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from hearth.engine import ports
from hearth.errors import ConfigError, PortInUse
from tests.tools import free_port


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", ""])
def test_a_taken_port_names_its_owner(listener: socket.socket, host: str) -> None:
    port = port_of(listener)
    with pytest.raises(PortInUse, match=f"port {port} .*process {os.getpid()}: .*python"):
        ports.ensure_free(host, port)
    assert ports.owner(port) == ports.Owner(os.getpid(), ports.owner(port).command)  # type: ignore[union-attr]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_free_port_stays_free(host: str) -> None:
    port = free_port()
    for _ in range(3):
        ports.ensure_free(host, port)
    assert ports.owner(port) is None


@pytest.mark.parametrize("reuse", [True, False])
def test_time_wait_counts_as_taken_only_where_the_engine_could_not_bind_either(reuse: bool) -> None:
    with socket.socket() as old:
        old.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        old.bind(("127.0.0.1", 0))
        old.listen()
        port = port_of(old)
        client = socket.create_connection(("127.0.0.1", port))
        old.accept()[0].close()
        client.close()
    if reuse:
        return ports.ensure_free("127.0.0.1", port)
    with pytest.raises(PortInUse, match="close in a minute"):
        ports.ensure_free("127.0.0.1", port)
    return None


def test_the_owners_secrets_are_not_shown() -> None:
    code = "import socket, sys, time\ns = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(60)"  # noqa: E501
    argv = [sys.executable, "-c", code, "--api-key", "s3cret-value"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        port = int(process.stdout.readline())
        with pytest.raises(PortInUse, match=rf"process {process.pid}: .*create_server") as error:
            ports.ensure_free("127.0.0.1", port)
        process.kill()
    assert "s3cret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_an_owner_that_cannot_be_seen(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [c._replace(pid=None) for c in psutil.net_connections(kind="tcp")]
    monkeypatch.setattr(psutil, "net_connections", lambda kind: seen)
    with pytest.raises(PortInUse, match="as root on the host, run ss -ltnp"):
        ports.ensure_free("127.0.0.1", port_of(listener))


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 300])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match=host[:20]):
        ports.ensure_free(host, free_port())
