"""rollout_server/evaluation"""
