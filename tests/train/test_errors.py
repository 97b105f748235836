"""What an error's line says of a name that does not exist."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from train.errors import described

config: Any = SimpleNamespace(task=SimpleNamespace(width=3, __widh__=1), batch_size=4)


class Broken:
    def __dir__(self) -> list[str]:
        raise OSError


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: config.task.widht, "no attribute 'widht'; did you mean width?"),
        (lambda: config.batchsize, "did you mean batch_size?"),
        (lambda: np.meann, "no attribute 'meann'; did you mean mean"),
        (lambda: confg, "NameError: name 'confg' is not defined; did you mean config?"),  # type: ignore[name-defined] # noqa: F821
        (lambda: prinnt, "did you mean print?"),  # type: ignore[name-defined] # noqa: F821
        (lambda: config.task.xyzzy, "AttributeError: 'types.SimpleNamespace' object has no attribute 'xyzzy'"),
        (lambda: Broken().one, "AttributeError: 'Broken' object has no attribute 'one'"),  # type: ignore[attr-defined]
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_the_nearest_name_is_named(fails: Callable[[], Any], said: str) -> None:
    with pytest.raises(Exception, match="") as caught:
        fails()
    assert described(caught.value).endswith(said) or said in described(caught.value)
    assert ("did you mean" in described(caught.value)) == ("did you mean" in said)
