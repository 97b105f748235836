"""Files of weights that lie where the doctor looks: wrapped ones, and what only claims to be weights."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from train.doctor import weights
from train.doctor.finding import WARNING, Finding

ROOT = Path(__file__).parents[3]


def test_weights_of_a_wrapped_model(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from torch import nn

    model = nn.DataParallel(nn.Linear(2, 2))
    torch.save(model.state_dict(), tmp_path / "wrapped.pt")
    save_file(model.state_dict(), tmp_path / "wrapped.safetensors")
    torch.save(model.module.state_dict(), tmp_path / "plain.pt")
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04nothing")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 9)
    findings = [finding for finding in weights.checks(tmp_path) if "broken" not in finding.seen]
    assert sorted(finding.seen.split(" in ")[1].split()[0] for finding in findings) == [
        "wrapped.pt",
        "wrapped.safetensors",
    ]
    assert all("2 of 2 names" in finding.seen for finding in findings)


def headed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def archived(pickled: bytes) -> bytearray:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickled)
    return bytearray(whole.getvalue())


def strange_weights(folder: Path) -> dict[str, str]:
    """Files that claim to be weights, and what is to be said of each."""
    encrypted, torn = archived(b"x"), archived(os.urandom(2000))
    encrypted[6] |= 1
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    torn[100:400] = os.urandom(300)
    listed = b"PK\x01\x02" + bytes([20, 0, 20]) + bytes(39)
    many = b"PK\x03\x04" + bytes(99) + listed * 400_000
    end = b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, 400_000 & 0xFFFF, 400_000 & 0xFFFF, 400_000 * 46, 103, 0)
    files = {
        "five.safetensors": (headed(b"5"), "lists no tensors"),
        "list.safetensors": (headed(b"[5]"), "lists no tensors"),
        "deep.safetensors": (headed(b"[" * 1_000_000), "nested too deep"),
        "short.safetensors": (headed(b"{}" * 50)[:-7], "ends before"),
        "empty.safetensors": (b"", "ends before"),
        "text.safetensors": (b"version https://git-lfs.github.com/spec/v1", "header would have"),
        "encrypted.pt": (bytes(encrypted), "encrypted"),
        "torn.pt": (bytes(torn), "damaged"),
        "bomb.pt": (bytes(archived(bytes(200_000_000))), "more than"),
        "many.pt": (many + end, "longer than"),
        "half.pt": (bytes(archived(b"x"))[:-9], "damaged"),
    }
    for name, (content, _) in files.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.pt")
    (folder / "loop.pth").symlink_to("loop.pth")
    (folder / "gone.pth").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(folder / "bound.pt"))
    (folder / "device.pt").symlink_to("/dev/zero")
    (folder / "folder.pt").mkdir()
    others = {"pipe.pt": "a named pipe", "bound.pt": "a socket", "device.pt": "a device", "loop.pth": "Too many levels",
              "gone.pth": "No such file"}  # fmt: skip
    return {name: said for name, (_, said) in files.items()} | others


def test_what_is_called_weights_and_is_none_has_a_line_and_nothing_waits_for_it(tmp_path: Path) -> None:
    expected = strange_weights(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "train", "doctor", "--json"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert not done.stderr
    said = [Finding(**each) for each in json.loads(done.stdout) if each["check"] == "weights"]
    assert sorted(finding.seen.split()[0] for finding in said) == sorted(expected)
    for finding in said:
        assert expected[finding.seen.split()[0]] in finding.seen
        assert finding.verdict == WARNING


def test_the_name_of_a_file_is_quoted_where_it_stands_in_a_command(tmp_path: Path) -> None:
    wrapped = archived(pickle.dumps({"module.weight": 1}))
    (tmp_path / "a b;reboot.pt").write_bytes(wrapped)
    (tmp_path / "--rm.pt").write_bytes(wrapped)
    remedies = [finding.remedy for finding in weights.checks(tmp_path)]
    assert sorted(remedy.partition("--init ")[2] for remedy in remedies) == ["'a b;reboot.pt'", "./--rm.pt"]


def test_bytes_that_were_changed_in_weights_end_nothing(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from torch import nn

    model = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    torch.save({"model": model.state_dict(), "none": None}, tmp_path / "whole.pt")
    save_file(model.state_dict(), tmp_path / "whole.safetensors")
    whole = [(tmp_path / name, (tmp_path / name).read_bytes()) for name in ("whole.pt", "whole.safetensors")]
    chance, took = random.Random(11), 0.0
    for number in range(2000):
        path, content = whole[number % 2]
        changed = bytearray(content[: chance.randrange(len(content))] if number % 3 == 0 else content)
        # headers are at the beginning of the one and at the end of the other
        for _ in range(chance.randrange(1, 6)):
            at = chance.choice([chance.randrange(1000), -1 - chance.randrange(1000)])
            if -len(changed) <= at < len(changed):
                changed[at] = chance.randrange(256)
        path.write_bytes(changed)
        begin = time.process_time()
        with contextlib.suppress(weights.Unreadable):
            weights.names_in(path)
        took = max(took, time.process_time() - begin)
    assert took < 1
