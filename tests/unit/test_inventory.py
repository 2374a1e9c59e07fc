"""HOST on the command line and inventories, to targets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.deploy.inventory import (
    Target,
    parse_host,
    read_inventory,
    resolve,
    split_hosts,
    targets_in,
    to_ansible,
)
from hearth.errors import ConfigError, HearthError, MissingError

INVENTORY = """
all:
  children:
    hearth:
      hosts:
        gpu1: {ansible_host: 192.0.2.1, ansible_port: 2222, ansible_user: ops}
        gpu2: {gpu: nvidia}
      vars: {gpu: none, ansible_ssh_common_args: '-o A=b -o ProxyCommand="ssh -W %h:%p jump"'}
"""


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("gpu1", Target("gpu1", "gpu1")),
        ("ops@gpu1", Target("gpu1", "gpu1", user="ops")),
        ("ops@10.0.0.1:2222", Target("10.0.0.1", "10.0.0.1", user="ops", port=2222)),
        ("[2001:db8::1]:22", Target("2001:db8::1", "2001:db8::1", port=22)),
        ("localhost", Target("localhost", "localhost", local=True)),
        ("root@localhost:2222", Target("localhost", "localhost", user="root", port=2222)),
    ],
)
def test_forms_of_host(text: str, target: Target) -> None:
    assert parse_host(text) == target


@pytest.mark.parametrize(
    "text", ["", "-oProxyCommand=x", "a b", "gpu1:0", "gpu1:70000", "gpu1:", "@gpu1", "a;b", "$(x)"]
)
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ConfigError, match="is no host"):
        parse_host(text)


@given(st.text(max_size=40))
def test_any_text_is_a_host_or_a_clear_error(text: str) -> None:
    try:
        target = parse_host(text)
    except ConfigError:
        return
    assert target.address
    assert not target.address.startswith("-")


def test_words_and_commas() -> None:
    assert split_hosts(["a,b", "c", "a"]) == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="no host given"):
        split_hosts([" , "])


def test_an_inventory_file_is_read_as_ansible_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(INVENTORY)
    first, second = resolve([str(path)], None)
    assert (first.address, first.port, first.user, first.gpus) == ("192.0.2.1", 2222, "ops", False)
    assert first.ssh_args == ("-o", "A=b", "-o", "ProxyCommand=ssh -W %h:%p jump")
    assert first.ansible()["ansible_ssh_common_args"] == "-o A=b -o 'ProxyCommand=ssh -W %h:%p jump'"
    assert second.gpus


def test_a_name_is_looked_up_and_may_bring_its_own_user(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(INVENTORY)
    (found,) = resolve(["root@gpu1"], path)
    assert (found.address, found.user, found.port) == ("192.0.2.1", "root", 2222)
    (other,) = resolve(["gpu9"], path, key="/k", ssh_args="-v -o 'A=b c'")
    assert (other.address, other.key, other.ssh_args) == ("gpu9", "/k", ("-v", "-o", "A=b c"))


@pytest.mark.parametrize(
    ("text", "said"),
    [("all: [", "hosts.yml"), ("all: {hosts: {}}", "no host in it"), ("just words", "hosts.yml")],
)
def test_a_broken_inventory_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(text)
    with pytest.raises(HearthError) as error:
        resolve([str(path)], None)
    assert said in str(error.value)


def test_quotes_that_are_not_closed(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(INVENTORY.replace(' jump"', " jump"))
    with pytest.raises(ConfigError, match=r"gpu1: ansible_ssh_common_args: .*No closing quotation"):
        resolve([str(path)], None)
    with pytest.raises(ConfigError, match="--ssh-args"):
        resolve(["gpu9"], None, ssh_args="-o 'x")


def test_a_missing_inventory() -> None:
    with pytest.raises(MissingError, match="no such inventory"):
        read_inventory(Path("/nonexistent/hosts.yml"))


def test_back_to_ansible() -> None:
    listing = {
        "_meta": {"hostvars": {"a": {"ansible_host": "h", "ansible_port": 1, "gpu": "none"}}},
        "all": {"children": ["ungrouped", "hearth"]},
        "hearth": {"hosts": ["a"]},
    }
    (target,) = targets_in(listing).values()
    said = to_ansible([target])["all"]["hosts"]["a"]
    assert said == {"gpu": "none", "ansible_host": "h", "ansible_port": 1}
