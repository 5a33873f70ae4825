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

ReadVersion = Callable[[], object]
ReadData = Callable[[], Mapping[str, Any]]


def serve(page: str, read_version: ReadVersion, read_data: ReadData, *, port: int) -> None:
    """Serve `page` at / and the data at /data; 0 is any free port. Raises ConfigError where the port is not free.

    The data are read when their version is another than the page has. An OffloadError or OSError of the two is told to
    the page.
    """
    try:
        server = _Server(page.encode(), read_version, read_data, port)
    except (OSError, OverflowError) as error:
        raise ConfigError("--port", port, f"a free port, or 0 for any: {error}") from error
    with server, contextlib.suppress(KeyboardInterrupt):
        print_lines([f"http://{ADDRESS}:{server.server_address[1]}/ (Ctrl-C ends it)"])
        server.serve_forever()


class _Server(TCPServer):
    """Answers one request after the other: there is no thread to end."""

    allow_reuse_address = True

    def __init__(self, page: bytes, read_version: ReadVersion, read_data: ReadData, port: int) -> None:
        self.page = page
        self.read_version = read_version
        self.read_data = read_data
        super().__init__((ADDRESS, port), _Handler)

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
            self._answer(HTTPStatus.OK, self.server.page, kind="text/html")
        elif self.path == "/data":
            self._answer_data()
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not here")

    def _answer_data(self) -> None:
        try:
            version = f'"{hash(self.server.read_version())}"'
            is_known = self.headers.get("If-None-Match") == version
            data = b"" if is_known else json.dumps(self.server.read_data(), allow_nan=False).encode()
        except (OffloadError, OSError) as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error).encode(errors="replace"))
            return
        status = HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK
        self._answer(status, data, kind="application/json", version=version)

    def _answer(
        self, status: HTTPStatus, body: bytes = b"", *, kind: str = "text/plain", version: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if version:
            self.send_header("ETag", version)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the page asks every second."""
