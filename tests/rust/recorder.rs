//! The live store: what slots mean, how passes and steps add up, and that nothing grows without need.

use std::fs;
use std::path::Path;
use std::sync::Barrier;

use _core::bitset::Row;
use _core::capture::{Fact, Lane, Passes, Situation, flags};
use _core::error::Error;
use _core::journal::read_shard;
use _core::recorder::{Recorder, Slot};

use crate::samples::{contents, parameters, plain_situation, row, run_id};

/// A recorder in memory over so many parameters, all trainable, and their slots.
fn recorder(num: u32) -> (Recorder, Vec<Slot>) {
    recorder_at(None, num)
}

fn recorder_at(path: Option<&Path>, num: u32) -> (Recorder, Vec<Slot>) {
    let recorder = Recorder::new(path, &run_id(), 0).unwrap();
    recorder.define(0, parameters(0..num)).unwrap();
    recorder.set_situation(plain_situation(num)).unwrap();
    let slots = (0..num).map(|id| recorder.slot(id).unwrap()).collect();
    (recorder, slots)
}

fn hit(slot: &Slot) {
    slot.arrived(true);
    slot.accumulated();
}

/// A pass that covers these.
fn pass(recorder: &Recorder, slots: &[Slot], covered: &[u32]) {
    recorder.begin_pass(false);
    covered.iter().for_each(|&id| hit(&slots[id as usize]));
    recorder.close_pass(0).unwrap();
}

fn lane(recorder: &Recorder) -> Lane {
    recorder.lane().unwrap().1
}

fn passes(pattern: u32, count: u64) -> Passes {
    Passes { pattern, flags: 0, count }
}

/// The rows covered in each pass of each closed step, and of the open one.
fn covered(lane: &Lane) -> (Vec<Vec<Row>>, Vec<Row>) {
    let rows =
        |step: Vec<crate::samples::PassContent>| step.into_iter().map(|(_, pattern, _)| pattern.covered).collect();
    let (steps, open) = contents(lane);
    (steps.into_iter().map(rows).collect(), rows(open))
}

#[test]
fn covered_means_defined_and_accumulated() {
    let (recorder, slots) = recorder(9);
    hit(&slots[0]);
    slots[1].accumulated(); // no tensor hook: nothing defined arrived
    slots[2].arrived(true); // `autograd.grad`: captured, not accumulated
    slots[3].arrived(false);
    slots[3].accumulated();
    slots[4].arrived(true);
    slots[4].arrived(true);
    slots[4].arrived(false); // what arrived last is what is accumulated
    slots[4].accumulated();
    hit(&slots[5]);
    hit(&slots[5]);
    hit(&slots[6]);
    slots[6].accumulated(); // an arrival vouches for one accumulation
    slots[7].accumulated();
    hit(&slots[7]);
    recorder.close_pass(0).unwrap();
    slots[2].accumulated(); // in the next pass it stands for what arrived in the one before
    recorder.close_pass(0).unwrap();
    let lane = lane(&recorder);
    assert_eq!(lane.patterns[0].reached, row(&[0, 1, 3, 4, 5, 6, 7]));
    assert_eq!(lane.patterns[0].covered, row(&[0, 5, 6, 7]));
    assert_eq!(lane.patterns[0].again, row(&[5, 6, 7]));
    assert_eq!(lane.patterns[1].reached, row(&[2]));
}

#[test]
fn what_is_frozen_cannot_be_covered() {
    let (recorder, slots) = recorder(2);
    let mut situation = plain_situation(2);
    situation.trainable = row(&[1]);
    recorder.set_situation(situation).unwrap();
    recorder.begin_pass(false);
    slots.iter().for_each(hit);
    let open = lane(&recorder);
    recorder.close_pass(0).unwrap();
    let closed = lane(&recorder);
    for pattern in [&open.patterns[0], &closed.patterns[0]] {
        assert_eq!((&pattern.reached, &pattern.covered), (&row(&[0, 1]), &row(&[1])));
    }
}

/// Autograd runs several threads at once; none runs while a pass is closed.
#[test]
fn threads_lose_no_bit() {
    const THREADS: u32 = 4;
    const PASSES: u32 = 200;
    const NUM: u32 = 130;
    let (recorder, slots) = recorder(NUM);
    // Each parameter is hit by so many threads, from none to two, anew in each pass; neighbours share a word.
    let hits = |pass: u32, thread: u32| (0..NUM).filter(move |id| (id * 7 + pass * 3 + thread * id) % 5 < 2);
    let barrier = Barrier::new(THREADS as usize + 1);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (barrier, slots) = (&barrier, &slots);
            scope.spawn(move || {
                for pass in 0..PASSES {
                    barrier.wait();
                    hits(pass, thread).for_each(|id| slots[id as usize].accumulated());
                    barrier.wait();
                }
            });
        }
        for _ in 0..PASSES {
            recorder.begin_pass(false);
            barrier.wait();
            barrier.wait();
            recorder.close_pass(0).unwrap();
            recorder.close_step().unwrap();
        }
    });
    let (steps, open) = contents(&lane(&recorder));
    assert!(open.is_empty());
    for (pass, step) in steps.iter().enumerate() {
        let all: Vec<Row> = (0..THREADS).map(|thread| hits(pass as u32, thread).collect()).collect();
        let reached = all.iter().fold(Row::default(), |a, b| a.union(b));
        let twice = |id: &u32| all.iter().filter(|row| row.contains(*id)).count() > 1;
        assert_eq!(step[0].1.reached, reached);
        assert_eq!(step[0].1.again, (0..NUM).filter(twice).collect());
    }
    assert_eq!(steps.len(), PASSES as usize);
}

#[test]
fn equal_steps_are_counted() {
    let (recorder, slots) = recorder(3);
    for step in 0..10 {
        for _ in 0..2 {
            pass(&recorder, &slots, &[0, 1]);
        }
        pass(&recorder, &slots, if step == 6 { &[2] } else { &[0] });
        recorder.close_step().unwrap();
    }
    let lane = lane(&recorder);
    assert_eq!(lane.shapes, [vec![passes(0, 2), passes(1, 1)], vec![passes(0, 2), passes(2, 1)]]);
    assert_eq!(lane.steps, [(0, 6), (1, 1), (0, 3)]);
    assert!(lane.open.is_empty());
}

#[test]
fn alternating_steps_share_their_shapes() {
    let (recorder, slots) = recorder(2);
    for step in 0..6 {
        pass(&recorder, &slots, &[step % 2]);
        recorder.close_step().unwrap();
    }
    let lane = lane(&recorder);
    assert_eq!(lane.shapes, [vec![passes(0, 1)], vec![passes(1, 1)]]);
    assert_eq!(lane.steps, [(0, 1), (1, 1), (0, 1), (1, 1), (0, 1), (1, 1)]);
}

#[test]
fn an_empty_step_is_a_step() {
    let (recorder, slots) = recorder(1);
    recorder.close_step().unwrap();
    recorder.close_step().unwrap();
    pass(&recorder, &slots, &[0]);
    recorder.close_step().unwrap();
    let lane = lane(&recorder);
    assert_eq!(lane.shapes[0], [Passes { flags: flags::EMPTY, ..passes(0, 1) }]);
    assert_eq!(lane.steps, [(0, 2), (1, 1)]);
}

#[test]
fn a_step_of_very_many_different_passes() {
    for num in [31, 32, 33, 34, 64, 65, 66, 200] {
        let (recorder, slots) = recorder(3);
        pass(&recorder, &slots, &[0, 1, 2]);
        recorder.close_step().unwrap();
        let expected: Vec<Row> = (0..num).map(|i| row(&[i % 3])).collect();
        for i in 0..num {
            pass(&recorder, &slots, &[i % 3]);
            assert!(recorder.has_passes());
        }
        assert_eq!(covered(&lane(&recorder)), (vec![vec![row(&[0, 1, 2])]], expected.clone()));
        recorder.close_step().unwrap();
        assert!(!recorder.has_passes());
        pass(&recorder, &slots, &[0, 1, 2]);
        recorder.close_step().unwrap();
        let steps = vec![vec![row(&[0, 1, 2])], expected, vec![row(&[0, 1, 2])]];
        assert_eq!(covered(&lane(&recorder)), (steps, vec![]), "{num} passes");
    }
}

/// A run without an optimizer: nothing ever closes a step.
#[test]
fn passes_without_steps_go_to_the_journal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shard");
    let (recorder, slots) = recorder_at(Some(&path), 3);
    for i in 0..5000 {
        pass(&recorder, &slots, &[i % 3]);
    }
    let size = fs::metadata(&path).unwrap().len();
    assert!(size < 5000 * 20, "{size} bytes");
    let expected: Vec<Row> = (0..5000).map(|i| row(&[i % 3])).collect();
    assert_eq!(covered(&read_shard(&fs::read(&path).unwrap()).unwrap().1), (vec![], expected));
    let size = fs::metadata(&path).unwrap().len();
    (0..5000).for_each(|_| pass(&recorder, &slots, &[1]));
    assert!(fs::metadata(&path).unwrap().len() <= size + 16 * 33, "equal passes cost a count");
    assert_eq!(lane(&recorder).open.iter().map(|p| p.count).sum::<u64>(), 10_000);
}

#[test]
fn a_model_grows_block_by_block() {
    let recorder = Recorder::new(None, &run_id(), 0).unwrap();
    let mut slots = Vec::new();
    let mut expected = Vec::new();
    for end in [1, 2, 63, 64, 65, 255, 256, 257, 300, 600, 601, 5000] {
        recorder.define(slots.len() as u32, parameters(slots.len() as u32..end)).unwrap();
        recorder.set_situation(plain_situation(end)).unwrap();
        slots.extend((slots.len() as u32..end).map(|id| recorder.slot(id).unwrap()));
        let ids: Vec<u32> = (0..end).filter(|id| [0, 62, 63, 64, 255, 256, end - 1].contains(id)).collect();
        pass(&recorder, &slots, &ids);
        recorder.close_step().unwrap();
        expected.push(vec![row(&ids)]);
        assert!(recorder.slot(end).is_err(), "the block has room, but there is no such parameter");
    }
    let lane = lane(&recorder);
    assert_eq!(covered(&lane), (expected, vec![]));
    assert_eq!(lane.params.as_slice(), parameters(0..5000));
}

#[test]
fn a_replaced_parameter_is_defined_anew() {
    let (recorder, slots) = recorder(3);
    pass(&recorder, &slots, &[1]);
    let mut anew = parameters(1..5);
    anew[0].shape = vec![7];
    recorder.define(1, anew.clone()).unwrap();
    hit(&recorder.slot(1).unwrap());
    recorder.close_pass(0).unwrap();
    let lane = lane(&recorder);
    assert_eq!(lane.params.as_slice()[1..], anew);
    assert_eq!(lane.open, [passes(0, 2)]);
}

#[test]
fn a_pass_says_whether_it_is_new_and_what_it_did() {
    let (recorder, slots) = recorder(70);
    assert_eq!(recorder.last_pass(), (vec![], vec![]));
    let close = |covered: &[u32], flags| {
        covered.iter().for_each(|&id| hit(&slots[id as usize]));
        recorder.close_pass(flags).unwrap()
    };
    assert!(close(&[1, 69], 0));
    assert!(!close(&[1, 69], flags::NO_SYNC | flags::BYPASSED), "how it went is no part of the pattern");
    slots[2].accumulated();
    assert!(close(&[1], 0));
    assert_eq!(recorder.last_pass(), (vec![1, 2], vec![1]));
    recorder.close_step().unwrap();
    recorder.close_step().unwrap();
    assert_eq!(recorder.last_pass(), (vec![1, 2], vec![1]), "a step without a pass is no pass");
    assert!(!close(&[1, 69], 0));
    assert_eq!(recorder.last_pass(), (vec![1, 69], vec![1, 69]));
    recorder.set_situation(Situation { num_orphans: 1, ..plain_situation(70) }).unwrap();
    assert!(close(&[1, 69], 0), "the same rows in another situation");
}

#[test]
fn calls_that_no_file_could_hold_are_refused() {
    let recorder = Recorder::new(None, &run_id(), 0).unwrap();
    let refusal = |result: Result<(), Error>| match result.unwrap_err() {
        Error::Invalid { what } => what,
        error => panic!("{error:?}"),
    };
    assert!(refusal(recorder.close_pass(0).map(|_| ())).contains("before any situation"));
    assert!(refusal(recorder.close_step()).contains("before any situation"));
    assert!(refusal(recorder.define(1, parameters(1..2))).contains("expected the next id"));
    let mut deep = parameters(0..1);
    deep[0].shape = vec![1; 256];
    assert!(refusal(recorder.define(0, deep)).contains("p0.weight: more dimensions"));
    assert!(refusal(recorder.slot(0).map(|_| ())).contains("parameter 0 of 0"));
    assert!(refusal(recorder.set_situation(plain_situation(1))).contains("parameter 0 of 0"));
    recorder.set_situation(plain_situation(0)).unwrap();
    assert!(refusal(recorder.close_pass(flags::OPEN).map(|_| ())).contains("flags 8"));
    assert_eq!(lane(&recorder).situations.len(), 1);
}

#[test]
fn a_disabled_recorder_hears_nothing() {
    let (recorder, slots) = recorder(2);
    pass(&recorder, &slots, &[0]);
    recorder.disable();
    slots.iter().for_each(hit);
    assert!(!recorder.is_touched());
    recorder.finish("clean").unwrap();
    let lane = lane(&recorder);
    assert_eq!((lane.open.len(), lane.end.as_deref()), (1, Some("clean")));
}

#[test]
fn an_open_pass_is_open_until_closed_or_dropped() {
    let (recorder, slots) = recorder(2);
    let open = || lane(&recorder).open.last().is_some_and(|p| p.flags & flags::OPEN != 0);
    assert!(!open());
    recorder.begin_pass(false);
    assert!(open() && !recorder.is_touched());
    recorder.drop_pass();
    assert!(!open());
    recorder.begin_pass(false);
    hit(&slots[1]);
    assert!(open() && recorder.is_touched());
    recorder.close_pass(0).unwrap();
    assert!(!open() && !recorder.is_touched());
    recorder.begin_pass(false);
    recorder.finish("exception: KeyboardInterrupt").unwrap();
    assert!(open());
}

#[test]
fn steps_that_do_not_change_cost_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shard");
    let (recorder, slots) = recorder_at(Some(&path), 10_000);
    let ids: Vec<u32> = (0..10_000).step_by(500).collect();
    let step = || {
        pass(&recorder, &slots, &ids);
        recorder.close_step().unwrap();
    };
    step();
    let size = fs::metadata(&path).unwrap().len();
    (1..5000).for_each(|_| step());
    assert_eq!(fs::metadata(&path).unwrap().len(), size, "as many as may come");
    assert!(size < 2_000_000, "{size} bytes");
    assert_eq!(lane(&recorder).steps, [(0, 5000)]);
}

#[test]
fn very_many_steps_are_one_count() {
    let (recorder, slots) = recorder(1);
    for _ in 0..200_000 {
        pass(&recorder, &slots, &[0]);
        recorder.close_step().unwrap();
    }
    assert_eq!(lane(&recorder).steps, [(0, 200_000)]);
}

#[test]
fn a_step_that_differs_from_the_last_costs_one_record() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shard");
    let (recorder, slots) = recorder_at(Some(&path), 2);
    let run = |num: u32| {
        for i in 0..num {
            pass(&recorder, &slots, &[i % 2]);
            recorder.close_step().unwrap();
        }
        fs::metadata(&path).unwrap().len()
    };
    let before = run(4);
    assert_eq!(run(20_000) - before, 20_000 * 24);
    assert_eq!(lane(&recorder).steps.len(), 20_004);
}

/// Random routing: patterns beyond what is remembered are met anew, and the history is the same.
#[test]
fn forgotten_patterns_are_recorded_again() {
    const NUM: u32 = 400_000; // 150 kB a pattern, so that about 450 are remembered
    let recorder = Recorder::new(None, &run_id(), 0).unwrap();
    recorder.define(0, vec![parameters(0..1).remove(0); NUM as usize]).unwrap();
    recorder.set_situation(plain_situation(NUM)).unwrap();
    let last = recorder.slot(NUM - 1).unwrap();
    let pass = |id: u32| {
        recorder.begin_pass(false);
        recorder.slot(id).unwrap().accumulated();
        last.accumulated();
        recorder.close_pass(0).unwrap();
        recorder.close_step().unwrap();
    };
    let ids = || (0..600).chain([599, 0, 0]);
    ids().for_each(pass);
    let lane = lane(&recorder);
    assert_eq!(lane.patterns.len(), 601, "0 was forgotten, 599 was not");
    let (steps, _) = contents(&lane);
    assert!(steps.iter().map(|step| step[0].1.reached.clone()).eq(ids().map(|id| row(&[id, NUM - 1]))));
}

#[test]
fn a_shard_whose_folder_is_gone_is_still_written() {
    let folder = tempfile::tempdir().unwrap();
    let (recorder, slots) = recorder_at(Some(&folder.path().join("shard")), 1);
    folder.close().unwrap();
    pass(&recorder, &slots, &[0]);
    recorder.note(Fact { topic: "t".into(), body: "{}".into() }).unwrap();
    recorder.define(1, parameters(1..1000)).unwrap();
    assert_eq!(recorder.failure(), None);
    assert_eq!(lane(&recorder).open, [passes(0, 1)]);
    assert_eq!(lane(&recorder).params.len(), 1000);
}
