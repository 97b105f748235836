"""Who sits at node 0's table: messages and the clock go in, messages come out."""

from __future__ import annotations

from typing import Any

import pytest

from train.cluster import same
from train.cluster.table import LAST_CALL, LOST, UNENDING, Table

SAME = {"torch": "2.7.1", "python": "3.11", "code": "abc", "task": "t", "data": "d", "init": "", "config": {"seed": 0}}


def hello(node: int, least: int = 2, most: int = 2, **more: Any) -> dict[str, Any]:
    one = {
        "is": "hello", "run": "a", "node": node, "nproc": 1, "least": least, "most": most, "chosen": {"cpu_threads": 1},
        "has_begun": False, "host": f"host{node}", "home": f"/runs{node}/a", "same": SAME,
    }  # fmt: skip
    return one | more


class Room:
    """A table and a clock."""

    def __init__(self, least: int = 2, most: int = 2) -> None:
        self.now = 100.0
        self.table = Table(hello(0, least, most), self.now)
        self.least, self.most = least, most

    def come(self, key: int, node: int, **more: Any) -> list[Any]:
        said = list(self.table.hello(key, hello(node, self.least, self.most, **more), self.now))
        return said + self.tick()

    def say(self, key: int, what: str, **more: Any) -> list[Any]:
        return list(self.table.heard(key, {"is": what, **more}, self.now)) + self.tick()

    def over(self, key: int, bad: bool = False) -> list[Any]:
        return self.say(key, "over", round=1, report={"bad": bad, "from": key})

    def gone(self, key: int) -> list[Any]:
        return list(self.table.gone(key, self.now)) + self.tick()

    def tick(self, seconds: float = 0.0, alive: tuple[int, ...] = ()) -> list[Any]:
        """Let time pass, in which these show signs of life."""
        self.now += seconds
        said = [one for key in alive for one in self.table.heard(key, {"is": "alive"}, self.now)]
        return said + list(self.table.tick(self.now))


def kinds(said: list[Any]) -> list[tuple[int, str]]:
    return [(key, message["is"]) for key, message in said]


@pytest.fixture
def room() -> Room:
    """Two nodes, in a round: keys 10 and 11."""
    made = Room()
    made.come(10, 0)
    assert kinds(made.come(11, 1)) == [(10, "begin"), (11, "begin")]
    return made


def test_who_waits_hears_who_is_missing() -> None:
    room = Room(3, 3)
    (_, said), *_ = room.come(12, 2)
    assert said["missing"] == [0, 1]
    assert [message["missing"] for _, message in room.come(10, 0)] == [[1], [1]]
    assert room.tick(1.0, alive=(10, 12)) == []  # nothing has changed


def test_ranks_are_counted_by_node_in_whatever_order_they_came() -> None:
    room = Room()
    room.come(11, 1, nproc=3)
    begun = room.come(10, 0)[0][1]
    assert [(node["node"], node["ranks"]) for node in begun["nodes"]] == [(0, 1), (1, 3)]


def test_a_node_in_trouble_ends_the_round_for_all_and_all_hear_from_all(room: Room) -> None:
    assert kinds(room.over(11, bad=True)) == [(10, "end")]
    said = room.over(10)
    assert kinds(said) == [(10, "reports"), (11, "reports")]
    assert set(said[0][1]["reports"]) == {"0", "1"} and said[0][1]["lost"] == []
    room.say(11, "ready")
    assert kinds(room.say(10, "ready"))[:2] == [(10, "begin"), (11, "begin")]


def test_a_node_that_is_gone_ends_the_round_for_the_others(room: Room) -> None:
    assert kinds(room.gone(11)) == [(10, "end")]
    (_, said), *_ = room.over(10, bad=True)
    assert said["lost"] == ["node 1 (host1)"]
    assert room.say(10, "ready")[0][1]["missing"] == [1]
    assert kinds(room.come(13, 1)) == [(10, "begin"), (13, "begin")]


def test_silence_is_the_same_after_a_while(room: Room) -> None:
    assert room.tick(LOST - 1, alive=(10,)) == []
    assert kinds(room.tick(2.0, alive=(10,))) == [(11, "bye"), (10, "end")]


def test_a_node_whose_ranks_cannot_be_ended_is_gone_after_a_while(room: Room) -> None:
    room.over(10, bad=True)
    said = [one for _ in range(int(UNENDING / 5)) for one in room.tick(5.0, alive=(10, 11))]
    assert said == []
    said = room.tick(5.0, alive=(10, 11))
    assert kinds(said) == [(10, "remark"), (11, "remark"), (11, "bye"), (10, "reports")]
    assert "node 1 (host1) cannot be ended" in said[0][1]["line"] and said[3][1]["lost"] == ["node 1 (host1)"]


def test_a_node_that_was_gone_when_the_run_ended_hears_how(room: Room) -> None:
    room.over(10), room.over(11)
    room.say(10, "leave")
    room.gone(11)  # before it could say that it knows
    assert room.table.untold == {1}
    assert (13, "reports") in kinds(room.come(13, 1))
    room.say(13, "leave")
    assert not room.table.untold


def test_a_node_that_is_back_before_the_others_have_ended_hears_how_and_did_not_come_anew(room: Room) -> None:
    room.over(11)
    room.gone(11)
    room.come(13, 1)
    said = room.over(10)
    assert kinds(said)[:2] == [(10, "reports"), (13, "reports")] and said[0][1]["came"] == []
    assert room.table.untold == {0, 1}


def test_the_same_rank_twice_is_refused_with_a_line_for_both(room: Room) -> None:
    room.tick(1.0)
    assert kinds(room.come(12, 1, host="other", home="/elsewhere/a")) == []  # until the first one shows that it lives
    said = room.tick(1.0, alive=(10, 11))
    assert kinds(said) == [(12, "refused"), (10, "remark"), (11, "remark")]
    assert "node 1 (other)" in said[0][1]["line"] and "--node-rank" in said[0][1]["line"]


def test_a_node_that_comes_again_takes_its_own_place(room: Room) -> None:
    assert kinds(room.come(12, 1)) == []
    assert kinds(room.tick(4.0, alive=(10,)))[:2] == [(11, "bye"), (10, "end")]  # its first connection is stale
    assert (10, "reports") in kinds(room.over(10, bad=True))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"run": "b"}, "run b"),
        ({"same": SAME | {"code": "xyz"}}, "copy of train/ than node 0 (host0): xyz instead of abc"),
        ({"same": SAME | {"torch": "2.8"}}, "version of torch"),
        ({"same": SAME | {"task": "u"}}, "task file"),
        ({"same": SAME | {"data": "e"}}, "data set"),
        ({"same": SAME | {"config": {"seed": 3}}}, "seed is 3, not 0"),
        ({"most": 3}, "--nnodes 2:3, and node 0 (host0) with 2"),
        ({"node": 5}, "counted from 0"),
    ],
)
def test_what_differs_is_refused_with_a_line_for_both(change: dict[str, Any], words: str) -> None:
    room = Room()
    room.come(10, 0)
    said = list(room.table.hello(11, hello(1) | change, room.now))
    assert kinds(said) == [(11, "refused"), (10, "remark")]
    for _, message in said:
        assert words in message["line"] and "(host1)" in message["line"]


@pytest.mark.parametrize(
    ("share", "counts", "fits"), [(4, (2, 2), True), (2, (4, 2), True), (2, (2, 1), False), (4, (4, 2), False)]
)
def test_copies_of_a_model_are_not_left_without_a_part(share: int, counts: tuple[int, int], fits: bool) -> None:
    same_hsdp = SAME | {"config": {"parallel.strategy": "hsdp", "parallel.shard_size": share}}
    nodes = [hello(node, nproc=count, same=same_hsdp) for node, count in enumerate(counts)]
    found = same.difference(*nodes)
    assert not found if fits else f"node 1 (host1) has --nproc {counts[1]}" in found and str(share) in found


def test_what_is_told_of_a_stranger_is_a_line_that_a_terminal_can_show(room: Room) -> None:
    for change in ({"run": "x" * 100_000}, {"node": 10**400}, {"host": "\x1b[2J", "run": "b"}):
        for _, said in room.table.hello(12, hello(1) | change, room.now):
            assert len(said["line"]) < 1300 and said["line"].isprintable(), said


def test_what_no_user_has_set_may_differ_and_is_node_0s() -> None:
    assert same.difference(hello(0), hello(1, chosen={"cpu_threads": 8})) == ""
    room = Room()
    room.come(10, 0)
    assert room.come(11, 1, chosen={"cpu_threads": 8})[0][1]["chosen"] == {"cpu_threads": 1}


def test_what_no_user_has_set_stays_as_the_run_has_begun_with_it_when_node_0_is_new() -> None:
    room = Room()
    room.come(10, 0)
    assert room.come(11, 1, chosen={"cpu_threads": 8}, has_begun=True)[0][1]["chosen"] == {"cpu_threads": 8}
    room.gone(10), room.over(11)
    room.say(11, "ready")
    assert room.come(12, 0)[0][1]["chosen"] == {"cpu_threads": 8}  # node 1 has not come again since


def test_an_elastic_run_begins_with_fewer_and_takes_in_who_comes_later() -> None:
    room = Room(1, 3)
    assert kinds(room.come(10, 0)) == [(10, "waiting")]
    assert room.tick(LAST_CALL - 1, alive=(10,)) == []
    assert kinds(room.tick(2.0, alive=(10,))) == [(10, "begin")]
    assert (10, "regroup") in kinds(room.come(12, 2))
    room.over(10)
    room.say(10, "ready")
    said = room.tick(LAST_CALL + 1, alive=(10, 12))
    assert [node["node"] for node in said[0][1]["nodes"]] == [0, 2]


def test_nothing_begins_without_node_0() -> None:
    room = Room(1, 3)
    room.come(11, 1)
    assert "begin" not in [kind for _, kind in kinds(room.tick(LAST_CALL + 1, alive=(11,)))]


def test_strangers_are_not_seated() -> None:
    room = Room()
    for wrong in ({"nproc": 0}, {"node": "1"}, {"same": None}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            list(room.table.hello(11, hello(1) | wrong, room.now))
    with pytest.raises(KeyError):
        list(room.table.hello(11, {"is": "hello"}, room.now))
    assert kinds(room.come(10, 0)) == [(10, "waiting")]


def test_who_comes_when_the_ranks_have_just_ended_is_told_of() -> None:
    room = Room(1, 2)
    room.come(10, 0)
    room.tick(LAST_CALL + 1, alive=(10,))
    room.come(11, 1)
    (_, said), *_ = room.over(10)
    assert (said["is"], said["came"]) == ("reports", ["node 1 (host1)"])
