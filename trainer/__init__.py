"""The trainer: takes batches from the buffer, trains the policy with Megatron-core, and publishes its weights.

    node_main --starts--> main, once per rank -------> loop
                                                        |
      coordinator   batches in, versions out            +--> step         one batch: version v -> v + 1
      weights       new weights to the rollout servers  +--> checkpoint   state to resume from
      run_logger    rows, logs, metrics_server          |
                                                        v
      model (Megatron) on platform (cpu | cuda | npu), fed by batch (packed micro-batches)

Child processes pass through this package when they start, so it imports nothing.
"""
