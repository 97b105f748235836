"""The commands in a warning about the learning rate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from train.build.schedule import Planned
from train.config import Config
from train.launcher.rate_change import _epochs


@given(st.integers(1, 10**12), st.integers(1, 10**7))
def test_steps_in_epochs_are_a_plain_number_that_gives_the_same_steps(steps: int, per_epoch: int) -> None:
    text = _epochs(steps, Planned(Config(), per_epoch, steps))
    assert round(float(text) * per_epoch) == steps and not {*text} - {*"0123456789."}


def test_they_have_as_few_digits_as_possible() -> None:
    found = [_epochs(steps, Planned(Config(), each, steps)) for steps, each in ((1500, 10), (15, 10), (1, 3), (10, 10))]
    assert found == ["150", "1.5", "0.3", "1"]
