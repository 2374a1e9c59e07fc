"""Is this the image that its bill of materials describes? What was seen becomes one line a check (pure).

`look.py` looks into the image; here stands what must be true of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.markers import Marker
from packaging.utils import canonicalize_name

from hearth.image.build import OWN, TITLE, Layer
from hearth.image.leaks import Leak
from hearth.image.pins import Lock, installed
from hearth.image.spec import Module, Spec

Status = Literal["ok", "fail", "skip"]
USER_ID = 10001
HEARTH_LAYER_LIMIT = 5_000_000
"""Bytes that a change of Hearth's own code may move."""
_NEEDED_LABELS = (
    f"{TITLE}.title",
    f"{TITLE}.version",
    f"{TITLE}.licenses",
    f"{TITLE}.base.digest",
    f"{OWN}.sglang",
    f"{OWN}.torch",
    f"{OWN}.flashinfer",
    f"{OWN}.cuda",
    f"{OWN}.archs",
    f"{OWN}.sbom",
)
_MAY_WRITE = {"/tmp", "/run/hearth", "/var/cache/hearth"}
_KEPT_TOOLS = ("triton/backends/nvidia/bin/ptxas", "triton/backends/nvidia/bin/ptxas-blackwell")
"""Assemblers that a package brings for its own kernels and can't be started without: named, not failed."""


@dataclass(frozen=True)
class Line:
    """One line of the table. `fix` is set where it failed."""

    id: str
    status: Status
    seen: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """The shape of `hearth image check --json`."""
        return {"id": self.id, "status": self.status, "seen": self.seen, "fix": self.fix}


@dataclass(frozen=True)
class Answer:
    """What a command in the container said: exit code, its JSON (None if it was none), its last words."""

    code: int
    body: Any = None
    words: str = ""


@dataclass(frozen=True)
class Seen:
    """Everything that was looked at. `config` is the image's; the rest is from inside a sealed container."""

    config: Mapping[str, Any]
    layers: tuple[Layer, ...]
    who: Answer
    files: Answer
    packages: Answer
    imports: Answer
    kernels: Answer
    trace: Answer
    plan: Answer
    pip: Answer
    leaks: tuple[Leak, ...] = ()
    leaks_sought: int = 0
    sbom_digest: str = ""
    extra: tuple[Line, ...] = field(default=())


def lines(spec: Spec, locks: tuple[Lock, ...], modules: tuple[Module, ...], seen: Seen) -> list[Line]:
    """Every check of an image, in the order they are printed."""
    return [
        _user(seen),
        _start(seen),
        _labels(seen),
        _none("compilers", _compilers(seen), "a build tool is in a layer: see docker/Dockerfile", seen.files),
        _none("setuid", _listed(seen.files, "setuid"), "remove the bit in the run-time stage", seen.files),
        _none("caches", _listed(seen.files, "caches"), "remove them in the step that made them", seen.files),
        _none(
            "cuda_compat", _listed(seen.files, "compat"), "they hide the host's driver: remove", seen.files
        ),
        _pins(spec, locks, seen.packages),
        _requirements(spec, seen.pip),
        _imports(seen.imports),
        _kernels(modules, seen.kernels),
        _trace(seen.trace),
        _plan(spec, seen.plan),
        _sizes(seen.layers),
        _sbom(seen),
        _leaks(seen),
        *seen.extra,
    ]


def good(found: Iterable[Line]) -> bool:
    """Whether no line failed."""
    return all(line.status != "fail" for line in found)


def _fail(name: str, seen: str, fix: str) -> Line:
    return Line(name, "fail", seen, fix)


def _silent(name: str, answer: Answer) -> Line | None:
    """The line for a command that said nothing usable."""
    if isinstance(answer.body, (dict, list)):
        return None
    words = answer.words.strip()[-200:]
    return _fail(name, f"no answer (exit {answer.code}): {words}", "run the command by hand in the image")


def _user(seen: Seen) -> Line:
    silent = _silent("user", seen.who)
    if silent:
        return silent
    who, named = seen.who.body, str(seen.config.get("User") or "root")
    if who["uid"] != USER_ID or named.split(":")[0] != str(USER_ID):
        return _fail("user", f"uid {who['uid']} (USER {named})", f"the image must run as {USER_ID}")
    more = sorted(set(who["writable"]) - _MAY_WRITE)
    if more:
        return _fail("user", f"uid {USER_ID} may write {', '.join(more)}", "give those folders to root")
    return Line("user", "ok", f"uid {USER_ID}, writes only {', '.join(sorted(who['writable'])) or 'nowhere'}")


def _start(seen: Seen) -> Line:
    entry = seen.config.get("Entrypoint") or []
    health = " ".join((seen.config.get("Healthcheck") or {}).get("Test") or [])
    wrong = []
    if not entry or not str(entry[0]).endswith("tini"):
        wrong.append(f"PID 1 is {entry[0] if entry else 'nothing'}, not tini")
    if seen.config.get("StopSignal") != "SIGTERM":
        wrong.append(f"stop signal {seen.config.get('StopSignal')}")
    if ":9400/livez" not in health:
        wrong.append("the health check doesn't ask Hearth's /livez on 9400")
    if wrong:
        return _fail("start", "; ".join(wrong), "see the end of docker/Dockerfile")
    return Line("start", "ok", "tini, SIGTERM, health from Hearth's /livez")


def _labels(seen: Seen) -> Line:
    said = seen.config.get("Labels") or {}
    absent = [name for name in _NEEDED_LABELS if not said.get(name)]
    if absent:
        return _fail("labels", f"missing: {', '.join(absent)}", "build with hearth image build")
    return Line("labels", "ok", f"{len(said)} labels")


def _listed(answer: Answer, key: str) -> list[str]:
    return list(answer.body[key]) if isinstance(answer.body, dict) else []


def _compilers(seen: Seen) -> list[str]:
    return [path for path in _listed(seen.files, "compilers") if not path.endswith(_KEPT_TOOLS)]


def _none(name: str, found: list[str], fix: str, answer: Answer) -> Line:
    silent = _silent(name, answer)
    if silent:
        return silent
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        return _fail(name, ", ".join(found[:5]) + more, fix)
    kept = [p for p in _listed(answer, "compilers") if p.endswith(_KEPT_TOOLS)] if name == "compilers" else []
    unread = _listed(answer, "unread")
    if unread:
        return _fail(name, f"can't be read: {', '.join(unread[:3])}", "the check must read every folder")
    return Line(
        name, "ok", "none" + (f" (a package's own assembler stays: {', '.join(kept)})" if kept else "")
    )


def _pins(spec: Spec, locks: tuple[Lock, ...], answer: Answer) -> Line:
    silent = _silent("pins", answer)
    if silent:
        return silent
    there = {canonicalize_name(name): version for name, version in answer.body["python"].items()}
    left = {canonicalize_name(item.package) for item in spec.without}
    wrong = [f"{name} is in, though left out" for name in sorted(left & there.keys())]
    for lock in locks:
        for name, pin in lock.pins.items():
            found = there.get(canonicalize_name(name))
            marker = Marker(lock.markers[name]) if name in lock.markers else None
            if name in left or not installed(marker, spec.python):
                continue
            if found is None or found.partition("+")[0] != pin.partition("+")[0]:
                wrong.append(f"{name} {found or 'absent'}, locked {pin}")
    if wrong:
        return _fail("pins", "; ".join(wrong[:4]) + (" ..." if len(wrong) > 4 else ""), "build it again")
    return Line("pins", "ok", f"{len(there)} Python packages, as locked")


def _requirements(spec: Spec, answer: Answer) -> Line:
    """`pip check`, where the lock claims to be whole; complaints about what was left out are expected."""
    if not spec.whole:
        return Line("pip_check", "skip", "the lock doesn't claim to be whole (whole: false)")
    left = {canonicalize_name(item.package) for item in spec.without}
    said = [line for line in answer.words.splitlines() if " requires " in line or " has requirement " in line]
    open_ = [line for line in said if not any(name in canonicalize_name(line) for name in left)]
    if answer.code not in (0, 1) or open_:
        fix = "lock again, or name it under without"
        return _fail("pip_check", "; ".join(open_[:3]) or answer.words[-200:], fix)
    return Line("pip_check", "ok", f"whole, apart from {', '.join(sorted(left)) or 'nothing'}")


def _imports(answer: Answer) -> Line:
    silent = _silent("imports", answer)
    if silent:
        return silent
    bad = {name: error for name, error in answer.body.items() if error}
    driver = [name for name, error in bad.items() if "libcuda.so.1" in error]
    if len(bad) > len(driver):
        first = next(f"{name}: {error}" for name, error in bad.items() if name not in driver)
        return _fail("imports", first[:200], "the runtime stage lacks something, see the error")
    if driver:
        return Line("imports", "skip", f"no NVIDIA driver here, which importing {', '.join(driver)} needs")
    return Line("imports", "ok", ", ".join(answer.body))


def _kernels(modules: tuple[Module, ...], answer: Answer) -> Line:
    silent = _silent("kernels", answer)
    if silent:
        return silent
    there = {item["name"]: item["problem"] for item in answer.body.get("libraries", ())}
    wrong = [f"{module.name}: not there" for module in modules if module.name not in there]
    wrong += [f"{name}: {problem}" for name, problem in there.items() if problem]
    if wrong or answer.code != 0 or not answer.body.get("ok"):
        fix = "bake them again: hearth image build"
        return _fail("kernels", "; ".join(wrong[:3]) or answer.words[-200:], fix)
    return Line("kernels", "ok", f"{len(there)} libraries, whole and for the right GPU")


def _trace(answer: Answer) -> Line:
    silent = _silent("trace", answer)
    if silent:
        return silent
    needed = [op for op in answer.body.get("ops", ()) if op.get("required", True)]
    bad = [f"{op['op']}: {op.get('reason')}" for op in needed if not op["traceable"]]
    if not needed:
        bad = ["no operator was traced"]
    if bad or answer.code != 0 or not answer.body.get("ok"):
        return _fail("trace", "; ".join(bad[:2]) or answer.words[-200:], "hearth trace names the frame")
    return Line("trace", "ok", f"{len(needed)} operators traced with fullgraph=True")


def _plan(spec: Spec, answer: Answer) -> Line:
    silent = _silent("plan", answer)
    if silent:
        return silent
    plan = answer.body.get("plan", {})
    wanted = (spec.graphs.ladder.prefill[0], spec.graphs.ladder.decode[0])
    if answer.code != 0 or (plan.get("prefill"), plan.get("decode")) != wanted:
        return _fail("plan", f"{plan or answer.words[-200:]}", f"the image's plan is {','.join(wanted)}")
    return Line("plan", "ok", f"SGLang {spec.engine.sglang}: {','.join(wanted)}")


def _sizes(layers: tuple[Layer, ...]) -> Line:
    """Total, and whether Hearth's own layer, the topmost, is small."""
    if not layers:
        return _fail("size", "no layer", "build it again")
    shown = ", ".join(f"{layer.size / 1e6:.1f}" for layer in layers)
    text = f"{sum(layer.size for layer in layers) / 1e9:.2f} GB, by layer from the top (MB): {shown}"
    if layers[0].size > HEARTH_LAYER_LIMIT:
        return _fail("size", text, "Hearth's own layer must stay under 5 MB: what else got into it?")
    return Line("size", "ok", text)


def _sbom(seen: Seen) -> Line:
    said = (seen.config.get("Labels") or {}).get(f"{OWN}.sbom", "")
    if not said or said != seen.sbom_digest:
        return _fail("sbom", f"label {said or 'absent'}, packages give {seen.sbom_digest}", "build it again")
    return Line("sbom", "ok", said)


def _leaks(seen: Seen) -> Line:
    if seen.leaks:
        shown = "; ".join(f"{leak.kind} in {leak.place}" for leak in seen.leaks[:3])
        return _fail("leaks", shown, "keep it in the build stages' base (--build-base)")
    return Line("leaks", "ok", f"none of this machine's {seen.leaks_sought} marks in config, history, layers")
