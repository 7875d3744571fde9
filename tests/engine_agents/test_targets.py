import itertools

from support.engine_versions import PLAN_DIGEST, key
from weightbus.engine_agents.targets import Targets
from weightbus.schemas.events import VersionAborted, VersionComplete, VersionKey, VersionRetired


def complete(version: VersionKey) -> VersionComplete:
    return VersionComplete(
        version=version, directory="/v", manifest_digest=PLAN_DIGEST, shards=1, nbytes=1
    )


def retired(version: VersionKey) -> VersionRetired:
    return VersionRetired(version=version, directory="/v", reason="keep 2")


def targets_of(*versions: VersionKey, depth: int = 3) -> Targets:
    targets = Targets("run-1", depth)
    for version in versions:
        targets.add(complete(version))
    return targets


def chosen(targets: Targets, current: VersionKey | None = None) -> VersionKey | None:
    event = targets.target(current)
    return None if event is None else event.version


def test_the_newest_attempt_and_version_win_in_every_order():
    versions = [key(1), key(2), key(9), key(0, attempt=2), key(1, attempt=2)]
    for order in itertools.permutations(versions):
        assert chosen(targets_of(*order)) == key(1, attempt=2)


def test_other_runs_and_aborted_versions_are_not_seen():
    targets = targets_of(key(1))
    assert not targets.add(complete(key(5, run_id="other")))
    aborted = VersionAborted(version=key(6), error="X", message="", by="w")
    assert not targets.add(aborted)
    assert chosen(targets) == key(1)


def test_an_event_seen_twice_changes_nothing():
    targets = targets_of(key(1))
    assert not targets.add(complete(key(1)))


def test_a_retired_version_gives_way():
    targets = targets_of(key(1), key(2))
    assert targets.add(retired(key(2)))
    assert targets.is_retired(key(2))
    assert chosen(targets) == key(1)


def test_a_corrupt_version_gives_way_to_the_one_before_it_but_never_behind_what_is_served():
    targets = targets_of(key(1), key(2), key(3))
    targets.reject(key(3), with_older=False)
    assert chosen(targets) == key(2)
    assert chosen(targets, current=key(2)) == key(2)
    targets.reject(key(2), with_older=False)
    assert chosen(targets, current=key(2)) is None
    assert chosen(targets, current=key(7, run_id="other")) == key(1)


def test_the_way_back_has_an_end():
    targets = targets_of(*(key(number) for number in range(9)), depth=2)
    targets.reject(key(8), with_older=False)
    assert chosen(targets) == key(7)
    targets.reject(key(7), with_older=False)
    assert chosen(targets) is None


def test_the_way_back_stays_in_the_attempt():
    targets = targets_of(key(1), key(0, attempt=2))
    targets.reject(key(0, attempt=2), with_older=False)
    assert chosen(targets) is None


def test_what_the_engine_refused_takes_older_versions_along():
    targets = targets_of(key(1), key(2))
    targets.reject(key(2), with_older=True)
    assert chosen(targets) is None
    targets.add(complete(key(3)))
    assert chosen(targets) == key(3)


def test_a_new_engine_process_may_try_older_versions_again():
    targets = targets_of(key(1), key(2))
    targets.reject(key(2), with_older=True)
    targets.forgive()
    assert chosen(targets) == key(1)


def test_the_newest_version_counts_even_if_the_engine_has_a_higher_one():
    # The stream was lost, and the run began again at attempt 1.
    assert chosen(targets_of(key(0)), current=key(8, attempt=3)) == key(0)


def test_skipped_versions_are_named_once_and_not_without_bound():
    targets = targets_of(*(key(number) for number in range(10)))
    targets.reported(key(8))
    assert targets.take_skipped(key(9), key(3), at_most=3) == [key(5), key(6), key(7)]
    assert targets.take_skipped(key(9), None, at_most=3) == []


def test_forgetting_starts_over():
    targets = targets_of(key(1))
    targets.forget()
    assert chosen(targets) is None
    assert targets.add(complete(key(1)))
