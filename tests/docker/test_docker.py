"""docker/ without Docker: files that are meant exist, options and metrics that are named are real, alerts do what they say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mtpserve.cli import launch
from mtpserve.cli.options import parsed_values, settings
from mtpserve.integrations.engines import checked_settings, values_of
from mtpserve.server.app import ROUTES, create_app
from mtpserve.server.observe.metrics import DEPRECATED
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.text import tiny

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
YAMLS = sorted(DOCKER.rglob("*.yaml"))
PROMTOOL = shutil.which("promtool")
BUILDS = re.compile(r"\b(apt-get|apk|gcc|g\+\+|make|cmake|git|pip3? install|build-essential)\b")


@dataclass
class Stage:
    image: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # instruction, the rest of its line

    def of(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


def stages() -> dict[str, Stage]:
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", (DOCKER / "Dockerfile").read_text()))
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, rest = line.split(maxsplit=1)
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            assert stage and stage not in found, line
            found[stage] = current = Stage(image)
        else:
            current.steps.append((name, rest))
    return found


def chain(stage: str) -> list[Stage]:
    """A stage and those that it stands on, the lowest first."""
    found = stages()
    up: list[Stage] = []
    while stage in found:
        up.insert(0, found[stage])
        stage = found[stage].image
    return up


# --------------------------------------------------------------------------------------------------------- the images


def test_stages_stand_on_images_with_a_version_or_on_stages_before_them() -> None:
    known: list[str] = []
    for name, stage in stages().items():
        assert stage.image in known or re.fullmatch(r"[\w./-]+:\d[\w.-]+", stage.image), stage.image
        for copy in stage.of("COPY"):
            if source := re.search(r"--from=(\S+)", copy):
                assert source[1] in known, copy
        known.append(name)
    assert known[-1] == "cpu"  # what a build without --target makes


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().split("\n")
    let_in = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    assert all((ROOT / path).exists() for path in let_in)
    copied = set()
    for stage in stages().values():
        for copy in stage.of("COPY"):
            if "--from" not in copy:
                copied |= set(copy.split()[:-1])
    assert copied == set(let_in)


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_an_image_is_not_root_has_a_healthcheck_and_no_build_tools(image: str) -> None:
    parts = chain(image)
    users = [user for part in parts for user in part.of("USER")]
    assert users and int(users[-1]) > 0
    assert any(f"--uid {users[-1]} mtpserve" in rest for part in parts for rest in part.of("RUN"))
    assert parts[0].image.endswith("-slim-bookworm")
    assert not [rest for part in parts for rest in part.of("RUN") if BUILDS.search(rest)]
    (check,) = [rest for part in parts for rest in part.of("HEALTHCHECK")]
    assert "127.0.0.1:30000/health" in check
    compile(json.loads(check[check.index("CMD ") + 4 :])[2], "HEALTHCHECK", "exec")
    # The environment was made for the interpreter, and at the place, that it has here.
    (source,) = [copy for copy in parts[-1].of("COPY") if copy.endswith(" /opt/mtpserve /opt/mtpserve")]
    made = chain(re.search(r"--from=(\S+)", source)[1])  # type: ignore[index]
    assert made[0].image == parts[0].image.replace("-slim", "")
    assert any("venv /opt/mtpserve" in rest for rest in made[0].of("RUN"))


def test_triton_finds_what_was_compiled_for_it() -> None:
    (building,) = [env for env in stages()["build-cuda"].of("ENV") if "TRITON" in env]
    assert building in stages()["cuda"].of("ENV")
    cache = dict(part.split("=") for part in building.split())["TRITON_CACHE_DIR"]
    assert any(copy.endswith(f"--chown=mtpserve:mtpserve {cache} {cache}") for copy in stages()["cuda"].of("COPY"))


def test_tritons_driver_is_compiled_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc is installed")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_LIBCUDA_PATH": str(tmp_path / "stub")}
    done = subprocess.run([sys.executable, DOCKER / "triton_driver.py"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (module,) = (tmp_path / "cache").glob("*/cuda_utils*.so")
    written = module.read_bytes()
    assert b"PyInit_cuda_utils" in written
    assert b"libcuda.so.1\0" in written


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_what_an_image_starts_is_a_command_of_ours(image: str) -> None:
    parts = chain(image)
    ((entry,), (command,)) = ([rest for part in parts for rest in part.of(name)] for name in ("ENTRYPOINT", "CMD"))
    assert json.loads(entry)[:2] == ["mtpserve", "launch"]
    chosen = settings(parsed_values(launch.parser().parse(json.loads(entry)[2:] + json.loads(command))))
    assert (chosen.server.host, chosen.server.port) == ("0.0.0.0", 30000)


def test_the_comments_commands_are_ours_too() -> None:
    """`docker run … image --options`, as the Dockerfile's head has it."""
    runs = re.findall(r"^#\s+docker run .*? mtpserve(?::cuda)?( --.*)?$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert len(runs) == 3
    for options in runs:
        settings(parsed_values(launch.parser().parse(shlex.split(options))))


# -------------------------------------------------------------------------------------------------------- the services


@pytest.mark.parametrize("file", YAMLS, ids=lambda file: str(file.relative_to(DOCKER)))
def test_yaml_is_yaml(file: Path) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(file.read_text()))


def compose(name: str) -> dict[str, Any]:
    return yaml.safe_load((DOCKER / name).read_text())["services"]  # type: ignore[no-any-return]


def test_services_mount_build_and_start_what_exists() -> None:
    targets = set()
    for services in (compose("compose.yaml"), compose("compose.cuda.yaml"), compose("compose.replicas.yaml")):
        for name, service in services.items():
            for volume in service.get("volumes", []):
                if volume.startswith("."):
                    assert (DOCKER / volume.split(":")[0]).is_file(), volume
                    assert volume.endswith(":ro")
            if build := service.get("build"):
                targets.add(build["target"])
                assert build["target"] in stages()
            assert "image" in service or "build" in service or name in compose("compose.yaml")
            if name == "server":
                assert settings(parsed_values(launch.parser().parse(service["command"]))).server.port == 30000
    assert targets == {"cpu", "cuda"}
    build = compose("compose.yaml")["server"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_a_router_has_servers_that_exist_and_tell_it_when_they_leave() -> None:
    services = compose("compose.router.yaml")
    router = services.pop("router")
    urls = re.findall(r"http://(\w+):(\d+)", router["command"][-1])
    asked_every = int(re.search(r"--health-check-interval-secs (\d+)", router["command"][-1])[1])  # type: ignore[index]
    assert {name for name, _ in urls} == set(services) == set(router["depends_on"])
    for service in services.values():
        server = settings(parsed_values(launch.parser().parse(service["command"]))).server
        assert {int(port) for _, port in urls} == {server.port} and server.drain_delay > asked_every
        assert int(service["stop_grace_period"].removesuffix("s")) > server.drain_delay + server.drain_timeout
        assert service["build"]["target"] in stages()


def test_ray_serves_what_the_options_say() -> None:
    (application,) = yaml.safe_load((DOCKER / "ray_serve.yaml").read_text())["applications"]
    module, _, name = application["import_path"].partition(":")
    assert f"def {name}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    args = application["args"]
    assert args.pop("deployment")["autoscaling_config"]["max_replicas"] > 1
    assert checked_settings(values_of(args), (), "Ray's").engine.parallel.restarts == 3


def test_services_are_reached_from_this_machine_alone_and_have_no_privileges() -> None:
    for service in compose("compose.yaml").values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert re.search(r":(v?\d[\w.]+|cpu)$", service["image"])


def test_the_services_find_each_other_and_their_files() -> None:
    services = compose("compose.yaml")

    def mounted(name: str) -> dict[str, str]:
        return {inside: outside for outside, inside, *_ in (volume.split(":") for volume in services[name]["volumes"])}

    scrape = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())
    for target in [each for job in scrape["scrape_configs"] for config in job["static_configs"] for each in config["targets"]]:
        host, port = target.split(":")
        assert any(published.endswith(f":{port}") for published in services[host]["ports"])
    config = next(part.split("=")[1] for part in services["prometheus"]["command"] if part.startswith("--config.file"))
    for file in [config, *(f"{Path(config).parent}/{rules}" for rules in scrape["rule_files"])]:
        assert (DOCKER / mounted("prometheus")[file]).is_file()
    (source,) = yaml.safe_load((DOCKER / "grafana/datasources.yaml").read_text())["datasources"]
    assert source["url"].split("//")[1].split(":")[0] in services
    (provider,) = yaml.safe_load((DOCKER / "grafana/dashboards.yaml").read_text())["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(home).parent) == provider["options"]["path"]
    assert mounted("grafana")[home] == "./grafana/mtpserve.json"


def test_kubernetes_probes_and_drains_what_the_server_has() -> None:
    deployment, service = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    config = settings(parsed_values(launch.parser().parse(container["args"]))).server
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.port} and pod["metadata"]["annotations"]["prometheus.io/port"] == str(config.port)
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause + config.drain_timeout
    routes = {path for _, paths, *_ in ROUTES for path in paths}
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert all(probe["path"] in routes and probe["port"] in ports for probe in probes)
    mounts = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == mounts and container["image"].split(":")[1] in stages()
    chosen = deployment["spec"]["selector"]["matchLabels"]
    assert chosen == pod["metadata"]["labels"] == service["spec"]["selector"]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == list(ports)


# ---------------------------------------------------------------------------------------------- metrics that are named


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Every sample's name that a server exports → its labels."""
    client = FakeClient()
    client.engine.stats.draft_tokens_by_source = {"mtp": 1}
    client.engine.stats.accepted_tokens_by_source = {"mtp": 1}
    client.card = replace(client.card, device="cpu", weight_format="float32")  # empty labels are none
    app = create_app(client, Tokenizer(tiny.write(tmp_path_factory.mktemp("checkpoint"))))

    async def ask() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            await http.get("/health")
            return (await http.get("/metrics")).text

    found: dict[str, set[str]] = {"up": set()}  # Prometheus' own
    for family in text_string_to_metric_families(asyncio.run(ask())):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def board() -> dict[str, Any]:
    return json.loads((DOCKER / "grafana/mtpserve.json").read_text())  # type: ignore[no-any-return]


def panels() -> list[dict[str, Any]]:
    """Those that draw something: all but the rows between them."""
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((DOCKER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def queries() -> list[str]:
    variables = [each["query"]["query"] for each in board()["templating"]["list"] if each["type"] == "query"]
    return [
        *(rule["expr"] for rule in rules()),
        *(target["expr"] for panel in panels() for target in panel["targets"]),
        *variables,
    ]


def metrics(query: str) -> set[str]:
    """Names in a query that are neither functions nor words of the language: what stands in braces, brackets and `by (…)` goes first."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", query)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"(label_values\(\w+) *, \w+\)", r"\1)", bare)
    words = {"and", "or", "unless", "offset", "bool", "group_left", "group_right"}
    return {found[1] for found in re.finditer(r"(?<![\w.$])([a-zA-Z_:][\w:]*)(?!\w*\s*\()", bare)} - words


def test_metrics_are_found_in_queries() -> None:
    query = 'sum by (le) (rate(a_bucket{x=~"b"}[$__rate_interval])) / ignoring (le) group_left sum(c) > 0.5 * d:e offset 10m and up == 1'
    assert metrics(query) == {"a_bucket", "c", "d:e", "up"}


def test_every_metric_that_a_query_names_is_exported(exported: dict[str, set[str]]) -> None:
    named = {name: query for query in queries() for name in metrics(query)}
    assert len(named) > 20
    assert {name: query for name, query in named.items() if name not in exported} == {}


def test_every_label_that_a_query_groups_by_is_exported(exported: dict[str, set[str]]) -> None:
    for query in queries():
        labels = {"instance", "job"}.union(*(exported[name] for name in metrics(query)))
        used = {label.strip() for inside in re.findall(r"\b(?:by|ignoring)\s*\(([^)]*)\)", query) for label in inside.split(",")}
        used |= {label for inside in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)\s*[=!]", inside)}
        assert used <= labels, query


def test_metrics_in_the_alerts_texts_are_exported(exported: dict[str, set[str]]) -> None:
    texts = " ".join(text for rule in rules() for text in rule["annotations"].values())
    assert set(re.findall(r"\bmtpserve_\w+", texts)) <= exported.keys()
    assert set(re.findall(r"--[\w-]+", texts)) <= {name for action in launch.parser()._actions for name in action.option_strings}


def test_panels_have_their_own_place_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in board()["panels"]}) == len(board()["panels"])
    for panel in board()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    rows = [panel for panel in board()["panels"] if panel["type"] == "row"]
    assert len(rows) >= 5 and board()["panels"][0] in rows and not any(row["panels"] or row["collapsed"] for row in rows)
    for panel in panels():
        assert re.fullmatch(r"[A-Za-z].{20,}\.", panel["description"]), panel["title"]


def test_the_board_asks_which_source_model_and_server_it_shows() -> None:
    """A uid of this repository's own Prometheus would draw empty panels in any other Grafana."""
    (source, model, server) = board()["templating"]["list"]
    assert (source["type"], source["query"], source["name"]) == ("datasource", "prometheus", "datasource")
    assert [variable["name"] for variable in (model, server)] == ["model_name", "instance"]
    used = [*panels(), *(target for panel in panels() for target in panel["targets"]), model, server]
    assert {json.dumps(each["datasource"]) for each in used} == {'{"type": "prometheus", "uid": "${datasource}"}'}
    for query in (target["expr"] for panel in panels() for target in panel["targets"]):
        chosen = re.findall(r"(mtpserve_\w+)(\{[^}]*\})?", query)
        assert all('model_name=~"$model_name", instance=~"$instance"' in labels for _, labels in chosen), query


def test_no_query_names_a_deprecated_metric() -> None:
    older = {f"mtpserve_{name}" for name in DEPRECATED}
    assert not [query for query in queries() for name in metrics(query) if name.removesuffix("_total") in older]


def test_no_alert_needs_a_jobs_name() -> None:
    assert not [rule["expr"] for rule in rules() if re.search(r"\bjob\s*=", rule["expr"])]


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    tests = [case for test in yaml.safe_load((DOCKER / "alerts.test.yaml").read_text())["tests"] for case in test["alert_rule_test"]]
    for fires in (True, False):
        assert {case["alertname"] for case in tests if bool(case["exp_alerts"]) == fires} == {rule["alert"] for rule in rules()}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: the package prometheus)")
@pytest.mark.parametrize("command", ["check rules alerts.yaml", "test rules alerts.test.yaml", "check config prometheus.yaml"])
def test_promtool(command: str) -> None:
    done = subprocess.run([str(PROMTOOL), *command.split()], cwd=DOCKER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: the package prometheus)")
def test_promtool_understands_every_panel(tmp_path: Path) -> None:
    exprs = [target["expr"].replace("$__rate_interval", "1m") for panel in panels() for target in panel["targets"]]
    groups = [{"name": "panels", "rules": [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(exprs)]}]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": groups}))
    done = subprocess.run([str(PROMTOOL), "check", "rules", "--lint=none", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
