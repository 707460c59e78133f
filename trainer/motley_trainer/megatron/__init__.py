"""The only package that imports megatron. Importing it applies the CPU shims where there is no CUDA, first."""

from motley_trainer.megatron import shims

shims.apply()
