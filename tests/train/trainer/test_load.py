"""Where an attempt continues: machines that were away, and which steps they had no part in."""

import math

import pytest

from train.trainer.load import _parted


@pytest.mark.parametrize(
    ("mine", "theirs", "step"),
    [
        ((), (), math.inf),
        ((), (("a", 0),), math.inf),
        ((("a", 0),), (("a", 0),), math.inf),
        ((("b", 100),), (("a", 0), ("b", 100), ("c", 310)), 310),
        ((("b", 100),), (("a", 0), ("b", 100), ("c", 310), ("d", 290)), 290),  # they died, too, and lost steps
        ((("b", 100), ("x", 400)), (("a", 0), ("b", 100), ("c", 310)), 310),  # it went on alone: that does not count
        ((("x", 0),), (("a", 0), ("c", 310)), math.inf),  # nothing is known of each other
    ],
)
def test_the_step_after_which_others_went_on_without_it(
    mine: tuple[tuple[str, int], ...], theirs: tuple[tuple[str, int], ...], step: float
) -> None:
    assert _parted(list(mine), list(theirs)) == step
