//! Files that are none of ours, damaged, cut, or forged: always an error that says what is wrong, never a panic, and never
//! memory for what is not there.

use std::path::Path;

use _core::analysis::analyse;
use _core::capture::{Capture, flags};
use _core::error::Error;
use _core::journal::live::STATE_WORDS;
use _core::journal::{encode_capture, peek, read_capture, read_history, read_shard};
use _core::merge::Merger;
use _core::recorder::Recorder;
use _core::stall::stalls;
use proptest::prelude::*;
use proptest::sample::Index;

use crate::forge::{
    HEADER, LIVE_ROWS, LIVE_STATE, Mutations, committed, forged, frames, header, history, lane_record, message,
    mutated, record, reseal, shuffled, small_capture, small_shard, valid_slot,
};
use crate::samples::{parameters, ranks, run_id};

#[test]
fn what_is_no_capture_is_named() {
    let cases: [(&[u8], &str); 10] = [
        (b"", "found an empty file"),
        (b"epoch 1 loss 0.5\n", "found a text file"),
        (b" {\"format_version\": 1}", "found JSON text"),
        (b"[1, 2]", "found JSON text"),
        (b"PK\x03\x04data.pkl", "found a zip archive (a PyTorch checkpoint?)"),
        (b"\x80\x02}q\x00", "found a Python pickle (a PyTorch checkpoint?)"),
        (b"\x89PNG\r\n\x1a\n", "found a file that begins with [89, 50, 4e, 47"),
        (&header(1, 2)[1..], "found a file that begins with [44, 44"),
        (&[0; 100], "found a file that begins with [00, 00"),
        (b"\x89DDPCOV\r\n", "found a file that begins with [89, 44, 44, 50, 43, 4f, 56, 0d]"), // sent as text
    ];
    for (bytes, expected) in cases {
        for text in [message(read_capture(bytes)), message(read_shard(bytes)), message(peek(bytes))] {
            assert!(text.starts_with("not a ddpcov capture") && text.contains(expected), "{text}");
            assert!(text.contains("expected a file written by ddpcov"), "{text}");
        }
    }
}

#[test]
fn versions_say_which_side_to_upgrade() {
    let newer = message(peek(&header(2, 1)));
    assert!(newer.contains("format 2 is too new: this ddpcov reads formats up to 1; upgrade ddpcov here"), "{newer}");
    let older = message(peek(&header(0, 1)));
    assert!(older.contains("format 0 is too old: this ddpcov reads formats from 1; record the run again"), "{older}");
}

#[test]
fn headers_are_checked() {
    let text = message(peek(&header(1, 2)[..20]));
    assert!(text.starts_with("truncated: the header needs 24 bytes at offset 0, found 20"), "{text}");
    let mut broken = header(2, 1);
    broken[8] ^= 1; // seems to be of version 3
    let text = message(peek(&broken));
    assert!(text.starts_with("damaged at offset 0: the header's checksum is "), "{text}");
    let text = message(peek(&header(1, 3)));
    assert!(text.starts_with("damaged at offset 12: file kind is 3, expected 1 or 2"), "{text}");
}

#[test]
fn kinds_are_not_confused() {
    assert_eq!(message(read_capture(&small_shard())), "this is a shard, expected a capture");
    assert_eq!(message(read_shard(&small_capture())), "this is a capture, expected a shard");
}

#[test]
fn every_flipped_bit_of_a_capture_is_noticed() {
    let mut bytes = small_capture();
    for bit in 0..8 * bytes.len() {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(read_capture(&bytes).is_err(), "bit {bit} of byte {} flipped, and accepted", bit / 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn every_cut_of_a_capture_is_noticed() {
    let bytes = small_capture();
    for len in 0..bytes.len() {
        assert!(read_capture(&bytes[..len]).is_err(), "cut to {len} of {} bytes, and accepted", bytes.len());
    }
    let text = message(read_capture(&bytes[..bytes.len() - 1]));
    assert!(text.starts_with("truncated: a record needs 4 bytes at offset "), "{text}");
    let between = frames(&bytes).iter().filter(|f| f.tag == 2).nth(1).unwrap().begin;
    let text = message(read_capture(&bytes[..between]));
    assert!(
        text.starts_with(&format!("truncated: the end of the last lane needs 12 bytes at offset {between}")),
        "{text}"
    );
}

#[test]
fn trailing_bytes_of_a_capture_are_refused() {
    let bytes = small_capture();
    for more in [&[0][..], &[0; 12], &[0xFF; 100], &history(), &bytes] {
        assert!(read_capture(&[&bytes, more].concat()).is_err(), "{} more bytes, and accepted", more.len());
    }
}

/// A checksum proves nothing about who wrote it: every field of four bytes, in turn, says four billion.
#[test]
fn huge_counts_take_no_memory() {
    for (whole, is_shard) in [(small_capture(), false), (small_shard(), true)] {
        let frames = frames(&whole);
        let mut num_truncated = 0;
        for frame in frames.iter().filter(|f| !f.is_live()) {
            for offset in frame.payload().start..=frame.payload().end.saturating_sub(4) {
                let mut bytes = whole.clone();
                bytes[offset..offset + 4].fill(0xFF);
                reseal(&mut bytes, &frames);
                let error = if is_shard { read_shard(&bytes).err() } else { read_capture(&bytes).err() };
                if let Some(Error::Truncated { needed, found, .. }) = error {
                    assert!(needed > found);
                    num_truncated += 1;
                }
            }
        }
        assert!(num_truncated > 50, "only {num_truncated} counts were seen through");
    }
    let count = 0xFFFF_FFFF_u32.to_le_bytes();
    let text = message(read_capture(&forged(&[lane_record(0), record(8, &count)])));
    assert!(text.contains("truncated: PASSES needs 68719476720 bytes at offset"), "{text}");
}

#[test]
fn records_must_stand_where_they_make_sense() {
    let number = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let after_history = |more: Vec<u8>| forged(&[lane_record(0), history(), more]);
    let run = small_capture()[HEADER..frames(&small_capture())[0].end].to_vec();
    let refers = "a record that refers to nothing, or cannot stand here";
    let cases = [
        (header(1, 2), "a record needs 8 bytes"),
        ([header(1, 2), lane_record(0)].concat(), "no RUN at the beginning"),
        (forged(&[history()]), "a record before the first LANE"),
        (forged(&[run, lane_record(0), history()]), "a record before the first LANE"),
        (forged(&[lane_record(0)]), "the end of the last lane"),
        (forged(&[lane_record(0), history(), lane_record(0), history()]), "a rank in two lanes"),
        (forged(&[record(2, &number(&[0, 0])), history()]), "a lane without ranks"),
        (forged(&[lane_record(99), history()]), "a rank that is not part of the run"),
        (after_history(record(LIVE_ROWS, &number(&[0, 0, 0]))), "a live record in a capture"),
        (after_history(record(3, &number(&[3, 0, 0]))), refers), // a gap before parameter 3
        (after_history(record(4, &number(&[0, 0, 1, 4, 0, 0, 0, 0, 0, 0]))), refers), // parameter 2 of 2
        (after_history(record(5, &number(&[1, 0, 0, 0]))), refers), // situation 1
        (after_history(record(5, &number(&[0, 1, 4, 0, 0, 0]))), refers), // parameter 2
        (after_history(record(6, &number(&[0]))), refers),       // a step of no pass
        (after_history(record(6, &number(&[1, 1, 0, 1, 0]))), refers), // pattern 1
        (after_history(record(6, &number(&[1, 0, flags::OPEN, 1, 0]))), refers),
        (after_history(record(6, &number(&[1, 0, 0, 0, 0]))), refers), // no times
        (after_history(record(7, &number(&[1, 1, 0]))), refers),       // shape 1
        (after_history(record(7, &number(&[0, 0, 0]))), refers),
        (after_history(record(7, &number(&[0, 0, 1 << 22]))), refers), // 2^54 steps
        (after_history(record(8, &number(&[1, 1, 0, 1, 0]))), refers),
        (after_history(record(9, &[])), refers), // no pass since the last step
        (after_history(record(9, &[0])), "1 bytes left over in a record"),
        (after_history(record(10, &number(&[1, 0xFF, 0]))), "FACT is not UTF-8"),
        (after_history(record(11, &number(&[0]))), refers), // a second END
        (forged(&[record(2, &[number(&[0, 1]), vec![1; 8], vec![0; 8]].concat())]), "LANE: ranges out of order"),
    ];
    for (i, (bytes, expected)) in cases.iter().enumerate() {
        let text = message(read_capture(bytes));
        assert!(text.contains(expected), "case {i}: {text}");
    }
    let text = message(read_history(&run_id(), ranks(0, 0), &[history(), lane_record(1), history()].concat()));
    assert!(text.contains("the end of the last lane"), "{text}");
}

/// Numbers that are each within bounds must not add up to more than can be counted.
#[test]
fn counts_do_not_overflow() {
    let most = |flags: u32| {
        record(8, &[&[1, 0, 0, 0, 0, 0, 0, 0][..], &flags.to_le_bytes(), &(1_u64 << 53).to_le_bytes()].concat())
    };
    assert!(read_capture(&forged(&[lane_record(0), history(), most(0)])).is_ok());
    let text = message(read_capture(&forged(&[lane_record(0), history(), most(0), most(1)])));
    assert!(text.contains("a record that refers to nothing, or cannot stand here"), "{text}");

    let mut bytes = small_shard();
    let frames = frames(&bytes);
    let slot = valid_slot(&bytes, &frames);
    let pass_word = frames[2].payload().end - 8 * (STATE_WORDS - 1);
    bytes[pass_word..pass_word + 8].fill(0xFF);
    bytes[slot + 16..slot + 24].fill(0xFF); // passes closed so far
    reseal(&mut bytes, &frames);
    let (_, lane) = read_shard(&bytes).unwrap();
    assert!(lane.open.iter().all(|p| p.flags & flags::OPEN == 0));
}

#[test]
fn shards_must_have_their_parts() {
    let whole = small_shard();
    let all = frames(&whole);
    let part = |i: usize| &whole[all[i].begin..all[i].end];
    let of = |parts: &[&[u8]]| [&whole[..HEADER], &parts.concat()].concat();
    let two_ranks = record(2, &[&[0; 4][..], &[1, 0, 0, 0], &[0; 8], &[1, 0, 0, 0, 0, 0, 0, 0]].concat());
    let all_ranks = record(2, &[&[0; 4][..], &[1, 0, 0, 0], &[0; 8], &[0xFF; 8]].concat());
    let cases = [
        (of(&[part(0), part(2)]), "no LANE where a shard has one"),
        (of(&[part(0), part(1), part(3)]), "no LIVE STATE where a shard has one"),
        (of(&[part(0), &two_ranks, part(2)]), "a shard of several ranks"),
        (of(&[part(0), &all_ranks, part(2)]), "a shard of several ranks"),
        (of(&[part(0), part(1), &record(LIVE_STATE, &[0; 12])]), "live state of 0 words, expected 152"),
    ];
    for (bytes, expected) in cases {
        let text = message(read_shard(&bytes));
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_torn_tail_of_a_shard_is_ignored() {
    let bytes = small_shard();
    let whole = read_shard(&bytes).unwrap();
    for tail in [&[0][..], &[0xFF; 30], &record(9, &[])[..7], &record(9, &[]), &record(11, &[0; 4])] {
        assert_eq!(read_shard(&[&bytes, tail].concat()).unwrap(), whole);
    }
}

#[test]
fn a_cut_or_a_flipped_bit_in_what_a_shard_committed_is_noticed() {
    let mut bytes = small_shard();
    let (len, still) = committed(&bytes);
    for len in 0..len {
        assert!(read_shard(&bytes[..len]).is_err(), "cut to {len} of {} bytes, and accepted", bytes.len());
    }
    for bit in still.into_iter().flat_map(|range| range.start * 8..range.end * 8) {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(read_shard(&bytes).is_err(), "bit {bit} of byte {} flipped, and accepted", bit / 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn a_flipped_bit_in_the_live_state_is_noticed() {
    let mut bytes = small_shard();
    let slot = valid_slot(&bytes, &frames(&bytes));
    let num_entries = usize::from(bytes[slot + 48]);
    assert!(num_entries > 1);
    for bit in 8 * slot..8 * (slot + 64 + 16 * num_entries) {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(read_shard(&bytes).is_err(), "bit {bit} of byte {} flipped, and accepted", bit / 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

/// Records of a capture or a shard, in any order and number.
fn picks() -> impl Strategy<Value = Vec<(Index, bool)>> {
    prop::collection::vec((any::<Index>(), any::<bool>()), 0..12)
}

fn mutations() -> impl Strategy<Value = Mutations> {
    let value = prop_oneof![Just(0), Just(1), Just(0xFF), Just(0x80), any::<u8>()];
    prop::collection::vec((any::<Index>(), value), 1..6)
}

/// `DDPCOV_FUZZ=1000000` for a long run.
fn num_cases() -> u32 {
    std::env::var("DDPCOV_FUZZ").map_or(2000, |n| n.parse().expect("a number of cases"))
}

/// Everything that is made of what was read.
fn use_all(capture: &Capture) {
    analyse(capture);
    stalls(&capture.lanes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(num_cases()))]

    #[test]
    fn no_capture_makes_the_reader_panic(mutations in mutations(), sealed: bool) {
        thread_local!(static WHOLE: Vec<u8> = small_capture());
        let bytes = WHOLE.with(|whole| mutated(whole, &mutations, sealed));
        if let Ok(capture) = read_capture(&bytes) {
            use_all(&capture);
            prop_assert_eq!(&read_capture(&encode_capture(&capture)).unwrap(), &capture);
        }
    }

    #[test]
    fn no_shard_makes_the_reader_panic(mutations in mutations(), sealed: bool) {
        thread_local!(static WHOLE: Vec<u8> = small_shard());
        let bytes = WHOLE.with(|whole| mutated(whole, &mutations, sealed));
        if let Ok((run, lane)) = read_shard(&bytes) {
            use_all(&Capture { run, lanes: vec![lane] });
        }
    }

    #[test]
    fn no_order_of_records_makes_the_reader_panic(picks in picks(), mutations in mutations(), is_shard: bool) {
        thread_local!(static WHOLE: [Vec<u8>; 2] = [small_capture(), small_shard()]);
        let bytes = WHOLE.with(|whole| shuffled(whole, &picks, is_shard));
        let bytes = mutated(&bytes, &mutations, true);
        if is_shard {
            if let Ok((run, lane)) = read_shard(&bytes) {
                use_all(&Capture { run, lanes: vec![lane] });
            }
        } else if let Ok(capture) = read_capture(&bytes) {
            use_all(&capture);
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 1_u32..3) {
        let file = [header(1, kind), bytes].concat();
        prop_assert!(read_capture(&file).is_err());
        prop_assert!(read_shard(&file).is_err());
    }
}

/// Lists the variants and names them, with a match that a new variant breaks.
macro_rules! kinds {
    ($($kind:ident),*) => {
        const KINDS: &[&str] = &[$(stringify!($kind)),*];

        fn kind(error: &Error) -> &'static str {
            match error {
                $(Error::$kind { .. } => stringify!($kind)),*
            }
        }
    };
}

kinds!(NotACapture, TooNew, TooOld, Truncated, Damaged, WrongKind, Mismatch, Invalid, Io);

#[test]
fn every_error_can_happen() {
    let missing = Path::new("/nowhere/run.bin.rank0");
    let recorder = Recorder::new(None, &run_id(), 0).unwrap();
    let errors = [
        read_capture(b"").unwrap_err(),
        peek(&header(2, 2)).unwrap_err(),
        peek(&header(0, 2)).unwrap_err(),
        read_capture(&small_capture()[..30]).unwrap_err(),
        read_capture(&forged(&[history()])).unwrap_err(),
        read_shard(&small_capture()).unwrap_err(),
        Merger::default().finish().unwrap_err(),
        recorder.define(1, parameters(1..2)).unwrap_err(),
        Recorder::new(Some(missing), &run_id(), 0).err().unwrap(),
    ];
    assert_eq!(errors.each_ref().map(kind), KINDS);
    for error in errors {
        assert!(!error.to_string().is_empty(), "{error:?} has no message");
    }
}
