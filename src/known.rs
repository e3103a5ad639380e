//! Recognising what was met before, in bounded memory.

use std::collections::HashMap;

/// Patterns and shapes kept for recognition, in bytes. When a run has more (random routing among many experts), they are
/// forgotten and met anew: the journal grows, memory does not.
const MAX_KNOWN_BYTES: usize = 64 << 20;

/// Things recognised when they are met again; ids count up whether or not they are still known.
pub struct Known<T> {
    ids: HashMap<T, u32>,
    /// The id of the next new thing.
    pub next: u32,
    bytes: usize,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self { ids: HashMap::new(), next: 0, bytes: 0 }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Known<T> {
    /// The thing's id, and whether it is new; `bytes` is roughly its size.
    pub fn intern(&mut self, thing: &T, bytes: usize) -> (u32, bool) {
        if let Some(&id) = self.ids.get(thing) {
            return (id, false);
        }
        self.bytes += bytes + 64;
        if self.bytes > MAX_KNOWN_BYTES {
            self.ids.clear();
            self.bytes = bytes;
        }
        self.ids.insert(thing.clone(), self.next);
        self.next += 1;
        (self.next - 1, true)
    }
}
