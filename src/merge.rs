//! Shards or lanes of one run into one capture: ranks whose histories are equal share a lane.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::capture::{Capture, Lane, RunId};
use crate::error::{Error, Result};
use crate::params::Params;

/// Collects lanes, one after the other, and keeps equal ones once.
#[derive(Default)]
pub struct Merger {
    run: Option<RunId>,
    lanes: Vec<Lane>,
    /// Where lanes of equal hash are, so that few need comparing.
    alike: HashMap<u64, Vec<usize>>,
    tables: Vec<Arc<Params>>,
}

impl Merger {
    /// Adds a lane of a run, which must be the run of those before, and of ranks that none before has.
    pub fn add(&mut self, run: &RunId, mut lane: Lane) -> Result<()> {
        match &self.run {
            Some(known) if known != run => {
                let what = format!("shards of different runs ({:016x} and {:016x})", known.nonce, run.nonce);
                return Err(Error::Mismatch { what });
            }
            Some(_) => {}
            None => self.run = Some(run.clone()),
        }
        if let Some(known) = self.lanes.iter().find(|l| !l.ranks.intersection(&lane.ranks).is_empty()) {
            let rank = known.ranks.intersection(&lane.ranks).as_slice()[0].0;
            return Err(Error::Mismatch { what: format!("rank {rank} twice") });
        }
        if !lane.ranks.difference(&run.ranks).is_empty() {
            let rank = lane.ranks.difference(&run.ranks).as_slice()[0].0;
            return Err(Error::Mismatch { what: format!("rank {rank} is not part of the run") });
        }
        // Names once: lanes of one table share it.
        match self.tables.iter().find(|table| **table == lane.params) {
            Some(table) => lane.params = table.clone(),
            None => self.tables.push(lane.params.clone()),
        }
        let mut hasher = DefaultHasher::new();
        (&lane.patterns, &lane.shapes, &lane.steps, &lane.open).hash(&mut hasher);
        let alike = self.alike.entry(hasher.finish()).or_default();
        if let Some(&index) = alike.iter().find(|&&i| is_same_history(&self.lanes[i], &lane)) {
            self.lanes[index].ranks = self.lanes[index].ranks.union(&lane.ranks);
        } else {
            alike.push(self.lanes.len());
            self.lanes.push(lane);
        }
        Ok(())
    }

    /// The capture of all that was added.
    pub fn finish(self) -> Result<Capture> {
        let Some(run) = self.run else {
            return Err(Error::Mismatch { what: "no shard".into() });
        };
        let mut lanes = self.lanes;
        lanes.sort_by_key(|lane| lane.ranks.as_slice().first().copied());
        Ok(Capture { run, lanes })
    }
}

fn is_same_history(a: &Lane, b: &Lane) -> bool {
    Arc::ptr_eq(&a.params, &b.params)
        && a.end == b.end
        && a.steps == b.steps
        && a.open == b.open
        && a.shapes == b.shapes
        && a.patterns == b.patterns
        && a.situations == b.situations
        && a.facts == b.facts
}
