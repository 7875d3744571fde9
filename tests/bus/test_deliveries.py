from __future__ import annotations

from datetime import UTC, datetime

from weightbus.bus.deliveries import Deliveries, parse_place
from weightbus.bus.interface import Message


def accept(
    deliveries: Deliveries, sequence: int, delivery: int, *, pending: int = 9
) -> Message | None:
    reply = f"$JS.ACK.WEIGHTBUS.writer-0.1.{sequence}.{delivery}.1796087535152339649.{pending}"
    return deliveries.accept("wb.run.1.0.opened", b"x", reply)


def started(last: int = 0, *, requested: int = 100) -> Deliveries:
    deliveries = Deliveries(last=last)
    deliveries.request(requested)
    return deliveries


def test_places_with_and_without_a_domain() -> None:
    plain = parse_place("$JS.ACK.WEIGHTBUS.writer-0.1.7.3.1796087535152339649.4")
    assert plain == (7, 3, datetime(2026, 12, 1, 1, 12, 15, 152339, UTC), 4)
    tail = "WEIGHTBUS.writer-0.1.7.3.1796087535152339649.4"
    assert parse_place(f"$JS.ACK.hub.ACCOUNT.{tail}") == plain
    assert parse_place(f"$JS.ACK._.ACCOUNT.{tail}.token") == plain


def test_contiguous_deliveries_are_handed_out() -> None:
    deliveries = started()
    sequences = [message.sequence for n in range(1, 6) if (message := accept(deliveries, n, n))]
    assert sequences == [1, 2, 3, 4, 5]
    assert (deliveries.delivered, deliveries.last, deliveries.requested) == (5, 5, 95)
    assert not deliveries.broken


def test_a_lost_delivery_breaks_the_consumer() -> None:
    deliveries = started()
    assert accept(deliveries, 1, 1)
    assert accept(deliveries, 3, 3) is None
    assert deliveries.broken == "delivery 3 of message 3 after delivery 1 of message 1"
    assert accept(deliveries, 2, 2) is None


def test_a_message_from_before_the_start_breaks_the_consumer() -> None:
    deliveries = started(last=10)
    assert accept(deliveries, 10, 1) is None
    assert deliveries.broken


def test_a_hole_waits_for_an_audit_and_takes_its_followers_along() -> None:
    deliveries = started()
    assert accept(deliveries, 1, 1)
    assert accept(deliveries, 5, 2) is None
    assert accept(deliveries, 6, 3) is None
    assert deliveries.hole_from == 2
    covered, hole_from = deliveries.begin_audit()
    assert (covered, hole_from) == (2, 2)
    assert accept(deliveries, 7, 4) is None
    assert [message.sequence for message in deliveries.end_audit(covered)] == [5, 6, 7]
    assert accept(deliveries, 8, 5)


def test_a_hole_during_an_audit_waits_for_the_next_one() -> None:
    deliveries = started()
    assert accept(deliveries, 3, 1) is None
    covered, _ = deliveries.begin_audit()
    assert accept(deliveries, 9, 2) is None
    assert [message.sequence for message in deliveries.end_audit(covered)] == [3]
    assert deliveries.hole_from == 4
    covered, hole_from = deliveries.begin_audit()
    assert (covered, hole_from) == (1, 4)
    assert [message.sequence for message in deliveries.end_audit(covered)] == [9]


def test_holes_behind_the_tail_are_no_matter() -> None:
    deliveries = started()
    assert accept(deliveries, 1, 1, pending=0)
    assert accept(deliveries, 50, 2, pending=0)
    deliveries = started()
    deliveries.arrive_at_tail(20)
    assert accept(deliveries, 30, 1, pending=2)
    assert accept(deliveries, 32, 2, pending=1) is None
    assert deliveries.hole_from == 31


def test_the_tail_needs_a_request_under_way() -> None:
    deliveries = started(requested=1)
    assert accept(deliveries, 1, 1, pending=0)
    deliveries.request(1)
    deliveries.audit = False
    assert accept(deliveries, 9, 2, pending=0) is None
    assert deliveries.hole_from == 2


def test_asking_again_after_nothing_was_asked_for_needs_an_audit() -> None:
    deliveries = Deliveries(last=0)
    deliveries.request(2)
    assert not deliveries.audit
    assert accept(deliveries, 1, 1)
    deliveries.request(1)
    assert not deliveries.audit
    assert accept(deliveries, 2, 2)
    assert accept(deliveries, 3, 3)
    deliveries.request(2)
    assert deliveries.audit
    assert accept(deliveries, 4, 4) is None
    covered, hole_from = deliveries.begin_audit()
    assert hole_from is None
    assert [message.sequence for message in deliveries.end_audit(covered)] == [4]
    assert not deliveries.audit


def test_statuses() -> None:
    deliveries = started()
    assert accept(deliveries, 1, 1)
    deliveries.on_status({"Status": "100", "Nats-Last-Consumer": "1"})
    deliveries.on_status({"Status": "408", "Nats-Pending-Messages": "99"})
    assert deliveries.requested == 0
    assert not deliveries.broken
    deliveries.on_status({"Status": "100", "Nats-Last-Consumer": "4"})
    assert deliveries.broken == "deliveries 2 to 4 were lost"
    deliveries = started()
    deliveries.on_status({"Status": "409", "Description": "Consumer Deleted"})
    assert deliveries.broken == "409 Consumer Deleted"
