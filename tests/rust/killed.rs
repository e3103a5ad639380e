//! A process that is killed at a random moment leaves a shard that is whole, and holds all that was done by then.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use _core::bitset::Row;
use _core::capture::flags;
use _core::journal::read_shard;
use _core::recorder::{Recorder, Slot};

use crate::samples::{contents, parameters, plain_situation, run_id};

const KILLS: u64 = 50;
const VARIABLE: &str = "DDPCOV_TEST_RECORD_UNTIL_KILLED";

/// Parameters there are in a step: the model grows until all records and blocks have been seen, then stays.
fn num_parameters(step: u64) -> u32 {
    (10 + step / 3).min(2000) as u32
}

/// What the passes of a step cover. Equal steps, new patterns, and steps too long for the live state, in turn.
fn passes(step: u64) -> Vec<Row> {
    let num = if step % 7 == 3 { 70 } else { 1 + step % 3 };
    let of_pass = |pass: u64| {
        let variant = if step % 11 < 6 { pass % 2 } else { step + pass };
        (0..num_parameters(step)).filter(|id| (u64::from(*id) * 31 + variant * 17) % 5 == 0).collect()
    };
    (0..num).map(of_pass).collect()
}

/// Not a test of its own: what the killed process does.
#[test]
fn record_until_killed() {
    let Some(path) = std::env::var_os(VARIABLE) else { return };
    let recorder = Recorder::new(Some(Path::new(&path)), &run_id(), 0).unwrap();
    let mut slots: Vec<Slot> = Vec::new();
    let mut progress = std::io::stdout();
    for step in 0.. {
        let (have, need) = (slots.len() as u32, num_parameters(step));
        if need > have {
            recorder.define(have, parameters(have..need)).unwrap();
            recorder.set_situation(plain_situation(need)).unwrap();
            slots.extend((have..need).map(|id| recorder.slot(id).unwrap()));
        }
        for covered in passes(step) {
            recorder.begin_pass(false);
            for id in covered.iter() {
                slots[id as usize].arrived(true);
                slots[id as usize].accumulated();
            }
            recorder.close_pass(0).unwrap();
        }
        recorder.close_step().unwrap();
        writeln!(progress, "\nclosed {step}").unwrap();
    }
}

/// Kills a recording process after so long, and says how many steps its shard holds.
fn kill_after(delay: Duration) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let (shard, output) = (folder.path().join("shard"), folder.path().join("output"));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed::record_until_killed", "--nocapture"])
        .env(VARIABLE, &shard)
        .stdout(File::create(&output).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while !shard.exists() {
        sleep(Duration::from_millis(1));
    }
    sleep(delay);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "it ended by itself");
    let output = fs::read_to_string(output).unwrap();
    // A last line that is torn counts for less than it says.
    let closed = output.lines().filter_map(|line| line.strip_prefix("closed ")?.parse().ok());
    let num_closed = closed.max().map_or(0, |last: u64| last + 1);

    let (_, lane) = read_shard(&fs::read(&shard).unwrap()).unwrap();
    let (steps, open) = contents(&lane);
    let num_steps = steps.len() as u64;
    assert!(
        (num_closed..=num_closed + 1).contains(&num_steps),
        "{num_closed} steps were closed, {num_steps} are there"
    );
    for (step, found) in steps.iter().enumerate() {
        let found: Vec<&Row> = found.iter().map(|(_, pattern, _)| &pattern.covered).collect();
        assert!(found.iter().copied().eq(&passes(step as u64)), "step {step} of {num_steps}");
    }
    let expected = passes(num_steps);
    assert!(open.len() <= expected.len());
    for (i, ((_, found, flags), expected)) in open.iter().zip(&expected).enumerate() {
        if flags & flags::OPEN == 0 {
            assert_eq!(&found.covered, expected);
        } else {
            assert_eq!(i, open.len() - 1, "only the last pass can be open");
            assert!(found.covered.difference(expected).is_empty());
        }
        assert!(found.covered.difference(&found.reached).is_empty());
        assert!(found.again.is_empty());
    }
    num_steps
}

#[test]
fn a_killed_process_leaves_all_it_recorded() {
    let mut random = 1_u64;
    let mut most = 0;
    for _ in 0..KILLS {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        most = most.max(kill_after(Duration::from_micros((random >> 33) % 60_000)));
    }
    assert!(most > 20, "never more than {most} steps: the process was killed before it did anything");
}
