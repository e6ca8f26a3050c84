"""Models by id, from a hub that this file serves: what is downloaded, what is not, and what is said when it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mtpserve.cli.main import main
from mtpserve.config import EngineConfig, ModelConfig, SpecConfig
from mtpserve.weights.checkpoint.hub import fetched, is_id
from tests.house.tree import ROOT

ID, COMMIT = "some-org/Some-Model.1", "c" * 40


class Hub(ThreadingHTTPServer):
    """The part of the hub's interface that downloading a model needs."""

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
        self.wanted = {name for name in self.files if name.endswith((".json", ".safetensors", ".jinja")) and "/" not in name}
        self.sent: list[str] = []
        self.bytes = 0


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        if path in (f"/api/models/{ID}/revision/main", f"/api/models/{ID}/revision/v2"):
            self.send(json.dumps({"id": ID, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}).encode(), body)
        elif path.startswith(f"/api/models/{ID}/tree/"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()} for name, data in files.items()]
            self.send(json.dumps(tree).encode(), body)
        elif path.startswith(f"/api/models/{ID}/revision/"):
            self.send(b"{}", body, 404, {"X-Error-Code": "RevisionNotFound"})
        elif (name := path.removeprefix(f"/{ID}/resolve/{COMMIT}/")) in files:
            if body:
                self.server.sent.append(name)
            data, whole, status = files[name], len(files[name]), 200
            if found := re.fullmatch(r"bytes=0-(\d+)", self.headers.get("Range", "")):
                data, status = data[: int(found[1]) + 1], 206
            ranges = {"Content-Range": f"bytes 0-{len(data) - 1}/{whole}"} if status == 206 else {}
            self.send(data, body, status, ranges | {"ETag": f'"{sha1(files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self.send(b"{}", body, 404, {"X-Error-Code": "RepoNotFound"})

    def send(self, data: bytes, body: bool, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.server.bytes += len(data)
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    directory = tmp_path_factory.mktemp("published") / "model"
    shutil.copytree(ModelConfig().directory, directory)
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    (directory / "modeling_some.py").write_text("print('code of a checkpoint')")
    (directory / "original").mkdir()
    (directory / "original" / "model.safetensors").write_bytes(b"the same again")
    hub = Hub(directory)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


def run(home: Path, endpoint: str, *arguments: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_TELEMETRY": "1"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, **variables, "PYTHONPATH": path, "NO_PROXY": "127.0.0.1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=200, check=False)


FETCH = """
import sys
from mtpserve.config import EngineConfig, ModelConfig, SpecConfig
from mtpserve.weights.checkpoint.hub import fetched
spec = SpecConfig(speculative_algorithm="STANDALONE", speculative_draft_model_path=sys.argv[1])
found = fetched(EngineConfig(model=ModelConfig(model=sys.argv[1], tokenizer=sys.argv[1], revision=sys.argv[2]), spec=spec))
assert found.model.served_model_name == (sys.argv[1],)
assert found.model.tokenizer == found.spec.speculative_draft_model_path == found.model.model, found
print(found.model.model)
"""


def test_an_id_becomes_a_directory_once(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    first = run(tmp_path, endpoint, "-c", FETCH, ID, "v2")
    assert first.returncode == 0, first.stderr
    directory = Path(first.stdout.strip())
    assert {file.name for file in directory.iterdir()} == hub.wanted == set(hub.sent) and len(hub.sent) == len(hub.wanted) >= 4
    assert all((directory / name).read_bytes() == hub.files[name] for name in hub.wanted)
    again = run(tmp_path, endpoint, "-c", FETCH, ID, "v2", offline=True)
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    report = run(tmp_path, endpoint, "-m", "mtpserve", "inspect", ID, "--json", "--revision", "v2")
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["arch"]["hidden"] > 0 and len(hub.sent) == len(hub.wanted)


def test_a_draft_model_with_the_models_own_name_is_its_mtp_layer(tmp_path: Path) -> None:
    def drafted_by(algorithm: str | None, path: Path | str) -> str | None:
        spec = SpecConfig(speculative_algorithm=algorithm, speculative_draft_model_path=str(path))
        return fetched(EngineConfig(model=ModelConfig(model=str(tmp_path)), spec=spec)).spec.speculative_draft_model_path

    for algorithm in ("MTP", "ernie_mtp", "EAGLE", "MTP+NGRAM", None):
        assert drafted_by(algorithm, tmp_path) is drafted_by(algorithm, f"{tmp_path}/.") is None
    assert drafted_by("STANDALONE", tmp_path) == str(tmp_path)
    assert drafted_by("MTP", tmp_path.parent) == str(tmp_path.parent)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launch", "some-org/none"), "no such model on Hugging Face; a private model needs HF_TOKEN"),
        (("serve", ID, "--revision", "v9"), f"{ID}: no revision 'v9' on Hugging Face"),
        (("inspect", "some-org/none"), "no such model on Hugging Face; a private model needs HF_TOKEN"),
    ],
)
def test_what_the_hub_has_not_is_one_line(hub: Hub, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    port = ("--port", "0") if arguments[0] != "inspect" else ()
    done = run(tmp_path, f"http://127.0.0.1:{hub.server_port}", "-m", "mtpserve", *arguments, *port)
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_no_hub_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "http://127.0.0.1:9", "-m", "mtpserve", "launch", "--model", ID, "--port", "0")
    assert done.returncode == 1 and "no such directory, and Hugging Face cannot be reached" in done.stderr.splitlines()[-1]


def test_inspecting_an_id_reads_headers_alone(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, sent = hub.bytes, len(hub.sent)
    there = run(tmp_path, f"http://127.0.0.1:{hub.server_port}", "-m", "mtpserve", "inspect", ID, "--json", "--max-total-tokens", "4096")
    assert there.returncode == 0, there.stderr
    weights = sum(len(data) for name, data in hub.files.items() if name.endswith(".safetensors"))
    assert 0 < hub.bytes - before < 400_000 < weights and "tokenizer.json" not in hub.sent[sent:]
    assert main(["inspect", "demo", "--json", "--max-total-tokens", "4096"]) == 0
    assert json.loads(there.stdout) == json.loads(capsys.readouterr().out)
    assert not list(tmp_path.rglob("*.safetensors"))
    offline = run(tmp_path, f"http://127.0.0.1:{hub.server_port}", "-m", "mtpserve", "inspect", ID, offline=True)
    assert offline.returncode == 1 and f"it is not downloaded: `hf download {ID}`" in offline.stderr


def test_a_path_that_is_not_there_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    code = "import sys; from mtpserve.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    done = run(tmp_path, "http://127.0.0.1:9", "-c", code, "inspect", str(tmp_path / "nowhere"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and f"{tmp_path / 'nowhere'}: no such directory" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launch", "dmo"), "dmo: no such directory or GGUF file, not a bundled model (demo, smollm2), "
         "and not a Hugging Face id (org/name); did you mean demo?"),
        (("generate", "--model", "unheard", "hi"), "unheard: no such directory or GGUF file, not a bundled model (demo, smollm2)"),
        (("launch", "demo", "--tokenizer", "./nowhere"), "./nowhere: no such directory or GGUF file"),
        (("launch", "demo", "--speculative-draft-model-path", "a/b/c"), "a/b/c: no such directory or GGUF file"),
        (("launch", "-hf", "org/name:Q4_K_M"), "run `hf download org/name FILE.gguf`, and give --model the path"),
        (("launch", "org/name-GGUF"), "run `hf download org/name-GGUF FILE.gguf`, and give --model the path"),
    ],
)  # fmt: skip
def test_a_name_that_means_nothing_is_refused_before_torch_is_imported(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mtpserve.server.launch", "mtpserve.llm"):  # an import of None fails
        monkeypatch.setitem(sys.modules, module, None)
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_what_is_said_while_offline(hub: Hub, tmp_path: Path) -> None:
    done = run(tmp_path, f"http://127.0.0.1:{hub.server_port}", "-m", "mtpserve", "launch", ID, "--port", "0", offline=True)
    assert done.returncode == 1 and f"{ID}: no such directory, and HF_HUB_OFFLINE is set: it is not downloaded" in done.stderr


def test_a_download_is_a_bar_and_not_a_line_for_each_request(hub: Hub, tmp_path: Path) -> None:
    """Ended by an option that is refused once the model is there."""
    refused = ("--port", "0", "--context-length", "100000000")
    done = run(tmp_path, f"http://127.0.0.1:{hub.server_port}", "-m", "mtpserve", "launch", ID, *refused)
    said = done.stderr
    assert done.returncode and "100000000" in said.splitlines()[-1] and "HTTP Request" not in said and "/resolve/" not in said
    bars = {line.partition(":")[0] for line in re.split("[\r\n]", said) if "%|" in line}
    assert bars == {f"Fetching {len(hub.wanted)} files"}, said


def test_what_is_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_id("deepseek-ai/DeepSeek-V3") and is_id("a/b")
    for name in ("demo", "/models/a", "./a", "models/", "a/b/c", "~/a", "../a", "a b/c", "a/b\n", "-a/b"):
        assert not is_id(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert not is_id("a/b")
