"""The ranks of the trainer on one machine or several: how they start, agree, communicate and end.

rendezvous, peers   nodes find each other and watch each other
local_ranks         the ranks of a node as processes
store, agreement    ranks find each other and check that they would train the same
distributed         process groups, and collective calls on host data
link                rank 0 and the other ranks of its machine, for the threads that copy weights
"""
