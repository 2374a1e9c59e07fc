"""docker-compose.yml and the example config belong together: no Engine is needed to see that."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICE = COMPOSE["services"]["hearth"]
EXAMPLE_TEXT = (ROOT / "hearth.example.yaml").read_text()
EXAMPLE = yaml.safe_load(EXAMPLE_TEXT)


def test_the_weights_are_where_the_example_looks_for_them():
    binds = {bind["source"]: bind for bind in SERVICE["volumes"] if isinstance(bind, dict)}
    (weights,) = (bind for source, bind in binds.items() if "HEARTH_MODEL" in source)
    assert weights["target"] == EXAMPLE["model"]["path"]
    assert weights["read_only"]
    assert binds["./hearth.yaml"]["target"] == "/etc/hearth/hearth.yaml"


def test_state_and_cache_outlive_the_container_where_the_example_has_them():
    kept = {volume.partition(":")[2] for volume in SERVICE["volumes"] if isinstance(volume, str)}
    assert kept == {EXAMPLE["paths"]["state"], EXAMPLE["paths"]["cache"]}
    assert any(entry.startswith(f"{EXAMPLE['paths']['runtime']}:") for entry in SERVICE["tmpfs"])


def test_the_ports_are_the_examples():
    published = [port.rpartition(":")[2] for port in SERVICE["ports"]]
    assert published == [str(EXAMPLE["ports"][name]) for name in ("engine", "supervisor")]


def test_both_files_say_where_the_key_has_to_be_named():
    (name,) = COMPOSE["secrets"]
    line = f"api_key_file: /run/secrets/{name}"
    assert SERVICE["secrets"] == [name]
    assert line in (ROOT / "docker-compose.yml").read_text()
    assert line in EXAMPLE_TEXT
