"""What megatron-core 0.19 needs to run on a CPU. None of it is applied where CUDA is there.

S1  transformer/moe/ops/paged_stash.py imports triton unguarded, and nothing of megatron.core imports without it.
S2  megatron.core asks the CUDA runtime without a guard: current_device() as the device to allocate on, synchronize(),
    current_stream(), Stream. torch.cpu has the same functions.
S3  the optimizer and the checkpoint writer hardcode device="cuda": `cuda_means_cpu()` is entered only around them.
S4  megatron.core decorates kernels with torch.compile at import, which alone costs 6 CPU-seconds and 80 MB for a
    compiler that a CPU run never calls: while it is imported, torch.compile leaves functions as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = not torch.cuda.is_available()


def apply() -> None:
    """Idempotent. Must run before anything of megatron.core is imported."""
    # Megatron warns at import of every kernel library that a CPU has no use for.
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    if not CPU or hasattr(torch.cuda, "_motley_cpu"):
        return
    _stand_in_for_paged_stash()
    _cuda_runtime_means_cpu()
    _import_without_compiling()
    torch.cuda._motley_cpu = True  # type: ignore[attr-defined]


def cuda_means_cpu() -> contextlib.AbstractContextManager[Any]:
    return _CudaMeansCpu() if CPU else contextlib.nullcontext()


def device() -> torch.device:
    return torch.device("cpu") if CPU else torch.device("cuda", torch.cuda.current_device())


def _stand_in_for_paged_stash() -> None:
    """Also where triton is installed: importing it costs 100 MB that a CPU has no use for."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    module = types.ModuleType(name)
    module.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
    module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None  # type: ignore[attr-defined]
    sys.modules[name] = module


def _import_without_compiling() -> None:
    def as_it_is(function: Any = None, **options: Any) -> Any:
        return function if function is not None else lambda decorated: decorated

    compile_function = torch.compile
    torch.compile = as_it_is  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.models.gpt")
    finally:
        torch.compile = compile_function


def _cuda_runtime_means_cpu() -> None:
    for name in ("current_device", "synchronize", "current_stream", "stream"):
        setattr(torch.cuda, name, getattr(torch.cpu, name))

    class Stream(torch.cpu.Stream):
        def wait_event(self, event: Any) -> None: ...

        def wait_stream(self, stream: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return self

        def synchronize(self) -> None: ...

    torch.cuda.Stream = Stream  # type: ignore[assignment,misc]
    torch.Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if isinstance(device, (str, torch.device)) and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:  # clip_grads asserts grad.type() == "torch.cuda.FloatTensor"
            return func(*args, **kwargs).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)
