"""Build stage `hearth`: install Hearth over the engine, and lay out what that added."""

import argparse
import shutil
import subprocess
import sysconfig
from pathlib import Path

VENV = Path("/opt/hearth/venv")


def main() -> None:
    """Install with the environment's own setuptools; copy the package, its metadata and its command."""
    parser = argparse.ArgumentParser()
    for name in ("source", "layer", "files"):
        parser.add_argument(f"--{name}", default="")
    said = parser.parse_args()
    command = [str(VENV / "bin" / "pip"), "install", "--no-cache-dir", "--no-deps", "--no-index"]
    subprocess.run([*command, "--no-build-isolation", said.source], check=True)
    packages = Path(sysconfig.get_path("purelib"))
    layer = Path(said.layer)
    added = [*packages.glob("hearth"), *packages.glob("hearth-*.dist-info"), VENV / "bin" / "hearth"]
    for path in added:
        put(path, layer)
    for path in sorted(Path(said.files).iterdir()) if said.files else ():
        if path.is_file():
            shutil.copy(path, packages)
            put(packages / path.name, layer)


def put(path: Path, layer: Path) -> None:
    """Copy a file or folder to the same place below `layer`."""
    target = layer / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copy2(path, target)


if __name__ == "__main__":
    main()
