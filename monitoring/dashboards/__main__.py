"""Writes grafana/dashboards/*.json; `--check` only says whether they are up to date (exit code 3)."""

import sys
from pathlib import Path

from monitoring.dashboards.boards import BOARDS, make

FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"


def stale() -> list[str]:
    """The dashboards whose file isn't what the code makes."""
    return [name for name in BOARDS if _read(FOLDER / f"{name}.json") != make(name)]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    names = stale()
    if arguments == ["--check"]:
        if names:
            print(f"not up to date: {', '.join(names)}; run python -m monitoring.dashboards", file=sys.stderr)
        return 3 if names else 0
    for name in names:
        (FOLDER / f"{name}.json").write_text(make(name), encoding="utf-8")
        print(f"wrote {name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
