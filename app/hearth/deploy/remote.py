"""A shell on a host, over ssh or on this machine, and what ssh's and sudo's complaints mean."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass

from hearth.deploy.inventory import Target
from hearth.errors import ExitCode, HearthError, MissingError, Unreachable

CONNECT_SECONDS = 15
# A host that was never seen is taken at its word; one whose key changed is refused.
OPTIONS = (
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=accept-new",
    "-o",
    f"ConnectTimeout={CONNECT_SECONDS}",
)
_SSH_FAILED = 255


class NoAccess(HearthError):
    """The host is there and refuses us."""

    code = ExitCode.PERMISSION


@dataclass(frozen=True)
class Said:
    """How a command on the host ended."""

    code: int
    out: str
    err: str


def ssh_words(target: Target) -> list[str]:
    """ssh and its options, up to the command."""
    words = ["ssh", *target.ssh_args, *OPTIONS]
    if target.port:
        words += ["-p", str(target.port)]
    if target.key:
        words += ["-i", target.key]
    name = f"{target.user}@{target.address}" if target.user else target.address
    return [*words, name]


def words_for(target: Target, script: str, root: bool) -> list[str]:
    """The command line that runs a shell script on the host, as root by sudo if asked."""
    inner = f"sudo -n -- sh -c {shlex.quote(script)}" if root else script
    inner = f'if [ "$(id -u)" = 0 ]; then sh -c {shlex.quote(script)}; else {inner}; fi' if root else inner
    return ["sh", "-c", inner] if target.local else [*ssh_words(target), inner]


def run(target: Target, script: str, root: bool = True, timeout: float = 60) -> Said:
    """Run a script on the host. Raises Unreachable, NoAccess or MissingError, each naming the fix."""
    try:
        done = subprocess.run(
            words_for(target, script, root), capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout
        )
    except FileNotFoundError as error:
        raise MissingError("ssh isn't installed", "apt-get install openssh-client") from error
    except subprocess.TimeoutExpired as error:
        raise Unreachable(
            f"{target.name}: no answer within {timeout:.0f} s", "look at the host's console"
        ) from error
    said = Said(done.returncode, _text(done.stdout), _text(done.stderr))
    problem = refusal(target, said)
    if problem is not None:
        raise problem
    return said


def service_says(target: Target) -> str:
    """What Hearth's unit on the host says of itself; empty where it says nothing, or can't be asked."""
    try:
        said = run(target, "systemctl show --property=StatusText --value hearth", root=False, timeout=20)
    except HearthError:
        return ""
    return said.out.strip()[:200]


def refusal(target: Target, said: Said) -> HearthError | None:
    """What ssh's or sudo's last words mean; None where they let us in (pure)."""
    if said.code == _SSH_FAILED and not target.local:
        return _ssh_refusal(target, said.err)
    if said.code != 0 and re.search(r"^sudo: ", said.err, re.M):
        return _sudo_refusal(target, said.err)
    return None


def _ssh_refusal(target: Target, text: str) -> HearthError:
    name = target.name
    last = text.strip().splitlines()[-1][-200:] if text.strip() else "no reason given"
    for pattern, what, fix in _SSH:
        if re.search(pattern, text, re.I):
            message, hint = (
                f"{name}: {what}".format(port=target.port or 22),
                fix.format(name=name, address=target.address, port=target.port or 22),
            )
            return NoAccess(message, hint) if pattern in _REFUSED else Unreachable(message, hint)
    return Unreachable(f"{name}: ssh: {last}", f"try: {shlex.join(ssh_words(target))}")


def _sudo_refusal(target: Target, text: str) -> NoAccess:
    user = target.user or "this user"
    if "not found" in text or "command not found" in text:
        return NoAccess(
            f"{target.name}: sudo isn't installed", f"log in as root (HOST=root@{target.address})"
        )
    return NoAccess(
        f"{target.name}: {user} may not use sudo without a password",
        f"add '{target.user or 'USER'} ALL=(ALL) NOPASSWD: ALL' to /etc/sudoers.d there, or log in as root",
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


_DENIED = r"permission denied"
_CHANGED = r"host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED"
_BAD_KEY = r"UNPROTECTED PRIVATE KEY|Load key .* (invalid format|error in libcrypto)"
_REFUSED = (_DENIED, _CHANGED, _BAD_KEY)
_SSH = (
    (r"could not resolve hostname", "unknown host", "check the name, or give ansible_host in the inventory"),
    (
        _CHANGED,
        "its SSH host key is unknown or has changed",
        "if the host was reinstalled: ssh-keygen -R {address}, then ssh {address} once and compare the key",
    ),
    (_BAD_KEY, "the SSH key file can't be used", "chmod 600 the key, or give another with --key"),
    (
        _DENIED,
        "the SSH key is refused",
        "put your public key there (ssh-copy-id {address}), or give user and key: user@{address} --key FILE",
    ),
    (r"no route to host|network is unreachable", "no route to it", "check network, VPN and firewall"),
    (
        r"connection refused",
        "nothing listens on SSH port {port}",
        "start sshd there, or give the port: {address}:PORT",
    ),
    (r"timed out|timeout", "no answer on SSH port {port}", "check that it is up, and the firewall between"),
    (r"connection (closed|reset)|kex_exchange", "it closes SSH connections", "look at sshd's log there"),
)
