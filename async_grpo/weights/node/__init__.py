"""The rollout machine's side of every transport: one store, one process that fills it, a handle for every server.

receiver      a rollout server's handle on the process
local_socket  the Unix socket between them
fetch         one version on its way into a slot: which chunks to ask for, which have come
slots         the two slots of the store, or the one
records       what a fetch asks for, and what it counts

The process itself is `zmq.node_receiver` or `folder.receiver`.
"""
