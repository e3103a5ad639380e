//! A pass that stays open: what its ranks have, and what the others did in that pass, in words. Ranks are matched by the
//! number of the pass; of each rank that much is told as its history holds.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::bitset::Row;
use crate::capture::{Lane, Passes, flags};
use crate::ranges::Ranges;

/// Names of parameters in a line, and lines on other ranks.
const MAX_NAMES: usize = 5;
const MAX_GROUPS: usize = 8;
/// Different passes in which ranks of one run may be open; beyond that nothing is told of them.
const MAX_PASSES: usize = 64;

const UNSEEN: &str = "how far it came is not known, as gradients are looked at where a pass ends";

/// What is told of a lane whose last pass is open.
pub struct Stall {
    /// The lane.
    pub lane: usize,
    /// Number of the open pass.
    pub pass: u64,
    /// What its ranks lack in it, then what the others did.
    pub lines: Vec<String>,
}

/// What ranks did in a pass.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Did {
    /// They are in it, and lack these.
    Opened(Vec<u64>),
    /// They are in it, and how far they came is not known.
    Unseen,
    /// They ended it without these.
    Ended(Vec<u64>),
    /// They did not begin it, and made so many.
    NotYet(u64, Option<String>),
}

/// A description of each lane whose last pass is open, in the order of the lanes.
pub fn stalls(lanes: &[Lane]) -> Vec<Stall> {
    let mut told: BTreeMap<u64, Vec<(Did, usize, Ranges)>> = BTreeMap::new();
    let mut out = Vec::new();
    for (index, lane) in lanes.iter().enumerate() {
        let Some(pass) = open_pass(lane) else { continue };
        if told.len() >= MAX_PASSES && !told.contains_key(&pass) {
            continue;
        }
        let groups = told.entry(pass).or_insert_with(|| group(lanes, pass));
        let mut text = match what(lane, pass) {
            Did::Opened(lacking) => vec![describe_own(lane, &lacking)],
            Did::Unseen => vec![format!("{}: {UNSEEN}", ranks_in_words(&lane.ranks))],
            _ => continue,
        };
        let mut others: Vec<String> = Vec::new();
        for (did, of, ranks) in groups {
            let ranks = ranks.difference(&lane.ranks);
            if !ranks.is_empty() {
                others.push(describe(&ranks, &lanes[*of], did));
            }
        }
        let more = others.len().saturating_sub(MAX_GROUPS);
        others.truncate(MAX_GROUPS);
        text.extend(others);
        if more > 0 {
            text.push(format!("and {more} more kinds of ranks"));
        }
        out.push(Stall { lane: index, pass, lines: text });
    }
    out
}

/// Number of the pass in which the lane's ranks are, if they are in one.
pub fn open_pass(lane: &Lane) -> Option<u64> {
    let is_open = lane.open.last().is_some_and(|p| p.flags & flags::OPEN != 0);
    is_open.then(|| num_passes(lane).saturating_sub(1))
}

/// What was done in a pass, with the lane that shows its names and the ranks of which it is true.
fn group(lanes: &[Lane], pass: u64) -> Vec<(Did, usize, Ranges)> {
    let mut groups: BTreeMap<(usize, Did), (usize, Ranges)> = BTreeMap::new();
    for (index, lane) in lanes.iter().enumerate() {
        // Rows of different tables cannot be compared.
        let key = (Arc::as_ptr(&lane.params) as usize, what(lane, pass));
        let (_, ranks) = groups.entry(key).or_insert_with(|| (index, Ranges::new()));
        *ranks = ranks.union(&lane.ranks);
    }
    let mut out: Vec<_> = groups.into_iter().map(|((_, did), (index, ranks))| (did, index, ranks)).collect();
    // Those that lack something first: it is what the others wait for.
    out.sort_by_key(|(did, _, ranks)| (order(did), ranks.as_slice().first().copied()));
    out
}

fn order(did: &Did) -> u8 {
    match did {
        Did::Ended(lacking) if !lacking.is_empty() => 0,
        Did::NotYet(..) => 1,
        Did::Opened(lacking) if !lacking.is_empty() => 2,
        Did::Unseen => 3,
        Did::Opened(_) => 4,
        Did::Ended(_) => 5,
    }
}

fn what(lane: &Lane, pass: u64) -> Did {
    let Some(found) = find(lane, pass) else { return Did::NotYet(num_passes(lane), lane.end.clone()) };
    let pattern = &lane.patterns[found.pattern as usize];
    let situation = &lane.situations[pattern.situation as usize];
    let needed = if situation.has_wrapper { &situation.awaited } else { &situation.trainable };
    if found.flags & flags::UNSEEN != 0 {
        return Did::Unseen;
    }
    let lacking = needed.difference(&pattern.reached).words().to_vec();
    if found.flags & flags::OPEN == 0 { Did::Ended(lacking) } else { Did::Opened(lacking) }
}

/// The passes of a step, without what is none.
fn each(shape: &[Passes]) -> impl Iterator<Item = &Passes> {
    shape.iter().filter(|passes| passes.flags & flags::EMPTY == 0)
}

fn count(shape: &[Passes]) -> u64 {
    each(shape).fold(0, |n, passes| n.saturating_add(passes.count))
}

fn num_passes(lane: &Lane) -> u64 {
    lane.steps.iter().fold(count(&lane.open), |n, &(shape, times)| {
        n.saturating_add(count(&lane.shapes[shape as usize]).saturating_mul(times))
    })
}

/// Pass number `pass` of a lane.
fn find(lane: &Lane, mut pass: u64) -> Option<Passes> {
    let closed = lane.steps.iter().map(|&(shape, count)| (&lane.shapes[shape as usize], count));
    for (shape, times) in closed.chain(std::iter::once((&lane.open, 1))) {
        let of_step = count(shape);
        let all = of_step.saturating_mul(times);
        if pass >= all {
            pass -= all;
            continue;
        }
        let mut rest = pass % of_step;
        for passes in each(shape) {
            if rest < passes.count {
                return Some(*passes);
            }
            rest -= passes.count;
        }
    }
    None
}

fn describe_own(lane: &Lane, lacking: &[u64]) -> String {
    let ranks = ranks_in_words(&lane.ranks);
    if lacking.is_empty() {
        format!("{ranks}: every gradient that is waited for has arrived here; what is open waits for other ranks")
    } else {
        format!("{ranks}: not reached so far: {}", names(lane, lacking))
    }
}

fn describe(ranks: &Ranges, lane: &Lane, did: &Did) -> String {
    let ranks = ranks_in_words(ranks);
    match did {
        Did::Ended(lacking) if lacking.is_empty() => format!("{ranks}: ended that pass"),
        Did::Ended(lacking) => format!("{ranks}: ended that pass without {}", names(lane, lacking)),
        Did::Opened(lacking) if lacking.is_empty() => format!("{ranks}: also in that pass, with every gradient"),
        Did::Opened(lacking) => format!("{ranks}: also in that pass, without {} so far", names(lane, lacking)),
        Did::Unseen => format!("{ranks}: also in that pass; {UNSEEN}"),
        Did::NotYet(num, None) => format!("{ranks}: did not begin that pass; {num} before it"),
        Did::NotYet(num, Some(end)) => format!("{ranks}: left after {num} passes ({end})"),
    }
}

fn names(lane: &Lane, row: &[u64]) -> String {
    let row = Row::from_words(row.to_vec());
    let known = lane.params.as_slice();
    let shown: Vec<&str> =
        row.iter().take(MAX_NAMES).filter_map(|id| known.get(id as usize)).map(|p| p.name.as_str()).collect();
    let more = row.count() as usize - shown.len();
    if more > 0 { format!("{} and {more} more", shown.join(", ")) } else { shown.join(", ") }
}

fn ranks_in_words(ranks: &Ranges) -> String {
    let shown: Vec<String> = (ranks.as_slice().iter())
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    format!("{} {}", if ranks.count() == 1 { "rank" } else { "ranks" }, shown.join(", "))
}
