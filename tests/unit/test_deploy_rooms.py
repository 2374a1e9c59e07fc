"""How much free space a deploy asks for, and of which place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.deploy.rooms import room_problems, rooms

GPU = {"gb": -1, "gpu": "nvidia", "image_from": "build", "model_from": "fetch", "model_path": "/data/glm"}
CPU = {**GPU, "gpu": "none"}


def needs(**said: Any) -> dict[str, int]:
    """GB by path."""
    return {room["path"]: room["gb"] for room in rooms({**GPU, **said})}


def test_a_build_and_a_fetch_take_what_they_take() -> None:
    assert needs() == {
        "/var/lib": 5,
        "/var/lib/docker": 85,
        "/var/tmp": 28,
        "/var/cache/hearth": 42,
        "/data/glm": 644,
    }


@pytest.mark.parametrize(
    ("said", "paths"),
    [
        ({"image_from": "local"}, {"/var/lib", "/var/lib/docker", "/var/cache/hearth", "/data/glm"}),
        ({"model_from": "present"}, {"/var/lib", "/var/lib/docker", "/var/tmp", "/var/cache/hearth"}),
        ({"gpu": "none"}, {"/var/lib", "/var/lib/docker", "/var/tmp"}),
        ({"gpu": "none", "image_from": "present"}, {"/var/lib", "/var/lib/docker"}),
    ],
)
def test_what_is_not_done_takes_no_room(said: dict[str, Any], paths: set[str]) -> None:
    assert set(needs(**said)) == paths


def test_a_ready_image_takes_less_than_a_build() -> None:
    assert needs(image_from="local")["/var/lib/docker"] == 28
    assert needs(gpu="none")["/var/lib/docker"] == 10
    assert needs(gpu="none", image_from="local")["/var/lib/docker"] == 3


@pytest.mark.parametrize("gb", [0, 5, "5"])
def test_a_number_in_the_inventory_is_the_only_need(gb: Any) -> None:
    assert needs(gb=gb) == {"/var/lib": int(gb)}


def test_the_message_has_place_and_fix() -> None:
    (said,) = room_problems(rooms({**GPU, "gb": 5}), "/var/lib\t0\t   17 /var/lib\n")
    assert said.startswith("0 GB free under /var/lib, 5 GB are needed")
    assert said.endswith("or set preflight_disk_gb")
    assert room_problems(rooms({**GPU, "gb": 5}), "/var/lib\t0\t 5000 /\n") == []


def answer(**free: str) -> str:
    """What a host with these places says: 'HELD FREE MOUNT' each, in MB."""
    lines = {
        "/var/lib": "0 900000 /",
        "/var/lib/docker": "0 900000 /",
        "/var/tmp": "0 900000 /",
        "/var/cache/hearth": "0 900000 /",
        "/data/glm": "0 900000 /data",
        **{f"/{name.replace('_', '/')}": text for name, text in free.items()},
    }
    return "".join("\t".join([path, *text.split(" ", 1)]) + "\n" for path, text in lines.items())


def test_places_of_one_file_system_are_added_up() -> None:
    wanted = rooms(GPU)
    assert room_problems(wanted, answer()) == []
    one = "0 700000 /"
    (said,) = room_problems(
        wanted, answer(var_lib=one, var_lib_docker=one, var_tmp=one, var_cache_hearth=one, data_glm=one)
    )
    assert said.startswith(
        "700 GB free under /var/lib and /var/lib/docker and /var/tmp and /var/cache/hearth and"
    )
    assert (
        "804 GB are needed (Hearth 5, images 85, the check of the image 28, compiled kernels 42, weights 644)"
        in said
    )


def test_a_second_deploy_asks_for_what_is_not_there_yet() -> None:
    wanted = rooms(GPU)
    assert room_problems(wanted, answer(data_glm="all 10000 /data", var_lib_docker="all 90000 /")) == []
    assert room_problems(wanted, answer(data_glm="440000 204000 /data")) == []
    (said,) = room_problems(wanted, answer(data_glm="440000 203000 /data"))
    assert said.startswith("203 GB free under /data/glm, 204 GB are needed (weights 204)")


@given(st.text())
def test_any_text_is_no_problem_at_worst(text: str) -> None:
    assert room_problems(rooms(GPU), text) == []
