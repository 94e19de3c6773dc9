"""Launchers of `async-grpo launch`, which hand the roles of a run to the scheduler of a cluster.

slurm        submits jobs and returns
kubernetes   applies objects and returns
ray          stays and supervises actors; `ray_role` is what an actor runs on its node
"""
