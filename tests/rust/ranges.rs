//! Ranges obey the laws of sets, held against `BTreeSet`, up to both ends of `u64`.

use std::collections::BTreeSet;

use _core::ranges::Ranges;
use proptest::prelude::*;

type Set = BTreeSet<u64>;

fn set(ranges: &Ranges) -> Set {
    ranges.as_slice().iter().flat_map(|&(first, last)| first..=last).collect()
}

/// Overlapping, touching, nested and repeated pieces, in any order, near 0 or near `u64::MAX`.
fn pieces() -> impl Strategy<Value = Vec<(u64, u64)>> {
    let piece = (any::<bool>(), 0_u64..60, 0_u64..12).prop_map(|(high, first, len)| {
        let (near, far) = (first, first + len);
        if high { (u64::MAX - far, u64::MAX - near) } else { (near, far) }
    });
    prop::collection::vec(piece, 0..12)
}

fn assert_canonical(ranges: &Ranges) {
    assert!(ranges.as_slice().iter().all(|(first, last)| first <= last), "{ranges:?}");
    let gaps = ranges.as_slice().windows(2).all(|pair| pair[1].0 > pair[0].1 && pair[1].0 - pair[0].1 > 1);
    assert!(gaps, "touching, overlapping or out of order: {ranges:?}");
}

proptest! {
    #[test]
    fn pieces_become_a_set(pieces in pieces()) {
        let ranges: Ranges = pieces.iter().copied().collect();
        let expected: Set = pieces.iter().flat_map(|&(first, last)| first..=last).collect();
        assert_canonical(&ranges);
        prop_assert_eq!(ranges.count(), expected.len() as u64);
        prop_assert_eq!(ranges.is_empty(), expected.is_empty());
        prop_assert_eq!(set(&ranges), expected);
    }

    #[test]
    fn operations_are_those_of_sets(a in pieces(), b in pieces()) {
        let (x, y): (Ranges, Ranges) = (a.into_iter().collect(), b.into_iter().collect());
        let results = [
            (x.union(&y), &set(&x) | &set(&y)),
            (x.intersection(&y), &set(&x) & &set(&y)),
            (x.difference(&y), &set(&x) - &set(&y)),
        ];
        for (result, expected) in results {
            assert_canonical(&result);
            prop_assert_eq!(set(&result), expected);
        }
        prop_assert_eq!(x == y, set(&x) == set(&y));
    }

    #[test]
    fn laws_hold(a in pieces(), b in pieces(), c in pieces()) {
        let [x, y, z]: [Ranges; 3] = [a, b, c].map(|pieces| pieces.into_iter().collect());
        prop_assert_eq!(x.union(&y), y.union(&x));
        prop_assert_eq!(x.intersection(&y), y.intersection(&x));
        prop_assert_eq!(x.union(&y).union(&z), x.union(&y.union(&z)));
        prop_assert_eq!(x.intersection(&y.union(&z)), x.intersection(&y).union(&x.intersection(&z)));
        prop_assert_eq!(x.difference(&y.union(&z)), x.difference(&y).intersection(&x.difference(&z)));
        prop_assert_eq!(x.difference(&y).union(&x.intersection(&y)), x.clone());
        prop_assert!(x.difference(&x).is_empty());
    }

    #[test]
    fn pushing_in_order_is_union(mut pieces in pieces()) {
        pieces.sort_unstable();
        let mut pushed = Ranges::new();
        pieces.iter().for_each(|&(first, last)| pushed.push(first, last));
        prop_assert_eq!(pushed, pieces.into_iter().collect::<Ranges>());
    }
}

#[test]
fn neighbours_join() {
    let joined: Ranges = [(4, 5), (0, 1), (2, 3)].into_iter().collect();
    assert_eq!(joined.as_slice(), [(0, 5)]);
}

#[test]
fn everything_is_one_range() {
    let whole: Ranges = [(0, u64::MAX)].into_iter().collect();
    let last: Ranges = [(u64::MAX, u64::MAX)].into_iter().collect();
    assert_eq!(whole.union(&last), whole);
    assert_eq!(whole.intersection(&last), last);
    assert_eq!(whole.difference(&last).as_slice(), [(0, u64::MAX - 1)]);
    assert!(last.difference(&whole).is_empty());
    assert_eq!((last.count(), whole.count()), (1, u64::MAX));
}
