//! The rows of the open pass, and the slots through which autograd sets their bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::bitset::Row;
use crate::journal::Words;
use crate::journal::live;

/// What all slots of a recorder look at.
pub struct Shared {
    pub enabled: AtomicBool,
    pub row_set: AtomicU32,
}

/// Row words for a range of parameters. A model that grows gets a further block; none is ever moved.
pub struct Block {
    pub first_word: usize,
    pub num_words: usize,
    /// Where its words are in the shard.
    pub offset: u64,
    pub words: Words,
}

impl Block {
    /// Its words of row `kind` (0 reached, 1 covered, 2 again) of a row set.
    pub fn row(&self, row_set: u32, kind: usize) -> impl Iterator<Item = u64> + '_ {
        let begin = live::row_index(row_set, self.num_words, 0) + kind;
        let words = self.words[begin..].iter().step_by(3).take(self.num_words);
        words.map(|word| u64::from_le(word.load(Ordering::Relaxed)))
    }

    /// Whether the bits of a parameter are in it.
    pub fn holds(&self, id: u32) -> bool {
        (self.first_word..self.first_word + self.num_words).contains(&(id as usize / 64))
    }

    /// Sets what it holds of the rows reached and covered.
    pub fn add(&self, row_set: u32, rows: [&Row; 2]) {
        let own = &self.words[live::row_index(row_set, self.num_words, 0)..];
        for (kind, row) in rows.into_iter().enumerate() {
            let bits = row.words().iter().skip(self.first_word).take(self.num_words);
            for (word, bits) in own[kind..].iter().step_by(3).zip(bits) {
                word.fetch_or(bits.to_le(), Ordering::Relaxed);
            }
        }
    }

    /// Clears every row of a row set.
    pub fn clear(&self, row_set: u32) {
        let begin = live::row_index(row_set, self.num_words, 0);
        for word in &self.words[begin..begin + 3 * self.num_words] {
            word.store(0, Ordering::Relaxed);
        }
    }
}

/// One parameter's entry to the recorder, called from autograd.
pub struct Slot {
    shared: Arc<Shared>,
    block: Arc<Block>,
    word: usize,
    mask: u64,
    defined: AtomicBool,
}

impl Slot {
    /// The slot of a parameter whose bits are in the block.
    pub fn new(shared: Arc<Shared>, block: Arc<Block>, id: u32) -> Self {
        let word = id as usize / 64 - block.first_word;
        Self { shared, block, word, mask: (1_u64 << (id % 64)).to_le(), defined: AtomicBool::new(false) }
    }

    /// A gradient, defined or not, is about to be accumulated; or was only captured, and nothing more follows.
    pub fn arrived(&self, defined: bool) {
        self.defined.store(defined, Ordering::Relaxed);
    }

    /// The gradient accumulator ran.
    pub fn accumulated(&self) {
        // Taken, not read: what `autograd.grad` captured last must not vouch for the next accumulation.
        let defined = self.defined.swap(false, Ordering::Relaxed);
        if !self.shared.enabled.load(Ordering::Relaxed) {
            return;
        }
        let row_set = self.shared.row_set.load(Ordering::Relaxed);
        let words = &self.block.words[live::row_index(row_set, self.block.num_words, self.word)..];
        if words[0].fetch_or(self.mask, Ordering::Relaxed) & self.mask != 0 {
            words[2].fetch_or(self.mask, Ordering::Relaxed);
        }
        if defined {
            words[1].fetch_or(self.mask, Ordering::Relaxed);
        }
    }
}
