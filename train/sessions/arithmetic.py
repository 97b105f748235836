"""Sets torch's arithmetic for a session so that sums do not differ from run to run, and names what differs anyway."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..build import determinism

log = logging.getLogger("train")


class Arithmetic:
    """Deterministic algorithms, where torch has them.

    Args:
        tell: names what is not exact.
        is_first: whether this is rank 0.
    """

    def __init__(self, tell: Callable[[str], None], *, is_first: bool) -> None:
        self._tell, self._borders = tell, 0
        if torch.backends.cudnn.benchmark and is_first:
            log.warning(
                "warning: torch.backends.cudnn.benchmark was True, and the session sets it to False; to keep it: "
                "ts.session(deterministic=False)"
            )
        is_strict = torch.are_deterministic_algorithms_enabled()
        determinism.switch_on(warn_only=not is_strict or torch.is_deterministic_algorithms_warn_only_enabled())
        warnings.filterwarnings("default", message="(?s).*deterministic")
        warnings.showwarning = self._shown(warnings.showwarning)

    def _shown(self, others: Callable[..., None]) -> Callable[..., None]:
        def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if name := determinism.without_form(str(message)):
                self._tell(f"{name} has no deterministic form here: its sums may differ from run to run")
            else:
                others(message, *args, **kwargs)

        return show

    def look(self) -> None:
        """Name what the script has set otherwise. Called at each border, looks at the 1st, 2nd, 4th, 8th, …"""
        self._borders += 1
        if self._borders & (self._borders - 1):
            return
        if not torch.are_deterministic_algorithms_enabled():
            self._tell("torch.use_deterministic_algorithms: was True, is False")
        if torch.backends.cudnn.benchmark and torch.cuda.is_available():
            self._tell("torch.backends.cudnn.benchmark: was False, is True")
