"""Rollout machine side of every transport: one store, one receiver process that fills it, one handle per server.

receiver      a rollout server's handle: its end of the Unix socket
local_socket  messages on that socket, the process's end of it, and starting the process
process       loop and states of the process; base class of `zmq.receiver` and `folder.receiver`
fetch         transfer of one version into a slot: chunks to request, chunks that have arrived
slots         the store's slots, and when one may be overwritten
stats         counters of the process
"""
