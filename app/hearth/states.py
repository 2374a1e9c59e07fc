"""The supervisor's states and the moves between them."""

from enum import StrEnum


class State(StrEnum):
    IDLE = "idle"
    STARTING = "starting"
    SERVING = "serving"
    RECOVERING = "recovering"
    BACKOFF = "backoff"
    DRAINING = "draining"
    STOPPED = "stopped"
    GAVE_UP = "gave_up"
    HOST_ACTION_REQUIRED = "host_action_required"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.IDLE: frozenset({State.STARTING, State.STOPPED, State.GAVE_UP, State.HOST_ACTION_REQUIRED}),
    State.STARTING: frozenset({State.SERVING, State.RECOVERING, State.DRAINING}),
    State.SERVING: frozenset({State.RECOVERING, State.DRAINING}),
    State.RECOVERING: frozenset(
        {State.STARTING, State.BACKOFF, State.DRAINING, State.GAVE_UP, State.HOST_ACTION_REQUIRED}
    ),
    State.BACKOFF: frozenset({State.STARTING, State.DRAINING, State.GAVE_UP, State.HOST_ACTION_REQUIRED}),
    State.DRAINING: frozenset({State.STOPPED}),
    State.STOPPED: frozenset(),
    State.GAVE_UP: frozenset(),
    State.HOST_ACTION_REQUIRED: frozenset(),
}


def allowed(current: State, new: State) -> bool:
    """Whether the table has this move."""
    return new in TRANSITIONS[current]
