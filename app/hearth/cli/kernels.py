"""`hearth kernels`: list what was baked, and check it before the engine trusts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hearth.errors import ConfigError, ExitCode
from hearth.kernels import manifest as manifests
from hearth.kernels.manifest import Report
from hearth.kernels.selftest import SelfTest, self_test

kernels_app = typer.Typer(help="The kernels baked into this image.", no_args_is_help=True)

ManifestOption = Annotated[
    Path | None, typer.Option("--manifest", help="Default: kernels.json in the folder.")
]
FolderOption = Annotated[
    Path | None, typer.Option("--dir", help="Default: the installed FlashInfer's data/aot.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@kernels_app.command("list")
def list_(manifest: ManifestOption = None, folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Print the manifest: name, architectures, size, versions."""
    path, _ = _places(manifest, folder)
    libraries = manifests.load(path).libraries
    if as_json:
        typer.echo(json.dumps({"libraries": [library.model_dump() for library in libraries]}))
        return
    for library in libraries:
        built = ", ".join(f"{package} {version}" for package, version in sorted(library.built_with.items()))
        archs = ", ".join(library.archs) or "no GPU code"
        typer.echo(f"{library.name}: {archs}, {library.size} bytes, {built}")


@kernels_app.command()
def verify(
    manifest: ManifestOption = None,
    folder: FolderOption = None,
    device: Annotated[str, typer.Option(help="Compute capability, such as 12.0; auto asks NVML.")] = "auto",
    with_self_test: Annotated[bool, typer.Option("--self-test", help="Run a kernel on the GPU too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every library: there, whole, unchanged, with code for this GPU, for the installed versions."""
    path, directory = _places(manifest, folder)
    versions = manifests.installed_versions()
    capabilities, unchecked = _devices(device)
    report = manifests.verify(path, directory, None, versions)
    for capability in capabilities:
        report = manifests.verify(path, directory, capability, versions) if report.ok else report
    tested = self_test() if with_self_test and report.ok else None
    _print(report, tested, unchecked, as_json)
    if not report.ok or (tested is not None and tested.status == "fail"):
        raise typer.Exit(ExitCode.MISSING)


def _places(manifest: Path | None, folder: Path | None) -> tuple[Path, Path]:
    """Manifest and folder from what was said: each stands for the other where one is missing."""
    directory = folder or (manifest.parent if manifest else manifests.aot_dir())
    return manifest or directory / manifests.NAME, directory


def _devices(text: str) -> tuple[list[tuple[int, int]], str | None]:
    """The compute capabilities to check for, or none and why the architecture isn't checked."""
    if text != "auto":
        major, _, minor = text.partition(".")
        if not (major.isdecimal() and minor.isdecimal()):
            raise ConfigError(f"--device: {text!r} is no compute capability", "say 12.0 or auto")
        return [(int(major), int(minor))], None
    try:
        found = _nvml_capabilities()
    except Exception as error:
        return [], f"no GPU asked: {error}"
    return found, None if found else "no GPU in this machine"


def _nvml_capabilities() -> list[tuple[int, int]]:
    """Each compute capability in this machine once. Raises pynvml's errors where there is no driver."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = (pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount()))
        return sorted({tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles})
    finally:
        pynvml.nvmlShutdown()


def _print(report: Report, tested: SelfTest | None, unchecked: str | None, as_json: bool) -> None:
    if as_json:
        test = None if tested is None else {"status": tested.status, "reason": tested.reason}
        good = report.ok and (tested is None or tested.status != "fail")
        typer.echo(
            json.dumps({**report.to_json(), "ok": good, "self_test": test, "arch_unchecked": unchecked})
        )
        return
    if report.manifest_problem:
        typer.echo(report.manifest_problem)
    for item in report.libraries:
        typer.echo(f"{item.name}: {item.problem or 'ok'} ({', '.join(item.archs) or 'no GPU code'})")
    if unchecked:
        typer.echo(f"architecture not checked: {unchecked}")
    if tested is not None:
        typer.echo(f"self-test: {tested.status}: {tested.reason}")
