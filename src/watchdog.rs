//! A thread that notices a pass that stays open, and says on stderr what it waits for. It needs neither the interpreter nor
//! anything of the threads that record.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::capture::{Fact, Lane, RunId};
use crate::journal::read_shard_at;
use crate::recorder::Recorder;
use crate::stall::{open_pass, stalls};

/// Topic of the fact that a stall was noticed.
pub const TOPIC: &str = "stall";

/// Shards of other ranks that are read.
const MAX_SHARDS: u64 = 4096;
/// Of several ranks in one pass the first speaks, each further one this much of the time later, if none has.
const TURN: f64 = 0.25;
const MAX_TURNS: u8 = 4;

/// Watches a recorder that writes to `shard`, until it is finished, disabled or gone.
pub fn watch(recorder: &Arc<Recorder>, shard: Option<PathBuf>, after: Duration) {
    let watchdog = Watchdog { recorder: Arc::downgrade(recorder), shard, after, since: None, has_spoken: false };
    // Without the thread nothing but the warning is missing.
    let _ = thread::Builder::new().name("ddpcov-watchdog".into()).spawn(move || watchdog.run());
}

struct Watchdog {
    recorder: Weak<Recorder>,
    shard: Option<PathBuf>,
    after: Duration,
    /// The open pass, and when it was first seen open.
    since: Option<(u64, Instant)>,
    has_spoken: bool,
}

impl Watchdog {
    fn run(mut self) {
        let pause = (self.after / 8).clamp(Duration::from_millis(5), Duration::from_secs(1));
        loop {
            thread::sleep(pause);
            let Some(recorder) = self.recorder.upgrade() else { return };
            if !recorder.is_enabled() {
                return;
            }
            self.look(&recorder);
        }
    }

    fn look(&mut self, recorder: &Recorder) {
        let Some(pass) = recorder.open_pass() else {
            self.since = None;
            return;
        };
        match self.since {
            Some((known, begun)) if known == pass => {
                if !self.has_spoken && begun.elapsed() >= self.after {
                    self.has_spoken = self.speak(recorder, pass, begun.elapsed());
                }
            }
            _ => {
                self.since = Some((pass, Instant::now()));
                self.has_spoken = false;
            }
        }
    }

    /// Says what is known of the pass, unless it is another rank's turn; whether that is settled.
    fn speak(&self, recorder: &Recorder, pass: u64, waited: Duration) -> bool {
        let Ok((run, own)) = recorder.lane() else { return true };
        if open_pass(&own) != Some(pass) {
            return false; // closed just now
        }
        let rank = own.ranks.as_slice()[0].0;
        let mut lanes = vec![own];
        lanes.extend(self.shard.as_deref().into_iter().flat_map(|shard| others(shard, &run, rank)));
        let is_in = |lane: &&Lane| open_pass(lane) == Some(pass);
        let before = lanes[1..].iter().filter(is_in).filter(|lane| lane.ranks.as_slice()[0].0 < rank).count();
        if waited
            < self.after.mul_f64(1.0 + TURN * f64::from(u8::try_from(before).map_or(MAX_TURNS, |n| n.min(MAX_TURNS))))
        {
            return false;
        }
        if lanes[1..].iter().filter(is_in).any(|lane| has_noted(lane, pass)) {
            return true;
        }
        let Some(stall) = stalls(&lanes).into_iter().find(|stall| stall.lane == 0) else { return true };
        let mut text = format!("ddpcov: backward pass {pass} is open for {:.0} s:\n", waited.as_secs_f64());
        for line in &stall.lines {
            text.extend(["  ", line, "\n"]);
        }
        if let Some(capture) = self.shard.as_deref().and_then(capture_of) {
            text.extend([
                "`python -m ddpcov report ",
                &capture.to_string_lossy(),
                "` tells more, also while it hangs.\n",
            ]);
        }
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
        let _ = recorder.note(Fact { topic: TOPIC.into(), body: body(pass, waited) });
        true
    }
}

fn body(pass: u64, waited: Duration) -> String {
    format!("{{\"pass\": {pass}, \"seconds\": {:.0}}}", waited.as_secs_f64())
}

fn has_noted(lane: &Lane, pass: u64) -> bool {
    let begin = format!("{{\"pass\": {pass},");
    lane.facts.iter().any(|fact| fact.topic == TOPIC && fact.body.starts_with(&begin))
}

/// `run.bin` of `run.bin.rank3`.
fn capture_of(shard: &Path) -> Option<PathBuf> {
    shard.file_stem().map(|name| shard.with_file_name(name))
}

/// What the other ranks of the run have on disk, beside this one's shard.
fn others(shard: &Path, run: &RunId, own: u64) -> Vec<Lane> {
    let Some(capture) = capture_of(shard) else { return Vec::new() };
    let ranks = run.ranks.as_slice().iter().flat_map(|&(first, last)| first..=last).filter(|&rank| rank != own);
    let read = |rank: u64| {
        let mut path = capture.clone().into_os_string();
        path.push(format!(".rank{rank}"));
        let (theirs, lane) = read_shard_at(Path::new(&path)).ok()?;
        (theirs.nonce == run.nonce).then_some(lane)
    };
    share_tables(ranks.take(MAX_SHARDS as usize).filter_map(read).collect())
}

/// Equal parameter tables become one, so that rows of different ranks can be compared.
fn share_tables(mut lanes: Vec<Lane>) -> Vec<Lane> {
    for i in 1..lanes.len() {
        let (before, rest) = lanes.split_at_mut(i);
        if let Some(same) = before.iter().find(|lane| lane.params == rest[0].params) {
            rest[0].params = same.params.clone();
        }
    }
    lanes
}
