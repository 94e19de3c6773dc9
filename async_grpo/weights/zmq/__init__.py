"""The default transport: announcements and chunks over ZMQ, weights in shared memory on both sides.

sender        copies the trainer's weights into shared memory, and goes on
publisher     the publisher process: announces, tracks the receivers, serves
relay_tree    who fetches from whom
node_receiver the receiver process of a machine, which relays to others
"""
