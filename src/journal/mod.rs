//! THE FORMAT of shards and captures, version 1.
//!
//! A shard (`run.bin.rank3`) is what one rank writes while it runs; a capture (`run.bin`) is a merged, finished run. Both are
//! a header and records; a shard also has two kinds of *live* record whose contents change in place. All numbers are
//! little-endian and of fixed width. A `string` is a `u32` length in bytes and that much UTF-8. A `row` is a `u32` number of
//! words and that many `u64` words, one bit per parameter id, lowest bit first, the last word not zero. `ranges` are a `u32`
//! count and that many pairs of `u64` (first, last), inclusive, ascending, neither touching nor overlapping.
//!
//! # Header, 24 bytes
//!
//! | Offset | Size | Contents |
//! | --- | --- | --- |
//! | 0 | 8 | magic `89 44 44 50 43 4F 56 0A` (`\x89DDPCOV\n`) |
//! | 8 | 4 | format version, 1 |
//! | 12 | 4 | kind: 1 shard, 2 capture |
//! | 16 | 4 | number of lanes of a capture, 0 in a shard |
//! | 20 | 4 | CRC-32 of bytes 0 to 19 |
//!
//! # Record
//!
//! | Size | Contents |
//! | --- | --- |
//! | 4 | tag |
//! | 4 | length of the payload |
//! | n | payload |
//! | 4 | CRC-32 (IEEE, as in zlib) of tag, length and payload; for live records of tag, length and the payload's first 12 bytes |
//!
//! A reader skips a record whose tag it does not know. Ids are given by order: the first PATTERN of a lane is pattern 0.
//! A record may refer only to ids that records before it defined.
//!
//! | Tag | Name | Payload |
//! | --- | --- | --- |
//! | 1 | RUN | `u64` start (ns since 1970 UTC), `u64` nonce, `u32` flags (bit 0: the user named the optimizers), `ranges` of the ranks that take part, `string` ddpcov version. The first record of every file |
//! | 2 | LANE | `u32` flags (bit 0: same parameters as the lane before), `ranges` of the ranks that share the history that follows, up to the next LANE. A shard has exactly one, of one rank |
//! | 3 | PARAMETERS | `u32` first id, `u32` number of strings, the strings (types and classes, once each), `u32` number of parameters; each: `string` name, `u16` index of the dtype, `u16` index of the module class, `u8` bytes per element, `u8` number of dimensions, a `u64` for each, `u16` number of aliases, a `string` for each. A first id below the number known redefines (replaced modules) |
//! | 4 | SITUATION | `u32` flags (bit 0: there is a wrapper), `u32` number of orphans, `row`s registered, trainable, awaited, wrapped, ignored, optimized: see [`crate::capture::Situation`] |
//! | 5 | PATTERN | `u32` situation, `row`s reached, covered, again: see [`crate::capture::Pattern`] |
//! | 6 | SHAPE | the passes of a step, which takes the next shape id: `u32` count, then each `u32` pattern, `u32` flags (1 not averaged, 2 raised, 4 no pass at all, 16 wrapper bypassed: [`crate::capture::flags`]), `u64` how many in a row |
//! | 7 | STEPS | `u32` shape, `u64` count: that many closed steps of that shape |
//! | 8 | PASSES | as SHAPE: more passes of the step that is not closed yet |
//! | 9 | STEP END | empty: closes the step made by the PASSES since the last closed step; its shape, too, takes the next shape id |
//! | 10 | FACT | `string` topic, `string` JSON |
//! | 11 | END | `string`: how the rank left. The last record of a finished lane |
//! | 12 | LIVE STATE | `u32` 0, `u32` number of words, `u32` padding, that many zero bytes, the words |
//! | 13 | LIVE ROWS | `u32` first word of the row, `u32` number of row words, `u32` padding, that many zero bytes, six times that many words |
//!
//! # Live records
//!
//! Padding puts the words on a file offset that is a multiple of eight; the process keeps them mapped, so what it stores
//! there outlives it, however it ends. [`live`] lays out the words and says in which order they are stored.
//!
//! # Reading a shard
//!
//! 1. Take the slot that LIVE STATE's commit word points to. It says how many bytes of the file are committed; records
//!    beyond were being written when the process ended, and are ignored, as is a torn one.
//! 2. Read the records. Then apply the slot: its run of closed steps comes after the last STEPS or STEP END, its passes
//!    after the last PASSES.
//! 3. If the pass word says that a pass is open, the rows of the slot's row set belong to it.
//!
//! In a capture every byte belongs to a whole record, and anything else is damage.
//!
//! # History
//!
//! 1. First version.

mod header;
pub mod live;
mod mapping;
mod read;
mod record;
mod wire;
mod write;

pub use header::{CURRENT_VERSION, Kind, OLDEST_VERSION};
pub use mapping::Words;
pub use read::{Peek, peek, read_capture, read_history, read_shard, read_shard_at};
pub use record::encode_lane;
pub(crate) use record::{Record, encode};
pub use write::encode_capture;
pub(crate) use write::{Sink, begin_shard, live_rows};
