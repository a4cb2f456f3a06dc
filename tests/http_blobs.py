# SPDX-License-Identifier: Apache-2.0
"""An object store for tests: the files of a layer store over HTTP on loopback, with ranges, and with faults on demand."""

import http.server
import os
import pathlib
import re
import threading


class BlobServer:
    """Serves GET /blobs/HEX/NAME below `root` at `url` until close().

    `fault` is None or one of: wrong (bytes of data.blob are others), short (the connection ends half way), error (500), hang
    (no answer until release()), whole (200 and all of it, whatever the range), elsewhere (206 with another Content-Range).
    It concerns data.blob alone, of the layer `only` if that is set. `requests` are (path, range, headers) in order, `sent` the bytes of bodies.
    """

    def __init__(self, root, port=0):
        self.root = pathlib.Path(root)
        self.fault = None
        self.only = ""
        self.requests = []
        self.sent = 0
        self.waiting = threading.Semaphore(0)  # one release for each request that hangs
        self._go = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.blobs = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def hang(self):
        """From now on requests for content get no answer."""
        self._go.clear()
        self.fault = "hang"

    def release(self):
        """Those that hang go on, and so does all else."""
        self.fault = None
        self._go.set()

    def close(self):
        """Ends the server and its connections."""
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._server.drop()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *words):
        self.open = set()
        super().__init__(*words)

    def process_request(self, request, client_address):
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.open.discard(request)
        super().shutdown_request(request)

    def drop(self):
        """A server that has died holds no connection."""
        for request in list(self.open):
            super().shutdown_request(request)

    def handle_error(self, request, client_address):
        pass  # clients come and go


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def _answer(self, status, body, headers=()):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        with self.server.blobs._lock:
            self.server.blobs.sent += len(body)

    def do_GET(self):
        blobs = self.server.blobs
        asked = self.headers.get("Range")
        with blobs._lock:
            blobs.requests.append((self.path, asked, dict(self.headers)))
        if not re.fullmatch(r"/blobs/[0-9a-f]{64}/(manifest\.json|meta\.erofs|chunks\.sha256|data\.blob)", self.path):
            return self._answer(404, b"no such thing\n")
        try:
            with open(blobs.root / self.path[1:], "rb") as file:
                return self._serve(file, asked)
        except FileNotFoundError:
            return self._answer(404, b"no such thing\n")

    def _serve(self, file, asked):
        blobs = self.server.blobs
        size = os.fstat(file.fileno()).st_size
        fault = blobs.fault if self.path.endswith(f"{blobs.only}/data.blob") else None
        if fault == "error":
            return self._answer(500, b"broken\n")
        if fault == "hang":
            blobs.waiting.release()
            blobs._go.wait()
        if asked is None or fault == "whole":
            return self._answer(200, file.read())
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups())
        part = os.pread(file.fileno(), last + 1 - first, first)
        if fault == "wrong":
            part = bytes([part[0] ^ 1]) + part[1:]
        if fault == "elsewhere":
            first, last = first + 1, last + 1
        headers = [("Content-Range", f"bytes {first}-{last}/{size}")]
        if fault != "short":
            return self._answer(206, part, headers)
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header(*headers[0])
        self.end_headers()
        self.wfile.write(part[: len(part) // 2])
        self.close_connection = True
