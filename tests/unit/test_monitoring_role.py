"""The role writes what the committed files say, and ships what the rules read."""

import re
from pathlib import Path

import jinja2
import pytest
import yaml
from monitoring.rules import FOLDER, metrics_in, rules

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "ansible/roles/monitoring"
DEFAULTS = yaml.safe_load((ROLE / "defaults/main.yml").read_text())


def render(name, **facts):
    return (
        jinja2.Environment(undefined=jinja2.StrictUndefined)
        .from_string((ROLE / "templates" / name).read_text())
        .render(**facts)
    )


def test_limits_are_written_as_they_are_committed():
    limits = {**DEFAULTS["monitoring_limits"], "gpus": 8}
    written = yaml.safe_load(render("limits.yml.j2", monitoring_limits=limits))
    assert written == yaml.safe_load((FOLDER / "rules/limits.yml").read_text())


def test_every_variable_is_specified_and_has_a_default():
    options = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]["main"][
        "options"
    ]
    assert options.keys() == DEFAULTS.keys()
    assert all(option["description"].endswith(".") for option in options.values())


def test_nothing_listens_on_every_network_by_default():
    text = (ROLE / "vars/main.yml").read_text() + (ROLE / "defaults/main.yml").read_text()
    assert "0.0.0.0" not in text
    listening = re.findall(r"--web.listen-address=(.+):\d+$", text, re.MULTILINE)
    assert sorted(listening) == ["127.0.0.1", "127.0.0.1", "{{ monitoring_listen }}"]
    assert DEFAULTS["monitoring_listen"] == "127.0.0.1"


def test_dcgm_exports_what_the_rules_read():
    lines = (ROLE / "files/dcgm.csv").read_text().splitlines()
    exported = {line.split(",")[0] for line in lines if not line.startswith("#")}
    read = {name for rule in rules() for name in metrics_in(rule["expr"]) if name.startswith("DCGM")}
    assert read
    assert read <= exported


def test_the_gpu_exporter_is_pinned_with_hashes():
    text = (ROLE / "files/nvitop-exporter.lock").read_text()
    assert len(re.findall(r"^[\w-]+==", text, re.MULTILINE)) >= 4
    assert text.count("--hash=sha256:") >= 4
    assert "http" not in text


@pytest.mark.parametrize("secured", [True, False])
def test_prometheus_asks_for_a_password_only_where_one_is_set(secured):
    facts = {"monitoring_tls_cert": "/c" if secured else "", "monitoring_tls_key": "/k" if secured else ""}
    facts |= {"monitoring_user": "ops" if secured else "", "monitoring_password_hash": "$2y$10$x"}
    written = yaml.safe_load(render("web.yml.j2", **facts))
    if secured:
        assert written["basic_auth_users"] == {"ops": "$2y$10$x"}
        assert written["tls_server_config"] == {"cert_file": "/c", "key_file": "/k"}
    else:
        assert written is None
