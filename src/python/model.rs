//! What is read off a model's own objects, again and again: whether it is as it was, and which gradients a pass changed.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{ffi, intern};

use super::{Error, Recorder};
use crate::recorder;

/// An attribute of tensors, by the C function behind it: to find it by name would take as long again as to read it.
struct Attribute {
    descriptor: Py<PyAny>,
    get: ffi::descrgetfunc,
}

#[allow(unsafe_code)] // PyO3 has no safe way to a slot; see the safety arguments.
impl Attribute {
    fn of(tensor: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let descriptor = tensor.get_type().getattr(name)?;
        // SAFETY: a slot of that number holds a function of that type, or null, which is `None`.
        let get = unsafe {
            let slot = ffi::PyType_GetSlot(descriptor.get_type_ptr(), ffi::Py_tp_descr_get);
            std::mem::transmute::<*mut c_void, Option<ffi::descrgetfunc>>(slot)
        };
        let get = get.ok_or_else(|| Error::new_err(format!("{name} of a tensor is no descriptor")))?;
        Ok(Self { descriptor: descriptor.unbind(), get })
    }

    fn read<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: as the interpreter calls it. It gives a new reference, or null and an exception.
        unsafe {
            let value = (self.get)(self.descriptor.as_ptr(), tensor.as_ptr(), tensor.get_type_ptr().cast());
            Bound::from_owned_ptr_or_err(tensor.py(), value)
        }
    }
}

/// The dicts of a model's modules with their values, and its parameters with their states.
#[pyclass(frozen, module = "ddpcov._core")]
pub struct Inventory {
    dicts: Vec<Py<PyDict>>,
    members: Vec<Py<PyAny>>,
    tensors: Vec<Known>,
    requires_grad: Option<Attribute>,
}

struct Known {
    tensor: Py<PyAny>,
    requires_grad: bool,
    /// Its C++ half, which `torch.utils.swap_tensors` exchanges, hooks and all, under the same object.
    half: u64,
}

fn half_of(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    tensor.getattr(intern!(tensor.py(), "_cdata"))?.extract()
}

#[pymethods]
impl Inventory {
    #[new]
    fn new(dicts: Vec<Bound<'_, PyDict>>, tensors: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let requires_grad = tensors.first().map(|tensor| Attribute::of(tensor, "requires_grad")).transpose()?;
        let know = |tensor: Bound<'_, PyAny>| {
            let requires_grad = tensor.getattr("requires_grad")?.is_truthy()?;
            Ok(Known { requires_grad, half: half_of(&tensor)?, tensor: tensor.unbind() })
        };
        Ok(Self {
            members: dicts.iter().flat_map(|dict| dict.iter().map(|(_, member)| member.unbind())).collect(),
            dicts: dicts.into_iter().map(Bound::unbind).collect(),
            tensors: tensors.into_iter().map(know).collect::<PyResult<_>>()?,
            requires_grad,
        })
    }

    fn is_current(&self, with_halves: bool, py: Python<'_>) -> PyResult<bool> {
        // By identity, of objects that are held here: an address could have passed to another tensor.
        let mut members = self.members.iter();
        let mut is_known = |member: &Bound<'_, PyAny>| members.next().is_some_and(|known| known.is(member));
        for dict in &self.dicts {
            if !dict.bind(py).iter().all(|(_, member)| is_known(&member)) {
                return Ok(false);
            }
        }
        if members.next().is_some() {
            return Ok(false);
        }
        for (known, requires_grad) in self.tensors.iter().zip(self.requires_grad.iter().cycle()) {
            let tensor = known.tensor.bind(py);
            if requires_grad.read(tensor)?.is_truthy()? != known.requires_grad
                || (with_halves && half_of(tensor)? != known.half)
            {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The gradients of the tensors that autograd accumulates into.
#[pyclass(frozen, module = "ddpcov._core")]
pub struct Gradients {
    recorder: Arc<recorder::Recorder>,
    leaves: Vec<Leaf>,
    grad: Option<Attribute>,
    /// Of each leaf, as [`Gradients::remember`] found it.
    before: Mutex<Vec<Option<Kept>>>,
}

/// A gradient, and how often it was written to.
type Kept = (Py<PyAny>, u64);

struct Leaf {
    id: u32,
    tensor: Py<PyAny>,
    /// The node of autograd that accumulates into it, where that lives anyway.
    node: Option<Py<PyAny>>,
}

fn version(gradient: &Bound<'_, PyAny>) -> PyResult<u64> {
    gradient.getattr(intern!(gradient.py(), "_version"))?.extract()
}

#[pymethods]
impl Gradients {
    #[new]
    fn new(recorder: &Recorder, leaves: Vec<(u32, Bound<'_, PyAny>, Option<Py<PyAny>>)>) -> PyResult<Self> {
        let grad = leaves.first().map(|(_, tensor, _)| Attribute::of(tensor, "grad")).transpose()?;
        let leaf = |(id, tensor, node): (u32, Bound<'_, PyAny>, _)| Leaf { id, tensor: tensor.unbind(), node };
        let leaves = leaves.into_iter().map(leaf).collect();
        Ok(Self { recorder: recorder.core.clone(), leaves, grad, before: Mutex::default() })
    }

    fn remember(&self, py: Python<'_>) -> PyResult<(usize, bool)> {
        let (mut num_kept, mut has_views) = (0, false);
        let mut before = Vec::with_capacity(self.leaves.len());
        for (leaf, grad) in self.leaves.iter().zip(self.grad.iter().cycle()) {
            let gradient = grad.read(leaf.tensor.bind(py))?;
            if gradient.is_none() {
                before.push(None);
                continue;
            }
            num_kept += 1;
            has_views |= gradient.call_method0(intern!(py, "_is_view"))?.is_truthy()?;
            let version = version(&gradient)?;
            before.push(Some((gradient.unbind(), version)));
        }
        *self.before.lock().unwrap_or_else(PoisonError::into_inner) = before;
        Ok((num_kept, has_views))
    }

    fn forget(&self) {
        self.before.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    #[pyo3(signature = (will_run, node_of, *, is_alone))]
    fn take(
        &self,
        will_run: Option<&Bound<'_, PyAny>>,
        node_of: &Bound<'_, PyAny>,
        is_alone: bool,
        py: Python<'_>,
    ) -> PyResult<(usize, usize)> {
        let look = self.look(py, will_run, node_of, is_alone)?;
        self.recorder.arrived(&look.reached.into_iter().collect(), &look.covered.into_iter().collect());
        Ok((look.num_made, look.num_doubtful))
    }

    fn agrees(&self, will_run: &Bound<'_, PyAny>, node_of: &Bound<'_, PyAny>, py: Python<'_>) -> PyResult<bool> {
        let look = self.look(py, Some(will_run), node_of, false)?;
        Ok(self.recorder.agrees(&look.reached.into_iter().collect(), &look.covered.into_iter().collect()))
    }
}

/// What a pass did so far.
#[derive(Default)]
struct Look {
    reached: Vec<u32>,
    covered: Vec<u32>,
    /// Nodes that had to be made, to ask about them.
    num_made: usize,
    /// Parameters whose gradients somebody's hook may have cleared; they count as covered.
    num_doubtful: usize,
}

impl Gradients {
    /// Without `will_run` a parameter that was reached and got nothing is not found; `is_alone` if no hooks are ours.
    fn look(
        &self,
        py: Python<'_>,
        will_run: Option<&Bound<'_, PyAny>>,
        node_of: &Bound<'_, PyAny>,
        is_alone: bool,
    ) -> PyResult<Look> {
        // Not held while Python runs, which might come back here.
        let before = std::mem::take(&mut *self.before.lock().unwrap_or_else(PoisonError::into_inner));
        let mut look = Look::default();
        for ((leaf, before), grad) in self.leaves.iter().zip(&before).zip(self.grad.iter().cycle()) {
            let tensor = leaf.tensor.bind(py);
            let gradient = grad.read(tensor)?;
            let mut is_covered = match before {
                _ if gradient.is_none() => false,
                None => true,
                Some((known, seen)) => !known.is(&gradient) || version(&gradient)? != *seen,
            };
            let mut is_reached = is_covered;
            if let (false, Some(will_run)) = (is_covered, will_run) {
                let node = match &leaf.node {
                    Some(node) => node.bind(py).clone(),
                    None => node_of.call1((tensor,))?,
                };
                look.num_made += usize::from(leaf.node.is_none());
                is_reached = will_run.call1((node,))?.is_truthy()?;
                if is_reached && is_alone && tensor.getattr(intern!(py, "_post_accumulate_grad_hooks"))?.is_truthy()? {
                    look.num_doubtful += 1;
                    is_covered = true;
                }
            }
            look.reached.extend(is_reached.then_some(leaf.id));
            look.covered.extend(is_covered.then_some(leaf.id));
        }
        *self.before.lock().unwrap_or_else(PoisonError::into_inner) = before;
        Ok(look)
    }
}
