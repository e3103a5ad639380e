//! Runs to test with: strategies for lanes and captures, and a lane taken apart into what it says.

use std::sync::Arc;

use _core::bitset::Row;
use _core::capture::{Capture, Fact, Lane, Passes, Pattern, RunId, Shape, Situation, flags, push_passes};
use _core::params::{Parameter, Params};
use _core::ranges::Ranges;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, subsequence};

/// A row of these parameters.
pub fn row(members: &[u32]) -> Row {
    members.iter().copied().collect()
}

/// The ranks `first..=last`.
pub fn ranks(first: u64, last: u64) -> Ranges {
    [(first, last)].into_iter().collect()
}

/// A run of ranks 0 to 15.
pub fn run_id() -> RunId {
    RunId { started: 1_700_000_000, nonce: 0xFEED, ranks: ranks(0, 15), optimizer_given: false, ddpcov: "0.1.0".into() }
}

/// Parameters `p0.weight`, `p1.weight`, …
pub fn parameters(ids: std::ops::Range<u32>) -> Vec<Parameter> {
    let of_id = |id| Parameter {
        name: format!("p{id}.weight"),
        aliases: Vec::new(),
        shape: vec![4, 4],
        dtype: "float32".into(),
        itemsize: 4,
        module_class: "torch.nn.modules.linear.Linear".into(),
    };
    ids.map(of_id).collect()
}

/// A table of these parameters.
pub fn table(parameters: Vec<Parameter>) -> Arc<Params> {
    let mut params = Params::default();
    assert!(params.define(0, parameters));
    Arc::new(params)
}

/// A situation in which parameters `0..num` are registered and trainable and nothing else is known.
pub fn plain_situation(num: u32) -> Situation {
    let all: Row = (0..num).collect();
    Situation { registered: all.clone(), trainable: all, ..Situation::default() }
}

/// A pass, taken apart: situation, pattern (its situation's id set to 0, for ids are no content) and flags.
pub type PassContent = (Situation, Pattern, u32);

/// The closed steps and the open one as lists of passes, one by one.
pub fn contents(lane: &Lane) -> (Vec<Vec<PassContent>>, Vec<PassContent>) {
    let of_shape = |shape: &Shape| -> Vec<PassContent> {
        let of_passes = |p: &Passes| {
            let pattern = lane.patterns[p.pattern as usize].clone();
            let situation = lane.situations[pattern.situation as usize].clone();
            vec![(situation, Pattern { situation: 0, ..pattern }, p.flags); p.count as usize]
        };
        shape.iter().flat_map(of_passes).collect()
    };
    let of_steps = |&(shape, count): &(u32, u64)| vec![of_shape(&lane.shapes[shape as usize]); count as usize];
    (lane.steps.iter().flat_map(of_steps).collect(), of_shape(&lane.open))
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![Just(String::new()), "[a-z.é]{1,8}".prop_map(String::from)]
}

/// Some of the parameters of a pool of names, in any order, with shapes that differ between tables now and then.
fn tables() -> impl Strategy<Value = Arc<Params>> {
    let names: Vec<u32> = (0..80).collect();
    let detail = (vec(0_u64..5, 0..3), vec(text(), 0..2), prop::sample::select(vec!["float32", "bfloat16"]), text());
    let chosen = prop_oneof![3 => subsequence(names.clone(), 0..6), 1 => subsequence(names, 60..80)].prop_shuffle();
    (chosen, vec(detail, 1..4)).prop_map(|(names, details)| {
        let of_name = |name: u32| {
            let (shape, aliases, dtype, module_class) = details[name as usize % details.len()].clone();
            let itemsize = if dtype == "float32" { 4 } else { 2 };
            Parameter { name: format!("n{name}"), aliases, shape, dtype: dtype.into(), itemsize, module_class }
        };
        table(names.into_iter().map(of_name).collect())
    })
}

type RawRow = (Vec<u16>, bool);

fn raw_rows(num: usize) -> impl Strategy<Value = Vec<RawRow>> {
    vec((vec(any::<u16>(), 0..5), any::<bool>()), num)
}

/// Members modulo the number of parameters there are; or all but those.
fn cooked(raw: &RawRow, num_parameters: u32) -> Row {
    let some: Row = raw.0.iter().filter(|_| num_parameters > 0).map(|&i| u32::from(i) % num_parameters).collect();
    if raw.1 { (0..num_parameters).collect::<Row>().difference(&some) } else { some }
}

type RawSituation = (Vec<RawRow>, u32, bool);
type RawPasses = Vec<(Index, u32, u64)>;
type RawHistory = (Vec<RawSituation>, Vec<(Index, Vec<RawRow>)>, Vec<RawPasses>, Vec<(Index, u64)>, RawPasses);

fn raw_history(max_count: u64) -> impl Strategy<Value = RawHistory> {
    let passes = move |least| {
        vec((any::<Index>(), (0..=flags::WRITTEN).prop_map(|f| f & flags::WRITTEN), 1..=max_count), least..4)
    };
    (
        vec((raw_rows(6), 0_u32..3, any::<bool>()), 1..4),
        vec((any::<Index>(), raw_rows(3)), 1..6),
        vec(passes(1), 1..4),
        vec((any::<Index>(), 1..=max_count), 0..5),
        passes(0),
    )
}

fn joined(raw: RawPasses, num_patterns: usize) -> Shape {
    let mut shape = Shape::new();
    for (pattern, flags, count) in raw {
        push_passes(&mut shape, Passes { pattern: pattern.index(num_patterns) as u32, flags, count });
    }
    shape
}

fn history(params: &Arc<Params>, raw: RawHistory) -> Lane {
    let num = params.len();
    let (situations, patterns, shapes, steps, open) = raw;
    let mut lane = Lane { params: params.clone(), ..Lane::default() };
    for (rows, num_orphans, has_wrapper) in situations {
        let [registered, trainable, awaited, wrapped, ignored, optimized] =
            [0, 1, 2, 3, 4, 5].map(|i| cooked(&rows[i], num));
        lane.situations.push(Situation {
            registered,
            trainable,
            awaited,
            wrapped,
            ignored,
            optimized,
            num_orphans,
            has_wrapper,
        });
    }
    for (situation, rows) in patterns {
        let [reached, covered, again] = [0, 1, 2].map(|i| cooked(&rows[i], num));
        let situation = situation.index(lane.situations.len()) as u32;
        lane.patterns.push(Pattern { situation, reached, covered, again });
    }
    let num_patterns = lane.patterns.len();
    lane.open = joined(open, num_patterns);
    lane.shapes = shapes.into_iter().map(|raw| joined(raw, num_patterns)).collect();
    for (shape, count) in steps {
        let shape = shape.index(lane.shapes.len()) as u32;
        match lane.steps.last_mut() {
            Some(last) if last.0 == shape => last.1 += count,
            _ => lane.steps.push((shape, count)),
        }
    }
    lane
}

/// A lane without ranks that a file can hold; no count is above `max_count`.
pub fn lanes(max_count: u64) -> impl Strategy<Value = Lane> {
    captures(max_count).prop_map(|mut capture| Lane { ranks: Ranges::new(), ..capture.lanes.swap_remove(0) })
}

/// Up to four lanes over up to two tables of parameters, which share names.
pub fn captures(max_count: u64) -> impl Strategy<Value = Capture> {
    let facts = vec((text(), text()).prop_map(|(topic, body)| Fact { topic, body }), 0..3);
    let end = prop_oneof![2 => Just("clean".to_owned()), 1 => text()];
    let lane = (any::<Index>(), raw_history(max_count), facts, end, any::<bool>());
    (vec(tables(), 1..3), vec(lane, 1..5), any::<bool>(), any::<u64>()).prop_map(
        |(tables, raw, optimizer_given, nonce)| {
            let of_raw =
                |(i, (table, raw, facts, end, is_shared)): (usize, (Index, RawHistory, Vec<Fact>, String, bool))| {
                    let rank = i as u64;
                    let more = if is_shared { vec![(rank, rank), (rank + 8, rank + 8)] } else { vec![(rank, rank)] };
                    let ranks = more.into_iter().collect();
                    Lane { ranks, facts, end: Some(end), ..history(table.get(&tables), raw) }
                };
            let run = RunId { nonce, optimizer_given, ..run_id() };
            Capture { run, lanes: raw.into_iter().enumerate().map(of_raw).collect() }
        },
    )
}
