"""A real Slurm with two nodes on this machine: munged, slurmctld and two slurmd, with separate files and ports."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.support.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("n1", "n2")
_SBIN = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))

# Servers run in `low` and can be preempted, with a minute to leave; trainers run in `trainers`, others in `high`. A job
# that is requeued waits for cred_expire seconds; the default is two minutes.
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5,bf_interval=5
SlurmdParameters=config_overrides
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=n1 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=trainers Nodes=n1,n2 PriorityTier=5 PreemptMode=OFF
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Return the programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_SBIN) is None]


def own_address() -> str:
    """Return an address of this machine other than the loopback; "" if there is none."""
    addresses = [
        card.address for cards in psutil.net_if_addrs().values() for card in cards if card.family == socket.AF_INET
    ]
    return next((address for address in addresses if not address.startswith("127.")), "")


class SlurmCluster:
    """A cluster. Slurm's commands, and those of this project, find it through `environment`."""

    def __init__(self, folder: Path, *addresses: str, prefixes: Sequence[Sequence[str]] = ((), ())) -> None:
        """The controller and all commands run on the first node.

        `addresses`: addresses of the nodes, or one for both. `prefixes`: words before the commands of each node.
        """
        self.folder = folder
        self.address = addresses[0]
        self._addresses = dict(zip(NODES, [addresses[0], addresses[-1]], strict=True))
        self._prefixes = dict(zip(NODES, prefixes, strict=True))
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _SBIN}

    def start(self) -> None:
        self.folder.mkdir()
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={free_port()} CPUs=4"
            for name, address in self._addresses.items()
        )
        values = {"host": host, "address": self.address, "port": free_port(), "user": getpass.getuser()}
        (self.folder / "slurm.conf").write_text(_CONFIG.format(folder=self.folder, nodes=nodes, **values))
        suffixes = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self.run(
            "munged", "--force", *(f"--{option}={self.folder}/munge.{suffix}" for option, suffix in suffixes.items())
        )
        self.run("slurmctld", "-c")
        for name in NODES:
            self.run("slurmd", "-N", name, on=name)
        self.until(
            lambda: self.run("sinfo", "-h", "-N", "-p", "trainers", "-t", "idle", "-o", "%N").split() == [*NODES]
        )

    def run(self, *argv: str, on: str = NODES[0]) -> str:
        """Run one of Slurm's commands and return its output."""
        argv = (*self._prefixes[on], *argv)
        result = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=self.environment, check=False)
        assert result.returncode == 0, f"{argv}: {result.stderr}"
        return result.stdout

    def jobs(self, name: str) -> dict[str, str]:
        """Return job -> state of the queued jobs of that name, one entry per task of an array."""
        rows = self.run("squeue", "--noheader", "--array", f"--name={name}", "--format=%i %T").splitlines()
        return dict(row.split() for row in rows)

    def crash(self, node: str) -> None:
        """Simulate a power failure: kill every process of the node and mark it down."""
        daemon = self._daemon(f"slurmd-{node}")
        log = str(self.folder / f"slurmd-{node}.log")  # only the node's daemons have it open
        steps = [process for process in psutil.process_iter() if log in _open_files(process)]
        for process in [daemon, *(child for step in steps for child in [step, *step.children(recursive=True)])]:
            process.kill()
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=crashed")

    def boot(self, node: str) -> None:
        """Start the node's daemon. Slurm accepts it immediately (ReturnToService=2)."""
        self.run("slurmd", "-N", node, on=node)
        self.until(lambda: "down" not in self.run("sinfo", "-h", "-N", "-n", node, "-o", "%T"), what=f"{node} to be up")

    def until(self, true: Callable[[], object], within_s: float = 60.0, what: str = "") -> None:
        deadline = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self.run('squeue', '--array')}"
            time.sleep(0.5)

    def cancel(self) -> None:
        """Cancel all jobs and wait until the queue is empty."""
        self.run("scancel", "--user", getpass.getuser())
        self.until(lambda: not self.run("squeue", "--noheader"), what="an empty queue")

    def stop(self) -> None:
        """End the daemons."""
        for pid in self.folder.glob("*.pid"):
            psutil.Process(int(pid.read_text())).send_signal(signal.SIGTERM)

    def _daemon(self, name: str) -> psutil.Process:
        return psutil.Process(int((self.folder / f"{name}.pid").read_text()))


def _open_files(process: psutil.Process) -> list[str]:
    try:
        return [file.path for file in process.open_files()] if process.name() == "slurmstepd" else []
    except psutil.Error:
        return []
