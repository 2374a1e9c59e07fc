"""What a Docker build says, as steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.image.steps import BuildKit, Classic

CLASSIC = """Step 1/4 : FROM base AS toolchain
 ---> 4eabf26b146c
Step 2/4 : RUN apt-get update
 ---> Using cache
 ---> 0123456789ab
Step 3/4 : FROM base AS runtime
 ---> 4eabf26b146c
Step 4/4 : RUN false
 ---> Running in 0123456789ab
first words
\x1b[91mlast words
\x1b[0mRemoving intermediate container 0123456789ab
"""
KIT = """#0 building with "default" instance using docker driver
#1 [internal] load build definition from Dockerfile
#1 DONE 0.0s
#5 [toolchain 1/2] FROM docker.io/library/base
#5 CACHED
#6 [toolchain 2/2] RUN apt-get update
#6 0.312 first words
#6 0.400 last words
#6 ERROR: process "/bin/sh -c apt-get update" did not complete successfully: exit code: 100
------
ERROR: failed to solve
"""


def ticking() -> float:
    """A clock that moves a second a look."""
    ticking.now += 1.0  # type: ignore[attr-defined]
    return float(ticking.now)  # type: ignore[attr-defined]


ticking.now = 0.0  # type: ignore[attr-defined]


def test_classic_steps_have_stage_cache_and_seconds() -> None:
    parser = Classic(ticking)
    for char in CLASSIC:
        parser.take({"stream": char})
    steps = parser.finished()
    assert [(s.stage, s.number, s.cached) for s in steps] == [
        ("toolchain", 1, False),
        ("toolchain", 2, True),
        ("runtime", 3, False),
        ("runtime", 4, False),
    ]
    assert all(s.seconds == 1.0 for s in steps)


def test_classic_failure_names_stage_step_and_last_words() -> None:
    parser = Classic()
    parser.take({"stream": CLASSIC})
    parser.take({"errorDetail": {"code": 1}, "error": "The command returned a non-zero code: 1"})
    assert parser.where == "stage runtime, step 4/4: RUN false"
    assert parser.error.endswith("non-zero code: 1")
    assert list(parser.tail) == ["first words", "last words"]


def test_classic_begins_and_ends_are_reported_once() -> None:
    parser = Classic(ticking)
    said = parser.take({"stream": CLASSIC})
    assert [(s.number, s.seconds is None) for s in said] == [
        (1, True),
        (1, False),
        (2, True),
        (2, False),
        (3, True),
        (3, False),
        (4, True),
    ]


def test_buildkit_steps_and_failure() -> None:
    parser = BuildKit()
    for line in KIT.splitlines(keepends=True):
        parser.take(line)
    assert [(s.stage, s.number, s.total, s.cached) for s in parser.finished()] == [
        ("toolchain", 1, 2, True),
        ("toolchain", 2, 2, False),
    ]
    assert parser.where == "stage toolchain, step 2/2: RUN apt-get update"
    assert "exit code: 100" in parser.error
    assert list(parser.tail) == ["first words", "last words"]


def test_an_error_before_any_step() -> None:
    kit, classic = BuildKit(), Classic()
    kit.take("ERROR: no such Dockerfile\n")
    classic.take({"error": "no such Dockerfile"})
    assert kit.where == classic.where == "before the first step"
    assert "no such Dockerfile" in kit.error
    assert classic.error == "no such Dockerfile"


@given(st.lists(st.text(max_size=60), max_size=30))
def test_any_words_are_survived(lines: list[str]) -> None:
    kit, classic = BuildKit(), Classic()
    for line in lines:
        kit.take(line + "\n")
        classic.take({"stream": line + "\n"})
    assert not classic.error
    assert len(classic.tail) <= 15
