"""Loaded by every Python process below `ddpcov run`, by way of PYTHONPATH.

Waits, at no cost, for torch to be imported. Python loads one module of this name only, so the one that stands behind it on
the path is loaded from here.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _TorchFinder:
    """On `sys.meta_path` until torch is imported; then the agent begins."""

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec: Any = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec  # to an import, or to somebody who only asks whether there is torch


class _Loader:
    """A loader's stand-in for the time of one import."""

    def __init__(self, loader: Any, finder: _TorchFinder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._loader.exec_module(module)
        try:
            from ddpcov.launch import agent

            agent.begin()
        except Exception as error:  # ours, and no reason to keep anyone from training
            print(f"ddpcov: {sys.executable}: not tracked: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _load_next() -> None:
    """Loads the sitecustomize that would have been loaded without this one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]  # the script's imports find what they would
if "DDPCOV_PLAN" in os.environ:
    sys.meta_path.insert(0, _TorchFinder())
_load_next()
