"""The software bill of materials (CycloneDX 1.6, JSON) of an image: every Python and Debian package in it."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any

from hearth.errors import MissingError


def sbom(name: str, version: str, python: Mapping[str, str], debian: Mapping[str, str]) -> str:
    """CycloneDX JSON of an image. The same packages give the same text: no time of making is in it.

    Raises MissingError without cyclonedx-python-lib.
    """
    try:
        from cyclonedx.model.bom import Bom
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.output.json import JsonV1Dot6
        from packageurl import PackageURL
    except ImportError as error:
        raise MissingError("cyclonedx-python-lib isn't installed", "make setup") from error

    def component(kind: str, package: str, release: str) -> Any:
        namespace = "debian" if kind == "deb" else None
        shown = package if kind == "deb" else package.lower().replace("_", "-")
        url = PackageURL(kind, namespace, shown, release)
        return Component(
            name=package, version=release, purl=url, type=ComponentType.LIBRARY, bom_ref=str(url)
        )

    packages = [component("pypi", *item) for item in sorted(python.items())]
    packages += [component("deb", *item) for item in sorted(debian.items())]
    bom = Bom(components=packages)
    bom.metadata.component = Component(name=name, version=version, type=ComponentType.CONTAINER, bom_ref=name)
    bom.register_dependency(bom.metadata.component, packages)
    content = (name, version, sorted(python.items()), sorted(debian.items()))
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_OID, repr(content))
    body = json.loads(JsonV1Dot6(bom).output_as_string())
    body["metadata"].pop("timestamp", None)
    body["metadata"].pop("tools", None)
    return json.dumps(body, indent=1, sort_keys=True) + "\n"


def digest(text: str) -> str:
    """`sha256:...` of a text."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
