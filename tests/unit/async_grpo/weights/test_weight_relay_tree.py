"""Who fetches from whom."""

from __future__ import annotations

import random

import pytest

from async_grpo.weights.zmq.relay_tree import ROOT, RelayTree


def grow(fanout: int, count: int) -> RelayTree:
    tree = RelayTree(fanout)
    for number in range(count):
        tree.add_receiver(f"n{number}", "host", f"tcp://10.0.0.1:{number}")
    return tree


def depth(tree: RelayTree, node: str) -> int:
    relays = {f"tcp://10.0.0.1:{name[1:]}": name for name in (f"n{number}" for number in range(100))}
    steps = 1
    while (parent := tree.parent_relay(node)) != ROOT:
        node, steps = relays[parent], steps + 1
        assert steps < 100, "a cycle"
    return steps


def test_nobody_has_more_children_than_the_fanout_and_the_tree_is_shallow() -> None:
    tree = grow(2, 14)
    assert len(tree.children_of(ROOT)) == 2
    assert all(len(tree.children_of(f"n{number}")) <= 2 for number in range(14))
    assert max(depth(tree, f"n{number}") for number in range(14)) == 3


def test_with_a_fanout_of_zero_everybody_fetches_from_the_publisher() -> None:
    tree = grow(0, 9)
    assert len(tree.children_of(ROOT)) == 9


def test_one_is_a_chain() -> None:
    tree = grow(1, 4)
    assert [depth(tree, f"n{number}") for number in range(4)] == [1, 2, 3, 4]


def test_children_of_a_relay_that_leaves_are_put_elsewhere_with_those_behind_them() -> None:
    tree = grow(2, 14)
    tree.remove_receiver("n0")
    assert len(tree) == 13
    assert len(tree.children_of(ROOT)) == 2
    assert all(depth(tree, f"n{number}") <= 4 for number in range(1, 14))


def test_a_child_that_could_not_fetch_is_put_elsewhere_and_never_back() -> None:
    tree = grow(2, 6)
    before = tree.parent_relay("n2")
    tree.report_failed_relay("n2", before)
    assert tree.parent_relay("n2") not in (before, ROOT)
    tree.report_failed_relay("n2", tree.parent_relay("n2"))
    assert tree.parent_relay("n2") != before


def test_a_suspicion_of_somebody_who_is_not_the_parent_changes_nothing() -> None:
    tree = grow(2, 6)
    before = tree.parent_relay("n5")
    tree.report_failed_relay("n5", "tcp://10.0.0.1:77")
    tree.report_failed_relay("n0", "tcp://10.0.0.1:1")
    assert (tree.parent_relay("n5"), tree.parent_relay("n0")) == (before, ROOT)


def test_the_publisher_serves_beyond_its_fanout_whom_nobody_else_can() -> None:
    tree = grow(1, 2)
    tree.report_failed_relay("n1", tree.parent_relay("n1"))
    assert tree.parent_relay("n1") == ROOT
    assert len(tree.children_of(ROOT)) == 2


def test_a_relay_on_the_loopback_serves_its_own_machine_only() -> None:
    tree = RelayTree(1)
    tree.add_receiver("a", "here", "tcp://127.0.0.1:1")
    tree.add_receiver("b", "there", "tcp://127.0.0.1:1")
    tree.add_receiver("c", "here", "tcp://127.0.0.1:2")
    assert [tree.parent_relay(node) for node in "abc"] == [ROOT, ROOT, "tcp://127.0.0.1:1"]


def test_a_receiver_that_comes_back_on_another_port_is_another_relay() -> None:
    tree = grow(1, 3)
    tree.add_receiver("n1", "host", "tcp://10.0.0.1:50")
    assert len(tree) == 3
    assert "tcp://10.0.0.1:1" not in {tree.parent_relay(f"n{number}") for number in range(3)}


@pytest.mark.parametrize("seed", range(20))
def test_the_relay_tree_has_no_cycle_and_always_reaches_the_publisher(seed: int) -> None:
    rng, tree, there = random.Random(seed), grow(2, 20), {f"n{number}" for number in range(20)}
    for _ in range(60):
        node = rng.choice(sorted(there))
        if rng.random() < 0.3 and len(there) > 1:
            tree.remove_receiver(node)
            there.remove(node)
        else:
            tree.report_failed_relay(node, tree.parent_relay(node))
        assert sum(len(tree.children_of(name)) for name in (ROOT, *there)) == len(there)
        assert all(depth(tree, name) <= len(there) for name in there)
