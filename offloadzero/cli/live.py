"""A page that follows data that grow, served to this machine alone until Ctrl-C.

[Note: who may ask for the page]
The server listens on 127.0.0.1 and knows two addresses: the page and its data. No part of a request becomes a path. A
site in a browser of this machine may send requests, too, but cannot read the answers, which allow no other origin; and
if it lets a name of its own point to 127.0.0.1, that name is the Host of the request, which is refused.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from offloadzero.cli.output import print_lines
from offloadzero.errors import ConfigError, OffloadError

ADDRESS = "127.0.0.1"
_HOST = re.compile(r"(localhost|127\.0\.0\.1)(:[0-9]+)?", re.ASCII | re.IGNORECASE)


def serve(page: str, read_data: Callable[[], Mapping[str, Any]], *, port: int) -> None:
    """Serve `page` at / and the data at /data; port 0 is any that is free. Raises ConfigError where it is not free.

    What `read_data` raises as OffloadError or OSError is told to the page.
    """
    try:
        server = _Server((ADDRESS, port), _Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError("--port", port, f"a free port, or 0 for any: {error}") from error
    server.page, server.read_data = page.encode(), read_data
    with server, contextlib.suppress(KeyboardInterrupt):
        print_lines([f"http://{ADDRESS}:{server.server_address[1]}/ (Ctrl-C ends it)"])
        server.serve_forever()


class _Server(TCPServer):
    """Answers one request after the other: there is no thread to end."""

    page: bytes
    read_data: Callable[[], Mapping[str, Any]]
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a browser that has gone
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 1.0  # browsers open connections on which they ask for nothing

    def do_GET(self) -> None:
        if not _HOST.fullmatch(self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, b"only for localhost and 127.0.0.1")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, self.server.page, "text/html")
        elif self.path == "/data":
            self._answer_data()
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not here")

    def _answer_data(self) -> None:
        try:
            data = json.dumps(self.server.read_data(), allow_nan=False).encode()
        except (OffloadError, OSError) as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error).encode(errors="replace"))
        else:
            self._answer(HTTPStatus.OK, data, "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the page asks every second."""
