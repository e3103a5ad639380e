"""Which gradients are exactly zero, and which are not finite, in every N-th step.

Where a pass of such a step ends, one fused reduction gives the largest magnitude in each gradient, and a byte per parameter
stays on the device. The bytes are read when the step is over: nothing in a pass waits for the device. Other steps cost
nothing.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpcov import _core
from ddpcov.hooks import Hooks

__all__ = ["Values"]

# The byte of a parameter; over the passes of a step, bits are joined.
_NONZERO, _NONFINITE, _ZERO_WEIGHT = 1, 2, 4

_MAX_NAMES = 10_000
_PATIENCE = 5.0
"""Seconds that a failing run waits for a device that may hang."""

_Key = tuple[torch.device, tuple[int, ...]]


class Values:
    """Samples the gradients of one model. `tell` is called, once, if that breaks down; training and coverage go on."""

    def __init__(
        self, every: int, hooks: Hooks, recorder: _core.Recorder, optimizers: list[Optimizer], *, tell: Callable[[str], None]
    ) -> None:
        self._every = every
        self._hooks = hooks
        self._recorder = recorder
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet(optimizers)
        self._tell = tell
        self._off: str | None = None
        self._pending: dict[_Key, Tensor] = {}
        self._step = self._num_closed = self._num_samples = 0
        self._first: dict[int, int] = {}  # parameter → steps closed when it was first sampled
        self._nonzero: set[int] = set()
        self._nonfinite: dict[int, int] = {}
        self._partnered: set[int] = set()

    def pass_begins(self, step: int) -> None:
        """A pass of that step is about to begin."""
        if self._pending and step != self._step:
            self._contain(self._read)

    def pass_closed(self, step: int) -> None:
        """The recorder took in a pass of that step; its gradients are still there."""
        if step % self._every == 0 and self._off is None:
            self._contain(lambda: self._sample(step))

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """An optimizer of the model stepped."""
        self._optimizers.add(optimizer)

    def step_ended(self) -> None:
        """The step ended."""
        if self._pending:
            self._contain(self._read)
        if self._num_closed == 0:
            # Each pass so far passed for a step of its own. They were one.
            self._num_samples = min(self._num_samples, 1)
            self._nonfinite = dict.fromkeys(self._nonfinite, 0)
        self._num_closed += 1

    def finish(self, *, has_failed: bool) -> dict[str, Any]:
        """What was found, to be noted in the capture."""
        if self._pending and (not has_failed or _are_idle({device for device, _ in self._pending})):
            self._contain(self._read)
        found = {
            "every": self._every,
            "samples": self._num_samples,
            "zero": self._names(zero := self._first.keys() - self._nonzero),
            "zero_partner": self._names(self._partnered & zero),
            "nonfinite": {name: self._nonfinite[i] for i, name in self._named(self._nonfinite)},
            "decayed": self._names(self._moved_all_the_same(zero)),
        }
        num_cut = max(len(zero), len(self._nonfinite)) - _MAX_NAMES
        return found | ({"cut": num_cut} if num_cut > 0 else {}) | ({"off": self._off} if self._off else {})

    def _contain(self, action: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                action()
        except Exception as error:
            self._pending.clear()
            self._off = f"{type(error).__name__}: {error}"[:300]
            self._tell(f"values: no longer observed, coverage is recorded without it: {self._off}")

    # On the device.

    def _sample(self, step: int) -> None:
        if self._pending and step != self._step:
            self._read()  # no pass began in between: autograd was run from C++
        if _is_capturing():
            return
        self._step = step
        covered = set(self._recorder.last_pass()[1])
        groups: defaultdict[tuple[torch.device, torch.dtype, bool], list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
        for param_id, parameter in self._hooks.parameters():
            if param_id in covered and parameter.numel() and (gradient := _dense(parameter.grad)) is not None:
                key = gradient.device, gradient.dtype, gradient.numel() == 0
                groups[key].append((param_id, gradient, parameter))
        for (device, _, is_empty), members in groups.items():
            ids = tuple(param_id for param_id, _, _ in members)
            if is_empty:  # this rank's shard; no element of it is other than zero
                codes = torch.zeros(len(ids), dtype=torch.uint8, device=device)
            else:
                norms = _largest([gradient for _, gradient, _ in members])
                codes = (norms != 0).byte() * _NONZERO | (~norms.isfinite()).byte() * _NONFINITE
                if not self._first.keys() >= set(ids):
                    codes |= self._zero_weights(members)
            known = self._pending.get((device, ids))
            self._pending[device, ids] = codes if known is None else known | codes

    def _zero_weights(self, members: list[tuple[int, Tensor, Tensor]]) -> Tensor:
        """Marks weights that are zero throughout: as long as they are, what stands before them has gradients of zero.

        Biases are left out, which only add.
        """
        marks = torch.zeros(len(members), dtype=torch.uint8, device=members[0][1].device)
        weights: defaultdict[torch.dtype, list[tuple[int, Tensor]]] = defaultdict(list)
        for place, (param_id, gradient, parameter) in enumerate(members):
            is_bias = parameter.ndim < 2 and "bias" in self._hooks.definition(param_id)[0].rpartition(".")[2]
            weight = _dense(parameter)
            if not is_bias and weight is not None and weight.numel() and weight.device == gradient.device:
                weights[weight.dtype].append((place, weight))
        for found in weights.values():
            places = torch.tensor([place for place, _ in found]).to(marks.device, non_blocking=True)
            marks[places] = (_largest([weight for _, weight in found]) == 0).byte() * _ZERO_WEIGHT
        return marks

    # When the step is over.

    def _read(self) -> None:
        pending, self._pending = self._pending, {}
        by_device: defaultdict[torch.device, list[_Key]] = defaultdict(list)
        for key in pending:
            by_device[key[0]].append(key)
        codes: defaultdict[int, int] = defaultdict(int)
        for keys in by_device.values():
            read = torch.cat([pending[key] for key in keys]).tolist()
            for param_id, code in zip((i for _, ids in keys for i in ids), read, strict=True):
                codes[param_id] |= code
        self._num_samples += bool(codes)
        is_weight_about_to_move = any(code & (_ZERO_WEIGHT | _NONZERO) == _ZERO_WEIGHT | _NONZERO for code in codes.values())
        for param_id, code in codes.items():
            if code & _NONZERO:
                self._nonzero.add(param_id)
            if code & _NONFINITE:
                self._nonfinite.setdefault(param_id, self._step)
            if param_id not in self._first:
                self._first[param_id] = self._num_closed
                if is_weight_about_to_move:
                    self._partnered.add(param_id)
            elif self._first[param_id] < self._num_closed:  # the weight has moved since
                self._partnered.discard(param_id)

    def _moved_all_the_same(self, zero: Iterable[int]) -> set[int]:
        """Those that an optimizer may move though their gradients are zero."""
        ids = {id(p): i for i, p in self._hooks.parameters()}
        zero = set(zero)
        out = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                is_restless = any(group.get(name, 0) for name in ("weight_decay", "momentum"))
                for p in group["params"]:
                    param_id = ids.get(id(p), -1)
                    if param_id in zero and (is_restless or "exp_avg" in optimizer.state.get(p, ())):
                        out.add(param_id)
        return out

    def _names(self, ids: Iterable[int]) -> list[str]:
        return [name for _, name in self._named(ids)]

    def _named(self, ids: Iterable[int]) -> list[tuple[int, str]]:
        named = ((i, self._hooks.definition(i)[0]) for i in ids)
        return sorted(named, key=lambda pair: pair[1])[:_MAX_NAMES]


def _dense(tensor: Tensor | None) -> Tensor | None:
    """The elements that this rank holds, strided; None where there are none to look at."""
    if tensor is None:
        return None
    to_local = getattr(tensor, "to_local", None)
    if to_local is not None:
        tensor = to_local()
    if tensor.layout is torch.sparse_coo:
        # Duplicates may cancel, and only their sum says so.
        tensor = tensor.coalesce().values()
    is_known = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return tensor if is_known and (tensor.is_floating_point() or tensor.is_complex()) else None


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest magnitude in each, NaN where there is one; none is empty, all are alike in device and type."""
    try:
        norms: Iterable[Tensor] = torch._foreach_norm(tensors, float("inf"))
    except RuntimeError:  # a type for which there is no such kernel
        norms = [torch.linalg.vector_norm(t, float("inf"), dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    stacked = torch.stack(list(norms))
    return stacked.float() if stacked.itemsize == 1 else stacked


def _is_capturing() -> bool:
    # What is called while a graph is captured would run again at each replay.
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _are_idle(devices: Iterable[torch.device]) -> bool:
    """Whether the devices have done what they were asked to; not if that takes long, which may be for good."""
    streams = [getattr(torch, d.type).current_stream(d) for d in devices if d.type in ("cuda", "xpu")]
    deadline = time.monotonic() + _PATIENCE
    while not all(stream.query() for stream in streams):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
