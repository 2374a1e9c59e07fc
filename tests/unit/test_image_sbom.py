"""The software bill of materials: valid CycloneDX, the same text for the same packages."""

from __future__ import annotations

import json
import re
import sys

import pytest

from hearth.errors import MissingError
from hearth.image.sbom import digest, sbom

PYTHON = {"torch": "2.14.1", "Jinja2": "3.1.6", "smg_grpc": "1.0"}
DEBIAN = {"tini": "0.19.0-1+b3", "libstdc++6": "12.2.0-14"}


def test_every_package_is_named_once() -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib isn't installed: make setup")
    body = json.loads(sbom("cpu", "0.5.23", PYTHON, DEBIAN))
    found = {item["purl"] for item in body["components"]}
    assert found == {
        "pkg:pypi/torch@2.14.1",
        "pkg:pypi/jinja2@3.1.6",
        "pkg:pypi/smg-grpc@1.0",
        "pkg:deb/debian/tini@0.19.0-1%2Bb3",
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14",
    }
    assert body["metadata"]["component"]["name"] == "cpu"
    assert body["specVersion"] == "1.6"


def test_the_same_packages_give_the_same_digest() -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib isn't installed: make setup")
    first = sbom("cpu", "0.5.23", PYTHON, DEBIAN)
    again = sbom("cpu", "0.5.23", dict(reversed(PYTHON.items())), dict(reversed(DEBIAN.items())))
    assert first == again
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest(first))
    assert digest(sbom("cpu", "0.5.23", {**PYTHON, "torch": "2.14.2"}, DEBIAN)) != digest(first)


def test_it_is_valid_cyclonedx() -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib isn't installed: make setup")
    pytest.importorskip("jsonschema", reason="cyclonedx-python-lib[json-validation] isn't installed")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(sbom("cpu", "0.5.23", PYTHON, DEBIAN))
    assert problem is None, problem


def test_without_the_library_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cyclonedx.model.bom", "cyclonedx.model", "cyclonedx"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingError, match=r"cyclonedx-python-lib isn't installed \(make setup\)"):
        sbom("cpu", "0.5.23", {}, {})
