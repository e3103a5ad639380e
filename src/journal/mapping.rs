//! Words of memory that several threads may write: mapped from a file, or on the heap where there is no file.
#![allow(unsafe_code, clippy::cast_ptr_alignment)] // The one place; see the safety arguments.

use std::fs::File;
use std::ops::Deref;
use std::sync::atomic::AtomicU64;

use memmap2::{MmapOptions, MmapRaw};

use crate::error::Result;

/// A slice of atomic words that stays valid, and in place, as long as this lives.
pub struct Words(Owner);

enum Owner {
    Mapped { map: MmapRaw, len: usize },
    Heap(Box<[AtomicU64]>),
}

impl Words {
    /// Maps `len` words at `offset` of the file, which must be a multiple of eight. The file must already be that long: the
    /// kernel has then set the space aside, and a store cannot fail for want of it.
    pub fn map(file: &File, offset: u64, len: usize) -> Result<Self> {
        debug_assert!(offset.is_multiple_of(8));
        let map = MmapOptions::new().offset(offset).len(len * 8).map_raw(file)?;
        Ok(Self(Owner::Mapped { map, len }))
    }

    /// `len` words of zero on the heap.
    pub fn heap(len: usize) -> Self {
        Self(Owner::Heap((0..len).map(|_| AtomicU64::new(0)).collect()))
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        match &self.0 {
            Owner::Heap(words) => words,
            // SAFETY: the map is `len` words long, lives as long as `self`, is readable and writable, and begins on a
            // multiple of eight (pages are aligned, and the offset is a multiple of eight). AtomicU64 has the layout of u64
            // and permits concurrent change, from this process or, through the file, from another.
            Owner::Mapped { map, len } => unsafe { std::slice::from_raw_parts(map.as_ptr().cast::<AtomicU64>(), *len) },
        }
    }
}
