"""`async-grpo launch kubernetes`: a run as objects of Kubernetes, which places and restarts its roles.

    JobSet        trainer   a pod for each of trainer.nodes; needs the JobSet operator
    Deployment    rollout   rollout.servers pods; a ScaledObject (KEDA) sets their number, with max_servers
    Job           report    waits for the end of the run and writes its report
    StatefulSet   redis     unless redis.url names a server

All read one ConfigMap, share a volume at /runs, and take their passwords from a Secret, which is made by hand. A pod
that is evicted or preempted gets SIGTERM and saves its work. A trainer that has done so exits with 75, so that its pod
is made again, and with 78 for a faulty configuration, which ends the run.

Interfaces: Kubernetes 1.37 (batch/v1, apps/v1, policy/v1, networking.k8s.io/v1), jobset.x-k8s.io/v1alpha2,
keda.sh/v1alpha1, and the resource names of NVIDIA's and Ascend's device plug-ins.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from async_grpo.app.launch.plan import load_run_config
from async_grpo.app.launch.role_specs import EXIT_STOPPED, make_stoppable
from async_grpo.config import RunConfig, dump
from async_grpo.errors import EXIT_CONFIG, ConfigError, DependencyError
from async_grpo.utils.text import short_digest
from trainer.platform import select_platform

Object = dict[str, Any]

RUNS, CONFIG_FOLDER = "/runs", "/etc/async-grpo"
CONFIG_FILE = f"{CONFIG_FOLDER}/config.yaml"
HTTP, METRICS, REDIS, WEIGHTS, RELAY = 8000, 8090, 6379, 5600, 5610
LIVENESS_FAILURES = 12
"""Least number of failed probes, ten seconds apart, after which a rollout server is restarted."""
GPU_RESOURCE = "nvidia.com/gpu"
"""The resource that NVIDIA's device plug-in offers; that of NPUs is launch.kubernetes.npu_resource."""
IMAGES = {"cpu": "async-grpo:cpu", "cuda": "async-grpo:cuda", "npu": "async-grpo:ascend"}
"""Platform -> the image of deploy/ for it."""
USER = 1000
"""User of the images in deploy/."""
_NAME_LENGTH = 40
"""Characters of a run's name in names of objects; Kubernetes takes 63 for a pod, with what JobSet appends."""
_APPLY_S = 120.0
_REDIS = f"""\
umask 077
printf 'requirepass %s\\n' "$ASYNC_GRPO_REDIS_PASSWORD" > /tmp/own.conf
exec valkey-server /tmp/own.conf --port {REDIS} --dir /data --appendonly yes --appendfsync always --save '' \
--maxmemory "$MAXMEMORY" --maxmemory-policy noeviction"""


def resolve_for_cluster(path: Path, overrides: Sequence[str], steps: int | None) -> RunConfig:
    """The run with the addresses and folders that its pods have. Raises ConfigError."""
    given = load_run_config(path, overrides, steps)
    name = object_name(given)
    told = [*overrides, f"runs_dir={RUNS}", f"weights.bind=tcp://0.0.0.0:{WEIGHTS}"]
    told += [f"weights.advertise={name}-trainer-0-0.{name}", f"weights.relay_bind=tcp://0.0.0.0:{RELAY}"]
    told += [f"trainer.rendezvous.address={name}-trainer-0-0.{name}", f"rollout.http.port={HTTP}"]
    told += ["rollout.http.host=0.0.0.0", "telemetry.http.host=0.0.0.0", f"telemetry.http.port={METRICS}"]
    if given.redis.url is None:
        told.append(f"redis.url=redis://{name}-redis:{REDIS}")
    if given.weights.encrypt == "off":
        told.append("weights.encrypt=control")
    return load_run_config(path, told, steps)


def make_objects(config: RunConfig) -> list[Object]:
    """What is applied, in this order. `config` is that of `resolve_for_cluster`."""
    name = object_name(config)
    site = config.launch.kubernetes
    found = [
        _object(config, "v1", "ConfigMap", name, data={"config.yaml": dump(config)}),
        _object(
            config,
            "v1",
            "PersistentVolumeClaim",
            f"{name}-runs",
            spec=_claim("ReadWriteMany", site.runs_gib, site.storage_class),
        ),
    ]
    if config.redis.url == f"redis://{name}-redis:{REDIS}":
        found += _redis(config, name)
    found += [_trainer(config, name), _rollout(config, name), _report(config, name)]
    found += [_budget(config, "trainer", {"minAvailable": config.trainer.nodes})]
    found += [_budget(config, "rollout", {"maxUnavailable": 1}), *_policies(config, name)]
    if site.max_servers is not None:
        found.append(_autoscaler(config, name))
    return found


def apply_objects(config: RunConfig) -> str:
    """Apply the objects with kubectl and return its output.

    Raises DependencyError without kubectl, ConfigError if kubectl or the cluster rejects them.
    """
    if shutil.which("kubectl") is None:
        raise DependencyError(
            "kubectl is not on the PATH. Install it, or print the objects with --dry-run and apply them yourself"
        )
    argv = ["kubectl", "apply", "--server-side", "-f", "-"]
    manifest = dump_objects(config)
    result = subprocess.run(argv, input=manifest, capture_output=True, text=True, timeout=_APPLY_S, check=False)
    if result.returncode:
        raise ConfigError(
            f"kubectl apply failed: {result.stderr.strip()}. The trainer needs the JobSet operator, and autoscaling "
            "(launch.kubernetes.max_servers) needs KEDA"
        )
    return result.stdout


class _Readable(yaml.SafeDumper):
    """Writes scripts and files as blocks of lines, and everything in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Readable.add_representer(str, _Readable.represent_str)


def dump_objects(config: RunConfig) -> str:
    """The objects as YAML documents."""
    return yaml.dump_all(make_objects(config), Dumper=_Readable, sort_keys=False, width=120, explicit_start=True)


def object_name(config: RunConfig) -> str:
    """Name of the run's objects: at most 40 lower-case letters, digits and hyphens, the first a letter.

    A name that had to be cut or changed ends in a digest of the run's name. Without it, runs that differ only behind
    the cut (max_staleness=0 and =4 of one configuration) have one name, and the second `kubectl apply` replaces the
    objects of the first, with its volumes.
    """
    name = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")
    if not name[:1].isalpha():  # a Service may not start with a digit
        name = f"run-{name}".rstrip("-")
    if name == config.name and len(name) <= _NAME_LENGTH:
        return name
    digest = short_digest(config.name)
    return f"{name[: _NAME_LENGTH - len(digest) - 1].rstrip('-')}-{digest}"


def _labels(config: RunConfig, role: str | None = None) -> dict[str, str]:
    run = {"app.kubernetes.io/name": "async-grpo", "app.kubernetes.io/instance": object_name(config)}
    return run if role is None else run | {"app.kubernetes.io/component": role}


def _object(config: RunConfig, version: str, kind: str, name: str, **parts: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(config)}, **parts}


def _claim(mode: str, gib: int, storage_class: str | None = None) -> Object:
    named = {"storageClassName": storage_class} if storage_class else {}
    return {"accessModes": [mode], "resources": {"requests": {"storage": f"{gib}Gi"}}, **named}


def _redis(config: RunConfig, name: str) -> list[Object]:
    labels = _labels(config, "redis")
    memory = config.redis.max_memory_bytes
    container = {
        "name": "redis",
        "image": config.launch.kubernetes.redis_image,
        "command": ["sh", "-c", _REDIS],
        "env": [{"name": "MAXMEMORY", "value": str(memory)}],
        "envFrom": _secrets(config),
        "ports": [{"containerPort": REDIS, "name": "redis"}],
        "readinessProbe": {"tcpSocket": {"port": REDIS}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "1", "memory": f"{math.ceil(1.5 * memory / 2**20)}Mi"}},
        "securityContext": _CONTAINED,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = {"containers": [container], "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}], **_SECURE}
    data = {"metadata": {"name": "data"}, "spec": _claim("ReadWriteOnce", math.ceil(4 * memory / 2**30))}
    spec = {
        "serviceName": f"{name}-redis",
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [data],
    }
    service = {"selector": labels, "ports": [{"name": "redis", "port": REDIS}]}
    return [
        _object(config, "v1", "Service", f"{name}-redis", spec=service),
        _object(config, "apps/v1", "StatefulSet", f"{name}-redis", spec=spec),
    ]


def _trainer(config: RunConfig, name: str) -> Object:
    nodes, restarts = config.trainer.nodes, config.launch.restarts.trainer
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container = _container(
        config,
        "trainer",
        ["bash", "-c", make_stoppable(f"async-grpo trainer {CONFIG_FILE}")],
        platform=config.trainer.platform,
        devices=config.trainer.processes_per_node,
        resources=config.launch.kubernetes.trainer,
        environment={"ASYNC_GRPO_NODE_RANK": {"fieldRef": {"fieldPath": index}}},
    )
    pod = _pod(config, "trainer", container) | {"restartPolicy": "Never"}
    job = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": restarts * nodes,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [EXIT_CONFIG]}},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [EXIT_STOPPED]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": _labels(config, "trainer")}, "spec": pod},
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": "trainer", "replicas": 1, "template": {"spec": job}}],
    }
    return _object(config, "jobset.x-k8s.io/v1alpha2", "JobSet", name, spec=spec)


def _rollout(config: RunConfig, name: str) -> Object:
    labels = _labels(config, "rollout")
    container = _container(
        config,
        "rollout",
        ["async-grpo", "rollout", CONFIG_FILE, "--name", "$(POD_NAME)"],
        platform=config.rollout.limits.platform,
        devices=config.rollout.limits.devices,
        resources=config.launch.kubernetes.rollout,
        environment={"POD_NAME": {"fieldRef": {"fieldPath": "metadata.name"}}},
    )
    # An engine that died is loaded again in the same process. /healthz answers meanwhile, but what loads may hold
    # Python's lock for a while: a probe with less patience than the start would end every restart of a large model.
    patience = max(LIVENESS_FAILURES, math.ceil(config.launch.ready_timeout_s / 10))
    container |= {
        "ports": [{"containerPort": HTTP, "name": "http"}, {"containerPort": RELAY, "name": "weights"}],
        "startupProbe": _probe("/healthz", HTTP, failures=patience),
        "livenessProbe": _probe("/healthz", HTTP, failures=patience),
        "readinessProbe": _probe("/readyz", HTTP, failures=3),
    }
    spec = {
        "replicas": config.rollout.servers,
        "selector": {"matchLabels": labels},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": {"metadata": {"labels": labels}, "spec": _pod(config, "rollout", container)},
    }
    if config.launch.kubernetes.max_servers is not None:
        del spec["replicas"]  # the autoscaler sets it
    return _object(config, "apps/v1", "Deployment", f"{name}-rollout", spec=spec)


def _report(config: RunConfig, name: str) -> Object:
    argv = ["async-grpo", "runs", "report", CONFIG_FILE, "--wait"]
    container = _container(config, "report", argv, platform=config.trainer.platform)
    pod = _pod(config, "report", container) | {"restartPolicy": "OnFailure"}
    template = {"metadata": {"labels": _labels(config, "report")}, "spec": pod}
    return _object(config, "batch/v1", "Job", f"{name}-report", spec={"backoffLimit": 20, "template": template})


def _container(
    config: RunConfig,
    role: str,
    argv: list[str],
    *,
    platform: str,
    devices: int = 0,
    resources: Mapping[str, str] | None = None,
    environment: Mapping[str, Object] | None = None,
) -> Object:
    kind = select_platform(platform).name
    wanted = {**(resources or {}), **_devices(config, kind, devices)}
    places = {"config": CONFIG_FOLDER, "runs": RUNS, "shm": "/dev/shm", "tmp": "/tmp"}
    mounts: list[Object] = [{"name": name, "mountPath": place} for name, place in places.items()]
    claims = config.launch.kubernetes.claims
    mounts += [{"name": claim, "mountPath": place, "readOnly": True} for claim, place in claims.items()]
    told = [{"name": name, "valueFrom": source} for name, source in (environment or {}).items()]
    own = {"HOME": "/tmp", "ASYNC_GRPO_CACHE": f"{RUNS}/.cache", "ASYNC_GRPO_LOG_FORMAT": "json"}
    if kind == "npu" and not devices:
        own["ASCEND_VISIBLE_DEVICES"] = "void"  # Ascend Docker Runtime wants it where no NPU is requested
    return {
        "name": role,
        "image": config.launch.kubernetes.image or IMAGES[kind],
        # As `command` it would replace the image's entrypoint, which sets up CANN (deploy/scripts/with-cann.sh).
        "args": argv,
        "env": [*told, *({"name": name, "value": value} for name, value in own.items())],
        "envFrom": _secrets(config),
        "resources": {"requests": wanted, "limits": wanted} if wanted else {},
        "securityContext": _CONTAINED,
        "volumeMounts": mounts,
    }


def _pod(config: RunConfig, role: str, container: Object) -> Object:
    name, claims = object_name(config), config.launch.kubernetes.claims
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _labels(config, role)},
    }
    return {
        "containers": [container],
        "terminationGracePeriodSeconds": math.ceil(config.launch.stop_timeout_s) + 15,
        "topologySpreadConstraints": [spread],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": f"{name}-runs"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "tmp", "emptyDir": {}},
            *({"name": claim, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}} for claim in claims),
        ],
        **_SECURE,
    }


def _devices(config: RunConfig, platform: str, count: int) -> dict[str, str]:
    resource = {"cuda": GPU_RESOURCE, "npu": config.launch.kubernetes.npu_resource}.get(platform)
    return {resource: str(count)} if resource and count else {}


def _secrets(config: RunConfig) -> list[Object]:
    return [{"secretRef": {"name": config.launch.kubernetes.secret}}]


def _probe(path: str, port: int, *, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _budget(config: RunConfig, role: str, bound: Object) -> Object:
    spec = {"selector": {"matchLabels": _labels(config, role)}, **bound}
    return _object(config, "policy/v1", "PodDisruptionBudget", f"{object_name(config)}-{role}", spec=spec)


def _policies(config: RunConfig, name: str) -> list[Object]:
    """Pods of the run reach each other; besides them, the monitoring's namespace reaches the metrics."""
    run = {"podSelector": {"matchLabels": _labels(config)}}
    space = {"kubernetes.io/metadata.name": config.launch.kubernetes.monitoring_namespace}
    monitoring = {"namespaceSelector": {"matchLabels": space}}
    ports = [{"protocol": "TCP", "port": port} for port in (HTTP, METRICS)]
    ingress = [{"from": [run]}, {"from": [monitoring], "ports": ports}]
    spec = {**run, "policyTypes": ["Ingress"], "ingress": ingress}
    return [_object(config, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)]


def _autoscaler(config: RunConfig, name: str) -> Object:
    """As many servers as the trainer's gauge says the run can use (`async_grpo.telemetry.servers_wanted`), in the
    median of ten minutes, so that neither one step nor a restart of the trainer changes their number."""
    site = config.launch.kubernetes
    gauge = f'async_grpo_trainer_servers_wanted{{pod=~"{name}-trainer-.*"}}'
    query = f"round(max(quantile_over_time(0.5, {gauge}[10m])))"
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {"serverAddress": site.prometheus, "query": query, "threshold": "1"},
    }
    slowly = {"scaleDown": {"stabilizationWindowSeconds": 600}}
    spec = {
        "scaleTargetRef": {"name": f"{name}-rollout"},
        "minReplicaCount": config.rollout.servers,
        "maxReplicaCount": site.max_servers,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": slowly}},
        "triggers": [trigger],
    }
    return _object(config, "keda.sh/v1alpha1", "ScaledObject", f"{name}-rollout", spec=spec)


_CONTAINED: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_SECURE: Object = {
    "automountServiceAccountToken": False,
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}
