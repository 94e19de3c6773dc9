"""Transports over a folder that all machines mount, or over an object-store bucket, with one layout for both.

objects   access to the folder or bucket: read, write, list, remove
chain     the layout: versions as changes to the previous one, with a dense version from time to time
sender    trainer side: encodes and writes versions, removes old ones
receiver  receiver process of a machine: reads versions into the store that engines map
"""
