//! The boundary: only here, and in the modules below, is Python named. It converts, releases the interpreter around what
//! takes long, and maps the core's errors, once. `python/ddpcov/_core.pyi` is its manual.

mod model;

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::{PyException, PyOSError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::analysis::{self, Kind};
use crate::capture::{self, Fact, RunId, Situation, flags};
use crate::error::Error as CoreError;
use crate::journal;
use crate::merge;
use crate::params::Parameter;
use crate::ranges::Ranges;
use crate::recorder;
use crate::stall;
use crate::watchdog;

pyo3::create_exception!(ddpcov, Error, PyException, "Base of everything that ddpcov raises on purpose.");
pyo3::create_exception!(ddpcov, CaptureError, Error, "A file is not a capture, or not a whole one.");
pyo3::create_exception!(ddpcov, MergeError, Error, "Shards that do not belong together.");

impl From<CoreError> for PyErr {
    fn from(error: CoreError) -> Self {
        let text = error.to_string();
        match error {
            CoreError::Io(io) if io.raw_os_error().is_some() => io.into(),
            CoreError::Io(_) => PyOSError::new_err(text),
            CoreError::Mismatch { .. } => MergeError::new_err(text),
            CoreError::Invalid { .. } => Error::new_err(text),
            _ => CaptureError::new_err(text),
        }
    }
}

type Pairs = Vec<(u64, u64)>;
type ParameterTuple = (String, Vec<String>, Vec<u64>, String, u8, String);

fn pairs(ranges: &Ranges) -> Pairs {
    ranges.as_slice().to_vec()
}

#[pyclass(frozen, module = "ddpcov._core")]
struct Slot(recorder::Slot);

#[pymethods]
impl Slot {
    /// torch warns of hooks that do not travel with a tensor to another process, unless they say that they know.
    #[classattr]
    #[pyo3(name = "__torch_unserializable__")]
    const TORCH_UNSERIALIZABLE: bool = true;

    fn __call__(&self, gradient: &Bound<'_, PyAny>) {
        self.0.arrived(!gradient.is_none());
    }

    #[expect(unused_variables, reason = "autograd passes the parameter")]
    fn accumulated(&self, parameter: &Bound<'_, PyAny>) {
        self.0.accumulated();
    }
}

#[pyclass(frozen, module = "ddpcov._core")]
struct Recorder {
    core: Arc<recorder::Recorder>,
    path: Option<PathBuf>,
    run: RunId,
}

#[pymethods]
impl Recorder {
    #[new]
    #[pyo3(signature = (path, *, started, nonce, ranks, rank, optimizer_given))]
    fn new(
        path: Option<PathBuf>,
        started: u64,
        nonce: u64,
        ranks: Pairs,
        rank: u64,
        optimizer_given: bool,
    ) -> PyResult<Self> {
        let ddpcov = env!("CARGO_PKG_VERSION").to_owned();
        let run = RunId { started, nonce, ranks: ranks.into_iter().collect(), optimizer_given, ddpcov };
        Ok(Self { core: Arc::new(recorder::Recorder::new(path.as_deref(), &run, rank)?), path, run })
    }

    fn define(&self, first: u32, parameters: Vec<ParameterTuple>) -> PyResult<()> {
        let of_tuple = |(name, aliases, shape, dtype, itemsize, module_class)| Parameter {
            name,
            aliases,
            shape,
            dtype,
            itemsize,
            module_class,
        };
        Ok(self.core.define(first, parameters.into_iter().map(of_tuple).collect())?)
    }

    fn slot(&self, id: u32) -> PyResult<Slot> {
        Ok(Slot(self.core.slot(id)?))
    }

    #[pyo3(signature = (*, registered, trainable, awaited, wrapped, ignored, optimized, num_orphans, has_wrapper))]
    #[expect(clippy::too_many_arguments, reason = "keywords, one for each field of Situation")]
    fn set_situation(
        &self,
        registered: Vec<u32>,
        trainable: Vec<u32>,
        awaited: Vec<u32>,
        wrapped: Vec<u32>,
        ignored: Vec<u32>,
        optimized: Vec<u32>,
        num_orphans: u32,
        has_wrapper: bool,
    ) -> PyResult<()> {
        Ok(self.core.set_situation(Situation {
            registered: registered.into_iter().collect(),
            trainable: trainable.into_iter().collect(),
            awaited: awaited.into_iter().collect(),
            wrapped: wrapped.into_iter().collect(),
            ignored: ignored.into_iter().collect(),
            optimized: optimized.into_iter().collect(),
            num_orphans,
            has_wrapper,
        })?)
    }

    fn watch(&self, stall_after: f64) -> PyResult<()> {
        let after = Duration::try_from_secs_f64(stall_after)
            .map_err(|error| Error::new_err(format!("stall_after={stall_after}: {error}")))?;
        watchdog::watch(&self.core, self.path.clone(), after);
        Ok(())
    }

    #[pyo3(signature = (unseen=false))]
    fn begin_pass(&self, unseen: bool) {
        self.core.begin_pass(unseen);
    }

    fn drop_pass(&self) {
        self.core.drop_pass();
    }

    fn close_pass(&self, flags: u32) -> PyResult<bool> {
        Ok(self.core.close_pass(flags)?)
    }

    fn last_pass(&self) -> (Vec<u32>, Vec<u32>) {
        self.core.last_pass()
    }

    fn is_touched(&self) -> bool {
        self.core.is_touched()
    }

    fn reached<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes: Vec<u8> = self.core.reached().words().iter().flat_map(|word| word.to_le_bytes()).collect();
        PyBytes::new(py, &bytes)
    }

    fn has_passes(&self) -> bool {
        self.core.has_passes()
    }

    fn close_step(&self) -> PyResult<()> {
        Ok(self.core.close_step()?)
    }

    fn note(&self, topic: String, body: String) -> PyResult<()> {
        Ok(self.core.note(Fact { topic, body })?)
    }

    fn finish(&self, end: &str) -> PyResult<()> {
        Ok(self.core.finish(end)?)
    }

    fn disable(&self) {
        self.core.disable();
    }

    #[getter]
    fn failure(&self) -> Option<String> {
        self.core.failure()
    }

    fn history<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.core.lane().map(|(_, lane)| journal::encode_lane(&lane, true)))?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn capture(&self, py: Python<'_>) -> PyResult<Capture> {
        py.detach(|| {
            let (run, lane) = self.core.lane()?;
            Ok(Capture(capture::Capture { run, lanes: vec![lane] }))
        })
    }

    fn merge(&self, py: Python<'_>, histories: Vec<(Pairs, Vec<u8>)>) -> PyResult<Capture> {
        py.detach(|| {
            let mut merger = merge::Merger::default();
            for (ranks, bytes) in histories {
                let lane = journal::read_history(&self.run, ranks.into_iter().collect(), &bytes)?;
                merger.add(&self.run, lane)?;
            }
            Ok(Capture(merger.finish()?))
        })
    }
}

#[pyclass(module = "ddpcov._core")]
#[derive(Default)]
struct Merger(merge::Merger);

#[pymethods]
impl Merger {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    #[expect(clippy::needless_pass_by_value, reason = "PyO3 hands over what it converted")]
    fn add_shard(&mut self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| {
            let (run, lane) = journal::read_shard_at(&path)?;
            Ok(self.0.add(&run, lane)?)
        })
    }

    fn finish(&mut self) -> PyResult<Capture> {
        Ok(Capture(std::mem::take(&mut self.0).finish()?))
    }
}

#[pyclass(frozen, module = "ddpcov._core")]
struct Capture(capture::Capture);

#[pymethods]
impl Capture {
    #[staticmethod]
    fn read(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| Ok(Self(journal::read_capture(&std::fs::read(path).map_err(CoreError::from)?)?)))
    }

    fn encode<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| journal::encode_capture(&self.0)))
    }

    #[getter]
    fn ranks(&self) -> Pairs {
        pairs(&self.0.run.ranks)
    }

    #[getter]
    fn nonce(&self) -> u64 {
        self.0.run.nonce
    }

    #[getter]
    fn optimizer_given(&self) -> bool {
        self.0.run.optimizer_given
    }

    fn analyse(&self, py: Python<'_>) -> Analysis {
        let analysis = py.detach(|| analysis::analyse(&self.0));
        let lanes = self.0.lanes.iter().map(|l| {
            let facts = l.facts.iter().map(|f| (f.topic.clone(), f.body.clone())).collect();
            (pairs(&l.ranks), l.end.clone(), facts)
        });
        let stalls = py.detach(|| stall::stalls(&self.0.lanes));
        let stalls = stalls.into_iter().map(|stall| (stall.lane, stall.lines)).collect();
        Analysis { lanes: lanes.collect(), stalls, core: analysis }
    }
}

type LaneTuple = (Pairs, Option<String>, Vec<(String, String)>);

#[pyclass(frozen, module = "ddpcov._core")]
struct Analysis {
    core: analysis::Analysis,
    lanes: Vec<LaneTuple>,
    stalls: HashMap<usize, Vec<String>>,
}

#[pymethods]
impl Analysis {
    #[getter]
    fn parameters(&self) -> Vec<ParameterTuple> {
        let to_tuple = |p: &Parameter| {
            (p.name.clone(), p.aliases.clone(), p.shape.clone(), p.dtype.clone(), p.itemsize, p.module_class.clone())
        };
        self.core.parameters.iter().map(to_tuple).collect()
    }

    #[getter]
    fn num_vain_sets(&self) -> usize {
        self.core.num_vain_sets
    }

    #[getter]
    fn conflicts(&self) -> Vec<analysis::Conflict> {
        self.core.conflicts.clone()
    }

    #[getter]
    fn lanes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let to_dict = |(index, (summary, lane)): (usize, (&analysis::LaneSummary, &LaneTuple))| {
            let out = PyDict::new(py);
            out.set_item("ranks", lane.0.clone())?;
            out.set_item("end", lane.1.clone())?;
            out.set_item("facts", lane.2.clone())?;
            out.set_item("num_steps", summary.num_steps)?;
            out.set_item("num_passes", summary.num_passes)?;
            out.set_item("finished", pairs(&summary.finished))?;
            out.set_item("interrupted", pairs(&summary.interrupted))?;
            out.set_item("idle", pairs(&summary.idle))?;
            out.set_item("num_vain_sets", summary.num_vain_sets)?;
            out.set_item("num_unreached_sets", summary.num_unreached_sets)?;
            out.set_item("num_orphans", summary.num_orphans)?;
            out.set_item("has_wrapper", summary.has_wrapper)?;
            let broken_off = summary.broken_off.as_ref().map(|b| (b.covered.clone(), b.lacking.clone(), b.is_seen));
            out.set_item("broken_off", broken_off)?;
            out.set_item("stall", self.stalls.get(&index).cloned().unwrap_or_default())?;
            Ok(out)
        };
        self.core.lanes.iter().zip(&self.lanes).enumerate().map(to_dict).collect()
    }

    #[getter]
    fn profiles<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let to_dict = |profile: &analysis::Profile| {
            let lanes = PyDict::new(py);
            for (lane, kinds) in &profile.lanes {
                let of_kind = PyDict::new(py);
                for (kind, ranges) in Kind::ALL.iter().zip(kinds).filter(|(_, ranges)| !ranges.is_empty()) {
                    of_kind.set_item(kind.name(), pairs(ranges))?;
                }
                lanes.set_item(lane, of_kind)?;
            }
            let out = PyDict::new(py);
            out.set_item("parameters", profile.parameters.clone())?;
            out.set_item("trainable", profile.trainable)?;
            out.set_item("lanes", lanes)?;
            Ok(out)
        };
        self.core.profiles.iter().map(to_dict).collect()
    }
}

/// More than the header and the RUN record of any job take.
const PEEK_BYTES: u64 = 1 << 20;

/// Which run a file belongs to: kind, nonce, start in ns.
#[pyfunction]
fn peek(py: Python<'_>, path: PathBuf) -> PyResult<(&'static str, u64, u64)> {
    let peek = py.detach(|| {
        let mut bytes = Vec::new();
        File::open(path)?.take(PEEK_BYTES).read_to_end(&mut bytes)?;
        journal::peek(&bytes)
    })?;
    Ok((peek.kind.name(), peek.run.nonce, peek.run.started))
}

/// Set algebra on ranges, for the rules.
#[pyfunction]
fn union(sets: Vec<Pairs>) -> Pairs {
    pairs(&sets.into_iter().flatten().collect())
}

#[pyfunction]
fn intersection(a: Pairs, b: Pairs) -> Pairs {
    pairs(&a.into_iter().collect::<Ranges>().intersection(&b.into_iter().collect()))
}

#[pyfunction]
fn difference(a: Pairs, b: Pairs) -> Pairs {
    pairs(&a.into_iter().collect::<Ranges>().difference(&b.into_iter().collect()))
}

#[pymodule(gil_used = false)]
#[pyo3(name = "_core")]
fn core_module(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("BYPASSED", flags::BYPASSED)?;
    m.add("NO_SYNC", flags::NO_SYNC)?;
    m.add("RAISED", flags::RAISED)?;
    m.add("Error", m.py().get_type::<Error>())?;
    m.add("CaptureError", m.py().get_type::<CaptureError>())?;
    m.add("MergeError", m.py().get_type::<MergeError>())?;
    m.add_class::<Slot>()?;
    m.add_class::<Recorder>()?;
    m.add_class::<model::Inventory>()?;
    m.add_class::<model::Gradients>()?;
    m.add_class::<Merger>()?;
    m.add_class::<Capture>()?;
    m.add_class::<Analysis>()?;
    for function in [
        wrap_pyfunction!(peek, m)?,
        wrap_pyfunction!(union, m)?,
        wrap_pyfunction!(intersection, m)?,
        wrap_pyfunction!(difference, m)?,
    ] {
        m.add_function(function)?;
    }
    Ok(())
}
