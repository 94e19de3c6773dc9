"""`async-grpo launch kubernetes`: a run as Kubernetes objects. Kubernetes places and restarts its roles.

    JobSet        trainer   a pod for each of trainer.nodes; needs the JobSet operator
    Deployment    rollout   rollout.servers pods; with max_servers, a ScaledObject (KEDA) sets their number
    Job           report    waits for the end of the run and writes its report
    StatefulSet   redis     unless redis.url names a server

All pods read one ConfigMap, share a volume at /runs, and take their passwords from a Secret that the user creates. An
evicted or preempted pod gets SIGTERM and saves its work. A trainer then exits with 75, so that Kubernetes starts its
pod again; exit code 78, for a wrong configuration, ends the run.

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
"""Minimum number of failed probes, ten seconds apart, after which a rollout server is restarted."""
GPU_RESOURCE = "nvidia.com/gpu"
"""Resource of NVIDIA's device plug-in. The resource for NPUs is launch.kubernetes.npu_resource."""
IMAGES = {"cpu": "async-grpo:cpu", "cuda": "async-grpo:cuda", "npu": "async-grpo:ascend"}
"""Platform -> image that deploy/ builds for it."""
USER = 1000
"""User id of the images in deploy/."""
_NAME_LENGTH = 40
"""Characters of a run's name in names of objects. A pod's name has at most 63, and JobSet appends some."""
_APPLY_TIMEOUT_S = 120.0
_REDIS_SCRIPT = f"""\
umask 077
printf 'requirepass %s\\n' "$ASYNC_GRPO_REDIS_PASSWORD" > /tmp/own.conf
exec valkey-server /tmp/own.conf --port {REDIS} --dir /data --appendonly yes --appendfsync always --save '' \
--maxmemory "$MAXMEMORY" --maxmemory-policy noeviction"""


def resolve_for_cluster(path: Path, overrides: Sequence[str], steps: int | None) -> RunConfig:
    """Return the run with the addresses and folders of its pods. Raises ConfigError."""
    config = load_run_config(path, overrides, steps)
    name = object_name(config)
    trainer_host = f"{name}-trainer-0-0.{name}"
    cluster_overrides = [
        *overrides,
        f"runs_dir={RUNS}",
        f"weights.bind=tcp://0.0.0.0:{WEIGHTS}",
        f"weights.advertise={trainer_host}",
        f"weights.relay_bind=tcp://0.0.0.0:{RELAY}",
        f"trainer.rendezvous.address={trainer_host}",
        f"rollout.http.port={HTTP}",
        "rollout.http.host=0.0.0.0",
        "telemetry.http.host=0.0.0.0",
        f"telemetry.http.port={METRICS}",
    ]
    if config.redis.url is None:
        cluster_overrides.append(f"redis.url=redis://{name}-redis:{REDIS}")
    if config.weights.encrypt == "off":
        cluster_overrides.append("weights.encrypt=control")
    return load_run_config(path, cluster_overrides, steps)


def make_objects(config: RunConfig) -> list[Object]:
    """Return the objects in the order in which they are applied. `config` is the result of `resolve_for_cluster`."""
    name = object_name(config)
    site = config.launch.kubernetes
    objects = [
        _make_object(config, "v1", "ConfigMap", name, data={"config.yaml": dump(config)}),
        _make_object(
            config,
            "v1",
            "PersistentVolumeClaim",
            f"{name}-runs",
            spec=_claim_spec("ReadWriteMany", site.runs_gib, site.storage_class),
        ),
    ]
    has_redis = config.redis.url == f"redis://{name}-redis:{REDIS}"
    if has_redis:
        objects += _make_redis(config, name)
    objects += [
        _make_trainer(config, name),
        _make_rollout(config, name),
        _make_report(config, name),
        _make_disruption_budget(config, "trainer", {"minAvailable": config.trainer.nodes}),
        _make_disruption_budget(config, "rollout", {"maxUnavailable": 1}),
        _make_network_policy(config, name),
    ]
    if site.max_servers is not None:
        objects.append(_make_autoscaler(config, name))
    return objects


def apply_objects(config: RunConfig) -> str:
    """Apply the objects with kubectl. Returns its output.

    Raises DependencyError without kubectl, ConfigError if kubectl or the cluster rejects the objects.
    """
    if shutil.which("kubectl") is None:
        raise DependencyError(
            "kubectl is not on the PATH. Install it, or print the objects with --dry-run and apply them yourself"
        )
    argv = ["kubectl", "apply", "--server-side", "-f", "-"]
    manifest = dump_objects(config)
    result = subprocess.run(argv, input=manifest, capture_output=True, text=True, timeout=_APPLY_TIMEOUT_S, check=False)
    if result.returncode:
        raise ConfigError(
            f"kubectl apply failed: {result.stderr.strip()}. The trainer needs the JobSet operator, and autoscaling "
            "(launch.kubernetes.max_servers) needs KEDA"
        )
    return result.stdout


class _ReadableDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeated values in full, without YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_ReadableDumper.add_representer(str, _ReadableDumper.represent_str)


def dump_objects(config: RunConfig) -> str:
    """Return the objects as YAML documents."""
    return yaml.dump_all(make_objects(config), Dumper=_ReadableDumper, sort_keys=False, width=120, explicit_start=True)


def object_name(config: RunConfig) -> str:
    """Return the name of the run's objects: at most 40 lower-case letters, digits and hyphens, starting with a letter.

    A name that was cut or changed ends in a digest of the run's name. Without it, runs that differ only after the cut
    (max_staleness=0 and =4 of one configuration) would have the same name, and the second `kubectl apply` would replace
    the objects and volumes of the first.
    """
    name = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")
    if not name[:1].isalpha():  # a Service may not start with a digit
        name = f"run-{name}".rstrip("-")
    if name == config.name and len(name) <= _NAME_LENGTH:
        return name
    digest = short_digest(config.name)
    return f"{name[: _NAME_LENGTH - len(digest) - 1].rstrip('-')}-{digest}"


def _labels(config: RunConfig, role: str | None = None) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "async-grpo", "app.kubernetes.io/instance": object_name(config)}
    if role is not None:
        labels["app.kubernetes.io/component"] = role
    return labels


def _make_object(config: RunConfig, version: str, kind: str, name: str, **parts: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(config)}, **parts}


def _claim_spec(mode: str, gib: int, storage_class: str | None = None) -> Object:
    spec: Object = {"accessModes": [mode], "resources": {"requests": {"storage": f"{gib}Gi"}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    return spec


def _make_redis(config: RunConfig, name: str) -> list[Object]:
    labels = _labels(config, "redis")
    memory = config.redis.max_memory_bytes
    container = {
        "name": "redis",
        "image": config.launch.kubernetes.redis_image,
        "command": ["sh", "-c", _REDIS_SCRIPT],
        "env": [{"name": "MAXMEMORY", "value": str(memory)}],
        "envFrom": _secret_references(config),
        "ports": [{"containerPort": REDIS, "name": "redis"}],
        "readinessProbe": {"tcpSocket": {"port": REDIS}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "1", "memory": f"{math.ceil(1.5 * memory / 2**20)}Mi"}},
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = {"containers": [container], "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}], **_POD_SECURITY}
    data = {"metadata": {"name": "data"}, "spec": _claim_spec("ReadWriteOnce", math.ceil(4 * memory / 2**30))}
    spec = {
        "serviceName": f"{name}-redis",
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [data],
    }
    service = {"selector": labels, "ports": [{"name": "redis", "port": REDIS}]}
    return [
        _make_object(config, "v1", "Service", f"{name}-redis", spec=service),
        _make_object(config, "apps/v1", "StatefulSet", f"{name}-redis", spec=spec),
    ]


def _make_trainer(config: RunConfig, name: str) -> Object:
    nodes, restarts = config.trainer.nodes, config.launch.restarts.trainer
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container = _make_container(
        config,
        "trainer",
        ["bash", "-c", make_stoppable(f"async-grpo trainer {CONFIG_FILE}")],
        platform=config.trainer.platform,
        devices=config.trainer.processes_per_node,
        resources=config.launch.kubernetes.trainer,
        environment={"ASYNC_GRPO_NODE_RANK": {"fieldRef": {"fieldPath": index}}},
    )
    pod = _make_pod(config, "trainer", container) | {"restartPolicy": "Never"}
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
    return _make_object(config, "jobset.x-k8s.io/v1alpha2", "JobSet", name, spec=spec)


def _make_rollout(config: RunConfig, name: str) -> Object:
    labels = _labels(config, "rollout")
    container = _make_container(
        config,
        "rollout",
        ["async-grpo", "rollout", CONFIG_FILE, "--name", "$(POD_NAME)"],
        platform=config.rollout.limits.platform,
        devices=config.rollout.limits.devices,
        resources=config.launch.kubernetes.rollout,
        environment={"POD_NAME": {"fieldRef": {"fieldPath": "metadata.name"}}},
    )
    # An engine that died is reloaded in the same process. /healthz answers meanwhile, but loading may hold the GIL for
    # a while. A probe with a shorter limit than the start would kill the server in every reload of a large model.
    max_failures = max(LIVENESS_FAILURES, math.ceil(config.launch.ready_timeout_s / 10))
    container |= {
        "ports": [{"containerPort": HTTP, "name": "http"}, {"containerPort": RELAY, "name": "weights"}],
        "startupProbe": _make_probe("/healthz", HTTP, failures=max_failures),
        "livenessProbe": _make_probe("/healthz", HTTP, failures=max_failures),
        "readinessProbe": _make_probe("/readyz", HTTP, failures=3),
    }
    spec = {
        "replicas": config.rollout.servers,
        "selector": {"matchLabels": labels},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": {"metadata": {"labels": labels}, "spec": _make_pod(config, "rollout", container)},
    }
    if config.launch.kubernetes.max_servers is not None:
        del spec["replicas"]  # the autoscaler sets it
    return _make_object(config, "apps/v1", "Deployment", f"{name}-rollout", spec=spec)


def _make_report(config: RunConfig, name: str) -> Object:
    argv = ["async-grpo", "runs", "report", CONFIG_FILE, "--wait"]
    container = _make_container(config, "report", argv, platform=config.trainer.platform)
    pod = _make_pod(config, "report", container) | {"restartPolicy": "OnFailure"}
    template = {"metadata": {"labels": _labels(config, "report")}, "spec": pod}
    return _make_object(config, "batch/v1", "Job", f"{name}-report", spec={"backoffLimit": 20, "template": template})


def _make_container(
    config: RunConfig,
    role: str,
    argv: list[str],
    *,
    platform: str,
    devices: int = 0,
    resources: Mapping[str, str] | None = None,
    environment: Mapping[str, Object] | None = None,
) -> Object:
    """Return a container of a role. `environment`: variable -> source of its value, such as a field of the pod."""
    kind = select_platform(platform).name
    quantities = {**(resources or {}), **_device_resource(config, kind, devices)}

    folders = {"config": CONFIG_FOLDER, "runs": RUNS, "shm": "/dev/shm", "tmp": "/tmp"}
    mounts: list[Object] = [{"name": volume, "mountPath": folder} for volume, folder in folders.items()]
    for claim, folder in config.launch.kubernetes.claims.items():
        mounts.append({"name": claim, "mountPath": folder, "readOnly": True})

    constants = {"HOME": "/tmp", "ASYNC_GRPO_CACHE": f"{RUNS}/.cache", "ASYNC_GRPO_LOG_FORMAT": "json"}
    if kind == "npu" and not devices:
        # Ascend Docker Runtime requires this for containers without an NPU.
        constants["ASCEND_VISIBLE_DEVICES"] = "void"
    variables: list[Object] = [{"name": name, "valueFrom": source} for name, source in (environment or {}).items()]
    variables += [{"name": name, "value": value} for name, value in constants.items()]
    return {
        "name": role,
        "image": config.launch.kubernetes.image or IMAGES[kind],
        # `command` instead of `args` would replace the image's entrypoint, which sets up CANN
        # (deploy/scripts/with-cann.sh).
        "args": argv,
        "env": variables,
        "envFrom": _secret_references(config),
        "resources": {"requests": quantities, "limits": quantities} if quantities else {},
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }


def _make_pod(config: RunConfig, role: str, container: Object) -> Object:
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
        **_POD_SECURITY,
    }


def _device_resource(config: RunConfig, platform: str, count: int) -> dict[str, str]:
    resource = {"cuda": GPU_RESOURCE, "npu": config.launch.kubernetes.npu_resource}.get(platform)
    return {resource: str(count)} if resource and count else {}


def _secret_references(config: RunConfig) -> list[Object]:
    return [{"secretRef": {"name": config.launch.kubernetes.secret}}]


def _make_probe(path: str, port: int, *, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _make_disruption_budget(config: RunConfig, role: str, bound: Object) -> Object:
    spec = {"selector": {"matchLabels": _labels(config, role)}, **bound}
    return _make_object(config, "policy/v1", "PodDisruptionBudget", f"{object_name(config)}-{role}", spec=spec)


def _make_network_policy(config: RunConfig, name: str) -> Object:
    """Return the policy: pods of the run reach each other, and the monitoring namespace reaches the HTTP ports."""
    run_pods = {"podSelector": {"matchLabels": _labels(config)}}
    namespace = {"kubernetes.io/metadata.name": config.launch.kubernetes.monitoring_namespace}
    monitoring = {"namespaceSelector": {"matchLabels": namespace}}
    http_ports = [{"protocol": "TCP", "port": port} for port in (HTTP, METRICS)]
    ingress = [{"from": [run_pods]}, {"from": [monitoring], "ports": http_ports}]
    spec = {**run_pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return _make_object(config, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def _make_autoscaler(config: RunConfig, name: str) -> Object:
    """Return the autoscaler of the rollout servers.

    Their number follows the trainer's gauge (`async_grpo.telemetry.servers_wanted`). The median of ten minutes keeps a
    single step or a restart of the trainer from changing it.
    """
    site = config.launch.kubernetes
    gauge = f'async_grpo_trainer_servers_wanted{{pod=~"{name}-trainer-.*"}}'
    query = f"round(max(quantile_over_time(0.5, {gauge}[10m])))"
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {"serverAddress": site.prometheus, "query": query, "threshold": "1"},
    }
    slow_scale_down = {"scaleDown": {"stabilizationWindowSeconds": 600}}
    spec = {
        "scaleTargetRef": {"name": f"{name}-rollout"},
        "minReplicaCount": config.rollout.servers,
        "maxReplicaCount": site.max_servers,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": slow_scale_down}},
        "triggers": [trigger],
    }
    return _make_object(config, "keda.sh/v1alpha1", "ScaledObject", f"{name}-rollout", spec=spec)


_CONTAINER_SECURITY: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_POD_SECURITY: Object = {
    "automountServiceAccountToken": False,
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}
