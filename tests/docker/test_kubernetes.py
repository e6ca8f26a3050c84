"""docker/kubernetes/: the manifests of docs/kubernetes.md are valid, fit each other, and name what the server has."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtpserve.cli import launch
from mtpserve.cli.options import parsed_values, settings
from mtpserve.server.app import ROUTES
from mtpserve.server.http.access import OPEN
from tests.docker.test_docker import exported, metrics, stages

__all__ = ["exported"]  # a fixture
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker" / "kubernetes"
KUBECTL = shutil.which("kubectl")
BUILT_IN = {"Namespace", "PersistentVolumeClaim", "Job", "Deployment", "Service", "PodDisruptionBudget"}
VERSION = "1.34"


def kustomization() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "kustomization.yaml").read_text())  # type: ignore[no-any-return]


def manifests() -> list[dict[str, Any]]:
    files = [FOLDER / name for name in kustomization()["resources"]]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [each for each in manifests() if each["kind"] == kind]
    return found


def pod(kind: str) -> dict[str, Any]:
    return manifest(kind)["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def server() -> dict[str, Any]:
    return pod("Deployment")["containers"][0]  # type: ignore[no-any-return]


def options() -> Any:
    return settings(parsed_values(launch.parser().parse(server()["args"])))


def test_every_manifest_is_in_the_kustomization() -> None:
    there = {file.name for file in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "alerts.head.yaml"}
    assert there == set(kustomization()["resources"])


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_kubernetes_accepts_it(kind: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: the extra `test`")
    validate.validate(manifest(kind), VERSION, strict=True)


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_kustomize_names_the_image_and_the_namespace_everywhere() -> None:
    done = subprocess.run([str(KUBECTL), "kustomize", str(FOLDER)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    assert {each["kind"] for each in documents} == {each["kind"] for each in manifests()}
    assert {each["metadata"].get("namespace") for each in documents if each["kind"] != "Namespace"} == {"mtpserve"}
    (image,) = kustomization()["images"]
    assert set(re.findall(r"image: (\S+)", done.stdout)) == {f"{image['newName']}:{image['newTag']}"}


def test_the_image_is_one_that_the_dockerfile_builds() -> None:
    (image,) = kustomization()["images"]
    assert image["newTag"] in stages()
    assert {container["image"] for kind in ("Deployment", "Job") for container in pod(kind)["containers"]} == {image["name"]}


def test_options_ports_and_probes_are_the_servers() -> None:
    config = options().server
    (port,) = server()["ports"]
    assert port["containerPort"] == config.port and config.host == "0.0.0.0"
    routes = {path for _, paths, *_ in ROUTES for path in paths}
    probes = {kind: server()[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    for probe in probes.values():  # the kubelet sends no key
        assert probe["path"] in routes & OPEN and probe["port"] == port["name"]
    assert probes["readiness"]["path"] == "/health" != probes["liveness"]["path"]


def test_the_model_that_is_downloaded_is_served() -> None:
    command = pod("Job")["containers"][0]["command"]
    assert options().engine.model.names == ("MiMo-7B-RL",)
    assert command[command.index("--local-dir") + 1] == server()["args"][1]
    (claim,) = [each["metadata"]["name"] for each in manifests() if each["kind"] == "PersistentVolumeClaim"]
    for kind in ("Job", "Deployment"):
        volumes = {volume["name"]: volume for volume in pod(kind)["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] == claim
        mounts = {mount["name"] for container in pod(kind)["containers"] for mount in container["volumeMounts"]}
        assert mounts == volumes.keys()


def test_a_pod_that_leaves_has_time_to_drain_and_is_not_ready_meanwhile() -> None:
    config, readiness = options().server, server()["readinessProbe"]
    assert pod("Deployment")["terminationGracePeriodSeconds"] > config.drain_delay + config.drain_timeout
    assert config.drain_delay > 2 * readiness["periodSeconds"] * readiness["failureThreshold"]


def test_the_key_comes_from_the_secret_that_the_page_creates() -> None:
    (volume,) = [each for each in pod("Deployment")["volumes"] if "secret" in each]
    (mount,) = [each for each in server()["volumeMounts"] if each["name"] == volume["name"]]
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    created = re.search(r"create secret generic (\S+) --from-literal=(\w+)=", page)
    assert created is not None and volume["secret"]["secretName"] == created[1]
    assert options().server.api_key_file == f"{mount['mountPath']}/{created[2]}"
    (endpoint,) = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": created[1], "key": created[2]}
    assert endpoint["port"] == server()["ports"][0]["name"]


def test_pods_may_run_in_the_restricted_namespace() -> None:
    assert manifest("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for kind in ("Deployment", "Job"):
        assert pod(kind)["securityContext"]["runAsNonRoot"] and pod(kind)["securityContext"]["runAsUser"] == 10001
        assert pod(kind)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod(kind)["containers"]:
            assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_all_find_the_pods_and_the_service() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Service")["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert manifest(kind)["spec"]["selector"]["matchLabels"] == labels, kind
    (rule,) = manifest("HTTPRoute")["spec"]["rules"]
    (backend,), (port,) = rule["backendRefs"], manifest("Service")["spec"]["ports"]
    assert backend == {"name": manifest("Service")["metadata"]["name"], "port": port["port"]}
    (listener,) = manifest("Gateway")["spec"]["listeners"]
    assert manifest("HTTPRoute")["spec"]["hostnames"] == [listener["hostname"]]
    assert manifest("HTTPRoute")["spec"]["parentRefs"][0]["sectionName"] == listener["name"]


def test_the_autoscaler_asks_for_metrics_of_the_server(exported: dict[str, set[str]]) -> None:
    spec = manifest("ScaledObject")["spec"]
    assert spec["scaleTargetRef"]["name"] == manifest("Deployment")["metadata"]["name"]
    assert "replicas" not in manifest("Deployment")["spec"]  # each apply would undo what the autoscaler did
    (trigger,) = spec["triggers"]
    assert metrics(trigger["metadata"]["query"]) == {"mtpserve_requests_running", "mtpserve_requests_waiting"} <= exported.keys()
    assert f"More than {trigger['metadata']['threshold']} requests" in (ROOT / "docs" / "kubernetes.md").read_text()


def test_the_alerts_command_gives_a_rule() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    command = re.search(r"^(\{ cat .*; \}) \| kubectl", page, re.MULTILINE)
    assert command is not None
    done = subprocess.run(["bash", "-c", command[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    rule, alerts = yaml.safe_load(done.stdout), (ROOT / "docker" / "alerts.yaml").read_text()
    assert rule["kind"] == "PrometheusRule" and rule["spec"] == yaml.safe_load(alerts)
    assert "job=" not in alerts  # the rules hold whatever name the operator gives the job


def test_the_job_is_named_by_a_label_of_the_pods() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels[manifest("PodMonitor")["spec"]["jobLabel"]] == "mtpserve"
