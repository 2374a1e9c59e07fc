"""The operator's side of the host tests: a checkout, an inventory, a config, and `hearth`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.host.machine import ROOT, Machine

IMAGE = "hearth-test/cpu:latest"
CHECKOUT = (
    "Makefile",
    "app",
    "ansible",
    "docker",
    "images",
    "monitoring",
    "requirements",
    "tools",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
KEY = "a-key-for-tests-6f1c"
MODEL = "/var/lib/hearth/models/tiny"
LIMIT = 1200.0
"""Seconds for an engine to start on a busy machine."""


@dataclass
class Operator:
    """Somebody with a checkout, who deploys to a machine."""

    machine: Machine
    folder: Path
    model: Path
    variables: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = self.folder / "checkout"
        left = shutil.ignore_patterns("__pycache__", "*.egg-info", ".cache", ".ansible")
        for name in CHECKOUT:
            place = ROOT / name
            copy = shutil.copytree if place.is_dir() else shutil.copy
            self.root.mkdir(exist_ok=True)
            copy(place, self.root / name, **({"ignore": left} if place.is_dir() else {}))
        self.api_key = self.folder / "api_key"
        self.api_key.write_text(KEY)
        self.inventory = self.folder / "hosts.yml"
        self.config = self.write_config()
        self.write_inventory()

    @property
    def environment(self) -> dict[str, str]:
        """Away from this user's own records."""
        own = {"DOCKER_HOST": self.machine.engine, "XDG_STATE_HOME": str(self.folder / "state")}
        return {**os.environ, **own, "HEARTH_SSH_ARGS": " ".join(self.machine.ssh_words)}

    def write_config(self, name: str = "hearth.yaml", **changes: Any) -> Path:
        """The demo's config with its planted fault: the engine dies in capture and is brought up without."""
        said: dict[str, Any] = yaml.safe_load((ROOT / "demo/hearth.demo.yaml").read_text())
        said["model"]["path"] = MODEL
        said["engine"]["python"] = "python3"
        said["engine"]["env"].update(PYTHONPATH=f"{MODEL}/faults", HEARTH_FAULT="capture_prefill")
        del said["paths"]
        said["ports"] = {"engine_host": "0.0.0.0", "supervisor_host": "0.0.0.0"}
        said["secrets"] = {"api_key_file": "/run/secrets/api_key"}
        for key, value in changes.items():
            section = said.setdefault(key, {})
            said[key] = {**section, **value}
        path = self.folder / name
        path.write_text(yaml.safe_dump(said, sort_keys=False))
        return path

    def write_inventory(self, more: tuple[Machine, ...] = (), **changes: Any) -> None:
        """Hosts without GPUs as an operator would write them: gpu1, and gpu2 ... for `more`."""
        hosts = {
            f"gpu{number}": {
                "ansible_host": machine.address,
                "ansible_user": "root",
                "ansible_ssh_private_key_file": str(machine.key),
            }
            for number, machine in enumerate((self.machine, *more), 1)
        }
        said = {
            "gpu": "none",
            "preflight_disk_gb": 5,
            "model_from": "copy",
            "model_source": str(self.model),
            "image_name": "cpu",
            "image_from": "local",
            "image_ref": IMAGE,
            "hearth_secrets": {"api_key": str(self.api_key)},
            "hearth_watchdog_seconds": 20,
            "hearth_ready_within": LIMIT,
            "hearth_smoke": smoke(),
            **changes,
        }
        whole = {"all": {"children": {"hearth": {"hosts": hosts, "vars": said}}}}
        self.inventory.write_text(yaml.safe_dump(whole, sort_keys=False))

    def command(self, *words: str) -> list[str]:
        """`hearth WORDS` as a command line."""
        return [sys.executable, "-m", "hearth", *words]

    def hearth(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `hearth WORDS` in the checkout."""
        return subprocess.run(
            self.command(*words), cwd=self.root, env=self.environment, capture_output=True, text=True
        )

    def deploy(self, *words: str, config: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run `hearth deploy` with the inventory and the config."""
        return self.hearth("deploy", str(self.inventory), "--config", str(config or self.config), *words)

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        """Run `make TARGET` as the README says it, with the .venv that it makes in the checkout."""
        words = ["make", target, f"HOST={self.inventory}", f"ARGS=--config {self.config}"]
        return subprocess.run(words, cwd=self.root, env=self.environment, capture_output=True, text=True)

    def record(self) -> dict[str, Any]:
        """The newest run's record."""
        newest = sorted((self.folder / "state/hearth/runs").iterdir())[-1]
        said: dict[str, Any] = json.loads((newest / "run.json").read_text())
        return said

    def status(self) -> dict[str, Any]:
        """What the host's supervisor says."""
        done = self.hearth("host", "status", str(self.inventory), "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said

    def unit(self, *names: str) -> dict[str, str]:
        """Properties of the unit."""
        said = self.machine.ssh(f"systemctl show hearth --property={','.join(names)}")
        return dict(line.partition("=")[::2] for line in said.splitlines())

    def ask(self, key: str | None = KEY, host: str | None = None) -> list[str]:
        """The pieces of a streamed answer, asked for from this machine."""
        body = {"model": "tiny", "prompt": "the", "max_tokens": 12, "stream": True, "temperature": 0}
        request = urllib.request.Request(
            f"http://{host or self.machine.address}:30000/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            lines = [line.decode().strip() for line in answer if line.strip()]
        assert lines[-1] == "data: [DONE]"
        return [line.removeprefix("data: ") for line in lines[:-1]]

    def until_serving(self, limit: float = LIMIT) -> None:
        """Until the unit is active and a streamed answer comes."""
        ends = time.monotonic() + limit
        while time.monotonic() < ends:
            if self.unit("ActiveState")["ActiveState"] == "active":
                try:
                    assert len(self.ask()) > 3
                    return
                except (OSError, urllib.error.URLError):
                    pass
            time.sleep(2)
        raise AssertionError(
            f"doesn't serve: {self.machine.ssh('journalctl -u hearth -n 20 -o cat | cut -c1-300')}"
        )


def smoke(**changes: Any) -> dict[str, Any]:
    """A smoke test that a tiny random model can pass."""
    long = {"words": 50, "expect": None, "max_tokens": 8}
    return {"stream": {"prompt": "the", "max_tokens": 16}, "long_prompt": long, **changes}
