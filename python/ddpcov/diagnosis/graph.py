"""Walks through autograd's graph. Without recursion: a chain of operations may be longer than Python's stack is deep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

__all__ = ["Flow", "leaf_of", "leaves", "nodes", "reach", "root_of"]

# Passes the outputs of a forward on, one by one, to make DDP's backward begin where the outputs' gradients arrive.
_SINK = "_DDPSinkBackward"


def root_of(tensor: Any) -> Any:
    """The node at which a backward pass from a tensor, or from a gradient edge, begins; nothing for a tensor without graph.

    Behind DDP's sink it is the node of that output alone.
    """
    node, output_nr = (tensor.node, tensor.output_nr) if isinstance(tensor, GradientEdge) else (tensor.grad_fn, None)
    if node is not None and type(node).__name__ == _SINK:
        return _behind_sink(node, tensor.output_nr if output_nr is None else output_nr)
    return node


def _behind_sink(sink: Any, output_nr: int) -> Any:
    return sink.next_functions[output_nr][0]  # arguments that are no tensors have no edge


def _following(node: Any) -> list[Any]:
    """Where the gradients that a node gives go, None for those that nobody wants; as if there were no sink."""
    return [
        _behind_sink(other, nr) if other is not None and type(other).__name__ == _SINK else other
        for other, nr in node.next_functions
    ]


def leaf_of(node: Any) -> Tensor | None:
    """The leaf that a node accumulates into, if it is such a node."""
    if type(node).__name__ != "AccumulateGrad":
        return None
    leaf = node.variable
    return leaf if isinstance(leaf, Tensor) else None


def reach(roots: Iterable[Any], bits: Mapping[int, int], inner: Mapping[Any, int]) -> dict[Any, int]:
    """Node → mask of the leaves that can be reached from it.

    Args:
        roots: nodes to begin with.
        bits: id of a leaf → its bit. Other leaves have none.
        inner: node → bits that it reaches besides, in a graph of its own.
    """
    masks: dict[Any, int] = {}
    following: dict[Any, list[Any]] = {}
    stack = [root for root in roots if root is not None]
    while stack:
        node = stack[-1]
        if node in masks:
            stack.pop()
            continue
        ahead = following.get(node)
        if ahead is None:
            ahead = following[node] = [n for n in _following(node) if n is not None]
            pending = [n for n in ahead if n not in masks]
            if pending:
                stack.extend(pending)
                continue
        mask = inner.get(node, 0) if inner else 0
        for other in ahead:
            mask |= masks[other]
        leaf = leaf_of(node)
        if leaf is not None and (bit := bits.get(id(leaf))) is not None:
            mask |= 1 << bit
        masks[node] = mask
        stack.pop()
    return masks


def nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Each node that can be reached."""
    stack = [root for root in roots if root is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for other in _following(node):
            if other is not None and other not in seen:
                seen.add(other)
                stack.append(other)


def leaves(roots: Iterable[Any]) -> Iterator[Tensor]:
    """Each leaf that can be reached."""
    return (leaf for node in nodes(roots) if (leaf := leaf_of(node)) is not None)


class Flow:
    """Watches, in one backward pass, which nodes were given a gradient and handed none on."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._undefined: dict[Any, tuple[bool, list[Any]]] = {}
        self._nodes = list(nodes(roots))
        self._handles = [self._watch(node) for node in self._nodes if leaf_of(node) is None]

    def _watch(self, node: Any) -> Any:
        undefined = self._undefined

        def hook(grad_inputs: Any, grad_outputs: Any) -> None:
            if any(g is None for g in grad_inputs):
                lacking = [
                    other
                    for other, gradient in zip(_following(node), grad_inputs, strict=False)
                    if gradient is None and other is not None
                ]
                if lacking:
                    undefined[node] = any(g is not None for g in grad_outputs), lacking

        return node.register_hook(hook)

    def stop(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def boundaries(self, leaf: Tensor) -> list[Any]:
        """The nodes at which the gradient on its way to `leaf` became undefined."""
        behind: dict[Any, list[Any]] = {}
        for node, (_, lacking) in self._undefined.items():
            for other in lacking:
                behind.setdefault(other, []).append(node)
        stack = [node for node in self._nodes if leaf_of(node) is leaf]
        seen = set(stack)
        found = []
        while stack:
            for node in behind.get(stack.pop(), ()):
                if node in seen:
                    continue
                seen.add(node)
                if self._undefined[node][0]:
                    found.append(node)
                else:
                    stack.append(node)
        return found
