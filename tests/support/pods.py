"""Pods of rendered Kubernetes objects, run as processes on this machine: each in network, mount, process and host name
spaces of its own, with the command line, environment, volumes and names that a cluster would give its containers.

``pods_of`` makes the pods that controllers of Deployments, Jobs, JobSets and TrainJobs make. ``PodNetwork`` runs them.
Needs root, iproute2 and util-linux. What is of the image and not of the manifest is in ``IMAGE``.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: deploy/Dockerfile: ENTRYPOINT and ENV of both images, without NUMBA_CACHE_DIR: kernels are those of this checkout.
ENTRYPOINT = ("bpslaunch",)
IMAGE = {"PATH": "/opt/byteps/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
#: All pods share the cores of this machine.
SHARED = {"OMP_NUM_THREADS": "1"}
INDEX = "batch.kubernetes.io/job-completion-index"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_SWITCH = "byteps-pods"
_LIMIT_S = 240.0

#: $1: an empty folder, which becomes the container's root. The rest: its command line.
CONTAINER = """
set -eu
root=$1; shift
mount -t tmpfs tmpfs "$root"
for path in /*; do
    case $path in /proc|/tmp|/run|/opt|/kernels|/workspace) continue ;; esac
    if [ -L "$path" ]; then cp -P "$path" "$root$path"
    elif [ -d "$path" ]; then mkdir "$root$path"; mount --rbind "$path" "$root$path"; fi
done
mkdir "$root/proc" "$root/run" "$root/tmp" "$root/opt" "$root/opt/byteps" "$root/workspace" "$root/workspace/examples"
mount -t proc proc "$root/proc"
for path in /usr/local/share /var/cache /var/lib; do mount -t tmpfs tmpfs "$root$path"; done
mkdir "$root/usr/local/share/byteps" "$root/var/cache/byteps"
mount --bind "$PODS_DEPLOY" "$root/usr/local/share/byteps"
mount --bind "$PODS_VENV" "$root/opt/byteps"
mount --bind "$PODS_EXAMPLES" "$root/workspace/examples"
mount --bind "$PODS_HOSTS" "$root/etc/hosts"
%(mounts)s
hostname %(hostname)s
unset PODS_DEPLOY PODS_VENV PODS_EXAMPLES PODS_HOSTS
exec /usr/sbin/chroot "$root" /bin/sh -c 'cd /workspace && exec "$@"' sh "$@"
"""


@dataclass(frozen=True)
class Pod:
    """``name`` is unique among pods. ``spec``: as in the manifest, with what a controller has added."""

    name: str
    hostname: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def component(self) -> str:
        """The name of its only container."""
        (container,) = self.spec["containers"]
        return str(container["name"])


def pods_of(objects: Sequence[Mapping[str, Any]]) -> list[Pod]:
    """The pods of all objects, in order."""
    found: list[Pod] = []
    runtimes = {each["metadata"]["name"]: each for each in objects if each["kind"] == "ClusterTrainingRuntime"}
    for each in objects:
        name = each["metadata"]["name"]
        if each["kind"] == "Deployment":
            template = each["spec"]["template"]
            names = [f"{name}-7d4f-{index}" for index in range(each["spec"]["replicas"])]
            found += [_pod(own, own, template, {}) for own in names]
        elif each["kind"] == "Job":
            found += _job_pods(name, each["spec"], {})
        elif each["kind"] == "JobSet":
            found += _set_pods(name, each["spec"])
        elif each["kind"] == "TrainJob":
            found += _set_pods(name, _trained(each, runtimes[each["spec"]["runtimeRef"]["name"]]))
    return found


def _pod(name: str, hostname: str, template: Mapping[str, Any], annotations: Mapping[str, str]) -> Pod:
    labels = template.get("metadata", {}).get("labels", {})
    return Pod(name, hostname, labels, annotations, template["spec"])


def _job_pods(name: str, spec: Mapping[str, Any], more: Mapping[str, Any]) -> list[Pod]:
    found = []
    for index in range(spec.get("parallelism", 1)):
        template = copy.deepcopy(spec["template"])
        template["spec"] |= more.get("spec", {})
        template.setdefault("metadata", {}).setdefault("labels", {}).update(more.get("labels", {}))
        hostname = template["spec"].get("hostname", f"{name}-{index}")
        if spec.get("completionMode") == "Indexed":
            template["metadata"]["labels"][INDEX] = str(index)
            for container in template["spec"]["containers"]:
                container.setdefault("env", []).insert(0, {"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        found.append(_pod(f"{name}-{index}-x", hostname, template, {INDEX: str(index)}))
    return found


def _set_pods(name: str, spec: Mapping[str, Any]) -> list[Pod]:
    found = []
    for each in spec["replicatedJobs"]:
        for number in range(each.get("replicas", 1)):
            more = {"spec": {"subdomain": name}, "labels": {JOBSET: name}}
            found += _job_pods(f"{name}-{each['name']}-{number}", each["template"]["spec"], more)
    return found


def _trained(job: Mapping[str, Any], runtime: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JobSet that Kubeflow Trainer makes of a runtime with the torch policy."""
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    policy, trainer, name = runtime["spec"]["mlPolicy"], job["spec"].get("trainer", {}), job["metadata"]["name"]
    assert "torch" in policy
    nodes = trainer.get("numNodes", policy.get("numNodes", 1))
    (node,) = (
        each for each in spec["replicatedJobs"] if each["template"].get("metadata", {}).get("labels", {}).get(STEP)
    )
    assert node["name"] == "node"
    node["template"]["spec"] |= {"completionMode": "Indexed", "parallelism": nodes, "completions": nodes}
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    container.setdefault("env", []).extend(
        [
            *trainer.get("env", []),
            {"name": "PET_NNODES", "value": str(nodes)},
            {"name": "PET_NPROC_PER_NODE", "value": str(trainer.get("numProcPerNode", "auto"))},
            {
                "name": "PET_NODE_RANK",
                "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}},
            },
            {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
            {"name": "PET_MASTER_PORT", "value": "29400"},
        ]
    )
    return spec  # type: ignore[no-any-return]


def names_of(pods: Sequence[Pod], objects: Sequence[Mapping[str, Any]], addresses: Mapping[str, str]) -> dict[str, str]:
    """The names that a cluster's DNS has for headless services and their pods, with their addresses."""
    found: dict[str, str] = {}
    for each in objects:
        if each["kind"] == "Service" and each["spec"].get("clusterIP") == "None":
            wanted = each["spec"]["selector"].items()
            for pod in pods:
                if wanted <= pod.labels.items():
                    found.setdefault(each["metadata"]["name"], addresses[pod.name])
    for pod in pods:
        if subdomain := pod.spec.get("subdomain"):
            found[f"{pod.hostname}.{subdomain}"] = addresses[pod.name]
    return found


def environment_of(
    pod: Pod, container: Mapping[str, Any], address: str, objects: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """The container's environment, as the kubelet makes it."""
    maps = {each["metadata"]["name"]: each.get("data", {}) for each in objects if each["kind"] == "ConfigMap"}
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]
    for each in container.get("env", ()):
        if "valueFrom" in each:
            found[each["name"]] = _field(pod, address, each["valueFrom"]["fieldRef"]["fieldPath"])
        else:
            found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found.get(match[1], match[0]), each["value"])
    return found


def _field(pod: Pod, address: str, path: str) -> str:
    if path == "status.podIP":
        return address
    match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    assert match, path
    return str({"labels": pod.labels, "annotations": pod.annotations}[match[1]][match[2]])


@dataclass
class RunningPod:
    """A pod's container. ``log``: what it has written."""

    pod: Pod
    container: Mapping[str, Any]
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Its first process is there."""
        try:
            return bool(self._first())
        except ProcessLookupError:
            return False

    def wait(self, limit_s: float = _LIMIT_S) -> int:
        return self.process.wait(limit_s)

    def execute(self, command: Sequence[str], limit_s: float = _LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as probes and hooks do."""
        inside = ["nsenter", "-t", str(self._first()), "-m", "-u", "-n", "-p", "-r", *command]
        return subprocess.run(inside, env=dict(self.environment), capture_output=True, text=True, timeout=limit_s)

    def terminate(self) -> None:
        """SIGTERM to its first process, which has the id 1 in it."""
        os.kill(self._first(), signal.SIGTERM)

    def kill(self) -> None:
        """All of it, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first(), signal.SIGKILL)
        self.process.wait(_LIMIT_S)

    def _first(self) -> int:
        own = self.process.pid
        listed = Path(f"/proc/{own}/task/{own}/children")
        children = listed.read_text().split() if self.process.poll() is None else []
        if not children:
            raise ProcessLookupError(self.pod.name)
        return int(children[0])


class PodNetwork:
    """Network namespaces for pods, joined by a bridge in one more. Use it in a ``with`` block."""

    def __init__(self, objects: Sequence[Mapping[str, Any]], folder: Path, secrets: Mapping[str, Mapping[str, str]]):
        self.objects, self.pods, self._folder, self._secrets = objects, pods_of(objects), folder, secrets
        self.addresses = {pod.name: f"10.77.0.{10 + number}" for number, pod in enumerate(self.pods)}
        self._namespaces = {pod.name: f"byteps-pod-{number}" for number, pod in enumerate(self.pods)}
        self.running: list[RunningPod] = []
        self._named: set[str] = set()

    def __enter__(self) -> PodNetwork:
        self._remove()
        _ip("netns", "add", _SWITCH)
        _ip("-n", _SWITCH, "link", "add", "bridge", "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", "bridge", "up")
        for number, pod in enumerate(self.pods):
            name, port = self._namespaces[pod.name], f"port{number}"
            _ip("netns", "add", name)
            _ip("-n", _SWITCH, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", _SWITCH, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self.addresses[pod.name]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for running in self.running:
            running.kill()
        self._remove()

    def _remove(self) -> None:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split("\n")
        for line in listed:
            name = line.partition(" ")[0]
            if name == _SWITCH or re.fullmatch(r"byteps-pod-\d+", name):
                _ip("netns", "del", name)

    def start(self, pod: Pod) -> RunningPod:
        """Run its init containers, and then its container."""
        self._named.add(pod.name)
        self._write_names()
        for container in pod.spec.get("initContainers", ()):
            first = self._run(pod, container)
            assert first.wait() == 0, first.text
        running = self._run(pod, pod.spec["containers"][0])
        self.running.append(running)
        return running

    def start_again(self, running: RunningPod) -> RunningPod:
        """As the kubelet does when a container has ended: with the same volumes."""
        self.running.remove(running)
        again = self._run(running.pod, running.container)
        self.running.append(again)
        return again

    def _write_names(self) -> None:
        """A name is known once its pod is there; as in a cluster, not before."""
        names = names_of(self.pods, self.objects, self.addresses)
        there = {self.addresses[name] for name in self._named}
        shared = [f"{address} {name}\n" for name, address in names.items() if address in there]
        for pod in self.pods:
            own = f"127.0.0.1 localhost\n{self.addresses[pod.name]} {pod.hostname}\n"
            (self._folder / f"{pod.name}.hosts").write_text("".join([own, *shared]))

    def _run(self, pod: Pod, container: Mapping[str, Any]) -> RunningPod:
        environment = {**IMAGE, **SHARED, **environment_of(pod, container, self.addresses[pod.name], self.objects)}
        own = {
            "PODS_DEPLOY": str(ROOT / "deploy"),
            "PODS_VENV": str(Path(sys.prefix)),
            "PODS_EXAMPLES": str(ROOT / "examples"),
            "PODS_HOSTS": str(self._folder / f"{pod.name}.hosts"),
        }
        root = self._folder / f"{pod.name}.root"
        root.mkdir(exist_ok=True)
        script = CONTAINER % {"mounts": self._mounts(pod, container), "hostname": shlex.quote(pod.hostname)}
        command = [*container.get("command", ENTRYPOINT), *container.get("args", ())]
        log = self._folder / f"{pod.name}.{container['name']}.log"
        isolated = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child=SIGKILL"]
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespaces[pod.name], *isolated, "bash", "-c", script, "bash", str(root),
                 *command],
                env={**environment, **own}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return RunningPod(pod, container, environment, process, log)

    def _mounts(self, pod: Pod, container: Mapping[str, Any]) -> str:
        volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
        lines = []
        for mount in container.get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            there = self._folder / f"{pod.name}.{volume['name']}"
            there.mkdir(exist_ok=True)
            if "secret" in volume:
                for name, text in self._secrets[volume["secret"]["secretName"]].items():
                    (there / name).write_text(text)
                    (there / name).chmod(volume["secret"].get("defaultMode", 0o644))
            target = f'"$root{mount["mountPath"]}"'
            lines += [f"mkdir -p {target}", f"mount --bind {shlex.quote(str(there))} {target}"]
        return "\n".join(lines)


def wait_for(what: Callable[[], object], limit_s: float = _LIMIT_S) -> None:
    """Until ``what()`` is true. Raises AssertionError after ``limit_s``."""
    until_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until_s, "not so in time"
        time.sleep(0.1)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
