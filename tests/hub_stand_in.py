"""A small stand-in for the Hugging Face Hub on 127.0.0.1: what fetching and pushing a model asks
for, and no more.

with stand_in() as hub: hub.url, hub.models["owner/name"] = [{file: bytes}, ...], one for each
commit
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN, STRANGER = "hf_of_owner", "hf_of_stranger"
REFUSED = {401: "Invalid username or password.", 403: "you must use a write token to write here"}


class Hub(ThreadingHTTPServer):
    """Models by name, the files after each commit, and what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.models: dict[str, list[dict[str, bytes]]] = {}
        self.made: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.gated: set[str] = set()


def commit_of(number: int) -> str:
    return f"{number:040x}"


def blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Answer(BaseHTTPRequestHandler):
    """One request."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, value: object, status: int = 200, **headers: str) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, code: str = "") -> None:
        said = REFUSED.get(status, code)
        self.reply({"error": said}, status, X_Error_Code=code, X_Error_Message=said)

    def commit(self, name: str, revision: str) -> int | None:
        """The number of the commit that a revision names; None once it is refused."""
        if name in self.server.gated:
            return self.refuse(403, "GatedRepo")
        commits = self.server.models.get(name)
        if commits is None:
            return self.refuse(404, "RepoNotFound")
        known = {commit_of(number): number for number in range(len(commits))} | {
            "main": len(commits) - 1
        }
        return known[revision] if revision in known else self.refuse(404, "RevisionNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        if path == "/api/whoami-v2":
            known = self.headers.get("Authorization") in {
                f"Bearer {token}" for token in (TOKEN, STRANGER)
            }
            return self.reply({"name": "owner"}) if known else self.refuse(401)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            return self.describe(*match.groups())
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        return self.send(*match.groups()) if match else self.refuse(404)

    def describe(self, name: str, kind: str | None, revision: str | None) -> None:
        if (number := self.commit(name, revision or "main")) is None:
            return
        files = self.server.models[name][number].items()
        tree = [
            {"type": "file", "path": file, "size": len(content), "oid": blob(content)}
            for file, content in files
        ]
        info = {
            "id": name,
            "sha": commit_of(number),
            "siblings": [{"rfilename": file} for file, _ in files],
        }
        self.reply(tree if kind == "tree" else info)

    def send(self, name: str, revision: str, file: str) -> None:
        if (number := self.commit(name, revision)) is None:
            return
        content = self.server.models[name][number].get(file)
        if content is None:
            self.refuse(404, "EntryNotFound")
        else:
            self.reply(content, ETag=f'"{blob(content)}"', X_Repo_Commit=commit_of(number))

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        body = self.body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(403)
        if self.path == "/api/repos/create":
            made = json.loads(body)
            name = f"{made['organization']}/{made['name']}"
            new = self.server.models.setdefault(name, [{}]) == [{}]
            self.server.made += [made] if new else []
            return self.reply({"url": f"{self.server.url}/{name}"}, 200 if new else 409)
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/?]+)", self.path)
        assert match, self.path
        name, kind, revision = match.groups()
        if (number := self.commit(name, revision)) is None:
            return None
        if kind == "preupload":
            asked = [file["path"] for file in json.loads(body)["files"]]
            return self.reply(
                {
                    "files": [
                        {"path": file, "uploadMode": "regular", "shouldIgnore": False}
                        for file in asked
                    ]
                }
            )
        files = dict(self.server.models[name][number])
        for change in map(json.loads, body.splitlines()):
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif change["key"] == "deletedFile":
                del files[value["path"]]
        self.server.models[name].append(files)
        commit = commit_of(number + 1)
        return self.reply(
            {"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit}
        )

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content


@contextmanager
def stand_in() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
