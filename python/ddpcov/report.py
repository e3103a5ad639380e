"""What a run's gradient coverage looks like once it has been read: plain, frozen data.

Everything here is made when a capture is read; none of it is stored. No torch is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddpcov import __version__

__all__ = [
    "Advice",
    "Finding",
    "Launch",
    "ParameterCoverage",
    "Place",
    "Precondition",
    "Range",
    "Report",
    "Run",
    "Totals",
    "Wrapper",
    "as_ranges",
    "some",
]

FORMAT_VERSION = 1
"""Version of the JSON document; raise it only for a change that is not an addition."""

Range = tuple[int, int]
"""First and last member of a run of consecutive integers, both included."""


def as_ranges(numbers: Iterable[int]) -> list[Range]:
    """Consecutive numbers as ranges."""
    out: list[Range] = []
    for n in sorted(numbers):
        if out and out[-1][1] == n - 1:
            out[-1] = (out[-1][0], n)
        else:
            out.append((n, n))
    return out


def some(names: Sequence[str], limit: int) -> str:
    """The first names, and how many more."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


@dataclass(frozen=True, slots=True)
class Place:
    """A line in somebody's source code."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or worth knowing, about a group of parameters.

    `parameters` may be empty where a finding concerns a rank or the run as a whole.
    """

    code: str
    slug: str
    severity: str
    parameters: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: tuple[Range, ...]
    message: str
    evidence: tuple[str, ...] = ()
    where: Place | None = None
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """This finding as the JSON document has it."""
        return {
            "code": self.code,
            "slug": self.slug,
            "severity": self.severity,
            "parameters": list(self.parameters),
            "ranks": list(self.ranks),
            "steps": [list(r) for r in self.steps],
            "message": self.message,
            "evidence": list(self.evidence),
            "where": asdict(self.where) if self.where else None,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True)
class ParameterCoverage:
    """One parameter over all ranks and steps.

    `missed` maps a rank to the ranges of steps in which it was trainable there and accumulated no defined gradient; ranks
    that missed nothing are absent. `hits` maps a rank to the number of steps in which it did accumulate one.
    `coverage` is `always`, `never`, `some` or `frozen` (trainable in no step).
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    itemsize: int
    dtype: str
    trainable: bool
    module: str
    module_class: str
    coverage: str
    missed: Mapping[int, tuple[Range, ...]]
    hits: Mapping[int, int]

    @property
    def num_bytes(self) -> int:
        """Size of the parameter, and so of its gradient, in bytes."""
        return self.numel * self.itemsize

    def to_dict(self) -> dict[str, Any]:
        """This parameter as the JSON document has it."""
        return {
            "name": self.name,
            "aliases": list(self.aliases),
            "shape": list(self.shape),
            "numel": self.numel,
            "dtype": self.dtype,
            "itemsize": self.itemsize,
            "trainable": self.trainable,
            "module": self.module,
            "module_class": self.module_class,
            "coverage": self.coverage,
            "missed": {str(k): [list(r) for r in v] for k, v in self.missed.items()},
            "hits": {str(k): v for k, v in self.hits.items()},
        }


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The data-parallel wrapper round the model: `ddp`, `fsdp1`, `fsdp2` or `none`, and DDP's two flags."""

    kind: str = "none"
    find_unused_parameters: bool = False
    static_graph: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """The `ddpcov run` that recorded it.

    `id` is the same for all models of the script; `model` is the class of this one. `order` is its number among the DDPs of a
    process, None where there is none. `freeze` are the names that the correction of that name froze.
    """

    id: str
    model: str
    order: int | None
    corrections: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """The job that was recorded.

    `ranks` are those whose data is here; `end` says for each how it ended (`clean`, `exception: …`, `killed`).
    `notes` are remarks on the recording itself that a reader must know (data dropped, another run's shards left alone).
    """

    world_size: int
    ranks: tuple[int, ...]
    steps: int
    backward_passes: int
    torch: str
    wrapper: Wrapper
    end: Mapping[int, str]
    notes: tuple[str, ...] = ()
    launch: Launch | None = None
    attempt: int | None = None
    """Number of the attempt, from 0, where a launcher restarts the job when it fails."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole run; `missed` counts parameters missed in at least one step of one rank."""

    parameters: int
    trainable: int
    covered: int
    missed: int
    never: int
    elements: int
    elements_missed: int
    bytes_missed: int


@dataclass(frozen=True, slots=True)
class Precondition:
    """Whether what an option of DDP takes for granted held in what was seen; `met` is None where that cannot be said."""

    option: str
    met: bool | None
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """This precondition as the JSON document has it, under its option."""
        return {"met": self.met, "reasons": list(self.reasons)}


@dataclass(frozen=True, slots=True)
class Advice:
    """What the recorded steps say about DDP's flags, and what to do; valid for `num_steps` steps on `num_ranks` ranks."""

    find_unused_parameters: str
    static_graph: str
    num_steps: int
    num_ranks: int
    bytes_reduced_for_nothing: int
    actions: tuple[str, ...] = ()
    preconditions: tuple[Precondition, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The advice as the JSON document has it."""
        return {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "scope": {"steps": self.num_steps, "ranks": self.num_ranks},
            "cost": {"bytes_reduced_for_nothing": self.bytes_reduced_for_nothing},
            "actions": list(self.actions),
            "preconditions": {p.option: p.to_dict() for p in self.preconditions},
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The exact unused-parameter report of one run."""

    run: Run
    totals: Totals
    parameters: Sequence[ParameterCoverage]
    findings: Sequence[Finding]
    advice: Advice
    others: Sequence[Report] = ()
    """Of the other models that the same `ddpcov run` tracked."""

    @property
    def verdict(self) -> str:
        """`clean`, or `findings` where there is at least one, of whatever model."""
        return "findings" if self.findings or any(other.findings for other in self.others) else "clean"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists and dicts, in the layout that `--format json` prints."""
        run = self.run
        return {
            "format_version": FORMAT_VERSION,
            "ddpcov_version": __version__,
            "verdict": self.verdict,
            "run": {
                "world_size": run.world_size,
                "ranks": list(run.ranks),
                "steps": run.steps,
                "backward_passes": run.backward_passes,
                "torch": run.torch,
                "wrapper": asdict(run.wrapper),
                "end": {str(k): v for k, v in run.end.items()},
                "notes": list(run.notes),
                "launch": asdict(run.launch) if run.launch else None,
                "attempt": run.attempt,
            },
            "totals": asdict(self.totals),
            "parameters": [p.to_dict() for p in self.parameters],
            "findings": [f.to_dict() for f in self.findings],
            "advice": self.advice.to_dict(),
            "others": [other.to_dict() for other in self.others],
        }
