"""Weights through a folder that all machines mount, or through a bucket of an object store: one layout for both.

objects   the folder or the bucket: read, write, list, remove
chain     what lies in it: versions as differences to the one before, with a dense one from time to time
sender    the trainer's end: encodes and writes versions, removes old ones
receiver  the receiver process of a machine: reads versions into the store that engines map
"""
