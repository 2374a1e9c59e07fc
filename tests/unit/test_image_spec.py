"""Bills of materials: the shipped ones fit, and each way of not fitting is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hearth.errors import ConfigError, MissingError
from hearth.image.pins import Lock, parse_lock
from hearth.image.spec import Spec, find, load, load_whole, modules_of, parse, problems_of, stale

IMAGES = Path(__file__).parents[2] / "images"
NAMES = sorted(path.stem for path in IMAGES.glob("*.yaml") if not path.stem.startswith("kernels-"))
HASH = "--hash=sha256:" + "0" * 64
GPU = IMAGES / "glm5-nvfp4-sm120.yaml"


def lock(pins: str, asks: str = "torch==2.14.1", name: str = "a.lock") -> Lock:
    """A lock from `name==version` words."""
    head = "".join(f"# asks: {ask}\n" for ask in asks.split("|"))
    return parse_lock(head + "".join(f"{pin} {HASH}\n" for pin in pins.split()), name)


PINS = "sglang==0.5.23 torch==2.14.1 flashinfer-python==0.7.2 nvidia-cuda-runtime==13.0.96"
LEFT = "nvidia-cuda-nvcc==13.5 nvidia-cuda-crt==13.5 nvidia-nvvm==13.5 ninja==1.13.2"


def test_the_four_images_are_there() -> None:
    gpu = "glm5-nvfp4-sm120"
    assert ["cpu", gpu, f"{gpu}-dynamo", f"{gpu}-piecewise"] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_shipped_bills_fit_their_locks(name: str) -> None:
    spec, locks = load_whole(IMAGES / f"{name}.yaml")
    assert spec.name == name
    assert locks[-1].download_bytes
    assert modules_of(spec, IMAGES)


def test_modules_follow_the_flashinfer_version() -> None:
    names = {n: [m.name for m in modules_of(load(find(n, IMAGES)), IMAGES)] for n in NAMES}
    assert "sparse_mla_sm120" in names["glm5-nvfp4-sm120"]
    assert "sparse_mla_sm120" not in names["glm5-nvfp4-sm120-dynamo"]
    assert all("fp4_quantization_120f" in found for found in names.values())


def test_gpu_images_bake_what_the_seed_problem_is_about() -> None:
    assert load(find("glm5-nvfp4-sm120-dynamo", IMAGES)).engine.sglang == "0.5.11"
    ladder = load(find("glm5-nvfp4-sm120-piecewise", IMAGES)).graphs.ladder
    assert {"tc_piecewise", "breakable"} <= set(ladder.prefill)


def test_unknown_image_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="there are: cpu, glm5"):
        find("nope", IMAGES)
    with pytest.raises(MissingError, match="there are: none"):
        find("../cpu", tmp_path)


def change(old: str, new: str) -> Callable[[], Spec]:
    """The GPU image's YAML with one change."""
    text = GPU.read_text()
    assert old in text
    return lambda: parse(text.replace(old, new), "x.yaml")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("title:", "titel: x\ntitle:", "titel: no such key: did you mean title?"),
        ('python: "3.11"', "python: 3.11", "python: is not text"),
        ("image: debian:12-slim", "image: debian", "base.image: "),
        ("digest: null", "digest: latest", "base.digest: "),
        ('archs: ["12.0f"]', 'archs: ["sm120"]', "write e.g. 12.0f"),
        ("file: kernels-glm5-sm120.yaml", "", "needs either file or modules"),
        ("locks: [glm5-nvfp4-sm120.lock]", "locks: []", "locks: "),
    ],
)
def test_bad_keys_are_told_with_place_and_fix(old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        change(old, new)()
    assert says in str(caught.value)
    assert str(caught.value).startswith("x.yaml: ")


def test_a_right_combination_has_no_problem() -> None:
    assert problems_of(load(GPU), (lock(f"{PINS} {LEFT}"),)) == []


@pytest.mark.parametrize(
    ("pins", "asks", "says"),
    [
        (
            PINS.replace("torch==2.14.1", "torch==2.13.0"),
            "torch==2.14.1",
            "engine.torch: 2.14.1 here",
        ),
        (PINS.replace("torch==2.14.1", "torch==2.13.0"), "torch==2.14.1", "sglang 0.5.23 asks for ==2.14.1"),
        (
            PINS.replace("flashinfer-python==0.7.2", ""),
            "torch==2.14.1",
            "engine.flashinfer: 0.7.2 here",
        ),
        (PINS, "torch==2.14.1|flashinfer_python[cu13]==0.7.1", "flashinfer-python is 0.7.2 but"),
        (PINS, "torch==2.14.1|aiohttp", "asks for aiohttp, which no lock has"),
        (PINS.replace("runtime==13.0.96", "runtime==12.9.1"), "torch==2.14.1", "compiler.release: 13.0, but"),
    ],
)
def test_a_wrong_combination_is_told(pins: str, asks: str, says: str) -> None:
    found = problems_of(load(GPU), (lock(f"{pins} {LEFT}", asks),))
    assert any(says in problem for problem in found), found


def test_a_lock_that_is_older_than_hearths_own_requirements() -> None:
    project = '[project]\ndependencies = ["torch>=2", "docker>=7", "colorama; os_name == \'nt\'"]\n'
    assert stale(load(GPU), (lock(f"{PINS} docker==7.2.0"),), project) == []
    found = stale(load(GPU), (lock(f"{PINS} docker==6.1"),), project)
    assert found == [
        "locks: hearth asks for docker>=7, the locks have 6.1: `make lock IMAGE=glm5-nvfp4-sm120`"
    ]
    assert "the locks have none" in stale(load(GPU), (lock(PINS),), project)[0]


def test_requirements_for_other_machines_are_passed_over() -> None:
    asks = 'torch==2.14.1|av==1; platform_machine == "aarch64"|x==1; python_version < "3.10"'
    assert problems_of(load(GPU), (lock(f"{PINS} {LEFT}", asks),)) == []


def test_what_is_left_out_must_be_in_the_lock() -> None:
    found = problems_of(load(GPU), (lock(PINS),))
    assert "without: ninja: not in the locks: remove the entry" in found


def test_two_locks_that_disagree() -> None:
    found = problems_of(load(GPU), (lock(f"{PINS} {LEFT}"), lock("torch==2.13.0", name="b.lock")))
    assert any("torch is 2.14.1 in a.lock and 2.13.0 in b.lock" in problem for problem in found)


def test_a_lock_that_does_not_say_what_sglang_asks() -> None:
    silent = parse_lock("".join(f"{pin} {HASH}\n" for pin in f"{PINS} {LEFT}".split()), "a.lock")
    assert any("none says what sglang asks for" in problem for problem in problems_of(load(GPU), (silent,)))


def test_departing_pins_need_a_reason_that_still_holds() -> None:
    cpu = load(IMAGES / "cpu.yaml")
    pins = PINS.replace("torch==2.14.1", "torch==2.13.0")
    assert problems_of(cpu, (lock(pins),)) == []
    assert "differs: torch: 2.13.0 is what sglang asks for: remove the entry" in problems_of(
        cpu, (lock(pins, "torch==2.13.0"),)
    )


def test_ladder_and_plan_follow_the_dialect() -> None:
    wrong = change("prefill: [breakable, disabled]", "prefill: [tc_piecewise, breakable, disabled]")()
    found = problems_of(wrong, (lock(f"{PINS} {LEFT}"),))
    assert found == ["graphs.ladder.prefill: not SGLang 0.5.23's order: write [breakable, disabled]"]
    gone = change("wanted: piecewise", "wanted: tc_piecewise,full")()
    assert any("graphs.wanted: " in p for p in problems_of(gone, (lock(f"{PINS} {LEFT}"),)))


def test_missing_files_are_all_told(tmp_path: Path) -> None:
    (tmp_path / "glm5-nvfp4-sm120.yaml").write_text(GPU.read_text())
    with pytest.raises(MissingError, match=r"glm5-nvfp4-sm120\.lock: no such lock"):
        load_whole(tmp_path / "glm5-nvfp4-sm120.yaml")
    (tmp_path / "glm5-nvfp4-sm120.lock").write_text(GPU.with_suffix(".lock").read_text())
    with pytest.raises(ConfigError) as caught:
        load_whole(tmp_path / "glm5-nvfp4-sm120.yaml")
    said = str(caught.value)
    assert "compiler.lock: " in said
    assert "kernels.file: " in said
