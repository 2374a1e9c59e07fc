"""The role writes what the committed files say, and ships what the rules read."""

import re
from pathlib import Path

import jinja2
import pytest
import yaml
from ansible.plugins.filter.core import to_bool
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


@pytest.mark.parametrize("certificate", ["", "/etc/ssl/hearth.pem"])
def test_grafana_may_read_the_key_that_prometheus_may_read(certificate):
    facts = {"monitoring_listen": "192.0.2.7", "monitoring_tls_cert": certificate, "monitoring_tls_key": "/k"}
    written = render("grafana.conf.j2", **facts)
    assert ("SupplementaryGroups=prometheus\n" in written) == bool(certificate)


def tasks(name):
    return yaml.safe_load((ROLE / "tasks" / name).read_text())


@pytest.mark.parametrize("address", ["9093/", "9100/", "9445/", "9090/", "3000/"])
def test_every_part_that_listens_is_asked_at_the_end(address):
    asked = [task for task in tasks("verify.yml") if "ansible.builtin.uri" in task]
    assert any(address in str(task) for task in asked)


def test_a_removal_takes_away_what_the_role_put_beside_prometheus():
    gone = {
        path
        for task in tasks("remove.yml")
        for path in task.get("loop", [])
        if isinstance(task["loop"], list)
    }
    installed = {
        re.sub("exporter-(dcgm|nvitop)", "exporter", path.stem) for path in ROLE.glob("templates/hearth-*")
    }
    assert {f"/etc/systemd/system/{unit}" for unit in installed} <= gone
    (found,) = (
        task["ansible.builtin.find"] for task in tasks("remove.yml") if "ansible.builtin.find" in task
    )
    assert set(found["patterns"]) == installed
    targets = yaml.safe_load((ROLE / "vars/main.yml").read_text())["monitoring_targets"]
    assert targets.keys() - gone == {"node", "prometheus", "gateway"}


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"monitoring": True}, True),
        ({"hearth_monitoring": True}, True),
        ({"hearth_monitoring": "yes"}, True),
        ({"hearth_monitoring": False, "monitoring": True}, False),
    ],
)
def test_the_inventory_switches_it_on_by_either_name(variables, on):
    (play,) = yaml.safe_load((ROOT / "ansible/monitoring.yml").read_text())
    environment = jinja2.Environment()
    environment.filters["bool"] = to_bool
    assert environment.compile_expression(play["roles"][0]["when"])(**variables) is on


def test_the_example_in_the_docs_names_what_there_is():
    block = re.search(r"then `make deploy`:\n\n((?:    .*\n)+)", (ROOT / "docs/monitoring.md").read_text())
    example = yaml.safe_load(block[1])
    assert example.keys() <= {"hearth_monitoring", *DEFAULTS}
    assert example["monitoring_receiver"] in [
        receiver["name"] for receiver in example["monitoring_receivers"]
    ]
