"""Plans, starts, supervises and resumes runs on this machine, or submits them to a scheduler.

Before a start:

    plan, plan_table   RunPlan: the only way from a configuration file to a start; the table of a dry run
    checks/            checks of data, reward functions and workflow
    inputs             models and data from a hub: pinned and downloaded
    first_policy       folder of the first policy: configured or generated
    memory_plan        memory of devices, hosts and /dev/shm
    node_plan          machines, cores and devices of each role
    run_folder, run_copy   the folder of a run, and its copy in a bucket

A run on this machine:

    local              `async-grpo run`, from start to report
    state_plane        the server of the buffer, with its connections
    role_specs         command, environment and devices of each role
    supervisor         restarts and stops roles, on this machine or on a cluster
    role_process       roles as processes of this machine
    monitor, autoscaler   poll the run; add and remove rollout servers
    results            summary, report and headline

Roles elsewhere:

    single_role        `async-grpo trainer` and `rollout`: this process becomes the role
    follow             the report of a run whose roles are started separately
    clusters/          Slurm, Kubernetes, Ray
"""
