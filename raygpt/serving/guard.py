"""Which requests are served at all: with the key, or by this machine's own name."""

import secrets
from typing import Any

from starlette.responses import JSONResponse

from raygpt.host import is_loopback
from raygpt.serving.completions import RefusedError


def refusal(error: RefusedError) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    return JSONResponse(error.as_json(), error.status, error.headers)


class Guard:
    """Serves clients that have the key. Without a key, it serves requests to `localhost` or a loopback address: a web
    page elsewhere, whose name resolves to this machine (DNS rebinding), sends that name."""

    def __init__(self, app: Any, key: str | None, open_paths: frozenset[str]):
        self._app, self._key, self._open_paths = app, key, open_paths  # these need no key: the page, which asks for it

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        error = self._error(scope) if scope["type"] == "http" else None
        await (refusal(error) if error else self._app)(scope, receive, send)

    def _error(self, scope: Any) -> RefusedError | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._key is None:
            host = headers.get(b"host", "")
            name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
            if not is_loopback(name):
                return RefusedError(403, "without an API key only localhost is served; see raygpt serve --help")
            return None
        if scope["path"].strip("/") in self._open_paths:
            return None
        scheme, _, given = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), self._key.encode()):
            return None
        return RefusedError(401, "wrong or missing API key; send the header Authorization: Bearer KEY")
