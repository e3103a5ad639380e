//! The model of a recorded run. Values here are valid by construction: every id refers to something, every row fits the
//! parameter table. The reader sees to that, and nothing later checks it again.

use std::sync::Arc;

use crate::bitset::Row;
use crate::params::Params;
use crate::ranges::Ranges;

/// A merged run: what `run.bin` holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Capture {
    /// Identity of the run.
    pub run: RunId,
    /// Histories, each with the ranks that share it, ordered by first rank. No rank is in two lanes.
    pub lanes: Vec<Lane>,
}

/// What all shards of one run have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunId {
    /// Nanoseconds since 1970-01-01 UTC at which the first rank began.
    pub started: u64,
    /// Random; ranks of one run agree on it.
    pub nonce: u64,
    /// The ranks that take part, as `torch.distributed` numbers them.
    pub ranks: Ranges,
    /// Whether the user named the optimizers, so that only they end a step.
    pub optimizer_given: bool,
    /// Version of ddpcov that recorded.
    pub ddpcov: String,
}

/// The history of one rank, or of several ranks whose histories are equal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lane {
    /// The ranks.
    pub ranks: Ranges,
    /// Every parameter ever tracked.
    pub params: Arc<Params>,
    /// Situations by id.
    pub situations: Vec<Situation>,
    /// Patterns by id.
    pub patterns: Vec<Pattern>,
    /// Step shapes by id.
    pub shapes: Vec<Shape>,
    /// Closed steps in order: so many steps of that shape.
    pub steps: Vec<(u32, u64)>,
    /// Passes since the last closed step.
    pub open: Shape,
    /// Facts noted on the way, in order.
    pub facts: Vec<Fact>,
    /// How the rank left the block: `clean`, `exception: …`; absent if the shard just stops.
    pub end: Option<String>,
}

/// What was true of the parameters when a pass began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Situation {
    /// Part of the model.
    pub registered: Row,
    /// Part of the model and requiring a gradient.
    pub trainable: Row,
    /// The wrapper waits for a gradient of this very tensor.
    pub awaited: Row,
    /// This very tensor was part of the module when the wrapper was built.
    pub wrapped: Row,
    /// The wrapper was told to leave it alone.
    pub ignored: Row,
    /// Held by an optimizer that the user named.
    pub optimized: Row,
    /// Tensors that the wrapper waits for and that are no longer part of the model.
    pub num_orphans: u32,
    /// Whether a wrapper that averages gradients was seen, so that `awaited`, `wrapped` and `ignored` mean something.
    pub has_wrapper: bool,
}

/// What one backward pass did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pattern {
    /// The situation in which it ran.
    pub situation: u32,
    /// Gradient accumulators that ran.
    pub reached: Row,
    /// Those that accumulated a defined gradient.
    pub covered: Row,
    /// Those that ran more than once.
    pub again: Row,
}

/// A number of equal passes in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Passes {
    /// What each did.
    pub pattern: u32,
    /// [`flags`] of each.
    pub flags: u32,
    /// How many.
    pub count: u64,
}

/// Circumstances of a pass.
pub mod flags {
    /// The wrapper was told not to average in this pass (`no_sync`).
    pub const NO_SYNC: u32 = 1;
    /// The pass ended with an exception.
    pub const RAISED: u32 = 2;
    /// No pass at all: the optimizer stepped without one. Only the situation counts.
    pub const EMPTY: u32 = 4;
    /// The process ended inside the pass. Made by the reader, never written.
    pub const OPEN: u32 = 8;
    /// No forward of the wrapper prepared the pass, though none told it not to average; stands beside [`NO_SYNC`].
    pub const BYPASSED: u32 = 16;
    /// Stands beside [`OPEN`]: how far the pass came is not known, as its gradients are looked at where it ends.
    pub const UNSEEN: u32 = 32;
    /// Every flag that a file may hold.
    pub const WRITTEN: u32 = NO_SYNC | RAISED | EMPTY | BYPASSED;
}

/// The passes of one step, in order.
pub type Shape = Vec<Passes>;

/// Adds passes to a step, joining equal neighbours.
pub fn push_passes(shape: &mut Shape, passes: Passes) {
    match shape.last_mut() {
        Some(last) if last.pattern == passes.pattern && last.flags == passes.flags => {
            last.count = last.count.saturating_add(passes.count);
        }
        _ => shape.push(passes),
    }
}

/// Something worth knowing that is not a row: a topic and a JSON text. The core stores it unread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// What it is about.
    pub topic: String,
    /// JSON.
    pub body: String,
}
