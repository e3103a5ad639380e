//! Files that ddpcov did not write: records laid out by hand after the specification, and whole files that were changed.

use std::fs;
use std::ops::Range;

use _core::capture::{Capture, Lane, Passes, Pattern, flags};
use _core::error::Error;
use _core::journal::live::{MAX_ENTRIES, STATE_WORDS};
use _core::journal::{encode_capture, encode_lane};
use _core::recorder::Recorder;
use proptest::sample::Index;

use crate::samples::{parameters, plain_situation, ranks, row, run_id, table};

pub const HEADER: usize = 24;
pub const LIVE_STATE: u32 = 12;
pub const LIVE_ROWS: u32 = 13;

/// A record as the specification lays it out.
pub fn record(tag: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = [&tag.to_le_bytes(), &(payload.len() as u32).to_le_bytes(), payload].concat();
    out.extend(crc32fast::hash(&out).to_le_bytes());
    out
}

/// Where a record is in a file.
pub struct Frame {
    pub tag: u32,
    pub begin: usize,
    pub end: usize,
}

impl Frame {
    pub fn payload(&self) -> Range<usize> {
        self.begin + 8..self.end - 4
    }

    pub fn is_live(&self) -> bool {
        self.tag == LIVE_STATE || self.tag == LIVE_ROWS
    }

    /// The words of a live record, which no checksum covers.
    fn words(&self, bytes: &[u8]) -> Range<usize> {
        let payload = self.payload();
        payload.start + 12 + u32_at(bytes, payload.start + 8) as usize..payload.end
    }
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

/// The records of a file that is whole.
pub fn frames(bytes: &[u8]) -> Vec<Frame> {
    let mut out = Vec::new();
    let mut begin = HEADER;
    while begin < bytes.len() {
        let end = begin + 12 + u32_at(bytes, begin + 4) as usize;
        out.push(Frame { tag: u32_at(bytes, begin), begin, end });
        begin = end;
    }
    out
}

/// Makes the checksums right again after payloads were changed, so that a reader has nothing but sense to go by.
pub fn reseal(bytes: &mut [u8], frames: &[Frame]) {
    for frame in frames {
        let payload = frame.payload();
        if frame.tag == LIVE_STATE {
            reseal_state(&mut bytes[payload.end - 8 * STATE_WORDS..payload.end]);
        }
        let summed = if frame.is_live() { payload.start + 12 } else { payload.end };
        let crc = crc32fast::hash(&bytes[frame.begin..summed]);
        bytes[payload.end..frame.end].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Where the valid slot of the live state is.
pub fn valid_slot(bytes: &[u8], frames: &[Frame]) -> usize {
    let words = frames.iter().find(|f| f.tag == LIVE_STATE).unwrap().words(bytes).start;
    words + 8 * (8 + 72 * usize::from(bytes[words] % 2))
}

fn reseal_state(words: &mut [u8]) {
    let slot = 8 * (8 + usize::from(words[0] % 2) * 72);
    let commit = words[..8].to_vec();
    let slot = &mut words[slot..];
    slot[..8].copy_from_slice(&commit);
    let num_entries = (u32_at(slot, 48) as usize).min(MAX_ENTRIES);
    let crc = crc32fast::hash(&[&slot[..56], &slot[64..64 + 16 * num_entries]].concat());
    slot[56..64].copy_from_slice(&u64::from(crc).to_le_bytes());
}

pub fn small_lane() -> Lane {
    Lane {
        ranks: ranks(0, 0),
        params: table(parameters(0..2)),
        situations: vec![plain_situation(2)],
        patterns: vec![Pattern { situation: 0, reached: row(&[0, 1]), covered: row(&[0]), again: row(&[]) }],
        shapes: vec![vec![Passes { pattern: 0, flags: 0, count: 2 }]],
        steps: vec![(0, 5)],
        end: Some("clean".into()),
        ..Lane::default()
    }
}

pub fn small_capture() -> Vec<u8> {
    let open = vec![Passes { pattern: 0, flags: flags::RAISED, count: 1 }];
    let lanes = vec![small_lane(), Lane { ranks: ranks(1, 2), open, ..small_lane() }];
    encode_capture(&Capture { run: run_id(), lanes })
}

pub fn small_shard() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bin.rank0");
    let recorder = Recorder::new(Some(&path), &run_id(), 0).unwrap();
    recorder.define(0, parameters(0..2)).unwrap();
    recorder.set_situation(plain_situation(2)).unwrap();
    for i in 0..40 {
        recorder.begin_pass(false);
        let slot = recorder.slot(i % 2).unwrap();
        slot.arrived(true);
        slot.accumulated();
        if i < 38 {
            recorder.close_pass(0).unwrap();
        }
        if i < 30 && i % 10 == 9 {
            recorder.close_step().unwrap();
        }
    }
    fs::read(path).unwrap()
}

/// A capture of these records after RUN.
pub fn forged(records: &[Vec<u8>]) -> Vec<u8> {
    let empty = encode_capture(&Capture { run: run_id(), lanes: vec![small_lane()] });
    let run_end = frames(&empty)[0].end;
    [&empty[..run_end], &records.concat()].concat()
}

pub fn lane_record(rank: u64) -> Vec<u8> {
    let words = [rank, rank].map(u64::to_le_bytes).concat();
    record(2, &[&0_u32.to_le_bytes()[..], &1_u32.to_le_bytes(), &words].concat())
}

pub fn history() -> Vec<u8> {
    encode_lane(&small_lane(), true)
}

pub fn header(version: u32, kind: u32) -> Vec<u8> {
    let fields = [version, kind, 0].map(u32::to_le_bytes).concat();
    let mut out = [b"\x89DDPCOV\n", &fields[..]].concat();
    out.extend(crc32fast::hash(&out).to_le_bytes());
    out
}

pub fn message<T>(result: Result<T, Error>) -> String {
    match result {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    }
}

/// What is committed, and the parts of it that a checksum or a rule covers.
pub fn committed(bytes: &[u8]) -> (usize, Vec<Range<usize>>) {
    let mut still: Vec<Range<usize>> = std::iter::once(0..HEADER).collect();
    for frame in frames(bytes) {
        if frame.is_live() {
            let words = frame.words(bytes);
            still.extend([frame.begin..words.start, words.end..frame.end]);
        } else {
            still.push(frame.begin..frame.end);
        }
    }
    (bytes.len(), still)
}

pub type Mutations = Vec<(Index, u8)>;

pub fn mutated(whole: &[u8], mutations: &Mutations, sealed: bool) -> Vec<u8> {
    let frames = frames(whole);
    let mut bytes = whole.to_vec();
    for (at, value) in mutations {
        let at = HEADER + at.index(whole.len() - HEADER);
        // With its checksum mended, a record must stay where it is: only payloads change.
        if !sealed || frames.iter().any(|f| f.payload().contains(&at)) {
            bytes[at] = *value;
        }
    }
    if sealed {
        reseal(&mut bytes, &frames);
    }
    bytes
}

/// What a capture or a shard must begin with, then records of a capture and a shard as they were picked.
pub fn shuffled(whole: &[Vec<u8>; 2], picks: &[(Index, bool)], is_shard: bool) -> Vec<u8> {
    let kept = if is_shard { 3 } else { 2 };
    let like = &whole[usize::from(is_shard)];
    let mut bytes = like[..frames(like)[kept - 1].end].to_vec();
    for (index, from_shard) in picks {
        let from = &whole[usize::from(*from_shard)];
        let frame = &frames(from)[index.index(frames(from).len())];
        bytes.extend_from_slice(&from[frame.begin..frame.end]);
    }
    bytes
}
