"""The native core: recording, the file format, merging and set algebra.

A range is a pair (first, last), both included. A parameter definition is (name, aliases, shape, dtype, bytes per element,
class of the owning module). Methods that take long release the interpreter.
"""

import os
from collections.abc import Callable
from typing import Any, ClassVar, final

__all__ = [
    "BYPASSED",
    "NO_SYNC",
    "RAISED",
    "Analysis",
    "Capture",
    "CaptureError",
    "Error",
    "Gradients",
    "Inventory",
    "MergeError",
    "Merger",
    "Recorder",
    "Slot",
    "__version__",
    "difference",
    "intersection",
    "peek",
    "union",
]

__version__: str
BYPASSED: int
"""Flag of a pass, beside NO_SYNC: no forward of the wrapper prepared it, though none told it not to average."""
NO_SYNC: int
"""Flag of a pass: the wrapper was told not to average it."""
RAISED: int
"""Flag of a pass: it ended with an exception."""

_Ranges = list[tuple[int, int]]
_Parameter = tuple[str, list[str], list[int], str, int, str]
_Path = str | os.PathLike[str]

class Error(Exception):
    """Base of everything that ddpcov raises on purpose."""

class CaptureError(Error):
    """A file is not a capture, or not a whole one, or of another format version."""

class MergeError(Error):
    """Shards that do not belong together."""

@final
class Slot:
    """One parameter's entry to the recorder. Both methods return None, raise nothing and may be called from any thread."""

    __torch_unserializable__: ClassVar[bool]
    """torch warns of hooks that do not travel with a tensor to another process, unless they say that they know."""

    def __call__(self, gradient: object) -> None:
        """A hook on the tensor: `gradient` is None where autograd has none."""

    def accumulated(self, parameter: object) -> None:
        """A post-accumulate hook."""

@final
class Recorder:
    """Records one rank.

    Raises OSError where the shard cannot be created. Later failures of the file are told by `failure`; the recording then goes
    on in memory. OSError from a later call means that it cannot go on.
    """

    def __new__(
        cls,
        path: _Path | None,
        *,
        started: int,
        nonce: int,
        ranks: _Ranges,
        rank: int,
        optimizer_given: bool,
    ) -> Recorder: ...
    def define(self, first: int, parameters: list[_Parameter]) -> None:
        """Defines parameters `first`, `first + 1`, …: new ones at the end, or known ones anew. Raises Error on a gap."""

    def slot(self, id: int) -> Slot:
        """The slot of a defined parameter. Raises Error for any other."""

    def set_situation(
        self,
        *,
        registered: list[int],
        trainable: list[int],
        awaited: list[int],
        wrapped: list[int],
        ignored: list[int],
        optimized: list[int],
        num_orphans: int,
        has_wrapper: bool,
    ) -> None:
        """What is true of the parameters (ids) from the next pass on; see `Situation` in the core for each. Raises Error for
        an id that is not defined."""

    def watch(self, stall_after: float) -> None:
        """Starts a thread that says on stderr, once, what a pass waits for that stays open for so many seconds. It ends
        with the recording."""

    def begin_pass(self, unseen: bool = False) -> None:
        """Marks the pass open, for whoever reads the shard if this process ends inside it; `unseen` if nothing is known of it
        until `Gradients.take`."""

    def drop_pass(self) -> None:
        """The pass that began is none of this model's."""

    def close_pass(self, flags: int) -> bool:
        """Takes what the slots saw since the last pass as one pass, and says whether its pattern (situation, and what was
        reached, covered and reached again) was not met before. Raises Error before the first situation, and for unknown
        flags."""

    def last_pass(self) -> tuple[list[int], list[int]]:
        """Ids reached, and ids covered, in the pass closed last; none before the first."""

    def is_touched(self) -> bool:
        """Whether any accumulator ran since the last pass was closed."""

    def reached(self) -> bytes:
        """The parameters whose accumulators ran since the last pass was closed: bit i, lowest first, is parameter i."""

    def has_passes(self) -> bool:
        """Whether a pass was closed since the last step was."""

    def close_step(self) -> None:
        """Ends the step; one without passes is recorded as such."""

    def note(self, topic: str, body: str) -> None:
        """Stores a JSON text."""

    def finish(self, end: str) -> None:
        """The rank leaves: `clean`, or `exception: …`. Slots fall silent."""

    def disable(self) -> None:
        """Silences the slots."""

    @property
    def failure(self) -> str | None:
        """Why the journal is no longer in its file."""

    def history(self) -> bytes:
        """All that was recorded, without the rank: equal for ranks of equal history."""

    def capture(self) -> Capture:
        """All that was recorded so far, of this rank alone."""

    def merge(self, histories: list[tuple[_Ranges, bytes]]) -> Capture:
        """The run, from histories and the ranks that have them. Raises MergeError if they do not fit together."""

@final
class Inventory:
    """A model as it was: the values of its modules' dicts, by identity, and of its tensors whether they require a gradient, and
    which C++ half they have: hooks go with that, under the same object (`torch.utils.swap_tensors`)."""

    def __new__(cls, dicts: list[dict[str, Any]], tensors: list[Any]) -> Inventory: ...
    def is_current(self, with_halves: bool) -> bool:
        """Whether all of it is still so."""

@final
class Gradients:
    """The gradients of leaves, each (id in the recorder, tensor, accumulating node if it is to be kept)."""

    def __new__(cls, recorder: Recorder, leaves: list[tuple[int, Any, Any]]) -> Gradients: ...
    def remember(self) -> tuple[int, bool]:
        """Keeps what each gradient is; returns how many there are, and whether any is a view."""

    def forget(self) -> None:
        """Lets go of what was kept."""

    def take(self, will_run: Callable[[Any], bool] | None, node_of: Callable[[Any], Any], *, is_alone: bool) -> tuple[int, int]:
        """Tells the recorder which parameters were covered since `remember`, and, by `will_run`, which were reached beside
        them. Returns how many nodes had to be made by `node_of`, and, if no hooks on the tensors are ours (`is_alone`), how
        many parameters count as covered because somebody else's hook may have cleared the gradient."""

    def agrees(self, will_run: Callable[[Any], bool], node_of: Callable[[Any], Any]) -> bool:
        """Whether the slots saw the same in the open pass, and nothing twice; tells the recorder nothing."""

@final
class Merger:
    """Merges the shards of one run in memory."""

    def __new__(cls) -> Merger: ...
    def add_shard(self, path: _Path) -> None:
        """Raises CaptureError, MergeError or OSError, and then has not added it."""

    def finish(self) -> Capture:
        """What was added. Raises MergeError if nothing was."""

@final
class Capture:
    """A run."""

    @staticmethod
    def read(path: _Path) -> Capture:
        """Reads a merged capture. Raises CaptureError or OSError."""

    def encode(self) -> bytes:
        """The bytes of the file."""

    @property
    def ranks(self) -> _Ranges:
        """Ranks that take part."""

    @property
    def nonce(self) -> int:
        """Identity of the run."""

    @property
    def optimizer_given(self) -> bool:
        """Whether the user named the optimizers."""

    def analyse(self) -> Analysis:
        """Set algebra over ranks and steps."""

@final
class Analysis:
    """What was found out about a capture; see `Analysis`, `LaneSummary`, `Profile` and `Kind` in the core."""

    @property
    def parameters(self) -> list[_Parameter]:
        """The parameters of all ranks, by id."""

    @property
    def num_vain_sets(self) -> int:
        """How many different sets of parameters a wrapper awaited in vain, over all finished, averaged passes."""

    @property
    def conflicts(self) -> list[tuple[int, list[tuple[int, list[int], str]]]]:
        """Parameters that lanes define differently: id, and lane, shape and dtype of each."""

    @property
    def lanes(self) -> list[dict[str, Any]]:
        """One dict per lane: the fields of `LaneSummary`, and `ranks`, `end` and `facts`."""

    @property
    def profiles(self) -> list[dict[str, Any]]:
        """Parameters that are alike: `parameters`, `trainable`, `lanes` (lane → kind → ranges of steps; no empty ones)."""

def peek(path: _Path) -> tuple[str, int, int]:
    """Kind (`shard` or `capture`), nonce and start (ns since 1970) of a file. Raises CaptureError or OSError."""

def union(sets: list[_Ranges]) -> _Ranges: ...
def intersection(a: _Ranges, b: _Ranges) -> _Ranges: ...
def difference(a: _Ranges, b: _Ranges) -> _Ranges: ...
