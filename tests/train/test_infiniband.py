"""NCCL uses InfiniBand only where the library, a driver, an open device file and an active port are all there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.verbs import install, plug_in
from train import infiniband
from train.nodes import address

UP, DOWN = "4: ACTIVE", "1: DOWN"


def test_active_ports_of_cards_that_the_library_knows_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(tmp_path, {"mlx5_0": UP, "mlx5_1": DOWN, "mlx5_2": UP, "rxe0": UP})
    install(tmp_path, monkeypatch, "mlx5_0", "mlx5_1", "mlx5_2")
    assert infiniband.usable({}, tmp_path) == ["mlx5_0:1", "mlx5_2:1"]
    assert infiniband.usable({"NCCL_IB_DISABLE": "1"}, tmp_path) == []
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    assert infiniband.usable({"NCCL_IB_DISABLE": "0"}, tmp_path) == ["mlx5_2:1"]
    monkeypatch.setattr(infiniband, "LIBRARIES", ("libibverbs-of-nobody.so",))
    assert infiniband.usable({}, tmp_path) == []


def test_nccl_gets_an_interface_only_without_infiniband() -> None:
    place = ("127.0.0.1", 1)
    assert address.interfaces(*place, environ={})[1] == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert address.interfaces(*place, environ={}, infiniband=["mlx5_0:1"])[1] == {"GLOO_SOCKET_IFNAME": "lo"}
