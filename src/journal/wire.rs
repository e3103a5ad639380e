//! Bytes of numbers, strings, rows and ranges; every length checked against what is there before anything is allocated.

use crate::bitset::Row;
use crate::error::{Error, Result};
use crate::ranges::Ranges;

pub fn put_u16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub fn put_str(out: &mut Vec<u8>, value: &str) {
    put_u32(out, value.len() as u32);
    out.extend_from_slice(value.as_bytes());
}

pub fn put_row(out: &mut Vec<u8>, row: &Row) {
    put_u32(out, row.words().len() as u32);
    for &word in row.words() {
        put_u64(out, word);
    }
}

pub fn put_ranges(out: &mut Vec<u8>, ranges: &Ranges) {
    put_u32(out, ranges.as_slice().len() as u32);
    for &(first, last) in ranges.as_slice() {
        put_u64(out, first);
        put_u64(out, last);
    }
}

/// Reads a piece of a file from its beginning; errors name the offset in the file.
pub struct Cursor<'a> {
    bytes: &'a [u8],
    offset: u64,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8], offset: u64) -> Self {
        Self { bytes, offset }
    }

    pub fn offset(&self) -> u64 {
        self.offset
    }

    pub fn rest(&self) -> usize {
        self.bytes.len()
    }

    pub fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.bytes.split_at_checked(len) else {
            let (needed, found) = (len as u64, self.bytes.len() as u64);
            return Err(Error::Truncated { what, offset: self.offset, needed, found });
        };
        self.bytes = rest;
        self.offset += len as u64;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    pub fn u8(&mut self, what: &'static str) -> Result<u8> {
        Ok(self.array::<1>(what)?[0])
    }

    pub fn u16(&mut self, what: &'static str) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things of at least `least` bytes each, which must fit into what is left.
    pub fn count(&mut self, least: usize, what: &'static str) -> Result<usize> {
        let offset = self.offset;
        let count = self.u32(what)? as usize;
        let needed = count as u64 * least as u64;
        if needed > self.bytes.len() as u64 {
            return Err(Error::Truncated { what, offset, needed, found: self.bytes.len() as u64 });
        }
        Ok(count)
    }

    pub fn string(&mut self, what: &'static str) -> Result<String> {
        let len = self.count(1, what)?;
        let offset = self.offset;
        let bytes = self.take(len, what)?;
        let damaged = |_| Error::Damaged { offset, what: format!("{what} is not UTF-8") };
        std::str::from_utf8(bytes).map(str::to_owned).map_err(damaged)
    }

    pub fn words(&mut self, count: usize, what: &'static str) -> Result<Vec<u64>> {
        let bytes = self.take(count * 8, what)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }

    pub fn row(&mut self, what: &'static str) -> Result<Row> {
        let count = self.count(8, what)?;
        Ok(Row::from_words(self.words(count, what)?))
    }

    pub fn ranges(&mut self, what: &'static str) -> Result<Ranges> {
        let offset = self.offset;
        let count = self.count(16, what)?;
        let mut out = Ranges::new();
        let mut next = Some(0);
        for _ in 0..count {
            let (first, last) = (self.u64(what)?, self.u64(what)?);
            if first > last || next.is_none_or(|n| first < n) {
                return Err(Error::Damaged { offset, what: format!("{what}: ranges out of order") });
            }
            next = last.checked_add(2);
            out.push(first, last);
        }
        Ok(out)
    }

    pub fn finish(&self, what: &'static str) -> Result<()> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        let what = format!("{} bytes left over in {what}", self.bytes.len());
        Err(Error::Damaged { offset: self.offset, what })
    }
}
