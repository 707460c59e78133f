"""The trainer: a durable trajectory buffer, and one corrected policy-gradient step per batch on Megatron-core."""
