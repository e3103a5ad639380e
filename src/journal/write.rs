//! Where a recorder's bytes go, and how a merged capture is written.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

use super::header::{self, Kind};
use super::live;
use super::mapping::Words;
use super::record::{LIVE_ROWS, LIVE_STATE, Record, encode, encode_lane, encode_live};
use crate::capture::{Capture, RunId};
use crate::error::Result;

/// An append-only journal, in a file or in memory.
pub struct Sink {
    storage: Storage,
    len: u64,
}

enum Storage {
    File(File),
    Memory(Vec<u8>),
}

impl Sink {
    /// A journal in memory that begins with `start`.
    pub fn memory(start: Vec<u8>) -> Self {
        Self { len: start.len() as u64, storage: Storage::Memory(start) }
    }

    /// A journal in a new file that begins with `start`. It is written beside and then renamed, so that a shard of that name
    /// is always complete: a process killed here leaves the shard of the run before, or none.
    pub fn file(path: &Path, start: &[u8]) -> Result<Self> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(".new");
        let mut file = File::options().read(true).write(true).create(true).truncate(true).open(&beside)?;
        file.write_all(start).and_then(|()| fs::rename(&beside, path)).inspect_err(|_| {
            let _ = fs::remove_file(&beside);
        })?;
        Ok(Self { storage: Storage::File(file), len: start.len() as u64 })
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Appends; on failure the journal is as before.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.storage {
            Storage::Memory(all) => all.extend_from_slice(bytes),
            Storage::File(file) => {
                file.seek(SeekFrom::Start(self.len))?;
                file.write_all(bytes)?;
            }
        }
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Everything written so far; live words are as they were when appended if the journal is in memory.
    pub fn contents(&mut self) -> io::Result<Vec<u8>> {
        match &mut self.storage {
            Storage::Memory(all) => Ok(all.clone()),
            Storage::File(file) => {
                let mut out = vec![0; self.len as usize];
                file.seek(SeekFrom::Start(0))?;
                io::Read::read_exact(file, &mut out)?;
                Ok(out)
            }
        }
    }

    /// Words that change in place, beginning at `offset`.
    pub fn words(&self, offset: u64, len: usize) -> Result<Words> {
        match &self.storage {
            Storage::File(file) => Words::map(file, offset, len),
            Storage::Memory(_) => Ok(Words::heap(len)),
        }
    }
}

/// The beginning of a shard: header, RUN, LANE and LIVE STATE, committed; and the offset of the live words.
pub fn begin_shard(run: &RunId, rank: u64) -> (Vec<u8>, u64) {
    let mut start = header::encode(Kind::Shard, 0);
    encode(&mut start, &Record::Run(run.clone()));
    encode(&mut start, &Record::Lane { same_parameters: false, ranks: [(rank, rank)].into_iter().collect() });
    let with_state = |words: &[u64]| {
        let mut whole = start.clone();
        let offset = encode_live(&mut whole, 0, LIVE_STATE, 0, words);
        (whole, offset)
    };
    let len = with_state(&[0; live::STATE_WORDS]).0.len() as u64;
    with_state(&live::initial(len))
}

/// A LIVE ROWS record of zeros to append at `base`, and the offset of its words.
pub fn live_rows(base: u64, first_word: u32, num_words: usize) -> (Vec<u8>, u64) {
    let mut out = Vec::new();
    let offset = encode_live(&mut out, base, LIVE_ROWS, first_word, &vec![0; num_words * live::ROWS_PER_WORD]);
    (out, offset)
}

/// The bytes of a capture.
pub fn encode_capture(capture: &Capture) -> Vec<u8> {
    let mut out = header::encode(Kind::Capture, capture.lanes.len() as u32);
    encode(&mut out, &Record::Run(capture.run.clone()));
    for (i, lane) in capture.lanes.iter().enumerate() {
        let same_parameters = i > 0 && capture.lanes[i - 1].params == lane.params;
        encode(&mut out, &Record::Lane { same_parameters, ranks: lane.ranks.clone() });
        out.extend(encode_lane(lane, !same_parameters));
    }
    out
}
