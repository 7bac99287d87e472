"""A Hub on this machine, over HTTP: huggingface_hub and Transformers push to it and load from it as from the real one."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class LocalHub:
    """Repositories in memory: files by repository and path; and every request, as "METHOD path"."""

    def __init__(self):
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator["LocalHub"]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(*hub.answer(self.command, self.path, b""))

            do_HEAD = do_GET

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.answer(*hub.answer(self.command, self.path, body))

            def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(content))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content."""
        path = path.partition("?")[0]
        self.requests.append(f"{method} {path}")
        if path == "/api/repos/create":
            repo = json.loads(body)
            name = "/".join(filter(None, (repo.get("organization") or "org", repo["name"].rpartition("/")[2])))
            self.files.setdefault(name, {})
            return as_json({"url": f"{self.url}/{name}", "id": name})
        if path == "/api/validate-yaml":
            return as_json({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", path):
            return self.file(found["repo"], found["file"])
        if found := re.fullmatch(r"/api/models/(?P<repo>[^/]+/[^/]+)(?P<rest>/.*)?", path):
            return self.api(found["repo"], found["rest"] or "", body)
        return missing("EntryNotFound")

    def api(self, repo: str, rest: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if repo not in self.files:
            return missing("RepoNotFound")
        files = self.files[repo]
        if rest.startswith("/preupload/"):
            asked = json.loads(body)["files"]
            return as_json(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
            )
        if rest.startswith("/commit/"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "deletedFile":
                    del files[entry["value"]["path"]]
            return as_json(
                {"commitUrl": f"{self.url}/{repo}/commit/{self.commit(repo)}", "commitOid": self.commit(repo)}
            )
        if rest.startswith("/tree/"):
            return as_json(
                [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()]
            )
        siblings = [{"rfilename": name} for name in files]
        return as_json({"id": repo, "modelId": repo, "sha": self.commit(repo), "siblings": siblings, "tags": []})

    def file(self, repo: str, name: str) -> tuple[int, dict[str, str], bytes]:
        if repo not in self.files:
            return missing("RepoNotFound")
        if name not in self.files[repo]:
            status, headers, content = missing("EntryNotFound")
            return status, headers | {"X-Repo-Commit": self.commit(repo)}, content
        content = self.files[repo][name]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": self.commit(repo)}
        return 200, headers, content

    def commit(self, repo: str) -> str:
        content = b"".join(name.encode() + data for name, data in sorted(self.files[repo].items()))
        return hashlib.sha1(content).hexdigest()


def as_json(content: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def missing(code: str) -> tuple[int, dict[str, str], bytes]:
    return 404, {"X-Error-Code": code}, b"{}"
