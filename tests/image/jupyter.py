"""A client of the station's JupyterLab: kernels and terminals over its REST and WebSocket interfaces."""

from __future__ import annotations

import json
import uuid

import requests
import websocket
from conftest import Station


class Client:
    def __init__(self, station: Station) -> None:
        self.base = station.url
        self.headers = {"Authorization": f"token {station.token}"}

    def request(self, method: str, path: str, **options: object) -> requests.Response:
        answer = requests.request(method, self.base + path, headers=self.headers, timeout=30, **options)
        answer.raise_for_status()
        return answer

    def socket(self, path: str) -> websocket.WebSocket:
        header = [f"{k}: {v}" for k, v in self.headers.items()]
        return websocket.create_connection(self.base.replace("http", "ws") + path, header=header, timeout=60)

    def run_in_kernel(self, code: str) -> str:
        """What the code prints in a fresh kernel."""
        kernel = self.request("POST", "/api/kernels").json()["id"]
        try:
            channel = self.socket(f"/api/kernels/{kernel}/channels")
            message = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "version": "5.3"}
            message |= {"username": "", "session": ""}
            content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
            request = {"header": message, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
            channel.send(json.dumps(request))
            printed = ""
            while True:
                answer = json.loads(channel.recv())
                if answer["parent_header"].get("msg_id") != message["msg_id"]:
                    continue
                if answer["msg_type"] == "stream":
                    printed += answer["content"]["text"]
                elif answer["msg_type"] == "error":
                    raise AssertionError("\n".join(answer["content"]["traceback"]))
                elif answer["msg_type"] == "status" and answer["content"]["execution_state"] == "idle":
                    return printed
        finally:
            self.request("DELETE", f"/api/kernels/{kernel}")

    def type_in_terminal(self, line: str) -> None:
        """Types a line into a new terminal, as a person does, and leaves it open."""
        name = self.request("POST", "/api/terminals").json()["name"]
        channel = self.socket(f"/terminals/websocket/{name}")
        channel.send(json.dumps(["stdin", line + "\r"]))
        channel.recv()
        channel.close()
