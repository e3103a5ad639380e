//! The parameters of a model: what the report must be able to say about each without the model at hand.

/// One parameter. Its index in [`Params`] is its id, the bit that stands for it in every row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Parameter {
    /// Fully qualified name without wrapper prefixes; what precedes the last dot names the owning module.
    pub name: String,
    /// Further names of the same tensor.
    pub aliases: Vec<String>,
    /// Sizes of the dimensions.
    pub shape: Vec<u64>,
    /// Element type, `float32`.
    pub dtype: String,
    /// Bytes per element.
    pub itemsize: u8,
    /// Class of the owning module, `torch.nn.modules.linear.Linear`.
    pub module_class: String,
}

impl Parameter {
    /// Number of elements.
    pub fn numel(&self) -> u64 {
        self.shape.iter().fold(1, |n: u64, &d| n.saturating_mul(d))
    }
}

/// All parameters that a rank ever tracked, in the order in which they were met.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Params(Vec<Parameter>);

impl Params {
    /// The parameters by id.
    pub fn as_slice(&self) -> &[Parameter] {
        &self.0
    }

    /// Number of parameters.
    pub fn len(&self) -> u32 {
        self.0.len() as u32
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Defines the parameters `first`, `first + 1`, …: new ones at the end, or known ones anew (a replaced module has the
    /// same names and may have other shapes). Returns whether `first` left no gap.
    #[must_use]
    pub fn define(&mut self, first: u32, parameters: Vec<Parameter>) -> bool {
        if first > self.len() {
            return false;
        }
        let first = first as usize;
        let known = parameters.len().min(self.0.len() - first);
        self.0.splice(first..first + known, parameters);
        true
    }
}
