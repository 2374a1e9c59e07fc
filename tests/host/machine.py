"""A real host to deploy to: systemd as PID 1, SSH and Python in a container of an Engine made for tests.

Its root is imported once; a new host is up in seconds. Docker is installed *inside* it by what is tested.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BARE = Path(__file__).with_name("bare")
NAME = "hearth-test"
MONITORING = "prometheus prometheus-alertmanager prometheus-node-exporter hearth-host-metrics.timer"
"""Units of the role `monitoring`."""
# What systemd and a Docker Engine inside need; --privileged doesn't start where CAP_SYS_RESOURCE is missing.
_SETTINGS = {
    "--cap-add": ["ALL"],
    "--cap-drop": ["SYS_RESOURCE"],
    "--security-opt": ["seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"],
    "--cgroupns": ["host"],
    "--volume": ["/sys/fs/cgroup:/sys/fs/cgroup:rw", "/var/lib/docker", "/var/lib/containerd"],
    "--tmpfs": ["/run:exec,mode=755", "/run/lock", "/tmp:exec,mode=1777"],
}
RUN = [word for option, values in _SETTINGS.items() for value in values for word in (option, value)]


def docker(engine: str, *words: str, check: bool = True) -> str:
    """What `docker WORDS` says. Raises RuntimeError with its complaint."""
    done = subprocess.run(["docker", "--host", engine, *words], capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"docker {' '.join(words[:3])}: {done.stderr[-800:]}")
    return done.stdout.strip()


def image(engine: str) -> str:
    """The bare host's image, made where it isn't there; its name follows its content."""
    parts = [*sorted(BARE.iterdir()), ROOT / "tests/image/mkbase.sh"]
    content = hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()[:12]
    name = f"{NAME}/host:{content}"
    if not docker(engine, "image", "ls", "--quiet", name):
        words = ["build", "--quiet", "--tag", name, "--build-arg", f"BASE={NAME}:base"]
        words += ["--build-arg", f"BUILD_BASE={NAME}:build", str(BARE)]
        environment = {**os.environ, "DOCKER_BUILDKIT": "0", "DOCKER_HOST": engine}
        subprocess.run(["docker", *words], check=True, env=environment, stdout=subprocess.DEVNULL)
    return name


@dataclass
class Machine:
    """One host. `folder` holds its SSH key and known hosts; `keys` is what may log in."""

    engine: str
    folder: Path
    name: str = field(default_factory=lambda: f"hearth-host-{uuid.uuid4().hex[:8]}")
    options: tuple[str, ...] = ()
    address: str = ""

    @property
    def key(self) -> Path:
        return self.folder / "key"

    @property
    def ssh_words(self) -> list[str]:
        """Options of ssh that keep it away from this user's own files."""
        known = self.folder / "known_hosts"
        options = [f"UserKnownHostsFile={known}", "StrictHostKeyChecking=accept-new", "BatchMode=yes"]
        return ["-F", "none", *(word for option in options for word in ("-o", option))]

    def start(self) -> Machine:
        """Create it and wait until it is reachable."""
        if not self.key.exists():
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(self.key)]
            subprocess.run(words, check=True)
        words = ["run", "--detach", "--name", self.name, "--hostname", self.name, *RUN, *self.options]
        docker(self.engine, *words, image(self.engine))
        docker(self.engine, "cp", f"{self.key}.pub", f"{self.name}:/etc/ssh/authorized_keys")
        self.execute("chown", "root:root", "/etc/ssh/authorized_keys")
        self.find()
        return self

    def find(self) -> None:
        """Learn its address and wait for SSH."""
        form = "{{.NetworkSettings.IPAddress}}"
        self.address = docker(self.engine, "inspect", "--format", form, self.name)
        for _ in range(240):
            done = self.try_ssh("systemctl is-system-running || true")
            if done.returncode == 0 and done.stdout.strip() in ("running", "degraded"):
                return
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} doesn't come up: {done.stdout} {done.stderr[-400:]}")

    def restart(self) -> None:
        """Power it off and on."""
        docker(self.engine, "restart", "--time", "120", self.name)
        self.find()

    def remove(self) -> None:
        """Away with it and its disks."""
        docker(self.engine, "rm", "--force", "--volumes", self.name, check=False)

    def execute(self, *words: str) -> str:
        """Run a command without SSH."""
        return docker(self.engine, "exec", self.name, *words)

    def fetch(self, path: str, user: str = "") -> str:
        """A page on its loopback (PORT/PATH), by its own Python; `HTTP <code>` where it is refused."""
        code = (
            "import base64, urllib.error, urllib.request as u\n"
            f"r = u.Request('http://127.0.0.1:{path}')\n"
            f"'{user}' and r.add_header('Authorization', 'Basic ' + base64.b64encode(b'{user}').decode())\n"
            "try: print(u.urlopen(r).read().decode())\n"
            "except urllib.error.HTTPError as e: print('HTTP', e.code)\n"
        )
        return self.execute("python3", "-c", code)

    def try_ssh(self, command: str, user: str = "root") -> subprocess.CompletedProcess[str]:
        """Run a command over SSH."""
        words = ["ssh", *self.ssh_words, "-i", str(self.key), f"{user}@{self.address}", command]
        return subprocess.run(words, capture_output=True, text=True)

    def ssh(self, command: str, user: str = "root") -> str:
        """What a command over SSH says. Raises AssertionError when it fails."""
        done = self.try_ssh(command, user)
        assert done.returncode == 0, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout
