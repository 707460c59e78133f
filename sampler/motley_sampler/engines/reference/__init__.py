"""A torch engine for CPUs: continuous batching, a prefix cache keyed by weights version, and precision as real arithmetic.

It serves Qwen3-MoE, Qwen3 and Llama checkpoints in the layout of a weight view. It is for laptops, CI and as an oracle:
precision costs time here instead of saving it. Not for throughput, long contexts, tensor parallelism, or speculation.
"""
