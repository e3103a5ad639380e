//! A row obeys the laws of sets, held against `BTreeSet`.

use std::collections::BTreeSet;

use _core::bitset::Row;
use proptest::prelude::*;

type Set = BTreeSet<u32>;

fn row(set: &Set) -> Row {
    set.iter().copied().collect()
}

fn set(row: &Row) -> Set {
    row.iter().collect()
}

/// Members on both sides of several word boundaries; words that are full and words that are empty.
fn sets() -> impl Strategy<Value = Set> {
    let sparse = prop::collection::btree_set(0_u32..300, 0..20);
    let run = (0_u32..300, 0_u32..200).prop_map(|(first, len)| (first..first + len).collect());
    prop_oneof![sparse, run]
}

proptest! {
    #[test]
    fn operations_are_those_of_sets(a in sets(), b in sets()) {
        let (x, y) = (row(&a), row(&b));
        prop_assert_eq!(set(&x.union(&y)), &a | &b);
        prop_assert_eq!(set(&x.intersection(&y)), &a & &b);
        prop_assert_eq!(set(&x.difference(&y)), &a - &b);
        prop_assert_eq!(x == y, a == b);
    }

    #[test]
    fn results_are_canonical(a in sets(), b in sets()) {
        let (x, y) = (row(&a), row(&b));
        for result in [x.union(&y), x.intersection(&y), x.difference(&y), y.difference(&x)] {
            prop_assert_ne!(result.words().last(), Some(&0));
            prop_assert_eq!(&result, &row(&set(&result)));
        }
    }

    #[test]
    fn laws_hold(a in sets(), b in sets(), c in sets()) {
        let (x, y, z) = (row(&a), row(&b), row(&c));
        prop_assert_eq!(x.union(&y), y.union(&x));
        prop_assert_eq!(x.intersection(&y), y.intersection(&x));
        prop_assert_eq!(x.union(&y).union(&z), x.union(&y.union(&z)));
        prop_assert_eq!(x.intersection(&y.union(&z)), x.intersection(&y).union(&x.intersection(&z)));
        prop_assert_eq!(x.difference(&y.union(&z)), x.difference(&y).intersection(&x.difference(&z)));
        prop_assert_eq!(x.difference(&y).union(&x.intersection(&y)), x.clone());
        prop_assert_eq!(x.union(&x), x.clone());
        prop_assert!(x.difference(&x).is_empty());
    }

    #[test]
    fn questions_are_answered_as_by_sets(a in sets()) {
        let x = row(&a);
        prop_assert_eq!(x.count(), a.len() as u64);
        prop_assert_eq!(x.is_empty(), a.is_empty());
        prop_assert_eq!(x.end(), a.last().map_or(0, |last| last + 1));
        prop_assert!(x.iter().eq(a.iter().copied()), "not ascending, or not the members");
        for index in 0..600 {
            prop_assert_eq!(x.contains(index), a.contains(&index));
        }
    }

    #[test]
    fn trailing_zeros_do_not_matter(a in sets(), zeros in 0_usize..5) {
        let x = row(&a);
        let mut words = x.words().to_vec();
        words.resize(words.len() + zeros, 0);
        prop_assert_eq!(Row::from_words(words), x);
    }

    #[test]
    fn renumbering_maps_each_member(a in sets(), order in Just((0..500).collect::<Vec<u32>>()).prop_shuffle()) {
        let expected = a.iter().map(|&i| order[i as usize]).collect();
        prop_assert_eq!(set(&row(&a).renumbered(&order)), expected);
    }

    #[test]
    fn members_come_in_any_order(members in prop::collection::vec(0_u32..300, 0..30)) {
        let expected: Set = members.iter().copied().collect();
        prop_assert_eq!(members.into_iter().collect::<Row>(), row(&expected));
    }
}
