//! Equal histories become one lane, whatever the order in which they come; what does not belong together is refused.

use std::sync::Arc;

use _core::capture::{Capture, Lane, RunId};
use _core::error::Error;
use _core::merge::Merger;
use proptest::prelude::*;

use crate::samples::{captures, lanes, parameters, ranks, run_id, table};

fn merged(run: &RunId, lanes: impl IntoIterator<Item = Lane>) -> Capture {
    let mut merger = Merger::default();
    for lane in lanes {
        merger.add(run, lane).unwrap();
    }
    merger.finish().unwrap()
}

/// Each lane once for each of its ranks, each with a parameter table of its own, as shards have it.
fn shards(capture: &Capture) -> Vec<Lane> {
    let of_lane = |lane: &Lane| {
        let members = lane.ranks.as_slice().iter().flat_map(|&(first, last)| first..=last);
        let shard = |rank| Lane { ranks: ranks(rank, rank), params: Arc::new((*lane.params).clone()), ..lane.clone() };
        members.map(shard).collect::<Vec<_>>()
    };
    capture.lanes.iter().flat_map(of_lane).collect()
}

proptest! {
    #[test]
    fn equal_histories_share_a_lane(capture in captures(9)) {
        let merged = merged(&capture.run, shards(&capture));
        for (i, lane) in merged.lanes.iter().enumerate() {
            for other in &merged.lanes[..i] {
                prop_assert_ne!(&Lane { ranks: lane.ranks.clone(), ..other.clone() }, lane);
                let is_shared = Arc::ptr_eq(&other.params, &lane.params);
                prop_assert_eq!(is_shared, other.params == lane.params, "a table is kept once");
            }
        }
        // Nothing is lost: each rank finds the history that it had.
        for shard in shards(&capture) {
            let lane = merged.lanes.iter().find(|l| !l.ranks.intersection(&shard.ranks).is_empty()).unwrap();
            prop_assert_eq!(&Lane { ranks: shard.ranks.clone(), ..lane.clone() }, &shard);
        }
        let num_ranks: u64 = capture.lanes.iter().map(|l| l.ranks.count()).sum();
        prop_assert_eq!(merged.lanes.iter().map(|l| l.ranks.count()).sum::<u64>(), num_ranks);
    }

    #[test]
    fn order_does_not_matter(
        (run, shards, shuffled) in captures(9).prop_flat_map(|capture| {
            let shards = shards(&capture);
            (Just(capture.run), Just(shards.clone()), Just(shards).prop_shuffle())
        })
    ) {
        prop_assert_eq!(merged(&run, shards), merged(&run, shuffled));
    }

    /// A difference in any one field keeps two ranks apart.
    #[test]
    fn different_histories_do_not(lane in lanes(9)) {
        let one = Lane { ranks: ranks(0, 0), ..lane.clone() };
        let mut others = vec![Lane { end: None, ..lane.clone() }, Lane { params: table(parameters(90..170)), ..lane.clone() }];
        let changes: [fn(&mut Lane); 6] = [
            |l| l.situations[0].num_orphans += 1,
            |l| l.patterns[0].again = [0, 1, 2, 3].into_iter().collect(),
            |l| l.shapes[0][0].count += 1,
            |l| l.steps.push((0, 1)),
            |l| l.open.push(l.shapes[0][0]),
            |l| l.facts.push(_core::capture::Fact { topic: "t".into(), body: "b".into() }),
        ];
        for change in changes {
            others.push(lane.clone());
            change(others.last_mut().unwrap());
        }
        for other in others.into_iter().filter(|other| *other != lane) {
            let capture = merged(&run_id(), [one.clone(), Lane { ranks: ranks(1, 1), ..other.clone() }]);
            prop_assert_eq!(capture.lanes.len(), 2);
        }
    }
}

fn refusal(lanes: &[(RunId, u64)]) -> String {
    let mut merger = Merger::default();
    let (last, before) = lanes.split_last().unwrap();
    let lane = |rank| Lane { ranks: ranks(rank, rank), ..Lane::default() };
    for (run, rank) in before {
        merger.add(run, lane(*rank)).unwrap();
    }
    match merger.add(&last.0, lane(last.1)).unwrap_err() {
        error @ Error::Mismatch { .. } => error.to_string(),
        error => panic!("{error:?}"),
    }
}

#[test]
fn a_rank_twice_is_refused() {
    assert_eq!(
        refusal(&[(run_id(), 3), (run_id(), 4), (run_id(), 3)]),
        "cannot merge: rank 3 twice; give only the shards of one run"
    );
}

#[test]
fn another_run_is_refused() {
    let other = RunId { nonce: 0xBEEF, ..run_id() };
    let text = refusal(&[(run_id(), 0), (other, 1)]);
    assert!(text.contains("shards of different runs (000000000000feed and 000000000000beef)"), "{text}");
}

#[test]
fn a_foreign_rank_is_refused() {
    assert!(refusal(&[(run_id(), 16)]).contains("rank 16 is not part of the run"));
}

#[test]
fn nothing_is_refused() {
    let text = Merger::default().finish().unwrap_err().to_string();
    assert_eq!(text, "cannot merge: no shard; give only the shards of one run");
}

#[test]
fn neighbours_make_one_range_of_ranks() {
    let lane = |rank| Lane { ranks: ranks(rank, rank), ..Lane::default() };
    let capture = merged(&run_id(), [5, 0, 2, 1].map(lane));
    assert_eq!(capture.lanes.len(), 1);
    assert_eq!(capture.lanes[0].ranks.as_slice(), [(0, 2), (5, 5)]);
}
