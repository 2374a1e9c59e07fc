"""What no graph plan can fix ends at once, with its name, its fix and the exit code of the table."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from hearth.errors import ExitCode
from tests.engine.conftest import Hearth, gone


def test_a_taken_engine_port_is_refused_before_anything_starts(fresh_hearth: Hearth) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", fresh_hearth.engine_port))
        taken.listen()
        fresh_hearth.start()
        assert fresh_hearth.wait_exit(60) == ExitCode.PORT_IN_USE
    said = fresh_hearth.tail()
    assert str(fresh_hearth.engine_port) in said
    assert f"is taken by process {os.getpid()}: " in said
    assert not fresh_hearth.engine_processes()


def test_a_port_taken_while_the_engine_loads_is_named(fresh_hearth: Hearth) -> None:
    fresh_hearth.start()
    fresh_hearth.wait_until("an engine", lambda s: s["phase"] != "spawn", 300)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", fresh_hearth.engine_port))
        taken.listen()
        assert fresh_hearth.wait_exit() == ExitCode.PORT_IN_USE
    assert "port_in_use" in fresh_hearth.tail()
    assert gone(fresh_hearth)


def test_a_model_path_that_is_not_there(fresh_hearth: Hearth, tmp_path: Path) -> None:
    fresh_hearth.config["model"]["path"] = str(tmp_path / "nowhere")
    fresh_hearth.start()
    assert fresh_hearth.wait_exit(60) == ExitCode.MISSING
    assert "nowhere: no such directory" in fresh_hearth.tail()


def test_a_model_folder_without_weights(fresh_hearth: Hearth, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(fresh_hearth.config["model"]["path"]).iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    fresh_hearth.config["model"]["path"] = str(model)
    fresh_hearth.start()
    assert fresh_hearth.wait_exit() == ExitCode.MISSING
    assert "missing_artifact" in fresh_hearth.tail()
    assert gone(fresh_hearth)


def test_a_flag_that_the_engine_does_not_know(fresh_hearth: Hearth) -> None:
    fresh_hearth.config["engine"]["args"]["no-such-flag"] = True
    begun = time.monotonic()
    fresh_hearth.start()
    assert fresh_hearth.wait_exit() == ExitCode.CONFIG
    assert "--no-such-flag" in fresh_hearth.tail()
    assert time.monotonic() - begun < 300, "the engine was not started twice for it"
    assert gone(fresh_hearth)
