import itertools

import pytest
from weightbus.engine_agents.states import TRANSITIONS, AgentState, Machine
from weightbus.schemas.errors import IllegalTransitionError

PAIRS = list(itertools.product(AgentState, AgentState))


def path_to(goal: AgentState) -> list[AgentState]:
    """The shortest way from IDLE."""
    paths = [[AgentState.IDLE]]
    for path in paths:
        if path[-1] is goal:
            return path
        paths += [[*path, state] for state in TRANSITIONS[path[-1]] if state not in path]
    raise AssertionError(f"{goal} cannot be reached")


def machine_in(state: AgentState) -> Machine:
    machine = Machine()
    for step in path_to(state)[1:]:
        machine.move(step)
    return machine


@pytest.mark.parametrize(("start", "goal"), PAIRS, ids=lambda state: state.name)
def test_every_pair_moves_as_the_table_says(start: AgentState, goal: AgentState):
    machine = machine_in(start)
    if goal in TRANSITIONS[start]:
        machine.move(goal)
        assert machine.state is goal
    else:
        with pytest.raises(IllegalTransitionError, match=f"from {start.name} to {goal.name}"):
            machine.move(goal)
        assert machine.state is start


def test_every_state_is_reached_and_left():
    assert set(TRANSITIONS) == set(AgentState)
    assert {state for after in TRANSITIONS.values() for state in after} == set(AgentState)
    assert all(TRANSITIONS.values())


def test_serving_is_reached_from_a_change_only_by_verifying():
    before = {state for state, after in TRANSITIONS.items() if AgentState.SERVING in after}
    assert {state for state in before if state.busy} == {AgentState.VERIFYING}


def test_a_paused_engine_is_left_only_by_states_that_say_what_became_of_it():
    for state in (AgentState.PAUSED, AgentState.LOADING, AgentState.VERIFYING):
        assert AgentState.IDLE not in TRANSITIONS[state]
        assert {AgentState.RESUMED, AgentState.FENCED} <= TRANSITIONS[state]


def test_timings_are_those_of_the_last_change():
    now = 0.0
    machine = Machine(lambda: now)
    way = ["STAGING", "STAGED", "PAUSED", "LOADING", "VERIFYING", "SERVING"]
    for seconds, name in enumerate(way):
        now += seconds
        machine.move(AgentState[name])
    expected = {"STAGING": 1, "STAGED": 2, "PAUSED": 3, "LOADING": 4, "VERIFYING": 5}
    assert machine.timings_s() == expected
    machine.move(AgentState.STAGING)
    assert machine.timings_s() == {}


def test_settle_accepts_the_state_it_is_in():
    machine = machine_in(AgentState.FENCED)
    machine.settle(AgentState.FENCED)
    machine.settle(AgentState.RESUMED)
    assert machine.state is AgentState.RESUMED
