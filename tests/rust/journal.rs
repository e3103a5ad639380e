//! The format: what is written is what is read, and both are what `tests/golden/format` holds.

use std::fs;
use std::path::PathBuf;

use _core::capture::{Capture, Fact, Lane, Passes, Pattern, RunId, Situation, flags};
use _core::journal::{
    CURRENT_VERSION, Kind, OLDEST_VERSION, encode_capture, encode_lane, peek, read_capture, read_history, read_shard,
};
use _core::params::Parameter;
use _core::recorder::Recorder;
use proptest::prelude::*;

use crate::samples::{captures, lanes, parameters, plain_situation, ranks, row, run_id, table};

proptest! {
    #[test]
    fn captures_come_back(capture in captures(1 << 40)) {
        let bytes = encode_capture(&capture);
        prop_assert_eq!(&read_capture(&bytes).unwrap(), &capture);
        let peek = peek(&bytes).unwrap();
        prop_assert_eq!(peek.kind, Kind::Capture);
        prop_assert_eq!(peek.run, capture.run);
    }

    #[test]
    fn histories_come_back(lane in lanes(1 << 40)) {
        let ranks = ranks(3, 5);
        let history = encode_lane(&lane, true);
        let expected = Lane { ranks: ranks.clone(), ..lane };
        prop_assert_eq!(read_history(&run_id(), ranks, &history).unwrap(), expected);
    }

    /// Ranks compare histories as bytes.
    #[test]
    fn histories_are_equal_where_lanes_are(a in lanes(2), b in lanes(2)) {
        prop_assert_eq!(encode_lane(&a, true) == encode_lane(&b, true), a == b);
        prop_assert_eq!(encode_lane(&a, true), encode_lane(&a.clone(), true));
    }
}

#[test]
fn parameters_are_stored_once() {
    let lane = |rank, num_orphans| Lane {
        ranks: ranks(rank, rank),
        params: table(parameters(0..1000)),
        situations: vec![Situation { num_orphans, ..plain_situation(1000) }],
        end: Some("clean".into()),
        ..Lane::default()
    };
    let size = |lanes: Vec<Lane>| encode_capture(&Capture { run: run_id(), lanes }).len();
    let (one, two) = (size(vec![lane(0, 0)]), size(vec![lane(0, 0), lane(1, 1)]));
    assert!(two - one < one / 10, "{one} bytes for one lane, {two} for two");
}

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/format").join(name)
}

/// The bytes of a golden file; first written anew if the environment says so.
fn golden_bytes(name: &str, written: &[u8]) -> Vec<u8> {
    if std::env::var_os("DDPCOV_UPDATE_GOLDEN").is_some() {
        fs::write(golden(name), written).unwrap();
    }
    fs::read(golden(name)).unwrap()
}

fn golden_run() -> RunId {
    RunId { optimizer_given: true, ranks: ranks(0, 7), ..run_id() }
}

fn golden_parameters() -> Vec<Parameter> {
    let linear = "torch.nn.modules.linear.Linear";
    let of =
        |name: &str, aliases: &[&str], shape: &[u64], (dtype, itemsize): (&str, u8), module_class: &str| Parameter {
            name: name.into(),
            aliases: aliases.iter().map(|&a| a.into()).collect(),
            shape: shape.into(),
            dtype: dtype.into(),
            itemsize,
            module_class: module_class.into(),
        };
    vec![
        of("embed.weight", &["head.weight"], &[100, 8], ("float32", 4), "torch.nn.modules.sparse.Embedding"),
        of("proj.weight", &[], &[8, 8], ("float32", 4), linear),
        of("proj.bias", &[], &[8], ("float32", 4), linear),
        of("größe", &[], &[], ("bfloat16", 2), "model.Net"),
    ]
}

fn golden_situation() -> Situation {
    Situation {
        registered: row(&[0, 1, 2, 3]),
        trainable: row(&[0, 1, 3]),
        awaited: row(&[0, 1, 2]),
        wrapped: row(&[0, 1, 2]),
        ignored: row(&[3]),
        optimized: row(&[0, 1]),
        num_orphans: 2,
        has_wrapper: true,
    }
}

fn passes(pattern: u32, flags: u32, count: u64) -> Passes {
    Passes { pattern, flags, count }
}

fn fact(topic: &str, body: &str) -> Fact {
    Fact { topic: topic.into(), body: body.into() }
}

fn golden_capture() -> Capture {
    let first = Lane {
        ranks: [(0, 2), (5, 5)].into_iter().collect(),
        params: table(golden_parameters()),
        situations: vec![golden_situation(), Situation::default()],
        patterns: vec![
            Pattern { situation: 0, reached: row(&[0, 1, 2]), covered: row(&[0, 1]), again: row(&[0]) },
            Pattern { situation: 1, ..Pattern::default() },
        ],
        shapes: vec![vec![passes(0, flags::NO_SYNC, 3), passes(0, 0, 1)], vec![passes(1, flags::EMPTY, 1)]],
        steps: vec![(0, 1_000_000), (1, 1), (0, 2)],
        open: vec![passes(0, flags::RAISED, 1)],
        facts: vec![fact("torch", r#""2.13.0""#)],
        end: Some("exception: RuntimeError: müde".into()),
    };
    let same_table =
        Lane { ranks: ranks(3, 3), steps: vec![(1, 7)], open: vec![], end: Some("clean".into()), ..first.clone() };
    let other_table = Lane {
        ranks: ranks(4, 4),
        params: table(parameters(0..1)),
        situations: vec![plain_situation(1)],
        end: Some("clean".into()),
        ..Lane::default()
    };
    Capture { run: golden_run(), lanes: vec![first, same_table, other_table] }
}

/// Rank 1 of a run that was killed in its second open pass; in it is every kind of record that a shard can hold but END.
fn record_golden(recorder: &Recorder) {
    let pass = |reached: &[u32], flags| {
        recorder.begin_pass(false);
        for &id in reached {
            let slot = recorder.slot(id).unwrap();
            slot.arrived(id != 3);
            slot.accumulated();
        }
        recorder.close_pass(flags).unwrap();
    };
    recorder.define(0, golden_parameters()[..3].to_vec()).unwrap();
    recorder.set_situation(plain_situation(3)).unwrap();
    recorder.note(fact("torch", r#""2.13.0""#)).unwrap();
    for _ in 0..3 {
        pass(&[0, 1], flags::NO_SYNC);
        pass(&[0, 1, 1], 0);
        recorder.close_step().unwrap();
    }
    recorder.close_step().unwrap();
    recorder.define(3, golden_parameters()[3..].to_vec()).unwrap();
    recorder.set_situation(golden_situation()).unwrap();
    for _ in 0..17 {
        pass(&[0], 0);
        pass(&[1, 3], 0);
    }
    recorder.close_step().unwrap();
    for _ in 0..2 {
        pass(&[0], 0);
        recorder.close_step().unwrap();
    }
    pass(&[1, 3], flags::RAISED);
    recorder.begin_pass(false);
    let frozen = recorder.slot(2).unwrap();
    frozen.arrived(true);
    frozen.accumulated();
    let slot = recorder.slot(0).unwrap();
    slot.arrived(true);
    slot.accumulated();
}

fn golden_lane() -> Lane {
    let pattern = |situation, reached: &[u32], covered: &[u32], again: &[u32]| Pattern {
        situation,
        reached: row(reached),
        covered: row(covered),
        again: row(again),
    };
    Lane {
        ranks: ranks(1, 1),
        params: table(golden_parameters()),
        situations: vec![plain_situation(3), golden_situation()],
        patterns: vec![
            pattern(0, &[0, 1], &[0, 1], &[]),
            pattern(0, &[0, 1], &[0, 1], &[1]),
            pattern(0, &[], &[], &[]),
            pattern(1, &[0], &[0], &[]),
            pattern(1, &[1, 3], &[1], &[]),
            pattern(1, &[0, 2], &[0], &[]),
        ],
        shapes: vec![
            vec![passes(0, flags::NO_SYNC, 1), passes(1, 0, 1)],
            vec![passes(2, flags::EMPTY, 1)],
            (0..34).map(|i| passes(3 + i % 2, 0, 1)).collect(),
            vec![passes(3, 0, 1)],
        ],
        steps: vec![(0, 3), (1, 1), (2, 1), (3, 2)],
        open: vec![passes(4, flags::RAISED, 1), passes(5, flags::OPEN, 1)],
        facts: vec![fact("torch", r#""2.13.0""#)],
        end: None,
    }
}

#[test]
fn golden_capture_is_what_is_written_and_read() {
    let written = encode_capture(&golden_capture());
    let stored = golden_bytes("v1.capture", &written);
    assert_eq!(read_capture(&stored).unwrap(), golden_capture());
    assert!(written == stored, "the bytes of a capture changed: see tests/golden/format/README.md");
}

#[test]
fn golden_shard_is_what_is_written_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bin.rank1");
    record_golden(&Recorder::new(Some(&path), &golden_run(), 1).unwrap());
    let written = fs::read(path).unwrap();
    let stored = golden_bytes("v1.shard", &written);
    assert_eq!(read_shard(&stored).unwrap(), (golden_run(), golden_lane()));
    assert!(written == stored, "the bytes of a shard changed: see tests/golden/format/README.md");
}

#[test]
fn every_version_has_golden_files() {
    for version in OLDEST_VERSION..=CURRENT_VERSION {
        for kind in ["capture", "shard"] {
            let path = golden(&format!("v{version}.{kind}"));
            assert!(path.exists(), "{} is missing", path.display());
            let bytes = fs::read(path).unwrap();
            assert_eq!(bytes[8..12], version.to_le_bytes());
            assert_eq!(peek(&bytes).unwrap().kind.name(), kind);
        }
    }
}

#[test]
fn an_unknown_record_is_skipped() {
    let whole = encode_capture(&golden_capture());
    let end = crate::forge::frames(&whole)[1].begin;
    let unknown = crate::forge::record(99, b"from a later version");
    let with_unknown = [&whole[..end], &unknown, &whole[end..]].concat();
    assert_eq!(read_capture(&with_unknown).unwrap(), golden_capture());
}
