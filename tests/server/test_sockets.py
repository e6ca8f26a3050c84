"""The server's sockets: who listens, who is cut off, and TLS. A subprocess with a fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from mtpserve.config import EngineConfig, ServerConfig
from mtpserve.core.errors import MTPServeError
from mtpserve.server.launch import is_loopback, serve
from tests.server.metric_text import without_model
from tests.server.test_launch import Server, launched

HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
LISTEN = "0A"


def connect(server: Server, buffer: int | None = None) -> socket.socket:
    opened = socket.socket()
    if buffer is not None:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    opened.settimeout(10)
    opened.connect((urlsplit(server.url).hostname, urlsplit(server.url).port))
    return opened


def listening(pid: int) -> list[str]:
    """Local addresses of the TCP sockets on which a process listens."""
    inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == LISTEN and f"socket:[{row[9]}]" in inodes]


def until(server: Server, text: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while text not in without_model(httpx.get(f"{server.url}/metrics").text):
        assert time.monotonic() < end, text
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with launched(checkpoint) as started:
        yield started


def test_one_socket_listens_and_on_loopback_alone(server: Server) -> None:
    (address,) = listening(server.process.pid)
    assert address == f"0100007F:{urlsplit(server.url).port:04X}"
    assert listening(server.engine()) == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(server: Server, stream: bool) -> None:
    """Such a client knows the end of an answer by that of the connection."""
    body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 20}, "stream": stream}).encode()
    with connect(server) as opened:
        opened.sendall(HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") % len(body) + body)
        answer = b"".join(iter(lambda: opened.recv(1 << 16), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head and b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    if stream:
        assert content.startswith(b"data: {") and content.endswith(b"data: [DONE]\n\n") and b"\r\n" not in content
    else:
        assert len(json.loads(content)["output_ids"]) == 20


UNFINISHED = [b"", b"\r\n", b"POST /generate HTTP/1.1\r\nHost: x\r\nX-A", HEAD % 100, HEAD % 100 + b'{"text": ']


@pytest.mark.parametrize("trickled", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_requests_that_do_not_come_to_their_end_are_cut_off(checkpoint: Path, trickled: bool) -> None:
    """Whether nothing more comes, or a byte now and then."""
    with launched(checkpoint, "--read-timeout", "1") as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in UNFINISHED]
        start = time.monotonic()
        for each, sent in zip(slow, UNFINISHED, strict=True):
            each.sendall(sent)
            each.settimeout(60)
        while trickled and time.monotonic() - start < 0.5:
            time.sleep(0.1)
            for each, sent in zip(slow, UNFINISHED, strict=True):
                each.sendall(b"a" if sent.strip() else b"")
        for each, sent in zip(slow, UNFINISHED, strict=True):
            try:
                answer = each.recv(1 << 16)
            except ConnectionResetError:
                answer = b""
            assert answer.startswith(b"HTTP/1.1 408 ") == (b"X-A" in sent), sent
        assert time.monotonic() - start > 0.9
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_idle_connections_are_kept(checkpoint: Path) -> None:
    with launched(checkpoint, "--read-timeout", "0.3") as server, httpx.Client(base_url=server.url) as http:
        http.get("/health")
        time.sleep(0.6)
        with connect(server) as kept:
            for _ in range(2):
                kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = b""
                while not answer.endswith(b"}"):
                    part = kept.recv(1 << 16)
                    assert part, f"the connection was closed after {answer!r}"
                    answer += part
                assert answer.startswith(b"HTTP/1.1 200 ")
                time.sleep(0.6)


def test_what_is_no_http_gets_an_error_of_the_one_shape(server: Server) -> None:
    smuggled = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /"
    for sent in (b"\x16\x03\x01 nonsense\r\n\r\n", smuggled):
        with connect(server) as broken:
            broken.sendall(sent)
            head, _, body = broken.recv(1 << 16).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in body


def seconds(pid: int) -> float:
    """Of computing, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_server_sleeps(server: Server) -> None:
    time.sleep(0.5)
    pids = (server.process.pid, server.engine())
    before = sum(map(seconds, pids))
    time.sleep(2)
    assert sum(map(seconds, pids)) - before < 0.06  # a loop that spins takes seconds, one that looks each 10 ms a fifth of one


def test_a_client_that_never_reads_is_cut_off(checkpoint: Path) -> None:
    # Each chunk of this route has all tokens so far: more than the sockets' buffers hold.
    body = b'{"text": "a", "stream": true, "return_logprob": true, "sampling_params": {"max_new_tokens": 4000}}'
    with launched(checkpoint, "--write-timeout", "1", "--log-level", "info", FAKE_PAUSE="0.0005") as server:
        with connect(server, 4096) as stalled:
            stalled.sendall(HEAD % len(body) + body)
            # That it runs is not waited for: on a busy machine it may be cut off between two looks.
            until(server, 'mtpserve_requests_total{outcome="abort"} 1.0', 30)
        until(server, "mtpserve_requests_running 0.0", 5)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make a certificate")
def test_tls(checkpoint: Path, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *subject]
    subprocess.run([*new, "-keyout", key, "-out", cert], check=True, capture_output=True)
    files = ["--ssl-keyfile", str(key), "--ssl-certfile", str(cert)]
    trusting = ssl.create_default_context(cafile=str(cert))
    with launched(checkpoint, *files) as server:
        assert server.url.startswith("https://")
        assert httpx.get(f"{server.url}/health", verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
    with launched(checkpoint, *files, "--ssl-ca-certs", str(cert)) as server:
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health", verify=trusting)
        trusting.load_cert_chain(cert, key)
        assert httpx.get(f"{server.url}/health", verify=trusting).status_code == 200
    with launched(checkpoint, "--ssl-keyfile", str(key), "--ssl-certfile", str(tmp_path / "no"), ready=False) as server:
        code, log = server.end(15)
        assert code == 2 and log.startswith("mtpserve: --ssl-certfile ") and log.count("\n") == 1


def test_more_connections_than_files_and_afterwards_all_is_well(checkpoint: Path) -> None:
    with launched(checkpoint) as server, httpx.Client(base_url=server.url) as early:
        assert early.get("/health").status_code == 200
        pid = server.process.pid
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(list(Path(f"/proc/{pid}/fd").iterdir())) + 8,) * 2)
        crowd = [connect(server) for _ in range(40)]
        before = seconds(pid)
        time.sleep(1)
        assert early.get("/health").status_code == 200  # who is connected is served
        assert seconds(pid) - before < 0.5  # nobody spins over what cannot be accepted
        for one in crowd:
            one.close()
        end = time.monotonic() + 10
        while True:
            try:
                assert httpx.get(f"{server.url}/health", timeout=2).status_code == 200
                break
            except httpx.HTTPError:
                assert time.monotonic() < end
                time.sleep(0.1)


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"api_key": ("k",)}, False)])
def test_an_open_door_is_pointed_out(caplog: pytest.LogCaptureFixture, options: dict[str, Any], warned: bool) -> None:
    with pytest.raises(MTPServeError, match=r"cannot listen on 192\.0\.2\.1"):  # an address that nobody has
        serve(EngineConfig(), ServerConfig(host="192.0.2.1", port=0, **options))
    assert ("without an API key" in caplog.text) == warned
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "example.org")] == [True] * 3 + [False] * 3
