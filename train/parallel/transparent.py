"""A module around a model, which a task's functions can use as if it were the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class Transparent(nn.Module):
    """What it lacks itself it finds in the model, and it names the parameters as the model does.

    `state_dict` and `children` are those of the module itself.
    """

    @property
    def inner(self) -> nn.Module:
        """The model."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self.__dict__.get("_modules", {}):  # torch asks for its own
                raise
            return getattr(self.inner, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.inner.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.inner.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self.inner.named_modules(*args, **kwargs)
