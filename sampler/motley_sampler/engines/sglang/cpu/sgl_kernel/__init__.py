"""A stand-in for SGLang's CUDA kernels, put before the real package on the path of a server that runs on a CPU.

PyPI's build of `sgl_kernel` loads CUDA libraries on import. With torch-native attention none of its functions is called; each
raises if one is. It has no submodules on purpose: SGLang falls back to its own definitions where one is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return missing
