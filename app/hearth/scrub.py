"""Takes secrets out of documents (mappings, lists, text) before they are kept or sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from hearth.engine.redact import Redactor

MASKED = "***"
_SECRET_KEY = re.compile(
    r"(?:^|[-_])(?:api[-_]?key|access[-_]key|token|passw(?:or)?d|passphrase|secret(?:[-_]key)?|authorization)$",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY", re.IGNORECASE)
_SHORTEST = 8
_TOKEN = re.compile(r"(?=[^A-Z0-9]*[A-Z0-9]).{12,}")


def scrub(value: Any, redact: Redactor) -> Any:
    """A copy of a JSON-like document: text is redacted, and what stands under a secret's name is masked."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact(str(key)): _under(str(key), item, redact) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(item, redact) for item in value]
    return value


def _under(key: str, value: Any, redact: Redactor) -> Any:
    if _SECRET_KEY.search(key) and isinstance(value, (str, int)) and not isinstance(value, bool):
        return MASKED
    return scrub(value, redact)


def secret_variables(environment: Mapping[str, str]) -> list[str]:
    """Values of variables whose name says that they are secret; paths and short words are none."""
    return [
        value
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and not value.startswith(("/", "~"))
    ]


def address_secrets(url: str) -> list[str]:
    """What of a webhook's address must not be shown: the whole, all after the host, what may be a token."""
    parts = urlsplit(url)
    after = f"{parts.path}?{parts.query}" if parts.query else parts.path
    tokens = [part for part in re.split(r"[/?&=#;]", after) if _TOKEN.fullmatch(part)]
    return [url, *tokens, *([after] if len(after) > _SHORTEST else [])]


def header_secrets(value: str) -> list[str]:
    """What of a header's value must not be shown: the whole, and the credential after its scheme."""
    return [value, *(word for word in value.split() if len(word) >= _SHORTEST)]


def shown_address(url: str) -> str:
    """An address without what may be secret in it: `https://host:8443/***`."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}{port}/{MASKED}"
