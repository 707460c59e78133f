"""Inference engines behind one protocol (`protocol.Engine`): `reference` in torch on a CPU, `sglang` on GPUs.

Nothing here imports torch or sglang; the engine's own subpackage does.
"""
