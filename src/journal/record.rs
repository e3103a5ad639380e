//! Records: their frame, and the payload of each kind, written and read side by side.

use std::collections::HashMap;
use std::sync::Arc;

use super::wire::{Cursor, put_ranges, put_row, put_str, put_u16, put_u32, put_u64};
use crate::capture::{Fact, Lane, Passes, Pattern, RunId, Shape, Situation};
use crate::error::{Error, Result};
use crate::params::{Parameter, Params};
use crate::ranges::Ranges;

/// Bytes of a record beside its payload.
pub const FRAME: usize = 12;

pub const LIVE_STATE: u32 = 12;
pub const LIVE_ROWS: u32 = 13;
/// Fixed fields at the head of a live record, the only ones under its checksum.
pub const LIVE_HEAD: usize = 12;

/// The contents of a record that is not live.
pub enum Record {
    Run(RunId),
    Lane { same_parameters: bool, ranks: Ranges },
    Parameters { first: u32, parameters: Vec<Parameter> },
    Situation(Situation),
    Pattern(Pattern),
    Shape(Shape),
    Steps { shape: u32, count: u64 },
    Passes(Shape),
    StepEnd,
    Fact(Fact),
    End(String),
}

/// Appends the record to `out`.
pub fn encode(out: &mut Vec<u8>, record: &Record) {
    let begin = out.len();
    out.extend_from_slice(&[0; 8]);
    let tag = match record {
        Record::Run(run) => {
            put_u64(out, run.started);
            put_u64(out, run.nonce);
            put_u32(out, u32::from(run.optimizer_given));
            put_ranges(out, &run.ranks);
            put_str(out, &run.ddpcov);
            1
        }
        Record::Lane { same_parameters, ranks } => {
            put_u32(out, u32::from(*same_parameters));
            put_ranges(out, ranks);
            2
        }
        Record::Parameters { first, parameters } => {
            put_parameters(out, *first, parameters);
            3
        }
        Record::Situation(s) => {
            put_u32(out, u32::from(s.has_wrapper));
            put_u32(out, s.num_orphans);
            for row in [&s.registered, &s.trainable, &s.awaited, &s.wrapped, &s.ignored, &s.optimized] {
                put_row(out, row);
            }
            4
        }
        Record::Pattern(p) => {
            put_u32(out, p.situation);
            for row in [&p.reached, &p.covered, &p.again] {
                put_row(out, row);
            }
            5
        }
        Record::Shape(shape) => {
            put_shape(out, shape);
            6
        }
        Record::Steps { shape, count } => {
            put_u32(out, *shape);
            put_u64(out, *count);
            7
        }
        Record::Passes(shape) => {
            put_shape(out, shape);
            8
        }
        Record::StepEnd => 9,
        Record::Fact(fact) => {
            put_str(out, &fact.topic);
            put_str(out, &fact.body);
            10
        }
        Record::End(text) => {
            put_str(out, text);
            11
        }
    };
    let len = (out.len() - begin - 8) as u32;
    out[begin..begin + 4].copy_from_slice(&u32::to_le_bytes(tag));
    out[begin + 4..begin + 8].copy_from_slice(&len.to_le_bytes());
    let crc = crc32fast::hash(&out[begin..]);
    put_u32(out, crc);
}

/// Appends a live record of `num_words` words, and says at which offset of the file they begin. `base` is the offset that
/// the first byte of `out` will have.
pub fn encode_live(out: &mut Vec<u8>, base: u64, tag: u32, first: u32, words: &[u64]) -> u64 {
    let begin = out.len();
    let padding = (base + (begin + 8 + LIVE_HEAD) as u64).wrapping_neg() % 8;
    put_u32(out, tag);
    put_u32(out, (LIVE_HEAD as u64 + padding) as u32 + words.len() as u32 * 8);
    put_u32(out, first);
    put_u32(out, if tag == LIVE_ROWS { words.len() as u32 / 6 } else { words.len() as u32 });
    put_u32(out, padding as u32);
    let crc = crc32fast::hash(&out[begin..]);
    out.resize(out.len() + padding as usize, 0);
    let offset = base + out.len() as u64;
    for &word in words {
        put_u64(out, word);
    }
    put_u32(out, crc);
    offset
}

fn put_shape(out: &mut Vec<u8>, shape: &Shape) {
    put_u32(out, shape.len() as u32);
    for passes in shape {
        put_u32(out, passes.pattern);
        put_u32(out, passes.flags);
        put_u64(out, passes.count);
    }
}

fn put_parameters(out: &mut Vec<u8>, first: u32, parameters: &[Parameter]) {
    let mut strings: Vec<&str> = Vec::new();
    let mut index: HashMap<&str, u16> = HashMap::new();
    for text in parameters.iter().flat_map(|p| [p.dtype.as_str(), p.module_class.as_str()]) {
        index.entry(text).or_insert_with(|| {
            strings.push(text);
            strings.len() as u16 - 1
        });
    }
    put_u32(out, first);
    put_u32(out, strings.len() as u32);
    for text in &strings {
        put_str(out, text);
    }
    put_u32(out, parameters.len() as u32);
    for p in parameters {
        put_str(out, &p.name);
        put_u16(out, index[p.dtype.as_str()]);
        put_u16(out, index[p.module_class.as_str()]);
        out.extend_from_slice(&[p.itemsize, p.shape.len() as u8]);
        for &size in &p.shape {
            put_u64(out, size);
        }
        put_u16(out, p.aliases.len() as u16);
        for alias in &p.aliases {
            put_str(out, alias);
        }
    }
}

/// Reads the payload of a record; `None` for a tag that this version does not know.
pub fn decode(tag: u32, payload: &[u8], offset: u64) -> Result<Option<Record>> {
    let mut c = Cursor::new(payload, offset);
    let record = match tag {
        1 => Record::Run(RunId {
            started: c.u64("RUN")?,
            nonce: c.u64("RUN")?,
            optimizer_given: c.u32("RUN")? & 1 == 1,
            ranks: c.ranges("RUN")?,
            ddpcov: c.string("RUN")?,
        }),
        2 => Record::Lane { same_parameters: c.u32("LANE")? & 1 == 1, ranks: c.ranges("LANE")? },
        3 => take_parameters(&mut c)?,
        4 => {
            let (flags, num_orphans) = (c.u32("SITUATION")?, c.u32("SITUATION")?);
            Record::Situation(Situation {
                has_wrapper: flags & 1 == 1,
                num_orphans,
                registered: c.row("SITUATION")?,
                trainable: c.row("SITUATION")?,
                awaited: c.row("SITUATION")?,
                wrapped: c.row("SITUATION")?,
                ignored: c.row("SITUATION")?,
                optimized: c.row("SITUATION")?,
            })
        }
        5 => Record::Pattern(Pattern {
            situation: c.u32("PATTERN")?,
            reached: c.row("PATTERN")?,
            covered: c.row("PATTERN")?,
            again: c.row("PATTERN")?,
        }),
        6 => Record::Shape(take_shape(&mut c, "SHAPE")?),
        7 => Record::Steps { shape: c.u32("STEPS")?, count: c.u64("STEPS")? },
        8 => Record::Passes(take_shape(&mut c, "PASSES")?),
        9 => Record::StepEnd,
        10 => Record::Fact(Fact { topic: c.string("FACT")?, body: c.string("FACT")? }),
        11 => Record::End(c.string("END")?),
        _ => return Ok(None),
    };
    c.finish("a record")?;
    Ok(Some(record))
}

fn take_shape(c: &mut Cursor, what: &'static str) -> Result<Shape> {
    let count = c.count(16, what)?;
    (0..count).map(|_| Ok(Passes { pattern: c.u32(what)?, flags: c.u32(what)?, count: c.u64(what)? })).collect()
}

fn take_parameters(c: &mut Cursor) -> Result<Record> {
    const WHAT: &str = "PARAMETERS";
    let first = c.u32(WHAT)?;
    let count = c.count(4, WHAT)?;
    let strings: Vec<String> = (0..count).map(|_| c.string(WHAT)).collect::<Result<_>>()?;
    let count = c.count(12, WHAT)?;
    let mut parameters = Vec::with_capacity(count);
    for _ in 0..count {
        let name = c.string(WHAT)?;
        let mut shared = || -> Result<String> {
            let (offset, index) = (c.offset(), c.u16(WHAT)?);
            let damaged = || Error::Damaged { offset, what: format!("string {index} of {}", strings.len()) };
            strings.get(usize::from(index)).cloned().ok_or_else(damaged)
        };
        let (dtype, module_class) = (shared()?, shared()?);
        let (itemsize, num_dims) = (c.u8(WHAT)?, c.u8(WHAT)?);
        let shape = c.words(usize::from(num_dims), WHAT)?;
        let num_aliases = c.u16(WHAT)?;
        let aliases = (0..num_aliases).map(|_| c.string(WHAT)).collect::<Result<_>>()?;
        parameters.push(Parameter { name, aliases, shape, dtype, itemsize, module_class });
    }
    Ok(Record::Parameters { first, parameters })
}

/// The records of a lane, without its LANE record: the same bytes for the same history, so that ranks can compare them.
pub fn encode_lane(lane: &Lane, with_parameters: bool) -> Vec<u8> {
    let mut out = Vec::new();
    if with_parameters {
        let parameters = Arc::unwrap_or_clone(lane.params.clone());
        encode(&mut out, &Record::Parameters { first: 0, parameters: Params::as_slice(&parameters).to_vec() });
    }
    let tables = (lane.situations.iter().cloned().map(Record::Situation))
        .chain(lane.patterns.iter().cloned().map(Record::Pattern))
        .chain(lane.shapes.iter().cloned().map(Record::Shape));
    let history = (lane.steps.iter())
        .map(|&(shape, count)| Record::Steps { shape, count })
        .chain((!lane.open.is_empty()).then(|| Record::Passes(lane.open.clone())));
    let rest = (lane.facts.iter().cloned().map(Record::Fact)).chain(lane.end.clone().map(Record::End));
    for record in tables.chain(history).chain(rest) {
        encode(&mut out, &record);
    }
    out
}
