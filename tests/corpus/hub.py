"""A Hugging Face Hub on loopback: as much of it as reading a dataset asks for."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3  # entries of a tree in one answer; the real Hub has 1000


class Hub:
    """Datasets with branches, each a commit of files; and what was asked for."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self._commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self._branches: dict[tuple[str, str], str] = {}

    def commit(self, dataset: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Put files on a branch; gives the commit's hash."""
        names = json.dumps([dataset, branch, len(self._commits), sorted(files)])
        sha = hashlib.sha1(names.encode()).hexdigest()
        self._commits[dataset, sha] = files
        self._branches[dataset, branch] = sha
        return sha

    def answer(self, path: str, span: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content for a GET."""
        self.asked.append(path if span is None else f"{path} {span}")
        address = urlsplit(path)
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/(revision|tree)/([^/]+)(?:/(.*))?", address.path):
            dataset, kind, revision, folder = (unquote(part or "") for part in found.groups())
            sha = self._sha(dataset, revision)
            if sha is None:
                known = any(name == dataset for name, _ in self._commits)
                return 404, {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"}, b"{}"
            if kind == "revision":
                return 200, {}, json.dumps({"id": dataset, "sha": sha}).encode()
            return self._tree(address.path, self._commits[dataset, sha], folder, parse_qs(address.query))
        if found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", address.path):
            dataset, revision, name = (unquote(part) for part in found.groups())
            content = self._commits.get((dataset, self._sha(dataset, revision) or ""), {}).get(name)
            if content is None:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            return _part(content, span)
        return 404, {}, b""

    def _sha(self, dataset: str, revision: str) -> str | None:
        return revision if (dataset, revision) in self._commits else self._branches.get((dataset, revision))

    def _tree(
        self, path: str, files: dict[str, bytes], folder: str, query: dict[str, list[str]]
    ) -> tuple[int, dict[str, str], bytes]:
        names = {name: PurePosixPath(name) for name in files}
        folders = {str(parent) for name in names.values() for parent in name.parents} - {"."}
        entries: list[dict[str, Any]] = [{"type": "directory", "path": name, "oid": "0" * 40} for name in folders]
        entries += [_entry(name, content) for name, content in files.items()]
        if query.get("recursive", ["false"])[0].lower() != "true":
            entries = [entry for entry in entries if str(PurePosixPath(entry["path"]).parent) == (folder or ".")]
        entries.sort(key=lambda entry: str(entry["path"]))
        first = int(query.get("cursor", ["0"])[0])
        more = f"{self.url}{path}?recursive={query.get('recursive', ['false'])[0]}&cursor={first + PAGE}"
        headers = {"Link": f'<{more}>; rel="next"'} if first + PAGE < len(entries) else {}
        return 200, headers, json.dumps(entries[first : first + PAGE]).encode()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    """Parquet files lie in large file storage, which knows their SHA-256; others in git."""
    entry = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    if name.endswith(".parquet"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def _part(content: bytes, span: str | None) -> tuple[int, dict[str, str], bytes]:
    if span is None:
        return 200, {}, content
    first, last = (int(number) for number in span.removeprefix("bytes=").split("-"))
    return 206, {"Content-Range": f"bytes {first}-{last}/{len(content)}"}, content[first : last + 1]


@contextmanager
def served() -> Iterator[Hub]:
    """A hub that answers at `url`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, content = hub.answer(self.path, self.headers.get("Range"))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
