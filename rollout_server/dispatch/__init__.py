"""From a leased ticket to an inserted group.

- `admission`           pause, resume and drain; the feeder that keeps tasks waiting in the buffer
- `concurrency`         sample slots, and the controller that adapts their number to the engine's load
- `dispatcher`          the loop: lease tickets, generate and judge their groups, insert or discard them
- `group_rollout`       state of one group
- `groups_in_progress`  all groups of this server: leases, saved partials, how a group ends
- `outcomes`            pure decisions on a complete group, and counters
"""
