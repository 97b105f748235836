"""What is wrong is refused in one line that names the remedy, exit code 2, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train import forks
from tests.train.conftest import Station, command
from tests.train.tiers import later
from tests.waiting import eventually
from train.launcher import tmux
from train.run.record import FORMAT

pytestmark = pytest.mark.never_forgiven

TASK = """
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from dataclasses import dataclass

def model(config):
    return nn.Linear(4, 2)

def datasets(config):
    return TensorDataset(torch.randn(40, 4), torch.randint(2, (40,))), None

def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)
"""

NODES = ("--node-rank", "0", "--rendezvous", "127.0.0.1:29999", "--nnodes")
Answer = tuple[int, str, str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which commands run, without the tests' own settings; a check is forked by a lent zygote."""
    monkeypatch.chdir(tmp_path)
    environment = Station(tmp_path).environment()
    for name, value in (environment | forks.held_warm(environment)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TRAIN_RUNS", raising=False)
    for key in list(os.environ):
        if key.startswith("TORCHELASTIC") or key in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(key)
    return tmp_path


def refused(answer: Answer, *words: str) -> str:
    """Check the form of a refusal and that it says these words."""
    code, out, err = answer
    assert code == 2, (code, out, err)
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("train: "), err
    assert "Traceback" not in err
    for word in words:
        assert word in err, err
    return err


def entries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place for temporary files that no other launch on this machine uses."""
    return tmp_path_factory.mktemp("temporary")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no command", "--help"]),
        (["lanch"], ["did you mean launch"]),
        (["launch"], ["TASK", "--script"]),
        (["launch", "digitz"], ["did you mean digits"]),
        (["launch", "./nope.py"], ["no file ./nope.py", "built-in"]),
        (["run", "."], ["is a folder"]),
        (["launch", "digits", "extra"], ["extra", "flags only"]),
        (["run", "digits", "extra"], ["extra"]),
        (["launch", "digits", "--optim.lrr", "1"], ["did you mean --optim.lr?"]),
        (["launch", "digits", "--lr", "1"], ["did you mean --optim.lr?"]),
        (["launch", "digits", "--epoch", "3"], ["did you mean --epochs?"]),
        (["launch", "digits", "--optim.lr", "abc"], ["--optim.lr abc", "number"]),
        (["launch", "digits", "--optim.lr", "nan"], ["finite"]),
        (["launch", "digits", "--optim.lr", "-1"], ["greater than 0"]),
        (["launch", "digits", "--optim.lr"], ["needs a value"]),
        (["launch", "digits", "--optim.lr", "--seed", "1"], ["--optim.lr needs a value"]),
        (["launch", "digits", "--batch-size", "0"], ["greater than or equal to 1"]),
        (["launch", "digits", "--batch_size", "2.5"], ["integer"]),
        (["launch", "digits", "--micro_batch_size", "0"], ["greater than or equal to 1, or auto"]),
        (["launch", "digits", "--micro_batch_size", "foo"], ["--micro_batch_size foo", "integer", "or auto"]),
        (["launch", "digits", "--compile", "yes"], ["true, false or blocks"]),
        (["launch", "digits", "--optim.name", "sdg"], ["did you mean sgd"]),
        (["launch", "digits", "--epochs", "1", "--steps", "2"], ["replace each other"]),
        (
            ["launch", "digits", "--eval.every_steps=1", "--eval.every_epochs=2"],
            ["eval.every_epochs replace each other"],
        ),
        (["launch", "digits", "--max-restarts", "-1"], ["at least 0"]),
        (["launch", "digits", "--max-restarts", "9" * 5000], ["--max-restarts 999", "at most"]),
        (["launch", "digits", *NODES, "\u0663"], ["--nnodes \u0663", "1:4"]),
        (["launch", "digits", "--nnodes", ""], ["--nnodes is missing"]),
        (["launch", "digits", *NODES, "2", "--wait-minutes", "1e300"], ["--wait-minutes 1e300", "must be a number"]),
        (["launch", "digits", "--parallel.timeout_minutes", "1e13"], ["timeout_minutes 1e13", "less than or equal"]),
        (["launch", "digits", "--seed", str(2**128)], ["--seed 3402", "less than"]),
        (["launch", "digits", "--seed", "1\n2\x1b[2J"], [r"--seed 1\n2\x1b[2J: should be"]),
        (["launch", "digits", "--data.root", "\udc80"], ["--data.root", "must be UTF-8"]),
        (["launch", "digits", *NODES, "2", "--rendezvous", "a:" + "9" * 5000], ["--rendezvous a:999"]),
        (["submit", "digits", "--on", "slurm", "--nproc", "1", "--time", "9" * 5000], ["--time 999", "give minutes"]),
        (["launch", "digits", "--name", ""], ["--name is empty"]),
        (["launch", "digits", "--name", "a/b"], ["legal run name"]),
        (["launch", "digits", "--name", "ü"], ["legal run name"]),
        (["launch", "digits", "--name", "-x"], ["legal run name"]),
        (["launch", "digits", "--name", ".."], ["legal run name"]),
        (["launch", "digits", "--name", ".partial-x"], ["legal run name"]),
        (["launch", "digits", "--name", "x."], ["not ending with a dot"]),
        (["launch", "digits", "--name", "a:b"], ["legal run name"]),
        (["launch", "digits", "--name", "x" * 65], ["up to 64"]),
        (["launch", "digits", "--runs", ""], ["--runs is empty"]),
        (["launch", "digits", "--runs"], ["needs a value"]),
        (["launch", "--script", "nope.py"], ["there is no file"]),
        (["launch", "--script", __file__, "--optim.lr", "1"], ["after --"]),
        (["launch", "digits", "--script", __file__], ["TASK, or --script"]),
        (["run", "digits", "--spawn", "0"], ["at least 1"]),
        (["show"], ["NAME"]),
        (["show", "nobody"], ["no run nobody"]),
        (["show", ""], ["empty"]),
        (["show", "../x"], ["no run"]),
        (["rm", "nobody"], ["no run nobody"]),
        (["resume", "nobody"], ["no run nobody"]),
        (["resume"], ["NAME", "--all"]),
        (["export", "nobody"], ["--to"]),
        (["export", "nobody", "--to", "x.pt"], ["no run nobody"]),
        (["plot", "nobody", "--to", "x.png"], ["no run nobody"]),
        (["ls", "--jsno"], ["did you mean --json"]),
        (["show", "x", "--seed", "1"], ["unknown flag --seed"]),
        (["bench", "scaling", "--strategies", "ddp,zero"], ["zero is not one of ddp, fsdp, hsdp"]),
        (["bench", "scaling", "--nproc", "1,,2"], ["--nproc", "at least 1"]),
        (["bench", "input", "--json"], ["--json is for train bench scaling, not input"]),
        (["bench", "lr", "digits"], ["needs a TASK and --to FILE.png"]),
        (["bench", "loop"], ["loop"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_a_wrong_request_is_refused_in_one_line_and_creates_nothing(
    here: Path, arguments: list[str], words: list[str]
) -> None:
    refused(command(*arguments), *words)
    assert entries(here) == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps = ", ["not valid TOML"]),
        ("[optim]\nlrr = 1", ["did you mean optim.lr"]),
        ("optim = 3", ["optim is a group", "[optim]"]),
        ('steps = "3"', ["steps = '3'", "integer"]),
        ("compile = 1", ["compile = 1", "boolean", "or blocks"]),
        ("steps = 99999999999999999999999999", ["less than"]),
        ("optim.lr = nan", ["finite"]),
        ("steps = 1\nepochs = 2", ["replace each other"]),
        ("[data]\nroot = 5", ["data.root", "string"]),
        ("task.width = nan", ["task.width", "finite"]),
        ("[task]\nwidth = 0", ["task.width", "greater than or equal to 1"]),
        (b"\xff\xfe", ["not valid TOML"]),
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, list) else None,
)
def test_a_wrong_configuration_file_is_named_in_the_refusal(here: Path, text: str | bytes, words: list[str]) -> None:
    file = here / "c.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    # values that flags replace are checked all the same: the file is wrong
    refused(command("run", "digits", "--config", file, "--steps", 1), "c.toml", *words)
    assert entries(here) == {"c.toml"}


@pytest.mark.parametrize("file", ["missing.toml", "."])
def test_a_configuration_file_that_cannot_be_read_is_refused(here: Path, file: str) -> None:
    refused(command("run", "digits", "--config", file), "cannot read", file)


SETTINGS = "from dataclasses import field\n@dataclass\nclass Settings:\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def model(config)\n  pass", ["task.py, line 1"]),
        ("import nosuchmodule", ["task.py, line 1", "nosuchmodule"]),
        ("x = 1\n\nraise ValueError('two\\nlines ü')", ["task.py, line 3", "two lines ü"]),
        ("", ["no function model", "def model(config)"]),
        (TASK.replace("def loss", "def losses"), ["no function loss", "did you mean losses?"]),
        (TASK + "def metric(model, batch): pass", ["task.py", "metric;", "did you mean metrics?", "_metric"]),
        (TASK + "@dataclass\nclass Setting:\n    a: int = 1", ["did you mean Settings?"]),
        (TASK + "metrics = 5", ["metrics", "no function"]),
        (TASK + "DEFAULTS = 5", ["DEFAULTS", "dict"]),
        (TASK + "DEFAULTS = {'lr': 1}", ["DEFAULTS", "did you mean optim.lr"]),
        (TASK + "DEFAULTS = {'optim.lr': 'x'}", ["task.py", "optim.lr", "number"]),
        (TASK + "class Settings:\n    a: int = 1", ["Settings", "@dataclass"]),
        (TASK + "@dataclass\nclass Settings:\n    a: int = 'x'", ["task.py", "task.a", "integer"]),
        (TASK + "@dataclass\nclass Settings:\n    a: int", ["task.a has no default", "--task.a"]),
        (TASK + "@dataclass\nclass Settings:\n    a: torch.Tensor = None", ["Settings", "type"]),
        (
            TASK + SETTINGS + "    a: int = 4\n    def __post_init__(self): self.a *= 2",
            ["task.a is 8", "would read 16"],
        ),
        (TASK + SETTINGS + "    a: int = 1\n    def __post_init__(self): {}['lost']", ["Settings", "KeyError: 'lost'"]),
        (TASK + SETTINGS + "    a: list[int | None] = field(default_factory=lambda: [1, None])", ["config.toml"]),
        (TASK + "def datasets(config): raise RuntimeError('no data')", ["datasets() failed", "line", "no data"]),
        (TASK + "def datasets(config): return None", ["(train, evaluation or None)"]),
        (TASK + "def datasets(config): return None, None", ["__len__ and __getitem__"]),
        (TASK + "def datasets(config): return [], None", ["training set", "empty"]),
        (
            TASK
            + "class I(IterableDataset):\n    def __iter__(self): yield 1\n    def __len__(self): return 3\n"
            + "def datasets(config): return I(), None",
            ["map-style", "train.shards(folder)"],
        ),
        (TASK + "def datasets(config): return {'train': [1], 'test': [1]}, None", ["a dict", "('train', 'test')"]),
        (TASK + "def model(): return nn.Linear(4, 2)", ["model() failed", "positional argument"]),
        (TASK + "def model(config): return 5", ["torch.nn.Module"]),
        (TASK + "def model(config): return nn.ReLU()", ["no parameter to train"]),
        (
            TASK + "from torch.utils.data import DataLoader\ndef datasets(config): return DataLoader([1]), None",
            ["training set", "return its dataset itself"],
        ),
        (
            TASK + "def optimizer(model, config): return [torch.optim.SGD([p], 0.1) for p in model.parameters()]",
            ["got list", "several groups"],
        ),
    ],
    ids=lambda value: value.removeprefix(TASK)[:50].replace("\n", " ") if isinstance(value, str) else None,
)
def test_a_broken_task_file_is_refused_with_its_place(here: Path, text: str, words: list[str]) -> None:
    (here / "task.py").write_text(text)
    refused(command("run", "./task.py", "--steps", 1), *words)
    assert not (here / "runs").exists()


def _folders(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["images"], ["--data.root"]),
        (["images", "--data.root", "nowhere"], ["no such folder"]),
        (["images", "--data.root", "mixed"], ["a missing in val/", "b missing in train/"]),
        (["images", "--data.root", "bare"], ["bare", "Found no valid file"]),
        (["images", "--data.root", "mixed", "--data.name", "CIFAR"], ["did you mean CIFAR10"]),
        (["images", "--data.root", "mixed", "--data.name", "CIFAR10"], ["not usable", "nothing is downloaded"]),
        (["text"], ["--data.root"]),
        (["text", "--data.root", "short"], ["too little text"]),
        (["text", "--data.root", "short", "--task.width", "30"], ["--task.heads", "divide"]),
        (["fake", "--task.model", "resnet19"], ["did you mean resnet18"]),
        (["fake", "--task.widht", "1"], ["unknown field --task.widht"]),
        (["digits", "--task.dropout", "2"], ["--task.dropout 2", "less"]),
        (["digits", "--trace", "5"], ["--trace 5", "such as 20:25"]),
        (["digits", "--trace", "5:6", "--steps", "5"], ["the run makes steps 1 to 5"]),
        (["digits", "--early_stopping.metric", "loss", "--eval.every_epochs", "0"], ["--eval.every_epochs"]),
        (["digits", "--precision", "fp16", "--device", "cpu"], ["fp16 needs a GPU", "bf16"]),
        (["digits", "--sync_batchnorm", "true", "--device", "cpu"], ["sync_batchnorm", "leave it out"]),
        (["digits", "--init", "nope.pt"], ["no file and no run", "NAME@best"]),
        (["digits", "--init", "task.txt"], ["neither a .safetensors file nor one of torch.save"]),
        (["fake", "--data.on_device", "true"], ["--data.on_device", "TensorDataset"]),
        (["digits", "--data.on_device", "true", "--data.workers", "2"], ["--data.on_device", "--data.workers 0"]),
        (["digits", "--spawn", "3", "--batch_size", "2"], ["smaller than the number of ranks, 3"]),
        (["digits", "--spawn", "3", "--micro_batch_size", "40"], ["micro_batch_size 21"]),
        (["digits", "--spawn", "2", "--parallel.strategy", "single"], ["one rank"]),
        (["task.txt"], ["not a Python file"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_what_only_a_look_at_task_and_data_shows_is_refused_before_anything_is_created(
    here: Path, arguments: list[str], words: list[str]
) -> None:
    _folders(here, "empty", "mixed/train/a", "mixed/val/b", "bare/train/a", "bare/val/a", "short")
    (here / "short" / "a.txt").write_text("too short")
    (here / "task.txt").write_text("x")
    before = entries(here)
    refused(command("run", *arguments), *words)
    assert entries(here) == before


def test_names_that_exist_are_refused_and_their_run_is_untouched(here: Path) -> None:
    _folders(here, "runs/taken")
    (here / "runs/taken/precious").write_text("x")
    refused(command("run", "digits", "--name", "taken"), "exists", "another name", "train resume taken")
    refused(command("launch", "digits", "--name", "taken"), "exists")
    assert entries(here) == {"runs", "runs/taken", "runs/taken/precious"}


@pytest.mark.parametrize("arguments", [["ls"], ["launch", "digits"]])
def test_a_runs_folder_that_is_a_file_is_refused(here: Path, arguments: list[str]) -> None:
    (here / "file").write_text("x")
    refused(command(*arguments, "--runs", "file"), "not a folder", "--runs")
    refused(command("--runs", "file", *arguments), "not a folder")
    assert (here / "file").read_text() == "x"


@pytest.mark.parametrize("content", ["{", f'{{"format": {FORMAT}}}', ""])
def test_a_damaged_record_is_refused_by_every_command_but_rm(here: Path, content: str) -> None:
    _folders(here, "runs/hurt")
    (here / "runs/hurt/run.json").write_text(content)
    for arguments in (["show"], ["stop"], ["logs"], ["attach"], ["resume"], ["eval"], ["export", "--to", "x.pt"]):
        refused(command(arguments[0], "hurt", *arguments[1:]), "run.json is damaged", "train rm hurt")
    code, _, err = command("ls")
    assert code == 0 and "damaged" in err
    assert (here / "runs/hurt/run.json").read_text() == content
    code, out, err = command("rm", "hurt")
    assert (code, out) == (0, "") and err.startswith("removed hurt: ") and err.count("\n") == 1
    assert entries(here) == {"runs"}


def _as_plain_owner() -> list[str]:
    """A prefix under which root respects modes, or nothing for everybody else."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("as root a folder can always be written")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]


@pytest.mark.parametrize("command_line", [["run", "digits", "--name", "x"], ["launch", "digits"]])
def test_a_runs_folder_that_cannot_be_written_is_refused(station: Station, command_line: list[str]) -> None:
    station.runs.mkdir()
    station.runs.chmod(0o555)
    done = subprocess.run(
        [*_as_plain_owner(), sys.executable, "-m", "train", *command_line],
        cwd=station.folder, env=station.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    station.runs.chmod(0o755)
    refused((done.returncode, done.stdout, done.stderr), "cannot write in", "--runs")
    assert entries(station.runs) == set()


def test_a_run_of_somebody_else_is_refused_in_one_line(station: Station) -> None:
    from train.run import folders, states

    run = folders.create(station.runs, "theirs", files={}, record={"state": states.STOPPED, "world_size": 1})
    (run.folder / "lock").chmod(0o444)
    for arguments in (["rm", "theirs"], ["resume", "theirs"]):
        done = subprocess.run(
            [*_as_plain_owner(), sys.executable, "-m", "train", *arguments],
            cwd=station.folder, env=station.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        refused((done.returncode, done.stdout, done.stderr), "Permission denied", "lock")
    assert run.read()["state"] == states.STOPPED


def test_without_tmux_launch_is_refused_and_leaves_no_file(station: Station, temporary: Path) -> None:
    bare = station.folder / "bin"
    bare.mkdir()
    done = station("launch", "digits", env={"PATH": str(bare), "TMPDIR": str(temporary)})
    refused((done.returncode, done.stdout, done.stderr), "tmux is not installed", "apt-get install tmux")
    # what imports for the agent clears away after the import that it is at
    eventually(lambda: f"{entries(temporary)} are gone", lambda: entries(temporary) == set(), 60)
    assert not station.runs.exists()


def _sessions(station: Station) -> str:
    listed = subprocess.run(tmux.tmux(station.runs, "list-sessions"), capture_output=True, text=True, check=False)
    return listed.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./raises.py"], ["raises.py, line 2", "on purpose"]),
        *later(
            (["digits", "--nproc", "65"], ["smaller than the number of ranks"]),
            (["./dies.py"], ["died before the run began"]),
        ),
    ],
    ids=["raises", "batch", "dies"],
)
def test_what_the_process_inside_tmux_refuses_reaches_launch_and_leaves_nothing(
    station: Station, temporary: Path, arguments: list[str], words: list[str]
) -> None:
    (station.folder / "raises.py").write_text("x = 1\nraise ValueError('on purpose')\n")
    (station.folder / "dies.py").write_text("import os\nos._exit(9)\n")
    done = station("launch", *arguments, "--name", "never", env={"TMPDIR": str(temporary)})
    refused((done.returncode, done.stdout, done.stderr), *words)
    assert not station.runs.exists()
    assert _sessions(station) == ""
    # what imports for the agent clears away after the import that it is at
    eventually(lambda: f"{entries(temporary)} are gone", lambda: entries(temporary) == set(), 60)


@pytest.mark.parametrize("nproc", ["0", "1.5", "two", "4097", "", "\u0663"])
def test_a_number_of_ranks_must_be_one(nproc: str) -> None:
    from train.errors import Refused
    from train.launcher.ranks_and_gpus import count_ranks

    with pytest.raises(Refused, match="--nproc"):
        count_ranks(nproc, None, cpu_only=True)


@pytest.mark.parametrize("gpus", ["0", "-1", "x", "", ",", "0,0", "1", "2,"])
def test_gpus_that_are_not_here_or_no_gpus_at_all_are_refused(gpus: str) -> None:
    from train.errors import Refused
    from train.launcher.ranks_and_gpus import count_ranks

    with pytest.raises(Refused, match="--gpus"):
        count_ranks(None, gpus, cpu_only=True)


def test_auto_means_one_rank_where_there_is_no_gpu() -> None:
    from train.launcher.ranks_and_gpus import count_ranks

    assert count_ranks("auto", None, cpu_only=True) == (1, None)
    assert count_ranks(None, None, cpu_only=True) == (1, None)
    assert count_ranks("3", None, cpu_only=True) == (3, None)
