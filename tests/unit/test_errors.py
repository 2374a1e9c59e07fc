"""The one table of exit codes, and errors as a person sees them."""

import inspect
import re
from pathlib import Path

import pytest

from hearth import errors
from hearth.errors import ExitCode, HearthError

OPERATIONS = Path(__file__).resolve().parents[2] / "docs/operations.md"
TREE = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, HearthError)]


def test_the_table_in_the_docs_is_the_table_in_the_code():
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \| (.+?) \| (yes|no) \|$", OPERATIONS.read_text(), re.M)
    code = [(str(c.value), c.name, c.meaning, "yes" if c.restartable else "no") for c in ExitCode]
    assert rows == code


def test_codes_are_exit_statuses_of_their_own():
    assert len({code.value for code in ExitCode}) == len(ExitCode)
    assert all(0 <= code <= 125 for code in ExitCode), "a shell uses 126 and above for itself"


def test_what_only_a_person_can_fix_is_not_restarted():
    person = {"CONFIG", "MISSING", "PORT_IN_USE", "OOM", "DISK", "HOST_ACTION", "GAVE_UP", "PERMISSION", "OK"}
    assert not any(ExitCode[name].restartable for name in person)
    assert ExitCode.RECREATE.restartable


@pytest.mark.parametrize("cls", TREE)
def test_an_error_is_one_line_with_its_fix(cls):
    assert str(cls("place: wrong", "do this")) == "place: wrong (do this)"
    assert str(cls("place: wrong")) == "place: wrong"
    assert isinstance(cls.code, ExitCode)
    assert cls.__name__ in errors.__doc__
