"""The control plane at scale: many virtual rollout servers over the real buffer, board and weight plane."""
