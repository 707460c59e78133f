"""What trainer and sampler share about weights: view codecs, the names mapping, checkpoints, and the versioned store.

Importing this package imports nothing heavy; its modules import torch.
"""
