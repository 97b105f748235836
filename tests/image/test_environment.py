"""Whichever way a person comes in, the same variables are there."""

import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Station, Terminal, run
from jupyter import Client

from tests.waiting import eventually

pytestmark = pytest.mark.never_forgiven

SAME = ("PATH", "CUDA", "NVIDIA_", "TRAIN", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY")
SAME += ("NO_PROXY", "LANG", "TZ", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "STATION_GPUS")
# A proxy that answers nobody, and a list of exceptions that forgot the station itself: it is healthy all the same.
PROXY = {"http_proxy": "http://127.0.0.1:9", "NO_PROXY": "here.invalid"}
DUMP = 'python3 -c \'import json, os; json.dump(dict(os.environ), open("{0}", "w"))\' && mv {0} {1}'


def chosen(variables: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in sorted(variables.items()) if k.startswith(SAME)}


@pytest.fixture(scope="module")
def proxied(make_station: Callable[..., Station]) -> Station:
    """A station with a variable of every kind, values with blanks, quotes and backslashes among them."""
    station = make_station("environment", HTTPS_PROXY="http://proxy.invalid:3128", **PROXY)
    environment = {"TRAIN_ODD": "a \"b\"  c\\d $$e 'f'", "HF_TOKEN": "hush-hush"}  # $$ is compose's way to write $
    override = {"services": {"station": {"environment": environment}}}
    (station.folder / "docker-compose.override.yml").write_text(json.dumps(override))
    station.make("up")
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.cpu.yml", "-f", "docker-compose.override.yml")
    run("docker", "compose", *files, "up", "-d", "--no-build", cwd=station.folder, env=station.env)
    station.wait_healthy()
    return station


@pytest.fixture(scope="module")
def expected(proxied: Station) -> dict[str, str]:
    printed = proxied.root("python3", "-c", "import json, os; print(json.dumps(dict(os.environ)))").stdout
    variables = chosen(json.loads(printed))
    variables["PATH"] += ":/home/dev/.local/bin"  # what dev installs comes last, and for root not at all
    assert variables["TRAIN_ODD"] == "a \"b\"  c\\d $e 'f'"
    assert variables["HTTPS_PROXY"] == "http://proxy.invalid:3128"
    assert variables["NO_PROXY"] == variables["no_proxy"] == "localhost,127.0.0.1,::1,here.invalid"
    assert {"PATH", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "TRAIN_RUNS"} <= set(variables)
    return variables


def dumped(station: Station, start: Callable[[str], object]) -> dict[str, str]:
    """Has a shell command line started that writes its environment to a file, and reads that."""
    name = uuid.uuid4().hex
    start(DUMP.format(f"/workspace/runs/.{name}", f"/workspace/runs/{name}"))
    path: Path = station.folder / "runs" / name
    eventually("the environment was written", path.exists)
    variables = chosen(json.loads(path.read_text()))
    path.unlink()
    return variables


SHADOWS = "datasets docker docs notebooks runs scripts"
FIND = "import importlib.util; print([name for name in {!r}.split() if importlib.util.find_spec(name)])"
TASK = """
import importlib.util, torch
found = [name for name in {!r}.split() if importlib.util.find_spec(name)]
def datasets(config):
    return torch.utils.data.TensorDataset(torch.ones(4, 2)), None
def model(config):
    print("found", found, flush=True)
    return torch.nn.Linear(2, 1)
def loss(model, batch):
    return model(batch[0]).mean()
"""


@pytest.mark.turns
def test_folders_of_the_station_are_no_packages(proxied: Station) -> None:
    code = FIND.format(SHADOWS)
    for folder in ("/workspace", "/workspace/notebooks", "/workspace/projects", "/home/dev", "/", "/tmp"):
        done = proxied.dev("bash", "-c", 'cd "$0" && python3 -c "$1"', folder, code)
        assert (folder, done.stdout) == (folder, "[]\n")
    assert "No module named 'datasets'" in proxied.dev("python3", "-c", "import datasets", check=False).stderr
    for name, text in (("find.py", code), ("task.py", TASK.format(SHADOWS))):
        (proxied.folder / "projects" / name).write_text(text)
    assert proxied.dev("python3", "projects/find.py").stdout == "[]\n"
    done = proxied.dev("train", "run", "projects/task.py", "--name", "finds", "--steps", "1", "--batch_size", "4")
    assert "found []" in done.stdout + done.stderr
    assert (
        proxied.dev("python3", "-c", "import train; print(train.__file__)").stdout == "/workspace/train/__init__.py\n"
    )
    code = "import os, train, trainstation.cli as cli; print(*map(os.path.realpath, (train.__file__, cli.__file__)))"
    elsewhere = proxied.dev("bash", "-c", 'cd /tmp && python3 -c "$0"', code)
    assert elsewhere.stdout == "/workspace/train/__init__.py /workspace/train/cli.py\n"
    # a package of that name that dev has installed is found
    line = 'd=$(python3 -m site --user-site)/docker; mkdir -p "$d" && echo "here = 1" >"$d/__init__.py"'
    proxied.dev("bash", "-c", f"{line}; cd /workspace && python3 -c 'import docker; assert docker.here'; rm -r \"$d\"")


def test_ssh_with_a_command(proxied: Station, expected: dict[str, str]) -> None:
    assert dumped(proxied, proxied.ssh) == expected


def test_ssh_with_a_login_shell(proxied: Station, expected: dict[str, str]) -> None:
    def log_in(line: str) -> None:
        words = proxied.ssh_words
        in_shell(line, words[0], "-tt", *words[1:])

    assert dumped(proxied, log_in) == expected


def test_sftp_server(proxied: Station, expected: dict[str, str]) -> None:
    """sftp's server is a process of dev's too: its environment is read while a connection is open."""
    words = proxied.ssh_words
    client = subprocess.Popen(
        ["sftp", *[w if w != "-p" else "-P" for w in words[1:]]],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:

        def server() -> str:
            listed = run("docker", "top", proxied.container, "-eo", "pid,comm").stdout.splitlines()
            return next((line.split()[0] for line in listed if "sftp-server" in line), "")

        # It shows its memory to nobody in the container; root of this machine sees it all the same.
        pid = eventually("sftp-server runs", server)
        pairs = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    finally:
        client.kill()
        client.wait()
    assert chosen(dict(pair.split("=", 1) for pair in pairs)) == expected


def test_jupyter_kernel(proxied: Station, expected: dict[str, str]) -> None:
    printed = Client(proxied).run_in_kernel("import json, os; print(json.dumps(dict(os.environ)))")
    assert chosen(json.loads(printed)) == expected


def test_jupyter_terminal(proxied: Station, expected: dict[str, str]) -> None:
    assert dumped(proxied, Client(proxied).type_in_terminal) == expected


def test_tmux_started_over_ssh(proxied: Station, expected: dict[str, str]) -> None:
    def in_tmux(line: str) -> None:
        proxied.ssh("tmux -L parity new-session -d && sleep 0.5")
        proxied.ssh(f"tmux -L parity send-keys -l {json.dumps(line)} && tmux -L parity send-keys Enter")

    try:
        assert dumped(proxied, in_tmux) == {**expected}
    finally:
        proxied.ssh("tmux -L parity kill-server", check=False)


def test_make_shell(proxied: Station, expected: dict[str, str]) -> None:
    def type_it(line: str) -> None:
        in_shell(line, "make", "-s", "shell", cwd=proxied.folder, env=proxied.env)

    assert dumped(proxied, type_it) == expected


def test_a_command_from_the_host(proxied: Station, expected: dict[str, str]) -> None:
    def execute(line: str) -> None:
        run("scripts/station.sh", "exec", "bash", "-c", line, cwd=proxied.folder, env=proxied.env)

    assert dumped(proxied, execute) == expected
    done = run("scripts/station.sh", "exec", "pwd", cwd=proxied.folder, env=proxied.env)
    assert done.stdout == "/workspace\n"


def in_shell(line: str, *command: str, **options: object) -> None:
    """Waits for a prompt, types a line, and leaves the shell."""
    with Terminal(*command, **options) as terminal:
        terminal.wait_for("$ ")
        terminal.type(line)
        terminal.type("exit")
        terminal.process.wait(timeout=60)


def test_secrets_in_the_environment_stay_out_of_ssh_sessions(proxied: Station) -> None:
    assert "HF_TOKEN" not in proxied.ssh("env").stdout
    assert "HF_TOKEN reads like a secret, so ssh sessions do not get it" in proxied.log
