//! The set algebra against a model that asks every question anew, for each parameter in each step of each lane.

use std::collections::BTreeSet;

use _core::analysis::{Analysis, Kind, analyse};
use _core::bitset::Row;
use _core::capture::{Capture, Lane, Pattern, Situation, flags};
use _core::ranges::Ranges;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::samples::{captures, contents, parameters, plain_situation, ranks, row, run_id, table};

/// A pass in the model: what was true, what it did, and how it went.
struct Pass {
    situation: Situation,
    pattern: Pattern,
    is_whole: bool,
    is_empty: bool,
    /// Whether the wrapper averages in it.
    is_averaged: bool,
    flags: u32,
}

struct Step {
    passes: Vec<Pass>,
    is_finished: bool,
}

fn steps(lane: &Lane, by_pass: bool) -> Vec<Step> {
    let (closed, open) = contents(lane);
    let is_clean = lane.end.as_deref() == Some("clean");
    let mut raw: Vec<_> = closed.into_iter().map(|step| (step, true)).collect();
    if by_pass {
        raw.extend(open.into_iter().map(|pass| (vec![pass], true)));
    } else if !open.is_empty() {
        raw.push((open, is_clean));
    }
    let of_raw = |(passes, is_closed): (Vec<(Situation, Pattern, u32)>, bool)| {
        let of_pass = |(situation, pattern, flags): (Situation, Pattern, u32)| Pass {
            is_whole: flags & flags::RAISED == 0 && flags & flags::OPEN == 0,
            is_empty: flags & flags::EMPTY != 0,
            is_averaged: situation.has_wrapper && flags & flags::NO_SYNC == 0 && flags & flags::EMPTY == 0,
            flags,
            situation,
            pattern,
        };
        let passes: Vec<Pass> = passes.into_iter().map(of_pass).collect();
        Step { is_finished: is_closed && passes.iter().all(|p| p.is_whole), passes }
    };
    raw.into_iter().map(of_raw).collect()
}

/// What the wrapper still waits for at the end of the step. A pass goes on with what the one before left, or starts anew.
fn left_over(step: &Step) -> Row {
    step.passes.iter().filter(|p| p.is_averaged).fold(Row::default(), |left, p| {
        let waits_for = if left.is_empty() { p.situation.awaited.clone() } else { left };
        if p.is_whole { waits_for.difference(&p.pattern.reached) } else { Row::default() }
    })
}

/// Whether `kind` is true of the lane's parameter `id` in the step, in the words of the documentation.
fn is_true(kind: Kind, id: u32, step: &Step) -> bool {
    let any = |of_pass: &dyn Fn(&Pass) -> bool| step.passes.iter().any(of_pass);
    let covered = |p: &Pass| p.pattern.covered.contains(id);
    let trainable = |p: &Pass| p.situation.trainable.contains(id);
    let awaited = |p: &Pass| p.situation.has_wrapper && p.situation.awaited.contains(id);
    let unknown = |p: &Pass| {
        p.situation.has_wrapper
            && trainable(p)
            && !p.situation.awaited.contains(id)
            && !p.situation.ignored.contains(id)
    };
    let wrapped = |p: &Pass| p.situation.wrapped.contains(id);
    match kind {
        Kind::Trainable => any(&trainable),
        Kind::Covered => any(&covered),
        Kind::Missed => any(&trainable) && !any(&covered),
        Kind::MissedForGood => step.is_finished && any(&trainable) && !any(&covered),
        Kind::MissedInPass => step.is_finished && any(&covered) && any(&|p| !p.is_empty && trainable(p) && !covered(p)),
        Kind::Undefined => any(&|p| p.pattern.reached.contains(id) && !covered(p)),
        Kind::Again => any(&|p| p.is_averaged && p.pattern.again.contains(id)),
        Kind::AwaitedInVain => any(&|p| p.is_averaged && p.is_whole && awaited(p) && !covered(p)),
        Kind::Unreached => left_over(step).contains(id),
        Kind::Bypassed => {
            let after = step.passes.iter().rposition(|p| p.is_averaged).map_or(0, |last| last + 1);
            let lost = |p: &Pass| p.flags & flags::BYPASSED != 0 && awaited(p) && covered(p);
            step.is_finished && step.passes[after..].iter().any(lost)
        }
        Kind::FrozenAwaited => any(&|p| awaited(p) && !trainable(p)),
        Kind::Thawed => any(&|p| unknown(p) && wrapped(p)),
        Kind::Replaced => any(&|p| unknown(p) && !wrapped(p)),
        Kind::Unheld => any(&|p| covered(p) && !p.situation.optimized.contains(id)),
    }
}

fn where_true(steps: &[Step], of_step: impl Fn(&Step) -> bool) -> Ranges {
    steps.iter().enumerate().filter(|(_, step)| of_step(step)).map(|(i, _)| (i as u64, i as u64)).collect()
}

/// The names of a lane's parameters in the row.
fn names<'a>(lane: &'a Lane, row: &Row) -> BTreeSet<&'a str> {
    row.iter().map(|id| lane.params.as_slice()[id as usize].name.as_str()).collect()
}

/// The sets, by name, of what was awaited in averaged, whole passes and not in the row that `done` takes from the pattern.
fn vain_sets<'a>(lane: &'a Lane, steps: &[Step], done: fn(&Pattern) -> &Row) -> BTreeSet<BTreeSet<&'a str>> {
    let passes = steps.iter().flat_map(|s| &s.passes).filter(|p| p.is_averaged && p.is_whole);
    passes.map(|p| names(lane, &p.situation.awaited.difference(done(&p.pattern)))).collect()
}

fn check_parameters(analysis: &Analysis, capture: &Capture, all_steps: &[Vec<Step>]) {
    let mut seen = BTreeSet::new();
    for profile in &analysis.profiles {
        for &index in &profile.parameters {
            assert!(seen.insert(index), "parameter {index} is in two profiles");
            let name = &analysis.parameters[index as usize].name;
            let mut lanes = profile.lanes.iter();
            let mut is_trainable = false;
            for (i, (lane, steps)) in capture.lanes.iter().zip(all_steps).enumerate() {
                let Some(id) = lane.params.as_slice().iter().position(|p| p.name == *name) else { continue };
                let (found, kinds) = lanes.next().unwrap();
                assert_eq!(*found as usize, i);
                is_trainable |= lane.situations.iter().any(|s| s.trainable.contains(id as u32));
                for kind in Kind::ALL {
                    let expected = where_true(steps, |step| is_true(kind, id as u32, step));
                    assert_eq!(kinds[kind as usize], expected, "{} of {name} in lane {i}", kind.name());
                }
            }
            assert!(lanes.next().is_none(), "{name} in a lane that does not have it");
            assert_eq!(profile.trainable, is_trainable);
        }
    }
    assert!(seen.into_iter().eq(0..analysis.parameters.len() as u32), "a parameter is in no profile");
}

fn check_lanes(analysis: &Analysis, capture: &Capture, all_steps: &[Vec<Step>]) {
    assert_eq!(analysis.lanes.len(), capture.lanes.len());
    let global = |row: &Row, lane: &Lane| -> Vec<u32> {
        let names = names(lane, row);
        (0..).zip(&analysis.parameters).filter(|(_, p)| names.contains(p.name.as_str())).map(|(i, _)| i).collect()
    };
    let mut all_vain = BTreeSet::new();
    for ((summary, lane), steps) in analysis.lanes.iter().zip(&capture.lanes).zip(all_steps) {
        let is_idle = |step: &Step| step.passes.iter().any(|p| p.is_whole && p.pattern.reached.is_empty());
        assert_eq!(summary.num_steps, steps.len() as u64);
        let num_passes = steps.iter().flat_map(|s| &s.passes).filter(|p| !p.is_empty).count();
        assert_eq!(summary.num_passes, num_passes as u64);
        assert_eq!(summary.finished, where_true(steps, |s| s.is_finished));
        assert_eq!(summary.interrupted, where_true(steps, |s| !s.is_finished && s.passes.iter().any(|p| p.is_whole)));
        assert_eq!(summary.idle, where_true(steps, is_idle));
        assert_eq!(summary.num_orphans, lane.situations.iter().map(|s| s.num_orphans).max().unwrap());
        assert_eq!(summary.has_wrapper, lane.situations.iter().any(|s| s.has_wrapper));
        let vain = vain_sets(lane, steps, |p| &p.covered);
        assert_eq!(summary.num_vain_sets, vain.len());
        assert_eq!(summary.num_unreached_sets, vain_sets(lane, steps, |p| &p.reached).len());
        all_vain.extend(vain);

        let last = contents(lane).1.pop().filter(|_| lane.end.as_deref() != Some("clean"));
        let broken_off =
            last.filter(|(_, _, f)| f & (flags::RAISED | flags::OPEN) != 0).map(|(situation, pattern, _)| {
                (global(&pattern.covered, lane), global(&situation.trainable.difference(&pattern.covered), lane))
            });
        let sorted = |ids: &[u32]| ids.iter().copied().collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>();
        assert_eq!(summary.broken_off.as_ref().map(|b| (sorted(&b.covered), sorted(&b.lacking))), broken_off);
    }
    assert_eq!(analysis.num_vain_sets, all_vain.len());
}

fn check_tables(analysis: &Analysis, capture: &Capture) {
    let mut expected = Vec::new();
    let mut known = Vec::new();
    for parameter in capture.lanes.iter().flat_map(|lane| lane.params.as_slice()) {
        if !known.contains(&parameter.name) {
            known.push(parameter.name.clone());
            assert_eq!(analysis.parameters[known.len() - 1], *parameter);
        }
    }
    assert_eq!(analysis.parameters.len(), known.len());
    for (i, name) in known.iter().enumerate() {
        let of_lane = |(lane, l): (usize, &Lane)| {
            let p = l.params.as_slice().iter().find(|p| p.name == *name)?;
            Some((lane as u32, p.shape.clone(), p.dtype.clone()))
        };
        let definitions: Vec<_> = capture.lanes.iter().enumerate().filter_map(of_lane).collect();
        if definitions.iter().any(|d| (&d.1, &d.2) != (&definitions[0].1, &definitions[0].2)) {
            expected.push((i as u32, definitions));
        }
    }
    assert_eq!(analysis.conflicts, expected);
}

fn check(capture: &Capture) {
    let analysis = analyse(capture);
    let by_pass = !capture.run.optimizer_given && capture.lanes.iter().all(|lane| lane.steps.is_empty());
    let all_steps: Vec<Vec<Step>> = capture.lanes.iter().map(|lane| steps(lane, by_pass)).collect();
    check_tables(&analysis, capture);
    check_lanes(&analysis, capture, &all_steps);
    check_parameters(&analysis, capture, &all_steps);
}

proptest! {
    #[test]
    fn all_kinds_are_what_they_say(capture in captures(3)) {
        check(&capture);
    }

    #[test]
    fn without_optimizer_steps_each_pass_is_a_step(mut capture in captures(3)) {
        capture.run.optimizer_given = false;
        capture.lanes.iter_mut().for_each(|lane| lane.steps.clear());
        check(&capture);
    }

    #[test]
    fn ranks_that_were_killed(mut capture in captures(3), in_pass in vec(any::<bool>(), 4)) {
        for (lane, in_pass) in capture.lanes.iter_mut().zip(in_pass) {
            lane.end = None;
            if let Some(last) = lane.open.last_mut().filter(|_| in_pass) {
                (last.flags, last.count) = (flags::OPEN, 1);
            }
        }
        check(&capture);
    }
}

#[test]
fn alike_parameters_form_one_profile() {
    let pattern = |covered: std::ops::Range<u32>| {
        let covered: Row = covered.collect();
        Pattern { situation: 0, reached: covered.clone(), covered, again: row(&[]) }
    };
    let passes = |pattern| vec![_core::capture::Passes { pattern, flags: 0, count: 1 }];
    let lane = Lane {
        ranks: ranks(0, 0),
        params: table(parameters(0..100_000)),
        situations: vec![plain_situation(100_000)],
        patterns: vec![pattern(0..60_000), pattern(30_000..100_000)],
        shapes: vec![passes(0), passes(1)],
        steps: vec![(0, 1 << 40), (1, 1), (0, 2)],
        end: Some("clean".into()),
        ..Lane::default()
    };
    let analysis = analyse(&Capture { run: run_id(), lanes: vec![lane] });
    let sizes: Vec<usize> = analysis.profiles.iter().map(|p| p.parameters.len()).collect();
    assert_eq!(sizes, [30_000, 30_000, 40_000]);
    let missed = |profile: usize| analysis.profiles[profile].lanes[0].1[Kind::Missed as usize].as_slice();
    assert_eq!(missed(0), [(1 << 40, 1 << 40)]);
    assert_eq!(missed(1), []);
    assert_eq!(missed(2), [(0, (1 << 40) - 1), ((1 << 40) + 1, (1 << 40) + 2)]);
}

/// What a pass leaves undone can be made good by the passes that follow in its step.
#[test]
fn left_undone_and_made_good() {
    let local = flags::NO_SYNC | flags::BYPASSED;
    let shape = |all: &[(u32, u32)]| -> Vec<_> {
        all.iter().map(|&(pattern, flags)| _core::capture::Passes { pattern, flags, count: 1 }).collect()
    };
    let pattern = |members: &[u32]| Pattern { reached: row(members), covered: row(members), ..Pattern::default() };
    let lane = Lane {
        ranks: ranks(0, 0),
        params: table(parameters(0..3)),
        situations: vec![Situation { awaited: row(&[0, 1]), has_wrapper: true, ..plain_situation(3) }],
        patterns: vec![pattern(&[0, 2]), pattern(&[0, 1]), pattern(&[1])],
        shapes: vec![
            shape(&[(0, local)]),
            shape(&[(0, local), (1, 0)]),
            shape(&[(1, 0), (0, local)]),
            shape(&[(0, flags::NO_SYNC)]),
            shape(&[(0, 0)]),
            shape(&[(0, 0), (2, 0)]),
            shape(&[(1, 0), (0, 0)]),
        ],
        steps: (0..7).map(|shape| (shape, 1)).collect(),
        open: shape(&[(0, local)]),
        end: Some("exception: KeyboardInterrupt".into()),
        ..Lane::default()
    };
    let analysis = analyse(&Capture { run: run_id(), lanes: vec![lane] });
    let of_kind = |kind: Kind| -> Vec<_> {
        analysis.profiles.iter().map(|p| (p.parameters[0], p.lanes[0].1[kind as usize].as_slice().to_vec())).collect()
    };
    assert_eq!(of_kind(Kind::Bypassed), [(0, vec![(0, 0), (2, 2)]), (1, vec![]), (2, vec![])]);
    assert_eq!(of_kind(Kind::Unreached), [(0, vec![]), (1, vec![(4, 4), (6, 6)]), (2, vec![])]);
}

#[test]
fn more_passes_than_can_be_counted() {
    let passes = |flags| vec![_core::capture::Passes { pattern: 0, flags, count: 1 << 53 }];
    let lane = Lane {
        ranks: ranks(0, 0),
        situations: vec![plain_situation(0)],
        patterns: vec![Pattern::default()],
        shapes: vec![passes(0), passes(flags::NO_SYNC)],
        steps: vec![(0, 1 << 52), (1, 1 << 52)],
        ..Lane::default()
    };
    let analysis = analyse(&Capture { run: run_id(), lanes: vec![lane] });
    assert_eq!(analysis.lanes[0].num_passes, u64::MAX);
    assert_eq!(analysis.lanes[0].num_steps, 1 << 53);
}

#[test]
fn kinds_are_numbered_as_listed() {
    for (i, kind) in Kind::ALL.into_iter().enumerate() {
        assert_eq!(kind as usize, i);
    }
    let names: BTreeSet<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
    assert_eq!(names.len(), Kind::ALL.len());
}
