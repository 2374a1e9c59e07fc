"""The unit's template: its exit codes are the table's, and systemd's own tools are content with it."""

import re
import shutil
import subprocess
from pathlib import Path

import jinja2
import pytest

from hearth.errors import ExitCode
from hearth.host.container import LABEL

TEMPLATE = Path(__file__).resolve().parents[2] / "ansible/roles/hearth/templates/hearth.service.j2"
EXPOSURE = 30
"""systemd calls up to 50 (5.0) OK."""


@pytest.fixture
def unit(tmp_path):
    def render(template=TEMPLATE, **variables):
        environment = jinja2.Environment(
            trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
        )
        text = environment.from_string(template.read_text()).render(**variables)
        path = tmp_path / "hearth.service"
        path.write_text(text)
        return path

    return render


def values(path, key):
    return re.findall(rf"^{key}=(.*)$", path.read_text(), re.M)


def test_systemd_restarts_what_the_table_calls_restartable(unit):
    (said,) = values(unit(hearth_secrets={}), "RestartPreventExitStatus")
    final = [code.value for code in ExitCode if not code.restartable and code is not ExitCode.OK]
    assert [int(code) for code in said.split()] == final


def test_each_secret_is_a_credential(unit):
    path = unit(hearth_secrets={"api_key": "/somewhere", "admin": "/else"})
    said = values(path, "LoadCredential")
    assert said == ["admin:/etc/hearth/secrets/admin", "api_key:/etc/hearth/secrets/api_key"]
    assert "/somewhere" not in path.read_text()
    assert values(unit(hearth_secrets={}), "LoadCredential") == []


def test_secrets_of_earlier_deploys_are_credentials_too(unit):
    path = unit(TEMPLATE.with_name("earlier-secrets.conf.j2"), hearth_kept_secrets=["old_key", "admin"])
    said = values(path, "LoadCredential")
    assert said == ["admin:/etc/hearth/secrets/admin", "old_key:/etc/hearth/secrets/old_key"]


def test_only_our_own_container_is_removed(unit):
    (said,) = values(unit(hearth_secrets={}), "ExecStopPost")
    assert f"label={LABEL}=%p" in said
    assert said.startswith("-")


def test_variables_have_an_effect(unit):
    path = unit(hearth_secrets={}, hearth_watchdog_seconds=7, hearth_program="/bin/true", hearth_release="/r")
    assert values(path, "WatchdogSec") == ["7"]
    assert values(path, "ExecStart") == ["/bin/true launch --name %p --release /r"]


def analyze(*words):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze (apt-get install systemd)")
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True)


def test_systemd_verifies_it_without_a_word(unit):
    path = unit(hearth_secrets={"api_key": ""}, hearth_program="/bin/true")
    done = analyze("verify", str(path))  # returns 0 for unknown keys too: only silence is consent
    said = [line for line in done.stderr.splitlines() if path.name in line]
    assert said == []


def test_a_wrong_key_would_be_noticed(unit):
    path = unit(hearth_secrets={}, hearth_program="/bin/true")
    path.write_text(path.read_text().replace("WatchdogSec=", "WatchdocSec="))
    done = analyze("verify", str(path))
    assert "WatchdocSec" in done.stderr


def test_systemd_calls_it_ok(unit):
    path = unit(hearth_secrets={"api_key": ""})
    done = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", str(path))
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
    path.write_text(
        re.sub(r"^(Protect|Private|Restrict|System|Capability|NoNew).*\n", "", path.read_text(), flags=re.M)
    )
    assert analyze("security", "--offline=true", f"--threshold={EXPOSURE}", str(path)).returncode != 0
