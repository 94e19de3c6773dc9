"""rollout_server/dispatch"""
