//! The words of a shard that change in place, so that what they say outlives the process without a system call.
//!
//! LIVE STATE, in words of 64 bits:
//!
//! | Word | Contents |
//! | --- | --- |
//! | 0 | commit: number of commits so far; slot `commit % 2` is valid |
//! | 1 | pass: `2 × (number of the pass begun last) + 1` while that pass is open, an even number otherwise |
//! | 2 | 1 while the rows tell nothing of the open pass, whose gradients are looked at where it ends; 0 otherwise |
//! | 3 to 7 | 0, for later use |
//! | 8 … | slot 0, then slot 1, of 72 words each |
//!
//! A slot:
//!
//! | Word | Contents |
//! | --- | --- |
//! | 0 | commit that wrote it |
//! | 1 | bytes of the file that are committed |
//! | 2 | passes closed so far, which is also the number of the open pass |
//! | 3 | low half: row set (0 or 1) of the open pass; high half: its situation, all ones before the first |
//! | 4 | low half: shape of the run of closed steps that is still growing; high half: 1 if there is one |
//! | 5 | its number of steps |
//! | 6 | number of entries |
//! | 7 | CRC-32 of words 0 to 6 and of the entries in use |
//! | 8 … | 32 entries of two words: pattern (low half) and flags (high half); count. Passes of the step not closed yet |
//!
//! The writer fills the slot that is not valid, then stores the commit word: whenever the process ends, one slot is whole.
//!
//! LIVE ROWS has, for row set 0 and then 1, for each word of the row, three words: reached, covered, again. The set that is
//! not in use is zero. A pass is closed by the one commit that also changes the row set: its bits are never counted twice,
//! never lost.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::capture::{Passes, Shape, flags};
use crate::error::{Error, Result};

/// Words of LIVE STATE.
pub const STATE_WORDS: usize = FIRST_SLOT + 2 * SLOT_WORDS;
/// Entries that a slot can hold.
pub const MAX_ENTRIES: usize = 32;
/// Words of LIVE ROWS for each word of a row.
pub const ROWS_PER_WORD: usize = 6;

const PASS: usize = 1;
const UNSEEN: usize = 2;
const FIRST_SLOT: usize = 8;
const ENTRIES: usize = 8;
const SLOT_WORDS: usize = ENTRIES + 2 * MAX_ENTRIES;
const NO_SITUATION: u32 = u32::MAX;

/// What a slot says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Bytes of the file that are committed.
    pub journal_len: u64,
    /// Passes closed so far.
    pub num_passes: u64,
    /// Row set of the open pass, 0 or 1.
    pub row_set: u32,
    /// Situation of the open pass.
    pub situation: Option<u32>,
    /// Shape and length of the run of closed steps that is still growing.
    pub run: Option<(u32, u64)>,
    /// Passes of the step that is not closed yet, as far as they are not in the journal; at most [`MAX_ENTRIES`].
    pub entries: Shape,
}

impl State {
    fn to_words(&self, commit: u64) -> Vec<u64> {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let (shape, steps) = self.run.unwrap_or((0, 0));
        let mut words = vec![
            commit,
            self.journal_len,
            self.num_passes,
            pair(self.row_set, self.situation.unwrap_or(NO_SITUATION)),
            pair(shape, u32::from(self.run.is_some())),
            steps,
            self.entries.len() as u64,
            0,
        ];
        words.extend(self.entries.iter().flat_map(|e| [pair(e.pattern, e.flags), e.count]));
        words[7] = checksum(&words);
        words
    }

    fn from_words(words: &[u64], commit: u64) -> Option<Self> {
        let num_entries = usize::try_from(words[6]).ok().filter(|&n| n <= MAX_ENTRIES)?;
        let words = &words[..ENTRIES + 2 * num_entries];
        if words[0] != commit || words[7] != checksum(words) {
            return None;
        }
        let low = |i: usize| words[i] as u32;
        let high = |i: usize| (words[i] >> 32) as u32;
        Some(Self {
            journal_len: words[1],
            num_passes: words[2],
            row_set: low(3) & 1,
            situation: Some(high(3)).filter(|&s| s != NO_SITUATION),
            run: (high(4) == 1).then_some((low(4), words[5])),
            entries: words[ENTRIES..]
                .as_chunks::<2>()
                .0
                .iter()
                .map(|&[id, count]| Passes { pattern: id as u32, flags: (id >> 32) as u32, count })
                .collect(),
        })
    }
}

fn checksum(words: &[u64]) -> u64 {
    let mut hasher = crc32fast::Hasher::new();
    for (_, word) in words.iter().enumerate().filter(|&(i, _)| i != 7) {
        hasher.update(&word.to_le_bytes());
    }
    u64::from(hasher.finalize())
}

/// LIVE STATE of a new shard of `journal_len` bytes, as plain words: commit 0, nothing recorded.
pub fn initial(journal_len: u64) -> Vec<u64> {
    let mut words = vec![0; STATE_WORDS];
    let slot = State { journal_len, ..State::default() }.to_words(0);
    words[FIRST_SLOT..FIRST_SLOT + slot.len()].copy_from_slice(&slot);
    words
}

/// Makes `state` the valid one; `commit` counts up by one from call to call. Words are stored little-endian.
pub fn store(words: &[AtomicU64], commit: u64, state: &State) {
    let slot = &words[FIRST_SLOT + (commit % 2) as usize * SLOT_WORDS..];
    for (to, from) in slot.iter().zip(state.to_words(commit)) {
        to.store(from.to_le(), Ordering::Relaxed);
    }
    words[0].store(commit.to_le(), Ordering::Release);
}

/// Says in LIVE STATE whether the rows tell of the open pass.
pub fn store_unseen(words: &[AtomicU64], unseen: bool) {
    words[UNSEEN].store(u64::from(unseen).to_le(), Ordering::Release);
}

/// Says in LIVE STATE whether pass number `pass` is open.
pub fn store_pass(words: &[AtomicU64], pass: u64, open: bool) {
    words[PASS].store((2 * pass + u64::from(open)).to_le(), Ordering::Release);
}

/// Number of the open pass, as [`store_pass`] left it.
pub fn load_pass(words: &[AtomicU64]) -> Option<u64> {
    let word = u64::from_le(words[PASS].load(Ordering::Acquire));
    (word % 2 == 1).then_some(word / 2)
}

/// The valid state, and the flags of its pass if that is open, from LIVE STATE as read from a file at `offset`.
pub fn load(words: &[u64], offset: u64) -> Result<(State, Option<u32>)> {
    if words.len() < STATE_WORDS {
        let what = format!("live state of {} words, expected {STATE_WORDS}", words.len());
        return Err(Error::Damaged { offset, what });
    }
    let commit = words[0];
    let slot = &words[FIRST_SLOT + (commit % 2) as usize * SLOT_WORDS..][..SLOT_WORDS];
    let Some(state) = State::from_words(slot, commit) else {
        return Err(Error::Damaged { offset, what: format!("live state {commit} does not match its checksum") });
    };
    let open = state.num_passes.checked_mul(2).is_some_and(|begun| words[PASS] == begun + 1);
    let flags = if words[UNSEEN] == 0 { flags::OPEN } else { flags::OPEN | flags::UNSEEN };
    Ok((state, open.then_some(flags)))
}

/// Where in LIVE ROWS of `num_words` row words the three words of row word `word` are.
pub fn row_index(row_set: u32, num_words: usize, word: usize) -> usize {
    (row_set as usize * num_words + word) * (ROWS_PER_WORD / 2)
}
