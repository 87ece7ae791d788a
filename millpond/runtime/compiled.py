"""Counts kernels that Triton compiles or loads, and warns of those that come once all is ready.

Knows Triton's hook and kernel names; does not know what made a kernel necessary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Hook = Callable[..., Any]


class Compilations:
    """Of one process: Triton has one hook for all its kernels."""

    def __init__(self) -> None:
        self.at_start = 0  # kernels that were made ready before `ready`
        self.late = 0  # and those that somebody's request had to wait for
        self._ready = False
        self._watching = False

    def watch(self, runtime: Any = None) -> None:
        """Hear of every kernel from here on; `runtime` holds Triton's hooks (None: Triton's own).

        A hook that is there already goes on being called. Watching twice is watching once.
        """
        if self._watching:
            return
        self._watching = True
        if runtime is None:
            runtime = import_module("triton").knobs.runtime
        before: Hook | None = runtime.jit_post_compile_hook

        def heard(**told: Any) -> Any:
            self._count(told)
            return before(**told) if before is not None else None

        runtime.jit_post_compile_hook = heard

    def ready(self) -> None:
        """From here on nothing should compile: each kernel that does is a warning."""
        self._ready = True

    def starting(self) -> None:
        """Another engine begins in this process: its kernels are expected again."""
        self._ready = False

    def _count(self, told: dict[str, Any]) -> None:
        if not self._ready:
            self.at_start += 1
            return
        self.late += 1
        kernel = told.get("fn")
        log.warning(
            "kernel %s.%s was compiled while requests were served, for %s;"
            " start-up should have run it",
            getattr(kernel, "module", "?"),
            getattr(kernel, "name", "?"),
            _key(told.get("compile", {})),
        )


def _key(compiled: Mapping[str, Any]) -> str:
    """What a kernel was compiled for: types, what is known of their values, constants."""
    signature = compiled.get("signature", {})
    known: Mapping[Any, Any] = (compiled.get("configs") or ({},))[0]
    constants = compiled.get("constants", {})
    parts = []
    for place, (name, kind) in enumerate(signature.items()):
        if (place,) in constants:
            parts.append(f"{name}={constants[place,]}")
        else:
            parts.append(f"{name}: {kind}" + ("/16" if (place,) in known else ""))
    return f"({', '.join(parts)}), {compiled.get('num_warps', '?')} warps"


COMPILATIONS = Compilations()
"""Those of this process."""


def kernel_cache() -> Path | None:
    """The folder in which Triton keeps what it has compiled; None without Triton."""
    if find_spec("triton") is None:
        return None
    return Path(import_module("triton").knobs.cache.dir)
