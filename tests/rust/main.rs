//! Tests of the core through its public interface, in one binary and without an interpreter.

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
