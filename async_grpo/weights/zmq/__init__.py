"""The default transport: announcements and chunks over ZMQ, weights in shared memory on both sides.

sender        the trainer's end: copies the weights into shared memory, without waiting
publisher     the publisher process: announces, tracks the receivers, serves
relay_tree    who fetches from whom
chunk_server  serves chunks, in the publisher and in every relay
receiver      the receiver process of a machine, which relays to others
upstream      its connections to the publisher and to the parent that it fetches from
messages      what travels between them
sockets       addresses, keys and connections
"""
