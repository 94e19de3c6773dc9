"""The trainer on one machine (a node), from the rendezvous with the other nodes to the end of its ranks.

    python -m trainer.node_main [--node-rank R] --config runs/NAME/roles.yaml --model FOLDER

    rendezvous with the other nodes --> ranks run --> all ranks have ended
    (skipped by a single node)          supervised until they end, another node fails, or SIGTERM arrives

Node 0 owns the store in which all ranks find each other.

- All ranks end with 0: the node ends with 0. Node 0 stays until the other nodes have ended, because it has the store.
- A rank or another node fails: the step in progress is lost. The node ends its ranks, sends the reason to the other
  nodes, and ends with it, including the last error of the rank. The supervisors restart all nodes, which meet again.
- SIGTERM to any node: node 0 forwards it to rank 0, which writes a checkpoint and lets all ranks end. If it kills rank
  0 before that has joined the run, there is nothing to save: all nodes end their ranks and exit with 0. During the
  rendezvous it only ends this node.

Exit code 0: the run is trained to its end, or a checkpoint was written after SIGTERM. 78: the configuration, the data
or the installation is wrong. Otherwise the code of the rank that failed, or 1; the last line of the log has the reason.
Restarted on all machines, the trainer resumes.

Rank 0 has two copies of the weights in /dev/shm. The node removes them when its ranks have ended, in case rank 0 was
killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from async_grpo.config import RunConfig, load
from async_grpo.errors import CONFIG_FAULTS, EXIT_CONFIG, AsyncGrpoError, ConfigError, NodeLost, TrainingError
from async_grpo.telemetry.logging import bind_process, configure_logging, report_fatal
from async_grpo.telemetry.role_history import record_end
from async_grpo.utils.aio import Overtaken, cancel_and_wait, race, stop_signals
from async_grpo.utils.network import LOOPBACK
from async_grpo.weights.shared_memory import remove_trainer_files
from trainer.ranks.local_ranks import LocalRanks, RankFailed, Terminated, network_environment, rank_environments
from trainer.ranks.peers import Ended, Hello, Peers, Start, Stop, Stopped, StoppedEarly
from trainer.ranks.rendezvous import Host, Invitation, host_rendezvous, join_rendezvous
from trainer.ranks.store import RankStore, listen

CAUSE_S = 2.0
"""Seconds to wait for another node's reason. If a rank fails elsewhere, ours fail too, with broken connections, and
often before the real reason arrives."""

LINGER_S = 60.0
"""Maximum seconds that node 0 keeps the store for ranks of other nodes that end later."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """Connections and store of a node that is ready to start its ranks."""

    peers: Peers
    host: Host | None = None
    """Server of the rendezvous, on node 0 of several."""
    store_at: tuple[str, int] | None = None
    """Address of the store of the ranks; None for a single rank."""
    store: RankStore | None = None
    """The store, on node 0."""


@dataclass(slots=True)
class Node:
    """Node `rank` of the trainer."""

    config: RunConfig
    config_file: Path
    model: Path
    rank: int
    stop_asked: asyncio.Event = field(default_factory=asyncio.Event)
    argv: Sequence[str] | None = None
    """Command of every rank; None for `trainer.main`."""

    async def run(self) -> None:
        """Train until the run ends or is stopped. Raises AsyncGrpoError otherwise."""
        try:
            with stop_signals(self.stop_asked.set):
                async with AsyncExitStack() as stack:
                    try:
                        setup = await race(stack.enter_async_context(self._set_up()), self.stop_asked.wait())
                    except Overtaken:
                        log.info("stopped before all nodes had met", node=self.rank)
                    else:
                        await self._train(setup)
        finally:
            remove_trainer_files(self.config.name_with_digest)  # left over if rank 0 was killed

    async def _train(self, setup: NodeSetup) -> None:
        """Start this node's ranks, wait until they end, and report to the other nodes how they ended."""
        async with setup.peers.exchange_heartbeats():
            ranks = await LocalRanks.start(self._argv(), self._environments(setup))
            try:
                await self._supervise(ranks, setup)
            except StoppedEarly:
                log.info("stopped before the ranks had joined the run", node=self.rank)
                setup.peers.broadcast(Stopped())
            except AsyncGrpoError as error:
                setup.peers.broadcast(_make_ended(error))
                raise
            finally:
                await ranks.terminate()

    @asynccontextmanager
    async def _set_up(self) -> AsyncIterator[NodeSetup]:
        """Meet the other nodes, if any, and open the store. Connections and store are closed on exit."""
        trainer = self.config.trainer
        where = trainer.rendezvous
        if trainer.processes == 1:
            yield NodeSetup(Peers([], where.silence_s))
        elif trainer.nodes == 1:
            with contextlib.closing(self._store(LOOPBACK, 0)) as store:
                yield NodeSetup(Peers([], where.silence_s), None, (LOOPBACK, store.port), store)
        elif self.rank == 0:
            invitation = self._invitation()
            place = (invitation.address, where.port + 1)
            # Bind the port of the store before waiting for the others: if it is taken, fail immediately.
            with contextlib.closing(self._store(*place)) as store:
                async with host_rendezvous(invitation) as host:
                    await store.open()
                    peers = Peers(host.connections.values(), where.silence_s)
                    peers.broadcast(Start())
                    yield NodeSetup(peers, host, place, store)
        else:
            invitation = self._invitation()
            connection = await join_rendezvous(invitation)
            try:
                yield NodeSetup(Peers([connection], where.silence_s), None, (invitation.address, where.port + 1))
            finally:
                await connection.close()

    def _store(self, address: str, port: int) -> RankStore:
        return RankStore(listen(address, port), self.config.trainer.rendezvous.timeout_s)

    async def _supervise(self, ranks: LocalRanks, setup: NodeSetup) -> None:
        """Wait until the ranks have ended. Raises the first failure of a rank, another node, the store or the stop."""
        working = asyncio.create_task(ranks.wait())
        watching = asyncio.create_task(_watch_peers(setup.peers, setup.host))
        stopping = asyncio.create_task(self._stop_on_request(ranks, setup.peers))
        own_tasks = [working, watching, stopping]
        if setup.store is not None:
            # In parallel with the start of the ranks: both import PyTorch for seconds. A rank that connects first is
            # answered when the store is open.
            own_tasks.append(asyncio.create_task(setup.store.open()))
        pending = set(own_tasks)
        try:
            while not working.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if working in done:
                    await self._report_end(working, watching, setup.peers)
                for ended in done:
                    ended.result()
            if setup.host is not None:
                # The run is trained. Only keep the store for the others, which report their own failures.
                await setup.peers.wait_until_gone(LINGER_S)
        finally:
            await cancel_and_wait(*own_tasks)

    async def _stop_on_request(self, ranks: LocalRanks, peers: Peers) -> None:
        """Wait for SIGTERM on any node and stop the trainer.

        Raises TrainingError if the ranks do not end in time; they are killed then.
        """
        await self._wait_for_stop_request(peers)
        if self.rank == 0:
            ranks.request_stop()
        else:
            peers.broadcast(Stop())
        timeout_s = self.config.launch.stop_timeout_s
        await asyncio.sleep(timeout_s)
        raise TrainingError(
            f"the ranks did not end within launch.stop_timeout_s ({timeout_s:g} s) after SIGTERM and were killed. The "
            "steps since the newest checkpoint will be trained again"
        )

    async def _report_end(self, working: asyncio.Task[None], watching: asyncio.Task[None], peers: Peers) -> None:
        """Report the end of the ranks to the other nodes.

        Raises TrainingError if a rank failed, with the reason of another node if that failed first; StoppedEarly if a
        rank was ended by SIGTERM, here or on another node.
        """
        error = working.exception()
        if isinstance(error, Terminated) and await self._was_stop_requested(peers):
            raise StoppedEarly
        if error is None:
            peers.broadcast(Ended(reason=""))
            return
        peers.broadcast(_make_ended(error))
        await asyncio.wait({watching}, timeout=CAUSE_S)
        theirs = watching.exception() if watching.done() else None
        if isinstance(theirs, StoppedEarly):
            raise theirs
        is_echo = str(error) in str(theirs)  # the other node failed because of our message
        if theirs is None or is_echo or _exit_code(error) == EXIT_CONFIG:
            raise error
        kind = ConfigError if isinstance(theirs, ConfigError) else NodeLost
        raise kind(f"{error}; {theirs}")

    async def _was_stop_requested(self, peers: Peers) -> bool:
        """True if this node or another was asked to stop.

        A launcher may send SIGTERM to node and ranks together, and the rank's end can be noticed first: wait CAUSE_S.
        """
        try:
            await asyncio.wait_for(self._wait_for_stop_request(peers), CAUSE_S)
        except TimeoutError:
            return False
        return True

    async def _wait_for_stop_request(self, peers: Peers) -> None:
        """Wait until this node or another is asked to stop."""
        with contextlib.suppress(Overtaken):
            await race(self.stop_asked.wait(), peers.stop_asked.wait())

    def _invitation(self) -> Invitation:
        where = self.config.trainer.rendezvous
        assert where.address is not None, "the configuration requires it for several nodes"
        trainer = self.config.trainer
        run_id = where.id or self.config.name
        hello = Hello(id=run_id, rank=self.rank, nodes=trainer.nodes, processes=trainer.processes)
        return Invitation(where, where.address, hello)

    def _argv(self) -> list[str]:
        if self.argv is not None:
            return [*self.argv]
        files = ["--config", str(self.config_file), "--model", str(self.model)]
        return [sys.executable, "-m", "trainer.main", *files]

    def _environments(self, setup: NodeSetup) -> list[dict[str, str]]:
        trainer = self.config.trainer
        network = network_environment(trainer.platform, setup.peers.own_address, os.environ)
        return [network | environment for environment in rank_environments(trainer, self.rank, setup.store_at)]


async def _watch_peers(peers: Peers, host: Host | None) -> None:
    """Wait until all other nodes have ended successfully.

    Raises the errors of `Peers.wait_for_success`, and on node 0 NodeLost for a node that was restarted, even before the
    loss of its earlier process is detected.
    """
    if host is None:
        await peers.wait_for_success()
        return
    with contextlib.suppress(Overtaken):
        # If both have happened, `race` prefers the first: the restart explains the loss.
        await race(host.node_restarted.wait(), peers.wait_for_success())
        raise NodeLost(f"{host.restarted_peer} was restarted, and the ranks wait for its earlier process")


def _make_ended(error: BaseException) -> Ended:
    """Make the message to the other nodes about an end with this error."""
    return Ended(reason=str(error), config_fault=_exit_code(error) == EXIT_CONFIG)


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a node that ends with this error."""
    if isinstance(error, CONFIG_FAULTS):
        return EXIT_CONFIG
    if isinstance(error, RankFailed):
        return error.code
    return 1


def main() -> None:
    """Entry point; see the module."""
    parser = argparse.ArgumentParser(prog="trainer.node_main", description="The trainer on one machine.")
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration of the run")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of the first policy")
    parser.add_argument("--node-rank", type=int, default=0, help="which of trainer.nodes this is, from 0")
    arguments = parser.parse_args()
    configure_logging("trainer")
    try:
        config = load(arguments.config)
        bind_process(run=config.name)
        node = Node(config, arguments.config, arguments.model, arguments.node_rank)
        asyncio.run(node.run())
        record_end()
    except AsyncGrpoError as error:
        report_fatal(error)
        sys.exit(_exit_code(error))


if __name__ == "__main__":
    main()
