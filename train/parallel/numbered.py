"""By which numbers GPUs are called. Imports no torch."""

from __future__ import annotations

import os

ORDER, AS_NVIDIA_SMI = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"


def as_nvidia_smi_does() -> None:
    """Let CUDA count the GPUs that this process sees as NVML does, unless a user has said otherwise.

    By itself CUDA begins with the fastest (CUDA C++ Programming Guide, "CUDA Environment Variables"): on a machine with
    several kinds of cards id 0 would be another than that of nvidia-smi, of `train top`, and of torch, which counts by
    NVML. Read when the driver is opened.
    """
    os.environ.setdefault(ORDER, AS_NVIDIA_SMI)
