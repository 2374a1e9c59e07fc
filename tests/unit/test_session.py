"""Who still runs in a session."""

from __future__ import annotations

import subprocess
import time

import psutil

from hearth.session import session_members


def test_what_is_dead_and_not_reaped_is_no_member() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as leader:
        assert [member.pid for member in session_members(leader.pid)] == [leader.pid]
        leader.kill()
        while psutil.Process(leader.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert session_members(leader.pid) == []
