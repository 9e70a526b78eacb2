"""Registers our operators when PyTorch is about to load a stored program, which may contain them.

`import aule` must not import torch, and torch may be imported before or after it. So a finder waits for the modules of
PyTorch that read stored programs, which PyTorch imports when the first one is loaded or saved. It finds no module
itself, and removes itself when it has done its work.
"""

from __future__ import annotations

import contextlib
import logging
import sys

_READERS = ("torch._export.serde", "torch._inductor.package")
"""Modules that `torch.export.load` and `torch._inductor.aoti_load_package` import."""


class _Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Register the operators before a reader is imported; leave the search to the other finders."""
        if name in _READERS:
            _register()


def register_when_needed() -> None:
    """Register the operators now if PyTorch has read a program already, else before it reads the first one."""
    if any(name in sys.modules for name in _READERS):
        _register()
    else:
        sys.meta_path.insert(0, _Finder)


def _register() -> None:
    with contextlib.suppress(ValueError):
        sys.meta_path.remove(_Finder)
    try:
        import aule.frontends.torch.compile.operators
        import aule.frontends.torch.compile.row_operators  # noqa: F401
    except Exception:  # a program without our operators must load all the same
        logging.getLogger("aule").warning("aule's operators could not be registered with PyTorch", exc_info=True)
