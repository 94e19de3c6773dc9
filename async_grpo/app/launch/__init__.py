"""How a run is planned, started, watched and resumed on this machine, or handed to a scheduler.

Before a start:

    plan, plan_table   RunPlan: the only way from a configuration file to a start; the table of a dry run
    checks/            checks of data, reward functions and workflow
    inputs             models and data of a hub: pinned, downloaded, found
    first_policy       folder of the first policy: given, or made
    memory_plan        memory of devices, hosts and /dev/shm
    node_plan          machines, cores and devices of each role
    run_folder, run_copy   the folder of a run, and its copy in a bucket

A run on this machine:

    local              the story of `async-grpo run`
    state_plane        the server of the buffer, with its connections
    role_specs         command, environment and devices of each role
    supervisor         restarts and stops roles, wherever they run
    role_process       roles as processes of this machine
    monitor, autoscaler   watch the run; add and remove rollout servers
    results            summary, report and headline

Roles elsewhere:

    single_role        `async-grpo trainer` and `rollout`: this process becomes the role
    follow             the report of a run whose roles are started one by one
    clusters/          Slurm, Kubernetes, Ray
"""
