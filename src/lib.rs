//! The native core of ddpcov: what is recorded, how it is kept, and the set algebra on it.
//!
//! ```text
//! collect   recorder ──► journal (one shard file a rank, written as the job runs)
//! analyse   journal ──► capture (one lane a rank) ──► merge (equal lanes become one) ──► analysis
//! report    in Python, from what `analysis` returns
//! ```
//!
//! Modules, each of which may use only those before it:
//!
//! | Module | Holds |
//! | --- | --- |
//! | [`error`] | one variant per cause |
//! | [`bitset`], [`ranges`] | a set of parameters; a set of steps or ranks |
//! | [`params`] | names, shapes and types of parameters |
//! | [`capture`] | the model of a run: lanes, patterns, step shapes |
//! | [`journal`] | THE FILE FORMAT: specification, reading, writing |
//! | `known` | recognises what was met before, in bounded memory |
//! | [`recorder`] | the live store that hooks write into |
//! | [`merge`] | shards or lanes into one capture |
//! | [`stall`] | what an open pass waits for |
//! | [`watchdog`] | the thread that notices one |
//! | [`analysis`] | set algebra over ranks and steps |
//!
//! Invariants, stated as what is absent:
//!
//! * [`recorder::Slot`]'s two event functions allocate nothing, lock nothing, make no system call and cannot fail.
//! * No byte in a file depends on the machine that wrote it: little-endian, fixed widths.
//! * A [`capture::Capture`] cannot be invalid: the reader validates, once; later code has no checks.
//! * Nothing outside `python.rs` knows of Python.

pub mod analysis;
pub mod bitset;
pub mod capture;
pub mod error;
pub mod journal;
mod known;
pub mod merge;
pub mod params;
pub mod ranges;
pub mod recorder;
pub mod stall;
pub mod watchdog;

#[cfg(feature = "python")]
mod python;
