//! The live store: hooks set bits in the open pass, closing a pass turns its bits into a pattern, and equal steps into a
//! count. Memory holds the patterns met so far, up to a limit; everything else is in the journal.

mod rows;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::bitset::Row;
use crate::capture::{Fact, Lane, Passes, Pattern, RunId, Shape, Situation, flags, push_passes};
use crate::error::{Error, Result};
use crate::journal::live::{self, MAX_ENTRIES, State};
use crate::journal::{Record, Sink, Words, begin_shard, encode, live_rows, read_shard};
use crate::known::Known;
use crate::params::Parameter;

pub use rows::Slot;
use rows::{Block, Shared};

/// Parameters that a model may have; 200 MB of rows.
const MAX_PARAMETERS: u32 = 1 << 24;

/// Records one rank. Any thread may call any method.
pub struct Recorder {
    shared: Arc<Shared>,
    inner: Mutex<Inner>,
}

impl Recorder {
    /// A recorder for `rank` that writes its shard to `path`, or keeps it in memory.
    pub fn new(path: Option<&Path>, run: &RunId, rank: u64) -> Result<Self> {
        let (start, offset) = begin_shard(run, rank);
        let journal_len = start.len() as u64;
        let sink = match path {
            Some(path) => Sink::file(path, &start)?,
            None => Sink::memory(start),
        };
        let words = sink.words(offset, live::STATE_WORDS)?;
        let state = State { journal_len, ..State::default() };
        live::store(&words, 0, &state);
        let inner = Inner {
            sink,
            state_words: (offset, words),
            state,
            commit: 0,
            blocks: Vec::new(),
            num_parameters: 0,
            situations: Known::default(),
            patterns: Known::default(),
            shapes: Known::default(),
            trainable: Row::default(),
            last_pass: Pattern::default(),
            spilled: false,
            failure: None,
            lost: false,
        };
        let shared = Shared { enabled: AtomicBool::new(true), row_set: AtomicU32::new(0) };
        Ok(Self { shared: Arc::new(shared), inner: Mutex::new(inner) })
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        // A panic while the lock was held left the journal committed up to the last whole step.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Defines parameters `first`, `first + 1`, …, new or anew.
    pub fn define(&self, first: u32, parameters: Vec<Parameter>) -> Result<()> {
        let mut inner = self.inner();
        let end = u64::from(first) + parameters.len() as u64;
        if first > inner.num_parameters || end > u64::from(MAX_PARAMETERS) {
            let what = format!("parameters {first} to {end}: expected the next id, at most {MAX_PARAMETERS}");
            return Err(Error::Invalid { what });
        }
        if let Some(p) = parameters.iter().find(|p| p.shape.len() > 255 || p.aliases.len() > usize::from(u16::MAX)) {
            return Err(Error::Invalid {
                what: format!("{}: more dimensions or aliases than can be recorded", p.name),
            });
        }
        inner.num_parameters = inner.num_parameters.max(end as u32);
        inner.append(&Record::Parameters { first, parameters })?;
        inner.grow()
    }

    /// The slot of a defined parameter.
    pub fn slot(&self, id: u32) -> Result<Slot> {
        let inner = self.inner();
        let holds = |b: &&Arc<Block>| b.holds(id);
        match inner.blocks.iter().find(holds) {
            Some(block) if id < inner.num_parameters => Ok(Slot::new(self.shared.clone(), block.clone(), id)),
            _ => Err(Error::Invalid { what: format!("parameter {id} of {}", inner.num_parameters) }),
        }
    }

    /// States what is true of the parameters from the next pass on.
    pub fn set_situation(&self, situation: Situation) -> Result<()> {
        let mut inner = self.inner();
        let s = &situation;
        let rows = [&s.registered, &s.trainable, &s.awaited, &s.wrapped, &s.ignored, &s.optimized];
        if let Some(row) = rows.iter().find(|row| row.end() > inner.num_parameters) {
            let what = format!("parameter {} of {}", row.end() - 1, inner.num_parameters);
            return Err(Error::Invalid { what });
        }
        let (id, is_new) = inner.situations.intern(&situation, 6 * 8 * situation.registered.words().len());
        inner.state.situation = Some(id);
        inner.trainable = situation.trainable.clone();
        if is_new {
            return inner.append(&Record::Situation(situation));
        }
        inner.commit();
        Ok(())
    }

    /// A backward pass begins; `unseen` if nothing of it is known until [`Recorder::arrived`] is called.
    pub fn begin_pass(&self, unseen: bool) {
        let inner = self.inner();
        live::store_unseen(&inner.state_words.1, unseen);
        live::store_pass(&inner.state_words.1, inner.state.num_passes, true);
    }

    /// The pass that began is none of this model's.
    pub fn drop_pass(&self) {
        let inner = self.inner();
        live::store_pass(&inner.state_words.1, inner.state.num_passes, false);
    }

    /// These were reached in the open pass, and those of them covered, as far as it came.
    pub fn arrived(&self, reached: &Row, covered: &Row) {
        if !self.is_enabled() {
            return;
        }
        let inner = self.inner();
        for block in &inner.blocks {
            block.add(inner.state.row_set, [reached, covered]);
        }
        live::store_unseen(&inner.state_words.1, false);
    }

    /// Whether the slots saw just these reached, and covered, in the open pass, and none twice.
    pub fn agrees(&self, reached: &Row, covered: &Row) -> bool {
        let inner = self.inner();
        let [saw_reached, saw_covered, again] = [0, 1, 2].map(|kind| inner.row(inner.state.row_set, kind));
        saw_reached == *reached && saw_covered.intersection(&inner.trainable) == *covered && again.is_empty()
    }

    /// The open pass ended; `flags` are those of [`crate::capture::flags`]. Needs a situation. Says whether its pattern is one
    /// that was not met before, or was forgotten since.
    pub fn close_pass(&self, flags: u32) -> Result<bool> {
        if flags & !flags::WRITTEN != 0 {
            return Err(Error::Invalid {
                what: format!("flags {flags} of a pass: expected some of {}", flags::WRITTEN),
            });
        }
        let mut inner = self.inner();
        let row_set = inner.state.row_set;
        let [reached, covered, again] = [0, 1, 2].map(|k| inner.row(row_set, k));
        // Frozen between forward and backward: its accumulator runs, hooks and all, and accumulates nothing.
        let covered = covered.intersection(&inner.trainable);
        let mut pattern = Pattern { situation: 0, reached, covered, again };
        let is_new = inner.add_pass(&mut pattern, flags)?;
        inner.last_pass = pattern;
        // One commit counts the pass and turns to the other row set; only then may the bits go.
        inner.state.num_passes += 1;
        inner.state.row_set = 1 - row_set;
        inner.commit();
        self.shared.row_set.store(inner.state.row_set, Ordering::Relaxed);
        for block in &inner.blocks {
            block.clear(row_set);
        }
        Ok(is_new)
    }

    /// The parameters reached, and those covered, in the pass closed last; none before the first.
    pub fn last_pass(&self) -> (Vec<u32>, Vec<u32>) {
        let inner = self.inner();
        (inner.last_pass.reached.iter().collect(), inner.last_pass.covered.iter().collect())
    }

    /// Whether any accumulator ran since the last pass was closed.
    pub fn is_touched(&self) -> bool {
        let inner = self.inner();
        inner.blocks.iter().any(|block| block.row(inner.state.row_set, 0).any(|word| word != 0))
    }

    /// The parameters whose accumulators ran since the last pass was closed.
    pub fn reached(&self) -> Row {
        let inner = self.inner();
        inner.row(inner.state.row_set, 0)
    }

    /// Whether a pass was closed since the last step was closed.
    pub fn has_passes(&self) -> bool {
        let inner = self.inner();
        inner.spilled || !inner.state.entries.is_empty()
    }

    /// The step ended; one without a pass is recorded as such.
    pub fn close_step(&self) -> Result<()> {
        let mut inner = self.inner();
        if !inner.spilled && inner.state.entries.is_empty() {
            inner.add_pass(&mut Pattern::default(), flags::EMPTY)?;
        }
        if inner.spilled {
            inner.spilled = false;
            inner.shapes.next += 1;
            let rest = std::mem::take(&mut inner.state.entries);
            return inner.append_all(&[Record::Passes(rest), Record::StepEnd]);
        }
        let shape = std::mem::take(&mut inner.state.entries);
        let (id, is_new) = inner.shapes.intern(&shape, size_of_val(&shape[..]));
        let flushed = match &mut inner.state.run {
            Some((run, count)) if *run == id => {
                *count += 1;
                None
            }
            run => run.replace((id, 1)),
        };
        let flushed = flushed.map(|(shape, count)| Record::Steps { shape, count });
        let records: Vec<_> = is_new.then_some(Record::Shape(shape)).into_iter().chain(flushed).collect();
        inner.append_all(&records)
    }

    /// Notes a fact.
    pub fn note(&self, fact: Fact) -> Result<()> {
        self.inner().append(&Record::Fact(fact))
    }

    /// The rank leaves; nothing may be recorded after this.
    pub fn finish(&self, end: &str) -> Result<()> {
        self.disable();
        self.inner().append(&Record::End(end.into()))
    }

    /// Ignores all events from now on: the block was left, or this is a forked child, whose pages of the file are shared with
    /// its parent.
    pub fn disable(&self) {
        self.shared.enabled.store(false, Ordering::Relaxed);
    }

    /// Whether events are still taken.
    pub fn is_enabled(&self) -> bool {
        self.shared.enabled.load(Ordering::Relaxed)
    }

    /// Number of the pass that is open, if one is.
    pub fn open_pass(&self) -> Option<u64> {
        live::load_pass(&self.inner().state_words.1)
    }

    /// Why recording went on in memory only, if it did.
    pub fn failure(&self) -> Option<String> {
        self.inner().failure.clone()
    }

    /// What was recorded so far, read back from the journal.
    pub fn lane(&self) -> Result<(RunId, Lane)> {
        let bytes = self.inner().snapshot()?;
        read_shard(&bytes)
    }
}

struct Inner {
    sink: Sink,
    state_words: (u64, Words),
    state: State,
    commit: u64,
    blocks: Vec<Arc<Block>>,
    num_parameters: u32,
    situations: Known<Situation>,
    patterns: Known<Pattern>,
    shapes: Known<Shape>,
    trainable: Row,
    /// What the pass closed last did.
    last_pass: Pattern,
    /// Whether passes of the step that is not closed yet are in the journal already.
    spilled: bool,
    /// Why the journal is no longer in its file.
    failure: Option<String>,
    /// The file took no more, and could not be read back either.
    lost: bool,
}

impl Inner {
    fn commit(&mut self) {
        if self.lost {
            return; // The state may refer to a record that was never written.
        }
        self.commit += 1;
        self.state.journal_len = self.sink.len();
        live::store(&self.state_words.1, self.commit, &self.state);
    }

    fn append(&mut self, record: &Record) -> Result<()> {
        self.append_all(std::slice::from_ref(record))
    }

    /// Writes the records and commits them together with the state.
    fn append_all(&mut self, records: &[Record]) -> Result<()> {
        let mut bytes = Vec::new();
        for record in records {
            encode(&mut bytes, record);
        }
        self.write(&bytes)?;
        self.commit();
        Ok(())
    }

    /// Appends bytes; if the file takes no more, goes on in memory with what it has.
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(()); // most steps: no system call
        }
        let Err(error) = self.sink.append(bytes) else { return Ok(()) };
        self.go_on_in_memory(&error)?;
        self.sink.append(bytes)?;
        Ok(())
    }

    /// Leaves the file, which took no more, as it is, and goes on with what it has.
    fn go_on_in_memory(&mut self, error: &std::io::Error) -> Result<()> {
        self.failure = Some(error.to_string());
        // The file keeps its last commit and must not show a pass that will never close in it.
        live::store_pass(&self.state_words.1, self.state.num_passes, false);
        self.lost = true;
        let all = self.sink.contents()?;
        self.lost = false;
        self.sink = Sink::memory(all);
        self.state_words.1 = Words::heap(live::STATE_WORDS);
        Ok(())
    }

    /// Makes room in the rows for all parameters, and to spare.
    fn grow(&mut self) -> Result<()> {
        let have = self.blocks.last().map_or(0, |b| b.first_word + b.num_words);
        let need = (self.num_parameters as usize).div_ceil(64);
        if need <= have {
            return Ok(());
        }
        let num_words = (need - have).max(have / 2).max(4);
        let (record, offset) = live_rows(self.sink.len(), have as u32, num_words);
        self.write(&record)?;
        let len = num_words * live::ROWS_PER_WORD;
        let words = self.sink.words(offset, len).or_else(|error| {
            let Error::Io(error) = error else { return Err(error) };
            self.go_on_in_memory(&error)?;
            self.sink.words(offset, len)
        })?;
        self.blocks.push(Arc::new(Block { first_word: have, num_words, offset, words }));
        self.commit();
        Ok(())
    }

    /// Row `kind` of a row set; see [`Block::row`].
    fn row(&self, row_set: u32, kind: usize) -> Row {
        Row::from_words(self.blocks.iter().flat_map(|block| block.row(row_set, kind)).collect())
    }

    /// Adds a pass to the open step, in the situation that holds, and says whether its pattern is new; the caller commits.
    fn add_pass(&mut self, pattern: &mut Pattern, flags: u32) -> Result<bool> {
        let Some(situation) = self.state.situation else {
            return Err(Error::Invalid { what: "a pass was closed before any situation was set".into() });
        };
        pattern.situation = situation;
        let bytes = 3 * 8 * pattern.reached.words().len();
        let (id, is_new) = self.patterns.intern(pattern, bytes);
        let mut written = Vec::new();
        if is_new {
            encode(&mut written, &Record::Pattern(pattern.clone()));
        }
        let passes = Passes { pattern: id, flags, count: 1 };
        let mut entries = std::mem::take(&mut self.state.entries);
        push_passes(&mut entries, passes);
        if entries.len() > MAX_ENTRIES {
            // A step of very many different passes, or a run without optimizer steps: the journal takes them.
            let last = entries.split_off(MAX_ENTRIES);
            if let Some((shape, count)) = self.state.run.take() {
                encode(&mut written, &Record::Steps { shape, count });
            }
            encode(&mut written, &Record::Passes(entries));
            entries = last;
            self.spilled = true;
        }
        self.state.entries = entries;
        self.write(&written)?;
        Ok(is_new)
    }

    /// The shard as a file would have it now.
    fn snapshot(&mut self) -> Result<Vec<u8>> {
        let mut bytes = self.sink.contents()?;
        let live = std::iter::once((self.state_words.0, &self.state_words.1));
        for (offset, words) in live.chain(self.blocks.iter().map(|b| (b.offset, &b.words))) {
            for (i, word) in words.iter().enumerate() {
                let begin = offset as usize + 8 * i;
                bytes[begin..begin + 8].copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
        }
        Ok(bytes)
    }
}
