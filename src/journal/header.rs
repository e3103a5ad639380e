//! The first 24 bytes of every file.

use super::wire::{Cursor, put_u32};
use crate::error::{Error, Result};

const MAGIC: [u8; 8] = *b"\x89DDPCOV\n";

/// Version written. To be raised with any change that an existing reader would get wrong; the reader of the version before
/// then moves to a file of its own, and a golden file of it stays in `tests/golden`.
pub const CURRENT_VERSION: u32 = 1;

/// Oldest version read.
pub const OLDEST_VERSION: u32 = 1;

/// Length of the header in bytes.
pub const LEN: usize = 24;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One rank, written as it runs.
    Shard = 1,
    /// A merged run.
    Capture = 2,
}

impl Kind {
    /// The word for it in messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Shard => "shard",
            Kind::Capture => "capture",
        }
    }
}

/// `num_lanes` is that of a capture, 0 in a shard.
pub fn encode(kind: Kind, num_lanes: u32) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    for value in [CURRENT_VERSION, kind as u32, num_lanes] {
        put_u32(&mut out, value);
    }
    let crc = crc32fast::hash(&out);
    put_u32(&mut out, crc);
    out
}

/// The kind of the file, and how many lanes it has if it is a capture.
pub fn decode(bytes: &[u8]) -> Result<(Kind, u32)> {
    let shown = &bytes[..bytes.len().min(MAGIC.len())];
    if bytes.is_empty() || !MAGIC.starts_with(shown) {
        return Err(Error::NotACapture { found: describe(bytes) });
    }
    if bytes.len() < LEN {
        return Err(Error::Truncated { what: "the header", offset: 0, needed: LEN as u64, found: bytes.len() as u64 });
    }
    let mut cursor = Cursor::new(&bytes[..LEN], 0);
    cursor.take(MAGIC.len(), "the magic")?;
    let (version, kind, num_lanes, crc) =
        (cursor.u32("version")?, cursor.u32("kind")?, cursor.u32("lanes")?, cursor.u32("checksum")?);
    let expected = crc32fast::hash(&bytes[..LEN - 4]);
    if crc != expected {
        let what = format!("the header's checksum is {crc:08x}, expected {expected:08x}");
        return Err(Error::Damaged { offset: 0, what });
    }
    // The checksum stands first: a flipped bit in the version is damage, and must not send anyone to upgrade.
    if version > CURRENT_VERSION {
        return Err(Error::TooNew { found: version, supported: CURRENT_VERSION });
    }
    if version < OLDEST_VERSION {
        return Err(Error::TooOld { found: version, supported: OLDEST_VERSION });
    }
    match kind {
        1 => Ok((Kind::Shard, num_lanes)),
        2 => Ok((Kind::Capture, num_lanes)),
        _ => Err(Error::Damaged { offset: 12, what: format!("file kind is {kind}, expected 1 or 2") }),
    }
}

/// Names the things that people pass by mistake.
fn describe(bytes: &[u8]) -> String {
    let text = bytes.trim_ascii_start();
    match bytes {
        [] => "an empty file".into(),
        [b'P', b'K', 3, 4, ..] => "a zip archive (a PyTorch checkpoint?)".into(),
        [0x80, 2..=5, ..] => "a Python pickle (a PyTorch checkpoint?)".into(),
        _ if text.starts_with(b"{") || text.starts_with(b"[") => {
            "JSON text (a report, not the capture it was made from?)".into()
        }
        _ if bytes.iter().take(64).all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace()) => "a text file".into(),
        _ => format!("a file that begins with {:02x?}", &bytes[..bytes.len().min(8)]),
    }
}
