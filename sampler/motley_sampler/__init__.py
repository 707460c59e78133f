"""Everything that samples: engines behind their agent, the router that places sessions, and the rollout worker."""
