//! Tests of the core through its public interface, in one binary and without an interpreter.

#![expect(clippy::needless_for_each, reason = "a call to each of several recorders or slots reads well on one line")]

mod analysis;
mod bitset;
mod damage;
mod forge;
mod journal;
mod killed;
mod merge;
mod ranges;
mod recorder;
mod recorder_model;
mod samples;
