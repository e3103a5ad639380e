//! Bytes into [`Capture`]s and [`Lane`]s. Everything that could be wrong with a file is found here.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::header::{self, Kind};
use super::live;
use super::record::{FRAME, LIVE_HEAD, LIVE_ROWS, LIVE_STATE, Record, decode, encode};
use super::wire::Cursor;
use crate::bitset::Row;
use crate::capture::{Capture, Lane, Passes, Pattern, RunId, Shape, flags, push_passes};
use crate::error::{Error, Result};
use crate::params::Params;
use crate::ranges::Ranges;

/// Ranks that a file may name: far beyond any job, and few enough that nobody can exhaust memory by naming more.
const MAX_RANKS: u64 = 1 << 20;
/// Steps or passes that a file may count: all of them are exact as a double.
const MAX_COUNT: u64 = 1 << 53;

/// How often a shard is read again whose rank went on meanwhile.
const MAX_TRIES: u32 = 50;

/// What the beginning of a file tells.
#[derive(Clone, Debug, PartialEq)]
pub struct Peek {
    /// Shard or capture.
    pub kind: Kind,
    /// The run it belongs to.
    pub run: RunId,
}

/// Reads as much as is needed to know which run a file belongs to.
pub fn peek(bytes: &[u8]) -> Result<Peek> {
    let (kind, _) = header::decode(bytes)?;
    let mut cursor = Cursor::new(&bytes[header::LEN..], header::LEN as u64);
    Ok(Peek { kind, run: take_run(&mut cursor)? })
}

/// Reads a merged capture.
pub fn read_capture(bytes: &[u8]) -> Result<Capture> {
    let (kind, num_lanes) = header::decode(bytes)?;
    if kind != Kind::Capture {
        return Err(Error::WrongKind { found: kind.name(), expected: Kind::Capture.name() });
    }
    let mut cursor = Cursor::new(&bytes[header::LEN..], header::LEN as u64);
    let run = take_run(&mut cursor)?;
    let mut lanes: Vec<LaneBuilder> = Vec::new();
    let mut seen = Ranges::new();
    while cursor.rest() > 0 {
        let offset = cursor.offset();
        match take_record(&mut cursor)? {
            Frame::Record(Record::Lane { same_parameters, ranks }) => {
                let mut lane = LaneBuilder::new(ranks);
                if !seen.intersection(&lane.lane.ranks).is_empty() || lane.lane.ranks.is_empty() {
                    return Err(damaged(offset, "a rank in two lanes, or a lane without ranks"));
                }
                seen = seen.union(&lane.lane.ranks);
                if let (true, Some(before)) = (same_parameters, lanes.last()) {
                    lane.lane.params = before.lane.params.clone();
                }
                lanes.push(lane);
            }
            Frame::Record(record) => match lanes.last_mut() {
                Some(lane) => lane.apply(record, offset)?,
                None => return Err(damaged(offset, "a record before the first LANE")),
            },
            Frame::Live { .. } => return Err(damaged(offset, "a live record in a capture")),
            Frame::Unknown => {}
        }
    }
    // Every lane of a capture is finished, and their number known, so that bytes cut off between two records are noticed.
    if lanes.is_empty() || lanes.len() != num_lanes as usize || lanes.iter().any(|l| l.lane.end.is_none()) {
        let what = "the end of the last lane";
        return Err(Error::Truncated { what, offset: cursor.offset(), needed: FRAME as u64, found: 0 });
    }
    if !seen.difference(&run.ranks).is_empty() {
        return Err(damaged(header::LEN as u64, "a lane of a rank that is not part of the run"));
    }
    Ok(Capture { run, lanes: lanes.into_iter().map(|l| l.lane).collect() })
}

/// Reads the history that [`super::encode_lane`] wrote, of these ranks of a run.
pub fn read_history(run: &RunId, ranks: Ranges, history: &[u8]) -> Result<Lane> {
    let mut bytes = header::encode(Kind::Capture, 1);
    encode(&mut bytes, &Record::Run(run.clone()));
    encode(&mut bytes, &Record::Lane { same_parameters: false, ranks });
    bytes.extend_from_slice(history);
    let mut lanes = read_capture(&bytes)?.lanes;
    Ok(lanes.swap_remove(0))
}

/// Reads the shard in a file that its rank may still be writing.
///
/// What changes in place is read in another moment than what it refers to; the commit and pass words tell whether anything
/// changed in between, as in a sequence lock. A rank that never rests is taken as it was read last.
pub fn read_shard_at(path: &Path) -> Result<(RunId, Lane)> {
    let mut file = File::open(path)?;
    let mut tries = 0;
    loop {
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut bytes)?;
        let found = read_shard(&bytes);
        tries += 1;
        if tries == MAX_TRIES || is_unchanged(&mut file, &bytes) {
            return found;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether the first two words of LIVE STATE are still what they were; so, too, if there is none.
fn is_unchanged(file: &mut File, bytes: &[u8]) -> bool {
    let Some(begin) = live_offset(bytes) else { return true };
    let mut now = [0; 16];
    let is_read = file.seek(SeekFrom::Start(begin as u64)).and_then(|_| file.read_exact(&mut now)).is_ok();
    !is_read || bytes.get(begin..begin + 16) == Some(&now)
}

/// Where in a shard the words of LIVE STATE begin.
fn live_offset(bytes: &[u8]) -> Option<usize> {
    let word = |at: usize| bytes.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let mut at = header::LEN;
    for _ in 0..3 {
        let (tag, len) = (word(at)?, word(at + 4)? as usize);
        if tag == LIVE_STATE {
            return Some(at + 8 + LIVE_HEAD + word(at + 16)? as usize);
        }
        at = at.checked_add(len)?.checked_add(FRAME)?;
    }
    None
}

/// Reads one rank's shard, finished or not.
pub fn read_shard(bytes: &[u8]) -> Result<(RunId, Lane)> {
    let (kind, _) = header::decode(bytes)?;
    if kind != Kind::Shard {
        return Err(Error::WrongKind { found: kind.name(), expected: Kind::Shard.name() });
    }
    let mut cursor = Cursor::new(&bytes[header::LEN..], header::LEN as u64);
    let run = take_run(&mut cursor)?;
    let offset = cursor.offset();
    let Frame::Record(Record::Lane { ranks, .. }) = take_record(&mut cursor)? else {
        return Err(damaged(offset, "no LANE where a shard has one"));
    };
    if ranks.count() != 1 {
        return Err(damaged(offset, "a shard of several ranks"));
    }
    let offset = cursor.offset();
    let Frame::Live { tag: LIVE_STATE, words, .. } = take_record(&mut cursor)? else {
        return Err(damaged(offset, "no LIVE STATE where a shard has one"));
    };
    let (state, open) = live::load(&words, offset)?;
    let committed = (state.journal_len.checked_sub(cursor.offset()))
        .ok_or_else(|| damaged(offset, "the live state commits less than itself"))?;
    let offset = cursor.offset();
    let len = usize::try_from(committed).unwrap_or(usize::MAX);
    let mut cursor = Cursor::new(cursor.take(len, "the committed part of the shard")?, offset);
    let mut lane = LaneBuilder::new(ranks);
    let mut rows = [Vec::new(), Vec::new(), Vec::new()];
    while cursor.rest() > 0 {
        let offset = cursor.offset();
        match take_record(&mut cursor)? {
            Frame::Record(record) => lane.apply(record, offset)?,
            Frame::Live { tag: LIVE_ROWS, first, words } => {
                let num_words = words.len() / live::ROWS_PER_WORD;
                let set = &words[live::row_index(state.row_set, num_words, 0)..][..3 * num_words];
                for (k, row) in rows.iter_mut().enumerate() {
                    if first as usize != row.len() {
                        return Err(damaged(offset, "live rows out of order"));
                    }
                    row.extend(set.iter().skip(k).step_by(3));
                }
            }
            Frame::Live { .. } => return Err(damaged(offset, "a second LIVE STATE")),
            Frame::Unknown => {}
        }
    }
    if let Some((shape, count)) = state.run {
        lane.apply(Record::Steps { shape, count }, offset)?;
    }
    lane.apply(Record::Passes(state.entries), offset)?;
    if let (Some(flags), Some(situation)) = (open, state.situation) {
        let [reached, mut covered, again] = rows.map(Row::from_words);
        if let Some(s) = lane.lane.situations.get(situation as usize) {
            covered = covered.intersection(&s.trainable); // as in a pass that is closed
        }
        let pattern = lane.lane.patterns.len() as u32;
        lane.apply(Record::Pattern(Pattern { situation, reached, covered, again }), offset)?;
        push_passes(&mut lane.lane.open, Passes { pattern, flags, count: 1 });
    }
    Ok((run, lane.lane))
}

fn take_run(cursor: &mut Cursor) -> Result<RunId> {
    let offset = cursor.offset();
    let Frame::Record(Record::Run(run)) = take_record(cursor)? else {
        return Err(damaged(offset, "no RUN at the beginning"));
    };
    if run.ranks.is_empty() || run.ranks.as_slice().iter().any(|&(_, last)| last >= MAX_RANKS) {
        return Err(damaged(offset, "no ranks, or more than can be"));
    }
    Ok(run)
}

enum Frame {
    Record(Record),
    Live { tag: u32, first: u32, words: Vec<u64> },
    Unknown,
}

fn take_record(cursor: &mut Cursor) -> Result<Frame> {
    const WHAT: &str = "a record";
    let offset = cursor.offset();
    let head = cursor.take(8, WHAT)?;
    let mut fields = Cursor::new(head, offset);
    let (tag, len) = (fields.u32(WHAT)?, fields.u32(WHAT)?);
    let payload = cursor.take(len as usize, WHAT)?;
    let crc = cursor.u32(WHAT)?;
    let is_live = tag == LIVE_STATE || tag == LIVE_ROWS;
    let summed = if is_live { &payload[..payload.len().min(LIVE_HEAD)] } else { payload };
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(summed);
    let expected = hasher.finalize();
    if crc != expected {
        return Err(damaged(offset, &format!("a record's checksum is {crc:08x}, expected {expected:08x}")));
    }
    if !is_live {
        return Ok(decode(tag, payload, offset + 8)?.map_or(Frame::Unknown, Frame::Record));
    }
    let mut c = Cursor::new(payload, offset + 8);
    let (first, count, padding) = (c.u32(WHAT)?, c.u32(WHAT)? as usize, c.u32(WHAT)? as usize);
    if c.take(padding, WHAT)?.iter().any(|&b| b != 0) {
        return Err(damaged(offset, "padding that is not zero"));
    }
    let words = c.words(count * if tag == LIVE_ROWS { live::ROWS_PER_WORD } else { 1 }, WHAT)?;
    c.finish(WHAT)?;
    Ok(Frame::Live { tag, first, words })
}

fn damaged(offset: u64, what: &str) -> Error {
    Error::Damaged { offset, what: what.into() }
}

/// Applies records to a lane, refusing what refers to nothing.
struct LaneBuilder {
    lane: Lane,
    num_steps: u64,
    num_open_passes: u64,
}

impl LaneBuilder {
    fn new(ranks: Ranges) -> Self {
        Self { lane: Lane { ranks, ..Lane::default() }, num_steps: 0, num_open_passes: 0 }
    }

    fn apply(&mut self, record: Record, offset: u64) -> Result<()> {
        let lane = &mut self.lane;
        let fits = |row: &Row, params: &Params| row.end() <= params.len();
        let valid = match record {
            Record::Parameters { first, parameters } => Arc::make_mut(&mut lane.params).define(first, parameters),
            Record::Situation(s) => {
                let rows = [&s.registered, &s.trainable, &s.awaited, &s.wrapped, &s.ignored, &s.optimized];
                let valid = rows.iter().all(|row| fits(row, &lane.params));
                lane.situations.push(s);
                valid
            }
            Record::Pattern(p) => {
                let valid = [&p.reached, &p.covered, &p.again].iter().all(|row| fits(row, &lane.params))
                    && (p.situation as usize) < lane.situations.len();
                lane.patterns.push(p);
                valid
            }
            Record::Shape(shape) => {
                let valid = !shape.is_empty() && is_valid(&shape, lane.patterns.len());
                lane.shapes.push(shape);
                valid
            }
            Record::Steps { shape, count } => {
                match lane.steps.last_mut() {
                    Some(last) if last.0 == shape => last.1 = last.1.saturating_add(count),
                    _ => lane.steps.push((shape, count)),
                }
                self.num_steps = self.num_steps.saturating_add(count);
                count > 0 && self.num_steps <= MAX_COUNT && (shape as usize) < lane.shapes.len()
            }
            Record::Passes(shape) => {
                self.num_open_passes = shape.iter().fold(self.num_open_passes, |n, p| n.saturating_add(p.count));
                let valid = is_valid(&shape, lane.patterns.len()) && self.num_open_passes <= MAX_COUNT;
                for passes in shape {
                    push_passes(&mut lane.open, passes);
                }
                valid
            }
            Record::StepEnd => {
                let shape = std::mem::take(&mut lane.open);
                self.num_open_passes = 0;
                let valid = !shape.is_empty();
                lane.shapes.push(shape);
                lane.steps.push((lane.shapes.len() as u32 - 1, 1));
                valid
            }
            Record::Fact(fact) => {
                lane.facts.push(fact);
                true
            }
            Record::End(text) => lane.end.replace(text).is_none(),
            Record::Run(_) | Record::Lane { .. } => false,
        };
        if valid { Ok(()) } else { Err(damaged(offset, "a record that refers to nothing, or cannot stand here")) }
    }
}

fn is_valid(shape: &Shape, num_patterns: usize) -> bool {
    let total = shape.iter().fold(0_u64, |n, p| n.saturating_add(p.count));
    let each = |p: &Passes| (p.pattern as usize) < num_patterns && p.flags & !flags::WRITTEN == 0 && p.count > 0;
    total <= MAX_COUNT && shape.iter().all(each)
}
