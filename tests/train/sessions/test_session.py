"""A loop in a session continues at any border with the same bits, and its calls refuse what they cannot keep.

Each attempt is a fork of this process, which is the rank of a launched run. Runs that are killed from outside, on
several ranks, are in test_kills.py.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from train.errors import EXIT_REFUSED, EXIT_STOPPED, Refused
from train.run import folders
from train.run.run_folder import Run
from train.sessions.session import Session, session

pytestmark = pytest.mark.never_forgiven

Body = Callable[..., Any]
KILLED = 9
mixing = np.random.default_rng()  # of the model's file: found and seeded


def die(run: Session) -> None:
    """End this process as a SIGKILL does, after the checkpoint that is being written: which step it is would be
    chance."""
    run._state.settle(60)
    os._exit(KILLED)


def made(folder: Path, name: str) -> Run:
    return folders.create(folder, name, files={}, record={"script": "script.py"})


def attempt(run: Run, body: Body, *arguments: Any) -> tuple[int, str]:
    """Start a rank of the run. Returns its exit code and what it printed."""
    number = run.begin_attempt(1, None)

    def rank() -> None:
        os.environ |= {"TRAIN_RUN_DIR": str(run.path), "TRAIN_ATTEMPT": str(number)}
        for fd in (1, 2):
            os.dup2(output.fileno(), fd)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        logging.getLogger().handlers = [logging.StreamHandler(sys.stderr)]  # not pytest's
        torch.set_num_threads(1)
        torch.seed()  # as in a fresh process, in which nothing was drawn yet
        try:
            body(*arguments)
        except Refused as error:
            print(error, file=sys.stderr)
            os._exit(EXIT_REFUSED)
        except SystemExit as error:
            os._exit(error.code)  # type: ignore[arg-type]
        os._exit(0)

    with tempfile.TemporaryFile() as output:
        pid = os.fork()  # a process of multiprocessing may not open a session
        if not pid:
            try:
                rank()
            finally:
                traceback.print_exc()
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        return code, output.read().decode()


class Data:
    """27 samples with noise from each generator of the host."""

    def __len__(self) -> int:
        return 27

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index)) + torch.randn(4), torch.tensor([random.random() + np.random.rand()])


class Net(nn.Sequential):
    """A class of this file, so that the generator of this file belongs to the model."""


def train(kill: tuple[int, int] = (-1, -1), save: int = 2, end: str = "", workers: int = 0) -> None:
    """Train a small network as a user's script does: with accumulation, and work at the end of an epoch.

    Args:
        kill: the epoch and the batch before whose body the process dies; batch 5: before the work at the epoch's end;
            batch 6: after it.
        save: the batch in which a checkpoint is asked for.
    """
    run = session(seed=1, save_minutes=0, log_samples=True)
    net = Net(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters())
    loader = run.loader(Data(), batch_size=5, num_workers=workers)
    run.register(model=net, optimizer=optimizer)
    sums = run.values.setdefault("sums", [])
    for epoch in run.epochs(3):
        sums.append(random.random())
        for number, (inputs, targets) in enumerate(loader, loader.start):
            if (epoch, number) == kill:
                die(run)
            loss = nn.functional.mse_loss(mixing.random() * net(inputs), targets) / 2
            loss.backward()
            if number % 2 or number == len(loader) - 1:
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss, lr=0.1)
            if number == save:
                run.save()
            if end == "break" and number == 3:
                break
        if (epoch, 5) == kill:
            die(run)
        sums.append(torch.rand(1).item() + np.random.rand() + random.random())
        with (run._place.run.folder / "ends").open("a") as file:
            file.write(f"{epoch} {sums[-1]}\n")
        if (epoch, 6) == kill:
            die(run)
    if end != "exit":
        run.finish()
    else:
        run._place._exited()


def outcome(run: Run, number: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run.logs(number) / "rank0.outcome.json").read_text())
    return content


def result(run: Run) -> dict[str, Any]:
    """All that a run leaves and that must not depend on kills."""
    last = outcome(run, max(int(path.name.removeprefix("attempt-")) for path in (run.folder / "logs").iterdir()))
    assert last["kind"] == "finished", last
    ends = dict.fromkeys((run.folder / "ends").read_text().splitlines())
    files = [run.metrics.read_text(), (run.folder / "samples.rank0.log").read_text()]
    return {"digest": last["figures"]["weights_sha256"], "step": last["step"], "ends": [*ends], "files": files}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What runs leave that nobody disturbed, by the batch in which they ask for a checkpoint."""
    found = {}
    for save in (2, 4):
        run = made(tmp_path_factory.mktemp("calm"), "calm")
        assert attempt(run, train, (-1, -1), save) == (0, "")
        found[save] = result(run)
    return found


def test_what_a_run_leaves(calm: dict[int, dict[str, Any]]) -> None:
    lines = [json.loads(line) for line in calm[2]["files"][0].splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 10)]
    assert [line["epoch"] for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(set(line) == {"step", "epoch", "loss", "lr"} for line in lines)
    samples = [[int(word) for word in line.split()] for line in calm[2]["files"][1].splitlines()]
    assert [line[0] for line in samples] == [*range(1, 16)] and all(len(set(line[1:])) == 5 for line in samples)
    assert calm[2]["digest"] == calm[4]["digest"] and calm[2]["step"] == 9


@pytest.mark.parametrize(
    ("kill", "save", "workers"),
    [((0, 1), 2, 0), ((1, 0), 2, 0), ((1, 4), 2, 0), ((1, 3), 2, 1), ((1, 5), 4, 0), ((1, 6), 4, 0), ((2, 2), 4, 2)],
)
def test_a_killed_run_ends_as_one_that_nobody_disturbed(
    calm: dict[int, dict[str, Any]], tmp_path: Path, kill: tuple[int, int], save: int, workers: int
) -> None:
    run = made(tmp_path, "killed")
    assert attempt(run, train, kill, save, "", workers)[0] == KILLED
    code, printed = attempt(run, train, (-1, -1), save, "", workers)
    assert code == 0 and re.sub(r"\d+", "N", printed) in ("", "session: continues after update N, epoch N, batch N\n")
    assert result(run) == calm[save]


def report(batch_size: int = 9, kill: tuple[int, int] = (-1, -1), stop: int = -1) -> None:
    """Use at the end of an epoch what its batches have set, as reports do, and save as often as possible.

    Args:
        kill: the epoch and the batch after whose body the process dies; a batch more: in the work at the epoch's end.
        stop: the epoch in whose last batch a stop is asked for.
    """
    run = session(save_every=1, save_minutes=0, log_samples=True)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
    loader = run.loader(Data(), batch_size=batch_size)
    run.register(net=net, optimizer=optimizer, plateau=plateau)
    for epoch in run.epochs(4):
        for number, (inputs, targets) in enumerate(loader, loader.start):
            loss = nn.functional.mse_loss(net(inputs) / 9, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = run.mean("loss", loss)
            assert (
                float(mean) == run.mean("loss") and not mean.requires_grad and run.mean("batch", number) == number / 2
            )
            if number == len(loader) - 1 and epoch == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            if (epoch, number) == kill:
                die(run)
        assert run.should_stop == (epoch == stop)
        if (epoch, len(loader)) == kill:
            die(run)
        plateau.step(run.mean("loss"))
        run.log(loss=loss, mean=run.mean("loss"), lr=optimizer.param_groups[0]["lr"])
        (run._place.run.folder / "ends").open("a").write(f"{epoch}\n")
    run.finish()


@pytest.mark.parametrize(
    ("batch_size", "kills"), [(9, [(1, 0)]), (9, [(1, 2), (1, 3), (2, 3)]), (27, [(0, 1), (1, 0), (3, 1)])]
)
def test_a_resume_never_enters_an_empty_inner_loop(
    tmp_path: Path, batch_size: int, kills: list[tuple[int, int]]
) -> None:
    runs = [made(tmp_path, name) for name in ("calm", "killed", "stopped")]
    for kill in kills:
        assert attempt(runs[1], report, batch_size, kill)[0] == KILLED
    assert attempt(runs[2], report, batch_size, (-1, -1), 1)[0] == EXIT_STOPPED
    assert "epoch 3, batch 0\n" in attempt(runs[2], report, batch_size)[1]
    for run in runs[:2]:
        code, printed = attempt(run, report, batch_size)
        assert code == 0, printed
    assert result(runs[0]) == result(runs[1]) == result(runs[2])
    rates = [json.loads(line)["lr"] for line in runs[0].metrics.read_text().splitlines()]
    assert len(set(rates)) > 1  # or the mean would have no say


def test_a_run_that_has_left_its_loop_stays_out_of_it(tmp_path: Path) -> None:
    def early(kill: bool) -> None:
        run = session(save_minutes=0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader = run.loader(Data(), batch_size=9)
        run.register(net=net, optimizer=optimizer)
        for epoch in run.epochs(9):
            for inputs, _ in loader:
                net(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if epoch == 1:
                break
        if kill:
            vars(run._place)["end"] = lambda *_, **__: os._exit(KILLED)
        run.finish()

    run = made(tmp_path, "early")
    assert attempt(run, early, True)[0] == KILLED
    assert attempt(run, early, False) == (0, "session: continues after update 6, epoch 3, batch 0\n")
    assert outcome(run, 2)["step"] == 6


def test_a_break_leaves_an_epoch_and_its_run_finishes(tmp_path: Path) -> None:
    found = []
    for kill in ((-1, -1), (1, 1), (2, 0)):
        run = made(tmp_path, f"break{kill[0]}")
        if kill[0] > 0:
            attempt(run, train, kill, 1, "break")
        assert attempt(run, train, (-1, -1), 1, "break")[0] == 0
        found.append(result(run))
    assert found[0] == found[1] == found[2] and found[0]["step"] == 6


def test_a_clean_exit_finishes(calm: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    run = made(tmp_path, "exit")
    assert attempt(run, train, (-1, -1), 2, "exit") == (0, "")
    assert result(run) == calm[2]


def steps(kill: int = -1) -> None:
    run = session(save_every=3, save_minutes=0)
    weight = nn.Parameter(torch.zeros(3))
    net, optimizer = nn.ParameterList([weight]), torch.optim.SGD([weight], lr=0.1)
    run.register(net=net, optimizer=optimizer)
    for step in run.range(10):
        if step == kill:
            die(run)
        (weight * torch.randn(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(norm=weight.norm())
    with (run._place.run.folder / "ends").open("a") as file:
        file.write("end\n")
    (run._place.run.folder / "samples.rank0.log").touch()
    run.finish()


def test_a_loop_without_a_loader(tmp_path: Path) -> None:
    runs = [made(tmp_path, name) for name in ("calm", "killed")]
    assert attempt(runs[1], steps, 7)[0] == KILLED
    assert runs[1].read()["step"] == 6
    for run in runs:
        assert attempt(run, steps)[0] == 0
    assert result(runs[0]) == result(runs[1])
    assert json.loads(runs[0].metrics.read_text().splitlines()[-1])["total_steps"] == 10


def flat(kill: int = -1) -> None:
    """Count steps over epochs of 5 batches."""
    run = session(save_every=1, save_minutes=0, log_samples=True)
    net = nn.Sequential(nn.Linear(4, 1), nn.Dropout())
    optimizer = torch.optim.Adam(net.parameters())
    loader = run.loader(Data(), batch_size=5)
    run.register(net=net, optimizer=optimizer)
    step = run.values.get("step", 0)
    for inputs, targets in run.batches(loader, steps=13):
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        step += 1
        run.values["step"] = step
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if step == kill:
            die(run)
        run.log(loss=loss, mean=run.mean("loss", loss))
    assert step == 13
    (run._place.run.folder / "ends").touch()
    run.finish()


def test_a_loop_that_counts_steps_over_epochs(tmp_path: Path) -> None:
    runs = [made(tmp_path, name) for name in ("calm", "killed")]
    for kill in (3, 5, 6, 11, 13):
        assert attempt(runs[1], flat, kill)[0] == KILLED
    for run in runs:
        assert attempt(run, flat)[0] == 0
    assert result(runs[0]) == result(runs[1])
    samples = [[int(word) for word in line.split()] for line in result(runs[0])["files"][1].splitlines()]
    assert [line[0] for line in samples] == [*range(1, 14)]
    assert len({index for line in samples[:5] for index in line[1:]}) == 25  # an epoch
    line = json.loads(runs[0].metrics.read_text().splitlines()[-1])
    assert line["total_steps"] == 6 and line["epoch"] == 3


# --- what is named


def named(run: Run) -> list[str]:
    return run.read().get("not_exact") or []


def test_a_loader_that_is_read_across_steps_is_named(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(8.0)[:, None])

    def cycled(persistent: bool) -> None:
        run = session(save_minutes=0)
        net = nn.Linear(1, 1)
        run.register(net=net)
        loader = DataLoader(data, batch_size=2, shuffle=True)
        batches = iter(loader)
        for step in run.range(6):
            list(loader)  # an evaluation: whole, in one step
            if persistent:
                net(next(batches)[0] if step % 4 else next(iter(loader))[0])

    for name, persistent in (("whole", False), ("across", True)):
        run = made(tmp_path, name)
        assert attempt(run, cycled, persistent)[0] == 0
        assert [("session.batches(loader, steps=N)" in line) for line in named(run)] == [True] * persistent


def test_arithmetic_is_deterministic_unless_the_script_sets_it_otherwise(tmp_path: Path) -> None:
    def sums(deterministic: bool, own: bool) -> None:
        run = session(save_minutes=0, deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        run.register(net=nn.Linear(1, 1))
        if own:
            torch.use_deterministic_algorithms(False)
        for _ in run.range(3):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))

    found = []
    for number, (deterministic, own) in enumerate([(True, False), (True, True), (False, False)]):
        run = made(tmp_path, f"sums{number}")
        code, printed = attempt(run, sums, deterministic, own)
        assert code == 0 and printed.count("\n") == len(named(run)), printed
        found.append(named(run))
    assert [len(lines) for lines in found] == [1, 1, 0] and found[0][0].startswith("put_ has no deterministic form")
    assert found[1] == ["torch.use_deterministic_algorithms: was True, is False"]


def test_what_was_drawn_before_the_session_is_told(tmp_path: Path) -> None:
    def late() -> None:
        nn.Linear(1, 1)
        session()

    code, printed = attempt(made(tmp_path, "late"), late)
    assert code == 0 and "call ts.session() first" in printed and printed.count("\n") == 1


def test_a_variable_that_a_resume_has_no_value_for_is_explained(tmp_path: Path) -> None:
    def gan(kill: int) -> None:
        run = session(save_every=1, save_minutes=0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader = run.loader(Data(), batch_size=5)
        run.register(net=net, optimizer=optimizer)
        try:
            for _ in run.epochs(2):
                for number, (inputs, _) in enumerate(loader, loader.start):
                    if number % 2 == 0:
                        generators = net(inputs).sum()
                    net(inputs).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    run.log(loss=generators)
                    if number == kill:
                        die(run)
        except NameError as error:
            run._place._failed(error)  # as at the end of a process

    run = made(tmp_path, "gan")
    attempt(run, gan, 3)
    printed = attempt(run, gan, -1)[1]
    line = "`generators` has no value yet: the script resumed at batch 3 of epoch 1; give it a value before the loop"
    assert line in printed and line in outcome(run, 2)["reason"], printed


def at_the_top(stop: bool = False) -> None:
    """A loop whose step stands at the top of the body: at every border a gradient is pending."""
    run = session(save_minutes=0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    run.register(net=net, optimizer=optimizer)
    optimizer.zero_grad()
    for step in run.range(90):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        net(torch.randn(4, 3)).square().sum().backward()
        run.log(norm=net.weight.norm())
        if stop and step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
    (run._place.run.folder / "ends").touch()
    (run._place.run.folder / "samples.rank0.log").touch()
    run.finish()


def test_a_stop_does_not_wait_for_ever_for_a_border_without_gradients(tmp_path: Path) -> None:
    runs = [made(tmp_path, name) for name in ("calm", "stopped")]
    assert attempt(runs[0], at_the_top) == (0, "")
    code, printed = attempt(runs[1], at_the_top, True)
    assert code == EXIT_STOPPED and "the last 50 batches each ended with a gradient pending" in printed, printed
    assert runs[1].newest_checkpoint == 57
    assert attempt(runs[1], at_the_top)[0] == 0
    assert result(runs[0]) == result(runs[1])


def test_weights_that_no_update_has_changed_are_saved_at_the_end(tmp_path: Path) -> None:
    def body() -> None:
        run = session()
        net = nn.Linear(3, 1)
        run.register(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.range(3):
            pass
        nn.init.ones_(net.weight)
        run.finish()

    run = made(tmp_path, "fit")
    assert attempt(run, body) == (0, "") and run.newest_checkpoint == 1
    assert outcome(run, 1)["step"] == 1


# --- what is refused


def opened(**options: Any) -> Session:
    run = session(**options)
    run.loader(Data(), 5)
    return run


def registered() -> Session:
    run = opened()
    run.register(model=nn.Linear(1, 1))
    return run


def _twice() -> None:
    run = registered()
    for _ in run.epochs(1):
        for _ in range(2):
            next(iter(run._loader))  # type: ignore[arg-type]


def _other_epoch() -> None:
    run = registered()
    assert run._loader is not None
    for _ in run.epochs(1):
        run._loader.sampler.set_epoch(0)
        run._loader.sampler.set_epoch(3)


def _beside() -> None:
    run = registered()
    for _ in run.epochs(1):
        next(run.range(3))


WRONG: list[tuple[str, Body]] = [
    ("seed=-1: give", lambda: session(seed=-1)),
    ("save_every=0: give", lambda: session(save_every=0)),
    ("save_minutes='5': give", lambda: session(save_minutes=cast(Any, "5"))),
    ("one loader, for training", lambda: opened().loader(Data(), 5)),
    ("session.register(model=…, optimizer=…) before session.epochs()", lambda: next(opened().epochs(3))),
    ("session.register(model=…, optimizer=…) before session.finish()", lambda: opened().finish()),
    ("to look at a sample write loader.dataset[0]", lambda: next(iter(cast(Any, registered()._loader)))),
    ("iterated twice in one epoch", _twice),
    ("set_epoch(3) in epoch 0: write set_epoch(epoch)", _other_epoch),
    ("session.range() beside session.epochs()", _beside),
    ("session.epochs(-1): give", lambda: next(registered().epochs(-1))),
    ("session.batches(…) reads session.loader(…)", lambda: next(registered().batches(cast(Any, [1]), 3))),
    ("session.mean('loss', …) takes a number, not str", lambda: registered().mean("loss", "x")),
    ("session.mean('loss') has no value in this epoch", lambda: registered().mean("loss")),
    ("session.log(loss=…) takes a number, not Tensor", lambda: registered().log(loss=torch.ones(2))),
    ("session.log(name=…) takes a number, not str", lambda: registered().log(name="x")),
    ("the session writes epoch itself", lambda: registered().log(epoch=3)),
]


@pytest.mark.parametrize(("words", "body"), WRONG)
def test_what_a_session_refuses(tmp_path: Path, words: str, body: Body) -> None:
    code, printed = attempt(made(tmp_path, "wrong"), body)
    assert code == EXIT_REFUSED and words in printed and printed.count("\n") == 1, printed


def test_other_data_are_refused_in_the_middle_of_an_epoch_only(tmp_path: Path) -> None:
    run = made(tmp_path, "other")
    attempt(run, train, (1, 4), 1)

    def other() -> None:
        script = session()
        net = Net(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        script.register(model=net, optimizer=torch.optim.Adam(net.parameters()))
        script.loader(Data(), batch_size=9)
        for _ in script.epochs(3):
            os._exit(0)

    code, printed = attempt(run, other)
    assert code == EXIT_REFUSED and "after batch 2 of an epoch of 27 samples in batches of 5" in printed, printed


def test_a_resumed_epoch_that_ends_between_two_updates_is_named(tmp_path: Path) -> None:
    def counting(kill: bool) -> None:
        script = session(save_every=1, save_minutes=0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = script.loader(Data(), batch_size=5)
        script.register(net=net, optimizer=optimizer)
        for _ in script.epochs(1):
            for number, (inputs, _) in enumerate(loader):  # wrong: not from loader.start
                net(inputs).sum().backward()
                if kill and number == 3:
                    die(script)
                if number % 2 or number == len(loader) - 1:
                    optimizer.step()
                    optimizer.zero_grad()

    run = made(tmp_path, "counting")
    assert attempt(run, counting, True)[0] == KILLED
    assert "count batches with enumerate(loader, loader.start)" in attempt(run, counting, False)[1]
