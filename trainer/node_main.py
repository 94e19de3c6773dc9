"""The trainer on one machine (a node), from the rendezvous with the other nodes to the end of its ranks.

    python -m trainer.node_main [--node-rank R] --config runs/NAME/roles.yaml --model FOLDER

First it waits for the other nodes or for SIGTERM (bounded; a single node skips this). Then it waits for its ranks, the
other nodes, or SIGTERM, whichever comes first. Node 0 keeps the store in which all ranks find each other.

- All ranks end with 0: the node ends with 0. Node 0 stays until the other nodes are done, since it keeps their store.
- A rank fails, or another node does: the step in progress is lost. The node ends its ranks, tells the other nodes, and
  ends with the reason, including the last error of the rank. The supervisors start all nodes again, and they meet
  again.
- SIGTERM to any node: node 0 passes it to rank 0, which writes a checkpoint and lets all ranks leave. If it ends rank 0
  before that has joined the run, there is nothing to save: all nodes end their ranks, and exit with 0. During the
  rendezvous it ends this node alone.

Exit code 0: the run is trained to its end, or SIGTERM was obeyed and a checkpoint holds what was trained. 78: the
configuration, the data or the installation is at fault. Otherwise the code of the rank that has failed, or 1; the last
line of the log gives the reason. Started again on all machines, the trainer resumes.

Rank 0 keeps two copies of the weights in /dev/shm. The node removes them when its ranks have ended, since a rank 0 that
was killed leaves them.
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
from trainer.ranks.rendezvous import Host, Invitation, hosted, join
from trainer.ranks.store import RankStore, listen

CAUSE_S = 2.0
"""Seconds to wait for the reason from another node: a rank ends as soon as its connection to another breaks."""

LINGER_S = 60.0
"""Seconds for which node 0 keeps the store, at most, for ranks that leave later."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """What a node has once its ranks may start."""

    peers: Peers
    host: Host | None = None
    """Server of the rendezvous, on node 0 of several."""
    store_at: tuple[str, int] | None = None
    """Where the ranks find each other; None for a single rank."""
    store: RankStore | None = None
    """The store itself, on node 0."""


@dataclass(slots=True)
class Node:
    """Node `rank` of the trainer."""

    config: RunConfig
    config_file: Path
    model: Path
    rank: int
    stop_asked: asyncio.Event = field(default_factory=asyncio.Event)
    argv: Sequence[str] | None = None
    """The program of every rank; None: `trainer.main`."""

    async def run(self) -> None:
        """Train until the run ends or is stopped. Raises AsyncGrpoError for every other end."""
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
            remove_trainer_files(self.config.local_name)  # of a rank 0 that was killed

    async def _train(self, setup: NodeSetup) -> None:
        """Start this node's ranks, wait for their end, and tell the other nodes how they ended."""
        async with setup.peers.followed():
            ranks = await LocalRanks.start(self._argv(), self._environments(setup))
            try:
                await self._supervise(ranks, setup)
            except StoppedEarly:
                log.info("stopped before the ranks had joined the run", node=self.rank)
                setup.peers.tell(Stopped())
            except AsyncGrpoError as error:
                setup.peers.tell(_ended(error))
                raise
            finally:
                await ranks.end()

    @asynccontextmanager
    async def _set_up(self) -> AsyncIterator[NodeSetup]:
        """Meet the other nodes, if there are any, and open the store; connections and store are closed afterwards."""
        trainer, where = self.config.trainer, self.config.trainer.rendezvous
        if trainer.processes == 1:
            yield NodeSetup(Peers([], where.silence_s))
        elif trainer.nodes == 1:
            with contextlib.closing(self._store(LOOPBACK, 0)) as store:
                yield NodeSetup(Peers([], where.silence_s), None, (LOOPBACK, store.port), store)
        elif self.rank == 0:
            invitation = self._invitation()
            place = (invitation.address, where.port + 1)
            with contextlib.closing(self._store(*place)) as store:  # a taken port is reported before any wait
                async with hosted(invitation) as host:
                    await store.open()
                    peers = Peers(host.connections.values(), where.silence_s)
                    peers.tell(Start())
                    yield NodeSetup(peers, host, place, store)
        else:
            invitation = self._invitation()
            connection = await join(invitation)
            try:
                yield NodeSetup(Peers([connection], where.silence_s), None, (invitation.address, where.port + 1))
            finally:
                await connection.close()

    def _store(self, address: str, port: int) -> RankStore:
        return RankStore(listen(address, port), self.config.trainer.rendezvous.timeout_s)

    async def _supervise(self, ranks: LocalRanks, setup: NodeSetup) -> None:
        working, watching = asyncio.create_task(ranks.wait()), asyncio.create_task(_watch(setup.peers, setup.host))
        stopping = asyncio.create_task(self._stop_when_asked(ranks, setup.peers))
        # Beside the ranks, which connect before they are answered: they take as long to import PyTorch as this does.
        opening = [asyncio.create_task(setup.store.open())] if setup.store is not None else []
        own_tasks = (working, watching, stopping, *opening)
        tasks = set(own_tasks)
        try:
            while not working.done():
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if working in done:
                    await self._report_end(working, watching, setup.peers)
                for ended in done:
                    ended.result()
            if setup.host is not None:
                await setup.peers.left(LINGER_S)  # the run is trained; the other nodes report their own failures
        finally:
            await cancel_and_wait(*own_tasks)

    async def _stop_when_asked(self, ranks: LocalRanks, peers: Peers) -> None:
        """Raises TrainingError if the ranks have not left in time; they are killed then."""
        await self._asked(peers)
        if self.rank == 0:
            ranks.stop()
        else:
            peers.tell(Stop())
        timeout_s = self.config.launch.stop_timeout_s
        await asyncio.sleep(timeout_s)
        raise TrainingError(
            f"the ranks were still at work launch.stop_timeout_s ({timeout_s:g} s) after SIGTERM, and were killed. "
            "What was trained since the newest checkpoint is trained again"
        )

    async def _report_end(self, working: asyncio.Task[None], watching: asyncio.Task[None], peers: Peers) -> None:
        """Tell the other nodes that the ranks have ended.

        Raises TrainingError if not well, with what the others say of it; StoppedEarly if SIGTERM ended one, here or
        there, because of which the others fail.
        """
        error = working.exception()
        if isinstance(error, Terminated) and await self._was_asked(peers):
            raise StoppedEarly
        if error is None:
            peers.tell(Ended(reason=""))
            return
        peers.tell(_ended(error))
        await asyncio.wait({watching}, timeout=CAUSE_S)
        theirs = watching.exception() if watching.done() else None
        if isinstance(theirs, StoppedEarly):
            raise theirs
        echo = str(error) in str(theirs)  # they ended because of what they were just told
        if theirs is None or echo or _exit_code(error) == EXIT_CONFIG:
            raise error
        kind = ConfigError if isinstance(theirs, ConfigError) else NodeLost
        raise kind(f"{error}; {theirs}")

    async def _was_asked(self, peers: Peers) -> bool:
        """Whether this node or another was asked to stop; one that was at the same time as its rank will soon know."""
        try:
            await asyncio.wait_for(self._asked(peers), CAUSE_S)
        except TimeoutError:
            return False
        return True

    async def _asked(self, peers: Peers) -> None:
        """Wait until this node or another is asked to stop."""
        with contextlib.suppress(Overtaken):
            await race(self.stop_asked.wait(), peers.stop_asked.wait())

    def _invitation(self) -> Invitation:
        where = self.config.trainer.rendezvous
        assert where.address is not None, "the configuration asks for it"
        trainer, run_id = self.config.trainer, where.id or self.config.name
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


async def _watch(peers: Peers, host: Host | None) -> None:
    """As `Peers.watch`; on node 0 it also raises NodeLost for a node that is back before its loss was noticed."""
    if host is None:
        await peers.watch()
        return
    with contextlib.suppress(Overtaken):
        await race(host.again.wait(), peers.watch())  # if both are done, the restart explains the loss
        raise NodeLost(f"{host.again_peer} was started again, and the ranks wait for its earlier process")


def _ended(error: BaseException) -> Ended:
    """What the other nodes are told of an end with this error."""
    return Ended(reason=str(error), config_fault=_exit_code(error) == EXIT_CONFIG)


def _exit_code(error: BaseException) -> int:
    """The exit code of a node that ends with this error."""
    if isinstance(error, CONFIG_FAULTS):
        return EXIT_CONFIG
    return error.code if isinstance(error, RankFailed) else 1


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
