"""The rollout worker: agent sessions on leased engines, bash in sandboxes, grading, delivery. Without torch."""
