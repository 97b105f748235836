"""What NCCL is told before the first communicator."""

from __future__ import annotations

import pytest

from train.parallel import nccl

FREE = "Name:\tpython\nCapEff:\t000001ffffffffff\nSeccomp:\t0\n"
DOCKER = "Name:\tpython\nCapEff:\t00000000a80425fb\nSeccomp:\t2\n"
WITH_NICE = "Name:\tpython\nCapEff:\t00000000a88425fb\nSeccomp:\t2\n"


@pytest.mark.parametrize(("status", "walled"), [(FREE, False), (DOCKER, True), (WITH_NICE, False), ("", False)])
def test_docker_s_wall_is_recognised(status: str, walled: bool) -> None:
    assert nccl.is_walled(status) is walled


def test_what_the_user_has_set_stays() -> None:
    environ = {"NCCL_NVLS_ENABLE": "1"}
    nccl.fill(environ, deterministic=True, walled=True)
    assert environ == {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"}


def test_the_switch_adds_only_where_no_order_is_wanted() -> None:
    environ: dict[str, str] = {}
    nccl.fill(environ, deterministic=False, walled=False)
    assert environ == {}
    nccl.fill(environ, deterministic=True, walled=False)
    assert environ == {"NCCL_NVLS_ENABLE": "0"}
