"""Searching an image for what belongs to the building machine."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import ExitCode, StateError
from hearth.image import leaks as leaking
from hearth.image import look as looking
from hearth.image.leaks import Leak, Needle, in_config, in_layers, needles

TOKEN = Needle("the value of API_TOKEN", b"s3cr3t-t0k3n")


def tar(files: dict[str, bytes]) -> bytes:
    """A tar archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def saved(*layers: dict[str, bytes], blobs: bool = False) -> io.BytesIO:
    """What `docker save` gives, the layers from the bottom up."""
    names = [f"blobs/sha256/{n:064x}" if blobs else f"{n:064x}/layer.tar" for n in range(len(layers))]
    files = {name: tar(layer) for name, layer in zip(names, layers, strict=True)}
    files |= {"blobs/sha256/config": b'{"config": "s3cr3t-t0k3n"}'} if blobs else {}
    files["manifest.json"] = json.dumps([{"Layers": names}]).encode()
    return io.BytesIO(tar(files))


def test_needles_come_from_pip_and_environment(tmp_path: Path) -> None:
    conf = tmp_path / "pip.conf"
    conf.write_text(
        "[global]\nindex-url = https://user:word@index.example/simple\nfind-links = /opt/wheels\n"
        "extra-index-url = file:///opt/more/simple https://pypi.org/simple\n"
        "cert = /etc/ssl/certs/ca-certificates.crt\n"
    )
    environment = {
        "API_TOKEN": "s3cr3t-t0k3n",
        "SHORT_TOKEN": "x",
        "PIP_INDEX_URL": "https://other.example/s",
    }
    found = {
        needle.value for needle in needles(environment, [conf, tmp_path / "absent"], [Path("/home/me/src")])
    }
    wanted = {b"s3cr3t-t0k3n", b"index.example", b"/opt/wheels", b"/opt/more/simple", b"other.example"}
    assert found == wanted | {b"/home/me/src"}


@pytest.mark.parametrize("blobs", [False, True])
def test_a_secret_in_a_layer_is_found_and_not_repeated(blobs: bool) -> None:
    found = in_layers(
        saved({"etc/x": b"fine"}, {"opt/app.conf": b"key = s3cr3t-t0k3n"}, blobs=blobs), [TOKEN]
    )
    assert found == [Leak("the value of API_TOKEN", "/opt/app.conf")]
    assert "s3cr3t" not in repr(found)


def test_layers_of_the_base_are_not_ours() -> None:
    image = ({"etc/pip.conf": TOKEN.value}, {"opt/app.conf": b"fine"})
    assert in_layers(saved(*image), [TOKEN], skip=1) == []
    assert in_layers(saved(*image), [TOKEN]) != []


@given(st.integers(0, 40))
def test_a_secret_across_two_reads_is_found(shift: int) -> None:
    whole = b"." * (leaking._CHUNK - shift) + TOKEN.value + b"."
    assert len(list(leaking._in_file(io.BytesIO(whole), "x", [TOKEN]))) == 1


def test_config_and_history() -> None:
    attributes = {"Config": {"Env": ["KEY=s3cr3t-t0k3n"], "Labels": {}}}
    assert in_config(attributes, [], [TOKEN]) == [Leak(TOKEN.kind, "config")]
    history = [{"CreatedBy": "RUN curl -H s3cr3t-t0k3n"}, {"CreatedBy": None}]
    assert in_config({"Config": {}}, history, [TOKEN]) == [Leak(TOKEN.kind, "history")]


def test_nothing_to_look_for_and_a_broken_stream() -> None:
    assert in_layers(io.BytesIO(b"not a tar"), []) == []
    with pytest.raises(tarfile.TarError):
        in_layers(io.BytesIO(b"not a tar"), [TOKEN])


class FullDisk:
    """Stands in for an image whose archive finds no room."""

    attrs = {"Size": 6_510_000_000, "Config": {}}  # noqa: RUF012

    def history(self) -> list[dict[str, str]]:
        return []

    def save(self) -> list[bytes]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_room_for_the_layers_says_how_much() -> None:
    with pytest.raises(StateError, match=r"/var/tmp: .*No space left.*6\.5 GB") as ended:
        looking._leaks(None, FullDisk(), [TOKEN], print)
    assert ended.value.code is ExitCode.DISK
