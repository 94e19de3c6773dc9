"""The rollout machine's side of every transport: one store, one process that fills it, a handle for every server.

receiver      a rollout server's handle, and its end of the Unix socket
local_socket  the messages on that socket, the process's end of it, and the start of the process
process       the loop and the states of the process; `zmq.receiver` and `folder.receiver` derive from it
fetch         one version on its way into a slot: which chunks to ask for, which have come
slots         the two slots of the store, or the one
stats         what the process counts
"""
