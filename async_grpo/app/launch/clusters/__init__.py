"""Launchers of `async-grpo launch`: start the roles of a run through the scheduler of a cluster.

slurm        submits jobs and returns
kubernetes   applies objects and returns
ray          stays and supervises actors; `ray_role` is what an actor runs on its node
"""
