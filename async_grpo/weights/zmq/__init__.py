"""The default transport: announcements and chunks over ZMQ, weights in shared memory on both sides.

sender        trainer side: hands versions in shared memory to the publisher process
publisher     publisher process: announces versions, tracks receivers, serves chunks
relay_tree    assignment of receivers to parents
chunk_server  serves chunks, in the publisher and in every relay
receiver      receiver process of a machine, which relays to other machines
upstream      the receiver's connections to the publisher and to its parent
messages      records on the wire
sockets       addresses, keys, socket options
"""
