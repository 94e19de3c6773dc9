"""Names of the keys of one run. They share a hash tag, so on a cluster they live on one node.

    {run}:meta                hash    epoch, version, counters, parameters
    {run}:inflight            zset    seq -> lease deadline (ms; 0: given back)
    {run}:ready, taken        zset    seq -> seq
    {run}:order               zset    INFLIGHT and READY by seq: the order in which groups are taken
    {run}:attempt, partial, admitted_version, oldest, strikes     hash    seq -> number
    {run}:log                 hash    version -> "epoch:seq,seq,..." of the batch of that step
    {run}:task:<seq>, group:<seq>:<attempt>, partial:<seq>:<attempt>      payloads (MessagePack)
    {run}:discarded:<seq>:<attempt>                                       so that a repeated discard is harmless
    {run}:wake:admit, wake:take                                           wake lists for BLPOP
    {run}:board:...                                                       the run board

A task's index is the sequence number of its ticket: tasks are admitted in order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of `run`."""

    run: str

    def __call__(self, *parts: object) -> str:
        """`keys("task", 3)` is `{run}:task:3`."""
        return f"{{{self.run}}}:" + ":".join(str(part) for part in parts)
