"""The trainer on its machines: one process a node, which meets the others, starts its ranks, and watches.

    node 1 --Hello--> node 0 --Look--> all: is this file of yours there? --Seen--> node 0 --Start--> all
                                                                                        |
    rank 8..15 <--environment-- node 1                       node 0 --environment--> rank 0..7, store

A node that is alone meets nobody, and keeps the store of its ranks on the loopback. Several meet first, so that what
would make the ranks wait for ever, or learn from different things, has a name before any of them starts.

The cast: `main` the command; `node` one machine from its start to its end; `meeting` who is there and
whether they agree (`agreement`, `folder`); `peers` whether they still are; `ranks` this machine's own, and the store.
"""
