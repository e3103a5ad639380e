//! Everything that can go wrong in the core, one variant per cause.
//!
//! A message says what was found and what was expected; the caller, who knows the path, puts it in front.

/// The result of every fallible function here.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a file could not be read or written, or why shards could not be merged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The first bytes are not those of a ddpcov file.
    #[error(
        "not a ddpcov capture: found {found}, expected a file written by ddpcov; check the path (a capture is the file given to `out=`)"
    )]
    NotACapture {
        /// What the file looks like instead.
        found: String,
    },
    /// Written by a later ddpcov.
    #[error(
        "capture format {found} is too new: this ddpcov reads formats up to {supported}; upgrade ddpcov here, or read the file where it was written"
    )]
    TooNew {
        /// Version in the file.
        found: u32,
        /// Newest version that can be read.
        supported: u32,
    },
    /// Written by an earlier ddpcov whose format is no longer read.
    #[error(
        "capture format {found} is too old: this ddpcov reads formats from {supported}; record the run again, or read it with the ddpcov that wrote it"
    )]
    TooOld {
        /// Version in the file.
        found: u32,
        /// Oldest version that can be read.
        supported: u32,
    },
    /// The file ends before something that it announces.
    #[error(
        "truncated: {what} needs {needed} bytes at offset {offset}, found {found}; copy the file again, or use the run's other shards"
    )]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Where in the file.
        offset: u64,
        /// How many bytes are needed there.
        needed: u64,
        /// How many bytes there are.
        found: u64,
    },
    /// The bytes contradict their checksum, or one another.
    #[error("damaged at offset {offset}: {what}; copy the file again, or use the run's other shards")]
    Damaged {
        /// Where in the file.
        offset: u64,
        /// What was found and what was expected.
        what: String,
    },
    /// A shard where a capture is needed, or the other way round.
    #[error("this is a {found}, expected a {expected}")]
    WrongKind {
        /// What the file is.
        found: &'static str,
        /// What the caller needs.
        expected: &'static str,
    },
    /// Shards that do not belong together.
    #[error("cannot merge: {what}; give only the shards of one run")]
    Mismatch {
        /// What differs.
        what: String,
    },
    /// A caller passed something that no file could hold.
    #[error("{what}")]
    Invalid {
        /// What was passed, and what is accepted.
        what: String,
    },
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}
