"""What the command line and the inventory ask for, before any host is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from hearth.deploy.inventory import Target
from hearth.deploy.order import Order, check_secrets, pairs, read_config, wish
from hearth.errors import ConfigError, HearthError, MissingError
from tests.unit.test_deploy_ship import checkout

CONFIG = """
model: {path: /m, served_name: tiny}
engine: {version: 0.5.23}
secrets: {api_key_file: /run/secrets/api_key}
"""


def target(**variables: object) -> Target:
    return Target("gpu1", "gpu1", variables=variables)


def test_an_image_is_named_after_its_content(tmp_path: Path) -> None:
    order = Order(Path("hearth.yaml"), checkout(tmp_path), image="x")
    first = wish(order, target())
    assert first.ref.startswith("hearth/x:")
    assert first.source == "build"
    assert wish(order, target(image_base="other:1")).ref != first.ref
    (tmp_path / "app/hearth/a.py").write_text("other")
    assert wish(order, target()).ref != first.ref


def test_the_command_line_goes_over_the_inventory(tmp_path: Path) -> None:
    said = target(image_name="x", image_from="local", image_ref="mine:1")
    assert wish(Order(Path(), tmp_path), said).ref == "mine:1"
    order = Order(Path(), tmp_path, image_from="present", image_ref="yours:2")
    assert (wish(order, said).source, wish(order, said).ref) == ("present", "yours:2")


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"image_from": "registry"}, "image_from: 'registry'"),
        ({"image_from": "present"}, "present needs image_ref"),
        ({"image_name": "nothing"}, "no image 'nothing'"),
    ],
)
def test_what_cannot_be_had_is_named(tmp_path: Path, variables: dict[str, str], part: str) -> None:
    with pytest.raises(HearthError) as error:
        wish(Order(Path(), checkout(tmp_path)), target(**variables))
    assert part in str(error.value)
    assert error.value.hint


def test_secrets_that_the_config_reads(tmp_path: Path) -> None:
    path = tmp_path / "hearth.yaml"
    path.write_text(CONFIG)
    config = read_config(path)
    key = tmp_path / "key"
    with pytest.raises(ConfigError, match="--secret api_key=FILE"):
        check_secrets(config, {})
    with pytest.raises(MissingError, match="no such file"):
        check_secrets(config, {"api_key": key})
    key.write_text("k")
    check_secrets(config, {"api_key": key})


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"hearth\.example\.yaml"):
        read_config(tmp_path / "none.yaml")


def test_pairs() -> None:
    assert pairs(["a=1", "b=x=y"], "--secret") == {"a": "1", "b": "x=y"}
    for wrong in ("a", "=b", " =b"):
        with pytest.raises(ConfigError, match="not NAME=VALUE"):
            pairs([wrong], "--secret")
