"""What is sent to each chat, what it answers, and that no message shows the address."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import socket
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.hooks import Hook, hook
from tests.waiting import eventually
from train import webhooks
from train.errors import Refused
from train.webhooks import Answer, Message

SECRET = "c0ffee-c0ffee"
TOLD = Message(text='vit 失败 at <step> 910: <at user_id="all">', run="vit", state="failed", step=910, host="here")


@pytest.fixture
def server() -> Iterator[Hook]:
    with hook() as made:
        yield made


def send(url: str, told: Message = TOLD) -> Answer:
    answer = webhooks.send(webhooks.parse(url, "--notify"), told)
    assert SECRET not in answer.text and "\n" not in answer.text
    return answer


def signed(key: str, text: str) -> str:
    return base64.b64encode(hmac.new(key.encode(), text.encode(), hashlib.sha256).digest()).decode()


def test_a_url_that_no_chat_has_gets_json(server: Hook) -> None:
    assert send(f"{server.url}/my/{SECRET}?x=1") == (True, f"{server.place} answered 200")
    [got] = server.received
    assert got.path == f"/my/{SECRET}?x=1" and got.headers["Content-Type"].startswith("application/json")
    assert got.body == {"text": TOLD.text, "run": "vit", "state": "failed", "step": 910, "host": "here"}


def test_slack_gets_no_links_and_discord_no_calls(server: Hook) -> None:
    server.answer = "ok"
    assert send(f"{server.url}/services/T01/B02/{SECRET}").is_sent
    assert server.received[-1].body == {"text": 'vit 失败 at &lt;step&gt; 910: &lt;at user_id="all"&gt;'}
    server.code = 204
    server.answer = ""
    assert send(f"{server.url}/api/webhooks/12/{SECRET}").is_sent
    assert server.received[-1].body == {"content": TOLD.text, "allowed_mentions": {"parse": []}}


def test_ntfy_gets_plain_text_and_a_title_in_ascii(server: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)  # so that the request to this host arrives here
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    odd = dataclasses.replace(TOLD, run="r\n训x")
    assert send(f"http://ntfy.invalid/{SECRET}", odd) == (True, "ntfy.invalid answered 200")
    [got] = server.received
    assert (got.path, got.text) == (f"http://ntfy.invalid/{SECRET}", TOLD.text)
    assert got.headers["Title"] == "r ?x failed"


def test_feishu_is_signed_and_its_refusal_is_seen_behind_a_200(server: Hook) -> None:
    url = f"{server.url}/open-apis/bot/v2/hook/abc"
    server.answer = '{"code": 0, "msg": "success"}'
    assert send(f"{url}#{SECRET}").is_sent
    got = server.received[-1].body
    assert (
        got["content"] == {"text": 'train: vit 失败 at <step> 910: < at user_id="all">'} and got["msg_type"] == "text"
    )
    assert got["sign"] == signed(f"{got['timestamp']}\n{SECRET}", "")
    assert abs(int(got["timestamp"]) - time.time()) < 60 and SECRET not in server.received[-1].path
    assert send(url).is_sent and "sign" not in server.received[-1].body
    server.answer = f'{{"code": 19021, "msg": "sign match fail {SECRET}"}}'
    assert send(f"{url}#{SECRET}") == (False, f"{server.place} answered 200: sign match fail …")


def test_dingtalk_is_signed_in_its_address(server: Hook) -> None:
    server.answer = '{"errcode": 0, "errmsg": "ok"}'
    assert send(f"{server.url}/robot/send?access_token=abc#{SECRET}").is_sent
    query = server.query()
    assert query["access_token"] == "abc"
    assert urllib.parse.unquote_plus(query["sign"]) == signed(SECRET, f"{query['timestamp']}\n{SECRET}")
    assert server.received[-1].body == {"msgtype": "text", "text": {"content": f"train: {TOLD.text}"}}
    server.answer = '{"errcode": 310000, "errmsg": "关键词不匹配"}'
    assert send(f"{server.url}/robot/send?access_token=abc") == (False, f"{server.place} answered 200: 关键词不匹配")
    assert server.query() == {"access_token": "abc"}


@pytest.mark.parametrize("answer", ['{"errcode": 93000, "errmsg": ""}', "<html>log in", "[]", "{}", "[" * 5000, ""])
def test_wecom_without_a_code_of_0_has_not_taken_the_message(server: Hook, answer: str) -> None:
    url = f"{server.url}/cgi-bin/webhook/send?key={SECRET}"
    server.answer = '{"errcode": 0, "errmsg": "ok"}'
    assert send(url).is_sent and server.query() == {"key": SECRET}
    server.answer = answer
    assert not send(url).is_sent


def test_a_redirect_and_an_error_are_told_without_the_address(server: Hook) -> None:
    server.code, server.headers = 302, {"Location": f"{server.url}/{SECRET}"}
    assert send(f"{server.url}/{SECRET}") == (
        False, f"{server.place} answered 302: it leads to another address; give that one"
    )  # fmt: skip
    assert len(server.received) == 1
    server.code, server.answer = 404, f"no\x1b[31m such\nhook /{SECRET}"
    assert send(f"{server.url}/{SECRET}") == (False, f"{server.place} answered 404: no?[31m such hook /…")
    server.answer = "no key abc+def="
    assert send(f"{server.url}/?key=abc%2Bdef%3D") == (False, f"{server.place} answered 404: no key …")


def test_a_server_that_drips_or_is_gone_does_not_hold_the_sender(server: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "PATIENCE", 1.0)
    server.seconds, server.answer = 0.3, "x" * 100  # no pause is as long as a time-out of the socket
    assert send(f"{server.url}/{SECRET}") == (False, f"{server.place} did not answer within 1 s")
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        place = f"127.0.0.1:{mute.getsockname()[1]}"
        assert send(f"http://{place}/{SECRET}").text == f"{place} did not answer within 1 s"
    assert send(f"http://{place}/{SECRET}").text.startswith(f"{place} cannot be reached: ")
    assert send(f"http://no.such.host.invalid/{SECRET}").text.startswith("no.such.host.invalid ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ftp://host/c0ffee-c0ffee", "URL of ftp"),
        ("https://", "needs a host"),
        ("https://host:99999/c0ffee-c0ffee", "host and port"),
        ("https://[::1/c0ffee-c0ffee", "host and port"),
        ("https://host/c0ffee-c0ffee 训", "no blanks"),
        ("https://host/c0ffee-c0ffee\tx", "no blanks"),
        ("https://me:c0ffee-c0ffee@host/", "password before its host"),
        ("https://host/#c0ffee-c0ffee", "only Feishu and DingTalk"),
        ("hooks.slack.com/services/c0ffee-c0ffee", "begins with https://"),
    ],
)
def test_what_is_no_address_is_refused_without_quoting_it(text: str, said: str) -> None:
    with pytest.raises(Refused) as refused:
        webhooks.parse(text, "--notify")
    assert said in str(refused.value) and SECRET not in str(refused.value)


def test_a_command_gets_the_text_and_ps_does_not_show_the_command(tmp_path: Path) -> None:
    command = 'cat >told; printf %s "$NOTICE" >variable; tr "\\0" " " </proc/$$/cmdline >shown # c0ffee-c0ffee'
    address = webhooks.parse(command, "--notify")
    assert SECRET not in repr(address)
    answer = webhooks.send(address, TOLD, str(tmp_path))
    assert answer == (True, "the command ended with exit code 0")
    assert (tmp_path / "told").read_text() == f"{TOLD.text}\n"
    assert (tmp_path / "variable").read_text() == TOLD.text
    assert SECRET not in (tmp_path / "shown").read_text()


def test_a_command_that_fails_hangs_or_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert send("exit 7") == (False, "the command ended with exit code 7")
    assert send("no-such-c0ffee-c0ffee").text == "the command ended with exit code 127"
    assert send("true", dataclasses.replace(TOLD, text="x" * 100_000)).is_sent
    monkeypatch.setattr(webhooks, "COMMAND_PATIENCE", 0.5)
    began = time.monotonic()
    answer = webhooks.send(webhooks.parse("sleep 300 & echo $! >pid; wait", "--notify"), TOLD, str(tmp_path))
    assert answer == (False, "the command did not end within 0.5 s and was killed") and time.monotonic() - began < 60
    left = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/cwd")
    eventually("the killed process is gone", lambda: not left.exists())
