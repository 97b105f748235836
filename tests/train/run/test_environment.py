"""What a run was started with reaches its resumes, and secrets are not kept."""

from __future__ import annotations

import json
import os
import pwd
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import PATIENCE, Station
from train.run import environment

pytestmark = pytest.mark.never_forgiven

SHOWS = """
import json, os, pathlib, time
import beside  # reads DATA
uses = "WANDB_API_KEY MY_PASSWORD $STORE AWS_SECRET_ACCESS_KEY"
attempt = os.environ["TRAIN_ATTEMPT"]
pathlib.Path(f"seen-{attempt}.json").write_text(json.dumps(dict(os.environ)))
while not pathlib.Path("done").exists():
    time.sleep(0.05)
"""
WITHHELD = {
    "WANDB_API_KEY": "k" * 20, "MY_PASSWORD": "hunter2", "STORE": "s3://me:hunter3@host/b",
    "https_proxy": "http://u:hunter4@proxy:3128", "AWS_SECRET_ACCESS_KEY": "/ab0/hunter5",
}  # fmt: skip
KEPT = {"DATA": "/some/where", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}
OTHER = {"NOBODY_READS": "hunter6", "UNUSED_TOKEN": "hunter7", "LIBRARY_READS": "b"}


@pytest.fixture
def shows(station: Station) -> Station:
    """A station with a script that imports from PYTHONPATH and writes down its environment."""
    (station.folder / "lib").mkdir()
    (station.folder / "lib" / "beside.py").write_text("")
    (station.folder / "shows.py").write_text(SHOWS)
    return station


def paths(station: Station) -> str:
    return os.pathsep.join([str(station.folder / "lib"), station.environment()["PYTHONPATH"]])


def launch(station: Station, *flags: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = KEPT | WITHHELD | OTHER | more
    done = station.ok("launch", "--script", "shows.py", "--name", "a", *flags, env=env)
    seen(station, 1)
    return done


def seen(station: Station, attempt: int) -> dict[str, Any]:
    path = station.folder / f"seen-{attempt}.json"
    station.wait("a", lambda _: path.exists() and path.read_text().endswith("}"), f"attempt {attempt}")
    return dict(json.loads(path.read_text()))


def clean(station: Station, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The command with almost no environment, as of cron. Without the state's folder it would be another station."""
    env = {name: os.environ[name] for name in ("PATH", "HOME", "TRAIN_STATE")} | more
    return subprocess.run(
        [sys.executable, "-m", "train", *arguments], cwd=station.folder, env=env, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=PATIENCE, check=False,
    )  # fmt: skip


def test_it_is_kept_readable_by_its_owner_alone_and_without_secrets_and_that_is_said(shows: Station) -> None:
    (shows.folder / "beside.py").touch()
    done = launch(shows, "--keep-env", "LIBRARY_READS", "--keep-env", "HOME")
    assert done.stdout == "a\n"
    [said] = [line for line in done.stderr.splitlines() if "secrets" in line]
    assert all(name in said for name in WITHHELD) and "hunter" not in done.stderr
    assert "UNUSED_TOKEN" not in said
    path = shows.runs / "a" / "environment.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    values = json.loads(path.read_text())["values"]
    assert (
        values.items()
        >= (KEPT | {"LIBRARY_READS": "b", "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}).items()
    )
    assert not values.keys() & {*WITHHELD, "NOBODY_READS", "UNUSED_TOKEN", "TMUX", "PWD", "RANK", "TRAIN_ATTEMPT"}
    for file in (shows.runs / "a").rglob("*"):
        assert not file.is_file() or "hunter" not in file.read_text(errors="replace")
    assert seen(shows, 1)["MY_PASSWORD"] == "hunter2"
    shown = " ".join(shows.ok("show", "a").stdout.split())
    assert f"not kept secrets: {', '.join(sorted(WITHHELD))}" in shown


@pytest.mark.minutes
def test_a_resume_from_a_clean_environment_has_it_and_says_so(shows: Station) -> None:
    launch(shows, PYTHONPATH=paths(shows))
    shows.ok("stop", "a", "--now")
    done = clean(shows, "resume", "a", DATA="/else/where", MY_PASSWORD="new")
    assert done.returncode == 0 and done.stdout == "a\n", done.stderr
    now = seen(shows, 2)
    assert now["PYTHONPATH"] == paths(shows) and now["TOKENIZERS_PARALLELISM"] == "false"
    assert now["DATA"] == "/else/where" and now["MY_PASSWORD"] == "new" and "WANDB_API_KEY" not in now
    for words in ("changed since the launch: DATA", "PYTHONPATH", "WANDB_API_KEY", "STORE"):
        assert words in done.stderr
    (shows.folder / "done").touch()
    assert shows.wait_for_end("a")["state"] == "finished"
    values = json.loads((shows.runs / "a" / "environment.json").read_text())["values"]
    assert values["DATA"] == "/else/where"  # what holds from now on


@pytest.mark.minutes
def test_a_resume_from_the_same_shell_warns_of_nothing(shows: Station) -> None:
    launch(shows, PYTHONPATH=paths(shows))
    shows.ok("stop", "a", "--now")
    env = KEPT | WITHHELD | OTHER | {"PYTHONPATH": paths(shows)}
    assert shows.ok("resume", "a", env=env).stderr == ""


@pytest.mark.minutes
def test_the_keeper_uses_it_whole(shows: Station) -> None:
    launch(shows, "--keep-env", "LIBRARY_READS", "--max-restarts", "3", PYTHONPATH=paths(shows))
    os.kill(shows.record("a")["pids"]["agent"], signal.SIGKILL)
    shows.wait("a", lambda record: record["state"] == "interrupted", "its death")
    of_keeper = dict.fromkeys(("DATA", "WANDB_PROJECT", "WANDB_API_KEY", "LIBRARY_READS"), "of the keeper")
    done = clean(shows, "keeper", "--once", **of_keeper)
    assert done.returncode == 0, done.stderr
    now = seen(shows, 2)
    assert now["DATA"] == "/some/where" and now["PYTHONPATH"] == paths(shows) and "WANDB_PROJECT" not in now
    assert now["LIBRARY_READS"] == "b" and "NOBODY_READS" not in now
    assert now["WANDB_API_KEY"] == "of the keeper"  # secrets it can only have of its own
    assert "MY_PASSWORD" in done.stderr
    (shows.folder / "done").touch()
    assert shows.wait_for_end("a")["state"] == "finished"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("NOT_SET", "NOT_SET is not set here"), ("MY_PASSWORD", "a secret is never kept"),
        ("STORE", "a secret is never kept"), ("SHLVL", "SHLVL differs from start to start"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(station: Station, flag: str, said: str) -> None:
    done = station("launch", "digits", "--name", "a", "--keep-env", flag, env=WITHHELD | {"SHLVL": "7"})
    assert done.returncode == 2 and f"--keep-env {flag}: {said}" in done.stderr
    assert not (station.runs / "a").exists()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_TOKEN", "a", True), ("GITHUBTOKEN", "a", True), ("AWS_SECRET_ACCESS_KEY", "a", True),
        ("db_password", "a", True), ("PGPASSWORD", "a", True), ("KEYS", "a", True), ("wandbApiKey", "a", True),
        ("TOKEN2", "a", True), ("AWS_ACCESS_KEY_ID", "a", True),
        ("TOKENIZERS_PARALLELISM", "a", False), ("KEYBOARD", "a", False), ("PYTHONPATH", "/a:/b:/c", False),
        ("NCCL_IB_PKEY", "1", False), ("A", "http://u:p@h:3128", True), ("A", "http://u:p@ss@h/x", True),
        ("A", "redis://:p@h", True), ("A", "u:p@proxy:3128", True), ("A", "a=http://h,b=http://v:q@i", True),
        ("FSSPEC_S3", '{"key": "a", "secret": "b"}', True), ("FSSPEC_S3", '{"config": {"verify": false}}', False),
        ("FSSPEC_S3_SECRET", "a", True), ("A", "{'password': 'b'}", True),
        ("A", "ssh://git@host/x", False), ("A", "http://h:80/a@b", False), ("A", "me@host", False),
        ("DB_PASS", "a", True), ("dbPass", "a", True), ("GH_PAT", "a", True), ("BEARER", "a", True),
        ("DBPASS", "a", True), ("BYPASS", "a", False),
        ("COOKIE", "a", True), ("SESSION_COOKIES", "a", True), ("SENTRY_DSN", "a", True), ("BASIC_AUTH", "a", True),
        ("MY_CREDENTIALS", "a", True), ("SLACK_WEBHOOK", "a", True), ("SIG", "a", True), ("SMTP_PWD", "a", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/a.json", False), ("AWS_SHARED_CREDENTIALS_FILE", "/a", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", '{"private_key": "a"}', True), ("PATTERN", "a", False),
        ("PASSES", "3", False),         ("AUTHOR", "me", False), ("COMPASS", "a", False),
        ("DATA_PATH", "/a", False), ("CONFIG", "a", False),
        ("A", "http://token@proxy:3128", True), ("A", "https://h/f?v=1&sig=ab%2B", True),
        ("A", "git+ssh://git@h/x", False),
        ("A", "https://s3/f?X-Amz-Signature=ab", True), ("A", "https://h/f?version=2&page=key", False),
        ("A", "https://hooks.slack.com/services/T0/B0/x", True), ("A", "https://discord.com/api/webhooks/1/a", True),
        ("A", "host=db user=me password=x", True), ("A", "Endpoint=sb://h/;SharedAccessKey=a", True),
        ("A", "AccountName=a;AccountKey=b==", True), ("A", "ghp_" + "a" * 36, True), ("A", "Bearer abcdefghij", True),
        ("A", "eyJhbGciOiJ.eyJzdWIiOi.abc", True), ("A", "-----BEGIN RSA PRIVATE KEY-----", True),
        ("A", "AKIA" + "A" * 16, True), ("A", "hf_" + "a" * 34, True), ("HF_HOME", "/home/hf_cache", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", False), ("NCCL_SOCKET_IFNAME", "=eth0", False),
        ("LS_COLORS", "di=01;34:ln=01;36", False), ("A", "a8098c1a7a3b2bd1f1d2c3e4f5061728394a5b6c", False),
        ("XLA_FLAGS", "--xla_key=3 --b=2", False), ("TRAIN_NOTIFY", "a", True),
        ("A", "s3://bucket/key=1/token=2", False),
    ],
)  # fmt: skip
def test_which_variables_are_secrets(name: str, value: str, expected: bool) -> None:
    assert environment.is_secret(name, value) is expected


def test_settings_of_object_stores_are_kept_for_the_keeper() -> None:
    names = ("FSSPEC_S3_ENDPOINT_URL", "FSSPEC_S3", "AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_ENDPOINT_URL_S3")
    names += ("AWS_RESPONSE_CHECKSUM_VALIDATION", "AWS_MAX_ATTEMPTS", "AWS_EC2_METADATA_DISABLED", "FSSPEC_CONFIG_DIR")
    kept = environment.keep(dict.fromkeys(names, "x") | {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/a"})
    assert kept.values == dict.fromkeys(names, "x")
    assert environment.resumed(kept, {}, as_recorded=True)[0] == kept.values


def test_what_torch_sets_by_itself_is_not_kept_and_no_difference() -> None:
    set_by_torch = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_me"}
    kept = environment.keep(set_by_torch | {"DATA": "/a"}, names=["DATA"])
    assert kept.values == {"DATA": "/a"}
    assert environment.resumed(kept, {"DATA": "/a"}, as_recorded=False)[1] == []
    assert environment.resumed(kept, set_by_torch | {"DATA": "/a"}, as_recorded=False)[1] == []
    chosen = {"TORCHINDUCTOR_CACHE_DIR": "/scratch/inductor"}
    assert environment.keep(chosen).values == chosen


def test_a_folder_without_it_is_resumed_as_before(tmp_path: Path) -> None:
    assert environment.read(tmp_path) is None
    assert environment.resumed(None, {"A": "1"}, as_recorded=True) == ({"A": "1"}, [])
    (tmp_path / environment.FILE).write_text("[]")
    assert environment.read(tmp_path) is None


def test_a_command_line_is_shown_without_secrets() -> None:
    words = ["train", "launch", "--script", "a b.py", "--", "--api-key", "abc", "--lr", "0.1", "--hub.token=xyz"]
    words += ["https://me:pass@host/x", "--optim.lr=3", "-v", "--notify", "mail me", "--notify=mail me"]
    assert environment.shown(words) == (
        "train launch --script 'a b.py' -- --api-key … --lr 0.1 --hub.token=… … --optim.lr=3 -v --notify … --notify=…"
    )


def test_a_run_knows_who_created_it_and_how(station: Station) -> None:
    station.ok("run", "digits", "--name", "a", "--steps", "2", "--device", "cpu")
    record = json.loads((station.runs / "a" / "run.json").read_text())
    assert record["command_line"].startswith("train run digits --name a --steps 2 --device cpu")
    assert record["user"] == pwd.getpwuid(os.geteuid()).pw_name
    assert record["image"] == os.environ.get("TRAINSTATION_VERSION")
    shown = station.ok("show", "a").stdout
    assert f"  command      {record['command_line']}" in shown and f"  user         {record['user']}\n" in shown
